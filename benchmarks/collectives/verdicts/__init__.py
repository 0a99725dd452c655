"""What stands out in measurements: slow ranks, slow links."""
