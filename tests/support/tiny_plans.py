"""Plans of the tiny model: every way to save activations, with its state on every tier."""

from typing import Any

import tiny

from penstock.engine.plan.plan import Plan

STREAMED = {"kv_window": "streamed", "chunk_tokens": 7}
LEAVING = {"activation_checkpointing": "auto", "chunk_tokens": 7}
GROUPS = {"group": 1, "offloaded_graphs": "all"}
FLOORS = {"gpu": tiny.FLOOR, "ram": tiny.FLOOR}
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpu": ({}, {}),
    "ram": ({}, {"gpu": tiny.FLOOR}),
    "nvme-spilled": ({}, FLOORS),
    "ram-two-rows": ({"chunk_tokens": 7, "micro_batch_size": 2}, {"gpu": tiny.FLOOR}),
    "nvme-aside": ({}, FLOORS | {"gpu": 620_000, "gpu_first": "saved activations"}),
    "nvme-recomputed": ({"activation_checkpointing": "full"}, FLOORS),
    "gpu-graphs": ({"activation_checkpointing": "none"}, {}),
    "mixed": ({"activation_checkpointing": "auto", "kv_window": "auto"}, FLOORS | {"gpu": 1_100_000}),
    "ram-streamed": (STREAMED, {"gpu": tiny.FLOOR}),
    "nvme-streamed-spilled": (STREAMED, FLOORS),
    "nvme-streamed-aside": (STREAMED, FLOORS | {"gpu": 620_000, "gpu_first": "saved activations"}),
    "nvme-streamed-recomputed": (STREAMED | {"activation_checkpointing": "full"}, FLOORS),
    "gpu-streamed-graphs": (STREAMED | {"activation_checkpointing": "none"}, {}),
    "ram-weights": ({}, {"gpu": 700_000, "gpu_first": "weights"}),
    "nvme-weights-groups": (LEAVING, FLOORS | {"gpu": 1_000_000, "gpu_first": "weights", "group": 1}),
    "ram-groups-graphs-leaving": (LEAVING, {"gpu": tiny.FLOOR} | GROUPS),
    "nvme-spilled-groups-graphs-leaving": (LEAVING, FLOORS | GROUPS),
}
"""Settings and budgets by what they come to: every way to save activations, the state on every tier."""
SHORT = ("ram-two-rows", "mixed", "nvme-aside", "nvme-recomputed", "nvme-streamed-spilled", "gpu-streamed-graphs",
         "nvme-spilled-groups-graphs-leaving")  # fmt: skip
"""Every tier and every way once."""


def features(plan: Plan) -> set[str]:
    """The words of PLANS that are true of a plan."""
    fields = {"aside": "saved_on_gpu", "graphs": "saved_graphs", "leaving": "offloaded_graphs"}
    names = ("spilled", "aside", "recomputed", "graphs", "leaving", "streamed")
    found = {name for name in names if getattr(plan, fields.get(name, name))}
    found |= {"groups"} if plan.num_groups > 1 else set()
    found |= {"weights"} if any(b.weights == "gpu" != b.state for b in plan.buffers.values()) else set()
    return found | {buffer.state or f"frozen-{buffer.weights}" for buffer in plan.buffers.values()}
