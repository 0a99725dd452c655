"""What stands out in measurements: slow ranks, slow links, guidelines that are broken."""
