"""The budgets and storage sections of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.engine.config.values import MOST_STEPS, Budget, parse_budget, parse_bytes, require, require_counts
from penstock.storage.offsite.location import parse_location

PART_STEP = 8192
"""storage.part_bytes is a multiple of so many bytes: whole pages of the drive in two-byte elements as well."""


@dataclass(kw_only=True, slots=True)
class BudgetConfig:
    """How much of each tier the run may use: a size such as 24GiB, a share of what is free such as 50%, or least, the
    smallest budget that the plan accepts."""

    gpu: str | int | None = None
    """GPU memory; on a machine without a GPU, ordinary memory used in its place. A size, a share of what is free such
    as 50%, or least. none uses all that is free, minus a reserve."""
    ram: str | int | None = None
    """Pinned RAM: a size, a share of what is free such as 50%, or least. none uses all that is free, minus a
    reserve."""
    nvme: str | int | None = None
    """Disk space for the state. none uses what is free."""

    def __post_init__(self) -> None:
        self.given()

    def given(self) -> tuple[Budget, Budget, int | None]:
        """What the recipe says of GPU, RAM and NVMe. Raises UserError."""
        nvme = None if self.nvme is None else parse_bytes(self.nvme, "budgets.nvme")
        return parse_budget(self.gpu, "budgets.gpu"), parse_budget(self.ram, "budgets.ram"), nvme


@dataclass(kw_only=True, slots=True)
class StorageConfig:
    """Where the state is stored and how often a generation is committed."""

    nvme: str | list[str] | None = None
    """Folder for the NVMe tier, or a list of folders on several drives to stripe over. none uses state/ in the run
    directory."""
    reader: Literal["auto", "kvikio", "direct", "tensorstore"] = "auto"
    """How chunk files are read: kvikio reads straight into GPU memory, direct uses direct I/O into RAM, tensorstore is
    the most portable. auto uses kvikio for the GPU if it works, and direct for RAM."""
    part_bytes: str | int = "32MiB"
    """Size of one chunk file of float32 state. Files of bfloat16 weights are half as large."""
    checkpoint_every: int = 50
    """Steps between committed generations. After a crash, a run resumes from the last one."""
    keep_last: int = 1
    """Number of committed generations to keep: the newest, and older ones as checkpoints named step-N."""
    keep_every: int | None = None
    """Every so many steps, keep a generation permanently, as checkpoint step-N. none keeps none."""
    keep_good: float | None = 2.0
    """Keep the newest good generation as checkpoint last-good, to go back to if the run diverges. Good means that the
    loss of the next step was at most this many times the running mean. Takes disk space for one more generation, and is
    left out if there is no room. none keeps none."""
    keep_best: bool = False
    """Keep the generation with the lowest validation loss, or the highest reward, as checkpoint best. Takes disk space
    for one more generation."""
    offsite: str | None = None
    """Where to upload the state in the background: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or a folder on another disk.
    Each run needs its own prefix. Credentials come from the environment. Takes disk space for one more generation. none
    uploads nothing."""
    offsite_every: int = 500
    """Steps between uploads to storage.offsite. Each upload starts with a commit. The last step is always uploaded."""
    offsite_bandwidth: str | int | None = None
    """Average limit of an upload, in bytes per second. none sets no limit."""
    offsite_keep: int = 2
    """Number of generations to keep at storage.offsite. Older ones are deleted once a newer one is complete."""

    def __post_init__(self) -> None:
        size = parse_bytes(self.part_bytes, "storage.part_bytes")
        require(size % PART_STEP == 0, f"storage.part_bytes: {size} is not a multiple of 8 KiB")
        require_counts(
            "storage",
            self,
            ("checkpoint_every", "keep_last", "keep_every", "offsite_every", "offsite_keep"),
            MOST_STEPS,
        )
        every = self.keep_every
        require(
            every is None or every % self.checkpoint_every == 0,
            f"storage.keep_every: {every} is not a multiple of storage.checkpoint_every {self.checkpoint_every}; only "
            "committed generations can be kept",
        )
        good = self.keep_good
        require(good is None or good > 1, f"storage.keep_good: {good} must be above 1; none keeps no last-good")
        require(self.nvme != [], "storage.nvme: the list is empty; name a folder, or leave it out")
        if self.offsite is not None:
            parse_location(self.offsite, "storage.offsite")
        if self.offsite_bandwidth is not None:
            rate = parse_bytes(self.offsite_bandwidth, "storage.offsite_bandwidth")
            require(
                rate >= 1, f"storage.offsite_bandwidth: {rate} uploads nothing; give bytes per second, or leave it out"
            )
        require("" not in self.drives, "storage.nvme: a folder's name is empty; give a name, or leave it out")

    @property
    def drives(self) -> list[str]:
        """The folders of `nvme`, as given; empty for the default place."""
        return [self.nvme] if isinstance(self.nvme, str) else list(self.nvme or ())
