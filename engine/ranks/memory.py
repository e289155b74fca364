"""The memory that the ranks of a run share."""

from __future__ import annotations

from penstock.engine.ranks.ranks import Ranks
from penstock.storage.tier.arena import HostArena, page_up
from penstock.storage.tier.shared import SharedMemory


def shared_arena(ranks: Ranks, slots: dict[str, int]) -> HostArena:
    """Memory that all ranks share, with room for these slots."""
    nbytes = sum(map(page_up, slots.values()))
    made: list[SharedMemory] = []

    def make() -> str:
        made.append(SharedMemory.create(nbytes))
        return made[0].name

    name = ranks.of_first(make)
    memory = made[0] if made else SharedMemory.open(name, nbytes)
    ranks.meet()  # all have it, and no name is needed any more
    memory.close()
    return HostArena(nbytes, budget_bytes=nbytes, memory=memory.map)
