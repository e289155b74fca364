"""The same recipe on several machines: PyTorch's own FSDP2, and a run's state as its checkpoints, both ways."""
