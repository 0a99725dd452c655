"""Starts programs and jobs, and tells their ranks what to measure."""
