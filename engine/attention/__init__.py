"""Exact attention of a chunk over any range of keys, and the kernels that compute it."""
