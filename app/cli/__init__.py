"""The command line: one file for each group of commands, their options, and what becomes of errors."""
