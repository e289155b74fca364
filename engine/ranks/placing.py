"""Which CPUs the threads of each rank use."""

from __future__ import annotations

import torch

from penstock.engine.machine.affinity import Placement, gpu_node, place_threads
from penstock.engine.ranks.ranks import Ranks


def place_rank(device: torch.device, ranks: Ranks) -> Placement | None:
    """As place_threads; ranks whose GPUs are on one NUMA node share its cores equally. All call it."""
    if device.type != "cuda":
        return None
    nodes = ranks.all_of(gpu_node(device))
    own = nodes[ranks.rank]
    return place_threads(device, (nodes[: ranks.rank].count(own), nodes.count(own)))
