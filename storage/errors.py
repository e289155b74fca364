"""Errors that are the user's to fix, raised by every package and shown as one message by the command line."""


class UserError(ValueError):
    """Bad input: a recipe, model folder, data set, disk or budget that cannot be used.

    The message says what is wrong, where, and how to fix it. The command line prints it without a
    traceback and exits with code 2.
    """


class BudgetError(UserError):
    """A tier's budget cannot hold what was asked of it; the message names both figures in bytes.

    The attributes are set where a plan did not fit: the tier, the bytes needed and the bytes given.
    """

    def __init__(self, message: str, *, tier: str | None = None, need_bytes: int = 0, budget_bytes: int = 0) -> None:
        super().__init__(message)
        self.tier, self.need_bytes, self.budget_bytes = tier, need_bytes, budget_bytes
