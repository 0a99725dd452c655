"""A directory of checkpoints: its owner, manifests, files, and what is found in it."""
