"""Committed generations: the store that moves between two, checkpoints, ownership, copies."""
