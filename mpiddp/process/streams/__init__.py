"""Standard output, error and input of a process."""
