"""What a step will take before it is taken: costs, the simulator, the search for a plan, what it promises. No torch."""
