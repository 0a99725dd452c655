"""``python -m benchmarks programs``: whole programs of torch.distributed, over mpiddp and Gloo."""
