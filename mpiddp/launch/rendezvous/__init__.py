"""The address that all nodes reach, and the store that listens on it."""
