"""What a run leaves behind: metrics, curves, logs, its directory."""
