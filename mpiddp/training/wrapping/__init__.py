"""DDP, FSDP, buckets, activation checkpointing."""
