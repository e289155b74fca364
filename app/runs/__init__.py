"""A run directory: what lies in it, who writes and who reads it, and what of it is shown."""
