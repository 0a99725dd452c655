"""Measurements of mpiddp beside what else there is: ``python -m benchmarks COMMAND``."""
