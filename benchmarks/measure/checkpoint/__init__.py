"""``python -m benchmarks checkpoint``: what checkpoints cost a training."""
