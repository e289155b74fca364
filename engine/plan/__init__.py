"""Where everything lives and how the step is cut, within budgets. Pure data, no torch."""
