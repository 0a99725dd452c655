"""One frozen dataclass of options for each component of a training."""
