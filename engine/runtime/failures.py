"""What failed in a step and is no mistake of ours, said to the user: the GPU, a compiler, or what is used up."""

from __future__ import annotations

import itertools
import math
import re

import torch
from torch import Tensor

from penstock.engine.events import op_text
from penstock.engine.plan.plan import Plan
from penstock.engine.schedule.ops import WHOLE, Op
from penstock.storage.files.errors import UserError, gpu_failure, used_up
from penstock.storage.files.untrusted import one_line


class DivergedError(UserError):
    """Loss, gradient or updated state is not finite, or too large to train on."""


_FULL = re.compile(r"[^\n]*(?:No space left on device|Disk quota exceeded)[^\n]*")
_TRIED = re.compile(r"[Tt]ried to allocate ([0-9.]+ [KMGT]?i?B)")


def explain(error: BaseException, op: Op | None, plan: Plan) -> UserError | None:
    """`error`, raised in `op` (None: outside any op), as a message for the user; None when it is a mistake of ours."""
    where = f"op {describe(op, plan)}" if op is not None else "what surrounds the ops"
    text = str(error)
    said = gpu_failure(error)
    if isinstance(error, torch.OutOfMemoryError) or (said is not None and "out of memory" in text):
        tried, gpu = _TRIED.search(text), plan.tiers["gpu"]
        requested = f" asked for {tried[1]} more" if tried else ""
        return UserError(
            f"budgets.gpu: out of GPU memory despite the plan: {where}{requested}; the plan's peak is "
            f"{gpu.peak_bytes:,} bytes of a budget of {gpu.budget_bytes:,}. Raise budgets.gpu, lower "
            "train.chunk_tokens, or stop the other programs on this GPU"
        )
    if said is not None:
        return UserError(
            f"the GPU failed in {where}: {said}. GPU errors are reported late, so an "
            "earlier op may be the cause. If the GPU is gone or hangs (nvidia-smi; Xid in the kernel's log), resume on "
            "another one"
        )
    if not isinstance(error, OSError) and (full := _FULL.search(text)) is not None:  # a compiler's own words
        return UserError(
            f"torch.compile has no room for its files in {where}: {one_line(full[0])}; free some space there, set "
            "TMPDIR to a folder with room, or use train.compile=off"
        )
    reason = used_up(error)
    return None if reason is None else UserError(f"in {where}: {reason}")


def describe(op: Op, plan: Plan) -> str:
    """An op by its name, with the tokens that it is about and its step."""
    tokens = f" {_tokens(plan, op.index)}" if op.index != WHOLE and op.lane == "compute" else ""
    return f"{op_text(op.action.name, op.block, op.index)}{tokens} of step {op.step}"


def _tokens(plan: Plan, index: int) -> str:
    rank = plan.rank_of(index)
    chunk, whose = plan.of_rank(rank).chunks[index % len(plan.chunks)], "" if rank == plan.rank else f" of GPU {rank}"
    return f"(micro-batch {chunk.micro_batch}{whose}, tokens {chunk.start} to {chunk.end})"


def first_not_finite(plan: Plan, losses: Tensor, squares: Tensor, marks: Tensor) -> str | None:
    """What first was not finite in a step, in the order of groups and their passes; None if all was. losses [chunks];
    squares [buffers]; marks [2, blocks, chunks], forward and backward."""
    if all(values.isfinite().all() for values in (losses, squares, marks)):
        return None
    of_loss, (forward, backward), blocks = losses.tolist(), marks.tolist(), range(len(plan.blocks))
    for group in plan.groups(plan.chunks):
        chunks = range(marks.shape[2]) if plan.choice.spread else range(group[0].index, group[-1].index + 1)
        in_order = itertools.chain(
            (("the output", block, chunk, forward[block][chunk]) for block in blocks for chunk in chunks),
            (("the loss", blocks[-1], c.index, of_loss[c.index]) for c in group[::-1]),
            (
                ("the gradient of the input", block, chunk, backward[block][chunk])
                for block in blocks[::-1]
                for chunk in chunks[::-1]
            ),
        )
        for what, block, chunk, value in in_order:
            if not math.isfinite(value):
                return f"{what} of {plan.blocks[block].name}[{chunk}] {_tokens(plan, chunk)}"
    bad = (~squares.isfinite()).nonzero()
    return f"the gradient of {list(plan.buffers)[int(bad[0])]}" if bad.numel() else None
