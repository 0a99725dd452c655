"""Ranks on machines that no Slurm gives: which they are, and whether they can take part."""
