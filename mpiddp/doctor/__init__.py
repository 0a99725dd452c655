"""Find what is wrong before training does: ``python -m mpiddp.doctor``."""
