"""Chunk files on drives: arrays in parts, direct reads and writes, manifests, and spilled activations."""
