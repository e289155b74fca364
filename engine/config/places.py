"""The budgets and storage sections of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.engine.config.values import MOST_STEPS, Budget, parse_budget, parse_bytes, require, require_most
from penstock.storage.offsite_place import parse_place

PART_STEP = 8192
"""storage.part_bytes is a multiple of so many bytes: whole pages of the drive in two-byte elements as well."""


@dataclass(kw_only=True, slots=True)
class BudgetConfig:
    """How much of each tier the run may use. Sizes are ints or texts such as 24GiB; 50% is a share of what is free, and
    least is the smallest budget with which a plan fits."""

    gpu: str | int | None = None
    """GPU memory (ordinary memory on a machine without a GPU): a size, a share of what is free such as 50%, or least;
    none takes all that is free, less a reserve."""
    ram: str | int | None = None
    """Pinned RAM: a size, a share of what is free such as 50%, or least; none takes all that is free, less a
    reserve."""
    nvme: str | int | None = None
    """Disk for the state; none takes what is free."""

    def __post_init__(self) -> None:
        self.given()

    def given(self) -> tuple[Budget, Budget, int | None]:
        """What the recipe says of GPU, RAM and NVMe. Raises UserError."""
        nvme = None if self.nvme is None else parse_bytes(self.nvme, "budgets.nvme")
        return parse_budget(self.gpu, "budgets.gpu"), parse_budget(self.ram, "budgets.ram"), nvme


@dataclass(kw_only=True, slots=True)
class StorageConfig:
    """Where the state lives and how often a generation is committed."""

    nvme: str | list[str] | None = None
    """Folder of the NVMe tier, or a list of folders on several drives to stripe over; none takes state/ in the run
    directory."""
    reader: Literal["auto", "kvikio", "direct", "tensorstore"] = "auto"
    """What reads chunk files: kvikio straight into GPU memory, direct by our own direct I/O into RAM, or tensorstore;
    auto takes kvikio for the GPU where it works and direct for RAM."""
    part_bytes: str | int = "32MiB"
    """Size of one chunk file of fp32 state (bf16 weights take half of it)."""
    checkpoint_every: int = 50
    """Steps between committed generations; a crash resumes from the last one."""
    keep_last: int = 1
    """Committed generations to keep: the newest, and as checkpoints named step-N those before it."""
    keep_every: int | None = None
    """Keep the generation of every so many steps for good, as checkpoint step-N; none keeps no such."""
    keep_good: float | None = 2.0
    """Keep, as checkpoint last-good, the newest generation whose following step had a loss of at most so many times the
    running mean: the way back from a run that diverges. Takes the disk of one more generation, and is left out where
    there is no room; none keeps none."""
    keep_best: bool = False
    """Keep, as checkpoint best, the generation with the lowest validation loss. Takes the disk of one more
    generation."""
    offsite: str | None = None
    """Place off this machine that the state is uploaded to in the background: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or
    a folder of another disk; each run has a prefix of its own, and credentials come from the environment. Takes the
    disk of one more generation; none uploads nothing."""
    offsite_every: int = 500
    """Steps between two uploads to storage.offsite; each begins with a commit. The run's last step is uploaded too."""
    offsite_bandwidth: str | int | None = None
    """Most bytes that an upload moves in a second, on average; none takes what the network gives."""
    offsite_keep: int = 2
    """Generations that stay at storage.offsite; an older one is deleted there once a newer one is whole."""

    def __post_init__(self) -> None:
        size = parse_bytes(self.part_bytes, "storage.part_bytes")
        require(size % PART_STEP == 0, f"storage.part_bytes: {size} is not a multiple of 8 KiB")
        require(self.checkpoint_every >= 1, f"storage.checkpoint_every: {self.checkpoint_every} must be at least 1")
        require_most(
            "storage",
            self,
            ("checkpoint_every", "keep_last", "keep_every", "offsite_every", "offsite_keep"),
            MOST_STEPS,
        )
        require(self.keep_last >= 1, f"storage.keep_last: {self.keep_last} must be at least 1, the newest generation")
        every = self.keep_every
        require(
            every is None or (every >= 1 and every % self.checkpoint_every == 0),
            f"storage.keep_every: {every} is not a multiple of storage.checkpoint_every {self.checkpoint_every}: "
            "only committed generations can be kept",
        )
        good = self.keep_good
        require(good is None or good > 1, f"storage.keep_good: {good} must be above 1; none keeps no last-good")
        require(self.nvme != [], "storage.nvme: the list is empty; name a folder, or leave it out")
        if self.offsite is not None:
            parse_place(self.offsite, "storage.offsite")
        require(self.offsite_every >= 1, f"storage.offsite_every: {self.offsite_every} must be at least 1 step")
        require(self.offsite_keep >= 1, f"storage.offsite_keep: {self.offsite_keep} must be at least 1, the newest")
        if self.offsite_bandwidth is not None:
            rate = parse_bytes(self.offsite_bandwidth, "storage.offsite_bandwidth")
            require(rate >= 1, f"storage.offsite_bandwidth: {rate} moves nothing; give bytes a second, or leave it out")
        require("" not in self.drives, "storage.nvme: the name of a folder is empty; name one, or leave it out")

    @property
    def drives(self) -> list[str]:
        """The folders of `nvme`, as given; empty for the default place."""
        return [self.nvme] if isinstance(self.nvme, str) else list(self.nvme or ())
