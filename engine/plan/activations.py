"""The kinds of activations: what each is, how large it is and where it waits, a row each.

What is saved of a block's chunk for its backward (plan/plan.py: saved_activations) waits in memory of its own or on
NVMe; else an activation waits in `ram` for whatever reads it next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.plan.problem import FP32, BlockShape, PlanInput


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationKind:
    """One row."""

    name: str
    says: str
    """What it is, for people: `a layer's input`."""
    bytes_per_token: Callable[[PlanInput, BlockShape], int]
    """Of the block that it is saved or loaded for; of a graph that is laid out in one piece see plan.leaving_bytes."""
    gpu: str
    """Memory on the compute device, as schedule/resources.py names it."""
    ram: str | None
    """Memory in RAM, where it is not among what is saved."""
    saved: bool
    """Whether it may be among what is saved of a chunk, in RAM or on NVMe."""


def _hidden(problem: PlanInput, block: BlockShape) -> int:
    return problem.hidden_size * problem.compute_bytes


_ROWS = (
    ActivationKind(
        name="x",
        says="a layer's input",
        bytes_per_token=_hidden,
        gpu="gpu.hidden",
        ram="ram.boundary",
        saved=True,
    ),
    ActivationKind(
        name="dy",
        says="the gradient of a layer's output",
        bytes_per_token=_hidden,
        gpu="gpu.hidden",
        ram="ram.boundary",
        saved=False,
    ),
    ActivationKind(
        name="routed",
        says="what a router sends to which experts",
        bytes_per_token=lambda problem, block: block.routed_bytes_per_token,
        gpu="gpu.routed",
        ram="ram.routed",
        saved=True,
    ),
    ActivationKind(
        name="drouted",
        says="the gradient of what a router sends",
        bytes_per_token=lambda problem, block: block.routed_bytes_per_token,
        gpu="gpu.routed",
        ram="ram.routed",
        saved=False,
    ),
    ActivationKind(
        name="saved",
        says="attention's output",
        bytes_per_token=lambda problem, block: block.saved_bytes_per_token,
        gpu="gpu.saved",
        ram="ram.window_saved",
        saved=True,
    ),
    ActivationKind(
        name="kv",
        says="keys and values",
        bytes_per_token=lambda problem, block: block.kv_bytes_per_token,
        gpu="gpu.kv",
        ram="ram.window_kv",
        saved=True,
    ),
    ActivationKind(
        name="dkv",
        says="gradients of keys and values",
        bytes_per_token=lambda problem, block: block.kv_numel_per_token * FP32,
        gpu="gpu.dkv",
        ram="ram.window_dkv",
        saved=False,
    ),
    ActivationKind(
        name="graph",
        says="a layer's saved graph",
        bytes_per_token=lambda problem, block: 0,
        gpu="gpu.graph_slot",
        ram=None,
        saved=True,
    ),
)
ACTIVATIONS = {row.name: row for row in _ROWS}
GRADIENT_OF = {"x": "dy", "routed": "drouted"}
"""Input of a block -> the gradient that backward finds of it."""
