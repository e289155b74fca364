"""Model blocks, attention, loss, optimizer, plan, schedule, executor, training loop and data."""
