"""One optimizer step as data: actions, ops, slots, dependencies. No torch."""
