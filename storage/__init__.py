"""Tiers of memory: NVMe, pinned RAM and GPU; committed generations; safetensors folders.

This package knows bytes, dtypes and block names, and nothing about models.
"""
