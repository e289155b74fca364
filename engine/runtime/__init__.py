"""Carrying out a schedule: lanes, memory, and what each op does."""
