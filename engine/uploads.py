"""Uploads of a run's generations to storage.offsite: due every so many steps, carried out beside the steps.

A due generation is committed and saved as a checkpoint, which is links; a thread has it sent by a process of its own
and deletes it then. One is on its way at a time; the next is the newest generation there is.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from penstock.engine.config import Recipe, drive_folders, parse_bytes, state_folder
from penstock.engine.hf.constants import CONSTANTS_FILE
from penstock.engine.run_files import run_files
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import bytes_text
from penstock.storage.generations.checkpoints import (
    AUTOMATIC,
    UPLOADED,
    checkpoint_folder,
    checkpoint_names,
    delete_checkpoint,
    read_checkpoint,
)
from penstock.storage.generations.store import NvmeStore
from penstock.storage.offsite.index import Claim, one_at_a_time, require_usable
from penstock.storage.offsite.link import Link
from penstock.storage.offsite.location import parse_location
from penstock.storage.offsite.send import send_checkpoint
from penstock.storage.tier.manifest import FILE_NAME, Manifest

_REPORT_S = 10.0
"""Between two words on an upload that the run's end waits for."""
_POLL_S = 0.05


class Uploads:
    """The uploads of one process of a run. `begin` it before anything is prepared, `attach` the store, `close` it."""

    def __init__(self, recipe: Recipe, run_dir: Path, link: Link) -> None:
        """Use `begin`."""
        storage = recipe.storage
        self._recipe, self._run_dir, self._link = recipe, run_dir, link
        self._every, self._last, self._keep = storage.offsite_every, recipe.train.steps, storage.offsite_keep
        limit = storage.offsite_bandwidth
        self._bytes_per_s = None if limit is None else float(parse_bytes(limit, "storage.offsite_bandwidth"))
        self._root = state_folder(run_dir)
        self._messages: deque[str] = deque()
        self._news = threading.Condition()
        self._next: str | None = None
        self._waits = self._reported_waiting = self._ends = False
        self._sending: int | None = None
        """Step of the generation that is on its way."""
        self._moved = self._total = 0
        self._newest: int | None = None
        """Step of the newest generation at the place, where it is known."""
        self._taken: int | None = None
        """Step of the newest generation that was to be uploaded."""
        self._claimed_new = self._sent_any = False
        self._thread: threading.Thread | None = None

    @classmethod
    def begin(cls, recipe: Recipe, run_dir: Path, offsite: str, *, resume: bool) -> Uploads:
        """Those to `offsite`, which the recipe names. UserError, one line, where this run may not write to it."""
        root, store = state_folder(run_dir), None
        if resume and (root / FILE_NAME).exists():
            store = Manifest.read(root).store
        link = Link(parse_location(offsite, "storage.offsite"))
        try:
            require_usable(link, root, store)
        finally:
            link.release()  # much comes before the first upload
        return cls(recipe, run_dir, link)

    def attach(self, store: NvmeStore) -> None:
        """Take the place for the run's store. Where an earlier process did not end an upload, the generation that the
        run goes on from is sent. UserError where another run has taken the place meanwhile."""
        self._store = store
        self._claim = Claim(self._link, store.root, store.id, self._recipe.name)
        with one_at_a_time(store.root, self._report_another):
            known = self._claim.look()
            self._claimed_new = known is None
            self._claim.take()
        if known is not None and known.entries:
            self._newest = known.entries[-1].step
        left = UPLOADED.names(store.root)
        for name in left:
            self._delete(name)
        step = int(store.meta["step"])
        if step != self._newest and (left or self.due(step)):
            self._taken = step
            self._save_next()
        self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        self._thread.start()

    def due(self, step: int) -> bool:
        """Whether the generation of `step` is to be committed and uploaded."""
        return step > 0 and (step % self._every == 0 or step == self._last)

    def committed(self, step: int) -> None:
        """The generation of `step` has been committed. On the lane that commits."""
        if self.due(step):
            self._take(step)

    def ended(self, step: int) -> None:
        """The run is over: the generation of `step`, which is committed, is uploaded unless it was taken already."""
        if step not in (self._taken, self._newest):
            self._take(step)

    def _take(self, step: int) -> None:
        self._taken = step
        with self._news:
            if self._sending is not None or self._next is not None:
                self._waits = True
                if not self._reported_waiting:
                    self._reported_waiting = True
                    self._say(
                        f"step {step} is due for upload, but the upload of step {self._sending} is still running: the "
                        "newest generation follows when it is done; uploads take longer than storage.offsite_every"
                    )
                return
        self._save_next()

    def take_messages(self) -> list[str]:
        """What there is to report, once each."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def finish(self, report: Callable[[str], None]) -> None:
        """Wait for what is due, reporting how far it is."""
        reported_at, busy = time.monotonic(), True
        while busy:
            busy = self._is_busy()
            for message in self.take_messages():
                report(message)
            if busy and time.monotonic() - reported_at > _REPORT_S:
                reported_at = time.monotonic()
                report(self._progress())
            time.sleep(_POLL_S * busy)

    def close(self, *, began: bool = True) -> None:
        """End at once: an upload that is on its way is begun anew by the next process. `began`: whether the run has
        ended a step; else a place that it took is given back."""
        with self._news:
            self._ends = True
            self._news.notify_all()
        if self._sending is None:
            if self._thread is not None:
                self._thread.join()
            if self._claimed_new and not began and not self._sent_any:
                with contextlib.suppress(UserError, OSError), one_at_a_time(self._root):
                    self._claim.give_up()
        self._link.close()
        if self._thread is not None:
            self._thread.join()

    # ---------------------------------------------------------------- inside

    def _is_busy(self) -> bool:
        with self._news:
            return self._next is not None or self._sending is not None or self._waits

    def _progress(self) -> str:
        share = f"{min(1.0, self._moved / self._total):.0%} of {bytes_text(self._total)}" if self._total else "begun"
        return f"uploading step {self._sending} to {self._link.location}: {share}; the run ends when the upload is done"

    def _say(self, text: str) -> None:
        self._messages.append(f"storage.offsite: {text}")

    def _save_next(self) -> None:
        """Make the checkpoint that is sent next, of what is committed."""
        step = int(self._store.meta["step"])
        name = UPLOADED.name(step)
        try:
            if name in checkpoint_names(self._root):
                delete_checkpoint(self._root, name)  # of steps that were done again
            self._store.checkpoint(name)
        except UserError as error:
            self._warn(step, error)
            return
        with self._news:
            self._next = name
            self._news.notify_all()

    def _work(self) -> None:
        while True:
            with self._news:
                while self._next is None and not self._ends:
                    self._news.wait()
                if self._ends:
                    return
                name, self._next = self._next, None
                assert name is not None
                self._sending, self._moved, self._total = int(name.rpartition("-")[2]), 0, 0
            try:
                self._send(name)
            except Exception as error:  # training goes on whatever becomes of an upload
                if not self._ends:
                    self._warn(self._sending, error)
            if not self._ends:
                self._delete(name)
            self._settle()

    def _settle(self) -> None:
        """Nothing is on its way; what fell due meanwhile is next."""
        while True:
            with self._news:
                if self._ends or self._next is not None or not self._waits:
                    self._sending = None
                    return
                self._waits = False
            self._save_next()

    def _send(self, name: str) -> None:
        """Upload a checkpoint of ours. UserError."""
        step = read_checkpoint(self._root, name).step or 0
        self._sending = step
        files = run_files(self._run_dir, self._recipe)
        constants = checkpoint_folder(self._root, name) / CONSTANTS_FILE
        started = time.monotonic()
        sent = send_checkpoint(
            self._claim,
            self._root,
            drive_folders(self._run_dir, self._recipe.storage),
            name,
            files | {f"state/{CONSTANTS_FILE}": constants},
            name=AUTOMATIC.name(step),
            automatic=True,
            keep=self._keep,
            bytes_per_s=self._bytes_per_s,
            waits=self._report_another,
            begins=self._begins,
            report=self._count,
        )
        self._newest, self._sent_any = step, True
        took_s = time.monotonic() - started
        self._say(f"step {step} is at {self._link.location}: {bytes_text(sent.moved_bytes)} in {took_s:.1f} s")

    def _report_another(self) -> None:
        self._say("another upload of this run is in progress; waiting for it")

    def _begins(self, total: int) -> None:
        self._total = total

    def _count(self, moved: int) -> None:
        self._moved += moved

    def _warn(self, step: int | None, error: Exception) -> None:
        newest = f"Step {self._newest} is the newest there"
        if self._newest is None:
            newest = "Nothing of this run has been uploaded yet"
        reason = str(error).removeprefix("storage.offsite: ") if isinstance(error, UserError) else repr(error)
        self._say(f"step {step} was not uploaded: {reason}. {newest}; it will be tried again with the next upload")

    def _delete(self, name: str) -> None:
        try:
            delete_checkpoint(self._root, name)
        except UserError as error:
            self._say(f"checkpoint {name} could not be deleted yet: {error}")
