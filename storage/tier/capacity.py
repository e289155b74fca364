"""Space on the drives and in the budget, counted before anything is written."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from penstock.storage.files.errors import BudgetError
from penstock.storage.files.units import least_text
from penstock.storage.tier.arrays import Array
from penstock.storage.tier.drives import FREE_MARGIN, DriveSet, require_capacity


class Capacity:
    """What a store has given out of its budget, and what its drives still have."""

    def __init__(self, drives: DriveSet, budget_bytes: int | None):
        """`budget_bytes` None: as much as the drives have."""
        self._drives, self._budget_bytes, self._spill_bytes = drives, budget_bytes, 0

    def reserve_spill(self, num_bytes: int, arrays: Collection[Array]) -> None:
        """Give out room for activations beside `arrays`."""
        what = "room for spilled activations"
        self._require_budget(int(num_bytes * FREE_MARGIN), arrays, what)
        share = -(-num_bytes // len(self._drives.active))
        require_capacity(dict.fromkeys(self._drives.folders, share), what)
        self._spill_bytes += num_bytes

    def require_new(self, added: Collection[Array], arrays: Collection[Array], what: str) -> None:
        """Room for all slots of the `added` arrays beside `arrays`."""
        self._require_budget(int(sum(array.disk_bytes() for array in added) * FREE_MARGIN), arrays, what)
        needs = dict.fromkeys(self._drives.folders, 0)
        for array in added:
            for part in range(len(array.parts)):
                needs[array.next(part)[0].folder] += array.disk_bytes() // len(array.parts)
        require_capacity(needs, what)

    def require_checkpoint(self, arrays: Collection[Array], count: int, what: str) -> None:
        """Room for one more checkpoint of the committed `arrays`, when there are `count` already."""
        size = sum(array.spec.slot_bytes for array in arrays if not array.scratch and not array.spec.fixed)
        self._require_budget(size, arrays, what, beside=size * count)
        self.require_to_write(arrays, what, shared=True)

    def require_to_write(self, arrays: Collection[Array], what: str, *, shared: bool) -> None:
        """Room for the files that both slots will need on the active drives and do not have, or not for themselves, as
        committed ones are about to be `shared` with a checkpoint."""
        needs = dict.fromkeys(self._drives.folders, 0)
        for array in arrays:
            for slot in () if array.scratch or array.lasts else array.slots():
                for part in range(len(array.parts)):
                    drive, path = array.chunk(array.target, slot, part)
                    with contextlib.suppress(OSError):
                        if path.stat().st_nlink == 1 and not (shared and slot == array.slot):
                            continue
                    needs[drive.folder] += array.form.file_bytes
        require_capacity(needs, what)

    def _require_budget(self, need: int, arrays: Collection[Array], what: str, beside: int = 0) -> None:
        held = self._spill_bytes + sum(array.disk_bytes() for array in arrays) + beside
        if self._budget_bytes is not None and held + need > self._budget_bytes:
            raise BudgetError(
                f"budgets.nvme: {what} in {self._drives.root} needs {need:,} bytes on top of {held:,} already "
                f"allocated, and the budget is {self._budget_bytes:,}; raise budgets.nvme to "
                f"{least_text(held + need)}, or keep more blocks in RAM"
            )
