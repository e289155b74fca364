"""Running a recipe, from the command line and from Python: what surrounds the engine's training."""
