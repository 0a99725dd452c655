"""The process beside the ranks: who is alive, and where they are."""
