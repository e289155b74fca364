"""Trackers: what a run directory holds, sent to where others look, by a process of its own for each of them.

The run's process starts these processes and reads what they say (`attach`), and does nothing else for a tracker: it
imports none, calls none and waits for none but some seconds at its end. A sender (`sender`) reads the run directory as
everybody does, hands what is new to one tracker (`on_wandb` and its neighbours) and keeps in the run directory what has
been sent (`record`), so that whoever comes next goes on there.
"""
