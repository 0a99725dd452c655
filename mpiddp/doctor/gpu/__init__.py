"""GPUs and NCCL."""
