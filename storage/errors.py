"""Errors that are the user's to fix, raised by every package and shown as one message by the command line."""


class UserError(ValueError):
    """Bad input: a recipe, model folder, data set, disk or budget that cannot be used.

    The message says what is wrong, where, and how to fix it. The command line prints it without a
    traceback and exits with code 2.
    """


class BudgetError(UserError):
    """A tier's budget cannot hold what was asked of it; the message names both figures in bytes."""
