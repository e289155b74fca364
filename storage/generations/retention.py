"""The checkpoints that a run keeps by itself: the last generations, every so many, the last good and the best one."""

from __future__ import annotations

from collections.abc import Callable

from penstock.storage.files.errors import UserError
from penstock.storage.generations.checkpoints import AUTOMATIC, BEST, GOOD, Series, delete_checkpoint, read_checkpoint
from penstock.storage.generations.store import NvmeStore

Report = Callable[[str, int, str | None], None]
"""Told of a checkpoint: its name, its step, and why it could not be made."""


class Retention:
    """Makes and deletes checkpoints of a store around its commits; use from one thread."""

    def __init__(
        self,
        store: NvmeStore,
        *,
        checkpoint_every: int,
        keep_last: int,
        keep_every: int | None,
        keep_good: bool,
        fits_good: bool,
        report: Report,
    ) -> None:
        """The fields of a recipe's `storage`; `fits_good`: whether the plan has room for the last good generation.

        Steps that are no multiple of `checkpoint_every` are committed for another reason, and not kept.
        """
        self._store, self._report = store, report
        self._checkpoint_every, self._keep_last, self._keep_every = checkpoint_every, keep_last, keep_every
        self._keeps_good = keep_good
        if self._keeps_good and not fits_good:
            self._give_up_good("the disk or budgets.nvme has no room for another generation")

    def before_commit(self, *, proved: bool) -> None:
        """Keep the committed generation as the last good one if it has `proved` good: another takes its place."""
        if self._keeps_good and proved and (error := self._replace(GOOD)) is not None:
            self._give_up_good(error)

    def keep_best(self) -> None:
        """Keep the committed generation as the best one, in the place of earlier ones."""
        if (error := self._replace(BEST)) is not None:
            self._report("best", self._step, error)

    @property
    def _step(self) -> int:
        return int(self._store.meta["step"])

    def checkpoint(self, name: str) -> str | None:
        """Make a checkpoint; why it could not be made. Training goes on without it."""
        try:
            self._store.checkpoint(name)
        except UserError as error:
            return str(error)
        return None

    def _replace(self, series: Series) -> str | None:
        """Make the series' checkpoint of the committed generation, and delete its others; why it could not be made."""
        root, name = self._store.root, series.name(self._step)
        old = series.names(root)
        error = None
        if name in old and read_checkpoint(root, name).generation == self._store.generation:
            old.remove(name)
        else:
            if name in old:  # of steps that were done again
                old.remove(name)
                self._delete(name)
            error = self.checkpoint(name)
            if error is not None and old:
                # What is committed now is the one to keep itself: until the next commit nothing else is needed.
                while old:
                    self._delete(old.pop())
                error = self.checkpoint(name)
        for other in old:
            self._delete(other)
        return error

    def after_commit(self, step: int) -> None:
        """Keep the generation of `step` if the recipe says so, and delete those that need not be kept any more."""
        every, root = self._keep_every, self._store.root
        kept_for_good = every is not None and step % every == 0
        if step % self._checkpoint_every or not (kept_for_good or self._keep_last > 1):
            return
        name = AUTOMATIC.name(step)
        if (error := self.checkpoint(name)) is not None:
            self._report(name, step, error)
        steps = sorted(kept for name in AUTOMATIC.names(root) if (kept := AUTOMATIC.step(name)) is not None)
        for old in steps[: -self._keep_last]:
            if every is None or old % every:
                self._delete(AUTOMATIC.name(old))

    def _delete(self, name: str) -> None:
        """Delete a checkpoint; one that somebody is reading stays until the next time."""
        try:
            delete_checkpoint(self._store.root, name)
        except UserError as error:
            self._report(name, self._step, f"it stays for now: {error}")

    def _give_up_good(self, error: str) -> None:
        self._keeps_good = False
        self._report("last-good", self._step, f"{error} (storage.keep_good: this process keeps no good generation)")
