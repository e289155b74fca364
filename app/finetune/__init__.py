"""From a model and a file to a recipe: what is found, what is chosen and why, and how it is shown."""
