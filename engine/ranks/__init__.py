"""Processes of one machine, each with a GPU of its own, that train one model together: weights, gradients on their way
and counters are in memory that they share, each owns a part of the state, and all of them run the same program."""
