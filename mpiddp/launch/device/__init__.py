"""GPUs and cores of a rank."""
