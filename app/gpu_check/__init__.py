"""`make gpu-check`: what ten minutes of a card are worth, most valuable first, every figure on disk once it is known.

`schedule` decides what runs and keeps what was found, `stages` says what there is to run, `device`, `smoke` and
`plugin` run in processes of their own.
"""
