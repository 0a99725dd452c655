"""Functions on ranks, called from another process: a script, a notebook, a test."""
