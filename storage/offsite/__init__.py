"""State at a place off the machine: its index, the way there and back, the process that moves bytes."""
