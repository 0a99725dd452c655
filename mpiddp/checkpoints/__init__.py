"""Checkpoints: the state of a training, written whole or not at all, and verified before use."""
