"""`make gpu-check`: ten minutes of a card, a plain list of commands (`commands`), each in a process of its own.

`__main__` runs them, `page` writes what they gave; `device` and `smoke` are commands of their own. The first two need
an interpreter and nothing else, so that what is missing is said command by command.
"""
