"""Recipes, the command line, run directories, launching and supervising a run."""
