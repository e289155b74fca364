"""Optimizers on flat buffers, gradient clipping, learning rates."""
