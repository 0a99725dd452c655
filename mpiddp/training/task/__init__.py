"""What is trained: models, losses, metrics."""
