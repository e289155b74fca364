"""The kinds of activations: what each is, how large it is, its slots on the GPU and where it waits, a row each.

What is saved of a block's chunk for its backward (plan/plan.py: saved_activations) waits in memory of its own or on
NVMe; else an activation waits in `ram` for whatever reads it next. Planner, memory, schedule and copies read the table.
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
    bytes_per_token: Callable[[PlanInput, BlockShape], int] = lambda problem, block: 0
    """Of the block that it is saved or loaded for, or sent by; 0: nothing, or no slot of its own."""
    bytes_per_chunk: Callable[[PlanInput, BlockShape], int] = lambda problem, block: 0
    """What it takes whatever a chunk's length is."""
    gpu: str
    """Memory on the compute device, as schedule/resources.py names it; kinds may share one."""
    slots: int = 0
    """Chunks of it that are on the compute device at once; 0: in windows (plan/windows.py: window_bytes)."""
    ram: str | None
    """Memory in RAM, where it is not among what is saved."""
    saved: bool = False
    """Whether it may be among what is saved of a chunk, in RAM or on NVMe."""
    gradient: str | None = None
    """Of what one block makes and another takes: the kind of the gradient that backward finds of it."""

    def nbytes(self, problem: PlanInput, block: BlockShape, tokens: int) -> int:
        """Of `tokens` tokens, a chunk or a part of one."""
        return tokens * self.bytes_per_token(problem, block) + self.bytes_per_chunk(problem, block)


def _hidden(problem: PlanInput, block: BlockShape) -> int:
    return problem.hidden_size * problem.compute_bytes


def _sent(problem: PlanInput, block: BlockShape) -> int:
    return block.sent_bytes_per_token


def _attended(problem: PlanInput, block: BlockShape) -> int:
    return 0 if problem.continues_only else block.saved_bytes_per_token


_ROWS = (
    # Slots: x, dy and dx or y of the running op, x and dy of the next, one on its way out.
    ActivationKind(
        name="x",
        says="a layer's input",
        bytes_per_token=_hidden,
        gpu="gpu.hidden",
        slots=6,
        ram="ram.boundary",
        saved=True,
        gradient="dy",
    ),
    ActivationKind(
        name="dy",
        says="the gradient of a layer's output",
        bytes_per_token=_hidden,
        gpu="gpu.hidden",
        slots=6,
        ram="ram.boundary",
    ),
    # Slots: the running op's and its gradient before and behind it, the next one's, one on its way out.
    ActivationKind(
        name="sent",
        says="what a layer hands to a branch",
        bytes_per_token=_sent,
        gpu="gpu.sent",
        slots=6,
        ram="ram.sent",
        saved=True,
        gradient="dsent",
    ),
    ActivationKind(
        name="dsent",
        says="the gradient of what a layer hands to a branch",
        bytes_per_token=_sent,
        gpu="gpu.sent",
        slots=6,
        ram="ram.sent",
    ),
    # Slots: the running op's, the next one's, one on its way out.
    ActivationKind(
        name="saved",
        says="attention's output",
        bytes_per_token=_attended,
        gpu="gpu.saved",
        slots=3,
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
    ),
    # Where ranks share sequences, between two ops of a chunk's backward. Slots: as of attention's output.
    ActivationKind(
        name="dq",
        says="the gradient of queries",
        bytes_per_token=lambda problem, block: block.q_numel_per_token * problem.compute_bytes * problem.sharded,
        bytes_per_chunk=lambda problem, block: block.lse_bytes_per_token * problem.sharded,  # of the sinks
        gpu="gpu.dq",
        slots=3,
        ram="ram.window_dq",
    ),
    # Slots: what the running op begins with and what it ends with, the next one's, one on its way out.
    ActivationKind(
        name="recurrent",
        says="a layer's recurrent state",
        bytes_per_chunk=lambda problem, block: 0 if problem.continues_only else block.recurrent_bytes,
        gpu="gpu.recurrent",
        slots=4,
        ram="ram.handed_on",
        saved=True,
    ),
    ActivationKind(
        name="drecurrent",
        says="the gradient of a layer's recurrent state",
        bytes_per_chunk=lambda problem, block: block.recurrent_bytes,
        gpu="gpu.drecurrent",
        ram="ram.handed_on",
    ),
    # In one piece, of a size of its own: plan.offloaded_graph_bytes.
    ActivationKind(
        name="graph",
        says="a layer's saved graph",
        gpu="gpu.graph_slot",
        slots=3,
        ram=None,
        saved=True,
    ),
)
ACTIVATIONS = {row.name: row for row in _ROWS}
GRADIENT_OF = {row.name: row.gradient for row in _ROWS if row.gradient is not None}
"""Kind of an input of a block -> the gradient that backward finds of it."""
BETWEEN = (*GRADIENT_OF, *GRADIENT_OF.values())
"""Kinds that go from block to block."""


def largest(problem: PlanInput, kind: str, tokens: int) -> int:
    """The most bytes that a chunk of `tokens` tokens takes of that kind in any block."""
    return max(ACTIVATIONS[kind].nbytes(problem, block, tokens) for block in problem.blocks)
