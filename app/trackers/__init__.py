"""Trackers: what a run directory holds, sent to where others look, by a process of its own for each of them.

The run starts these processes and reads what they say (`attach`); it imports no tracker and waits for none but some
seconds at its end. A `sender` reads the run directory, hands what is new to one tracker (`on_wandb` and its neighbours)
and keeps what was sent (`record`), so that whoever comes next goes on there.
"""
