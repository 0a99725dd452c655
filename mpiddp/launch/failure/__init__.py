"""What ends a job that has failed: one path, one report, one exit code."""
