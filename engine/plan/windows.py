"""Memory of one layer's attention over a micro-batch: windows on the compute device, and what passes through RAM."""

from __future__ import annotations

from penstock.engine.plan.activations import largest
from penstock.engine.plan.chunks import Chunk, streams
from penstock.engine.plan.plan import aligned
from penstock.engine.plan.problem import DKV_SLOTS, FP32, KV_SLOTS, BlockShape, PlanInput


def _widest(blocks: tuple[BlockShape, ...], name: str) -> int:
    widths: list[int] = [getattr(block, name) for block in blocks]
    return max(widths)


def window_bytes(problem: PlanInput, max_chunk: int, streamed: bool, windows: int) -> dict[str, list[int]]:
    """What a layer's chunks hand to one another on the compute device: name -> bytes of each buffer, in whole pages.

    The gradient of a recurrent state (drecurrent). Of attention, whole: keys and values of `windows` micro-batches (kv)
    and float32 gradients of one (dkv). Streamed: KV_SLOTS and DKV_SLOTS chunks of them; of the running chunk queries
    (q), the gradient of attention's output (dout), and in float32 the partial output and its log-sum-exp, or the
    queries' gradient (partial, partial_lse).
    """
    blocks = problem.blocks
    kv, kv_numel = _widest(blocks, "kv_bytes_per_token"), _widest(blocks, "kv_numel_per_token")
    if problem.continues_only:
        return {}
    states = aligned(_widest(blocks, "recurrent_bytes"))
    of_states = {"drecurrent": [states]} if states and problem.trains else {}
    if not streamed:
        tokens = problem.rows * problem.row_tokens
        summed = {"dkv": [aligned(tokens * kv_numel * FP32)]} if problem.trains else {}
        return {"kv": [aligned(tokens * kv)] * windows} | summed | of_states
    q, out = _widest(blocks, "q_numel_per_token"), _widest(blocks, "out_numel_per_token")
    return of_states | {
        "kv": [aligned(max_chunk * kv)] * KV_SLOTS,
        "dkv": [aligned(max_chunk * kv_numel * FP32)] * DKV_SLOTS,
        "q": [aligned(max_chunk * q * problem.compute_bytes)],
        "dout": [aligned(max_chunk * out * problem.compute_bytes)],
        "partial": [aligned(max_chunk * max(q, out) * FP32)],
        "partial_lse": [aligned(max_chunk * _widest(blocks, "lse_bytes_per_token"))],
    }


def attention_regions(
    problem: PlanInput, chunks: tuple[Chunk, ...], streamed: bool, recomputing: bool, spilling: bool
) -> dict[str, list[int]]:
    """RAM that one block's pass over a micro-batch needs beside what is saved: name -> bytes per chunk, in whole pages.
    saved: attention's output and log-sum-exp, computed again; kv: unsaved keys and values; dkv: their float32
    gradients. Where ranks share sequences, kv is shared (shared_regions), dkv are all ranks' sums, and dq is the
    gradient of the queries."""
    tokens = [chunk.end - chunk.start for chunk in chunks if chunk.micro_batch == 0]
    blocks = problem.blocks
    unsaved = any(block.attends and not block.backward for block in blocks)
    own_kv = streamed and not problem.sharded and (recomputing or spilling or unsaved)
    sizes = {
        "saved": [aligned(n * _widest(blocks, "saved_bytes_per_token") * recomputing) for n in tokens],
        "kv": [aligned(n * _widest(blocks, "kv_bytes_per_token") * own_kv) for n in tokens],
        "dkv": [aligned(n * _widest(blocks, "kv_numel_per_token") * FP32 * streamed) for n in tokens],
    }
    if problem.sharded:
        sizes["dq"] = [aligned(largest(problem, "dq", n)) for n in tokens]
    if not problem.trains and problem.sharded:
        sizes |= {"dkv": [], "dq": []}
    return {name: each if any(each) else [] for name, each in sizes.items()}


SHARED_WINDOWS = 2
"""Of keys and values that ranks share: a layer's are read while the next one's are written."""


def shared_regions(problem: PlanInput) -> dict[str, list[int]]:
    """RAM in which ranks that share sequences leave for one another what one block's pass over a micro-batch makes:
    name -> bytes per chunk of the whole stream, in whole pages. kv: SHARED_WINDOWS times keys and values; dkv: of each
    rank in turn what it adds to their float32 gradients; recurrent, drecurrent, of all micro-batches: the state that it
    begins with and the gradient of the one behind it. Nothing where they do not."""
    if not problem.sharded:
        return {}
    tokens = [chunk.end - chunk.start for chunk in streams(problem)[0]]
    kv, numel = (_widest(problem.blocks, name) for name in ("kv_bytes_per_token", "kv_numel_per_token"))
    summed = [aligned(n * numel * FP32) for n in tokens] * problem.ranks if problem.trains else []
    states = [aligned(_widest(problem.blocks, "recurrent_bytes"))] * len(tokens) * problem.micro_batches
    sizes = {"kv": [aligned(n * kv) for n in tokens] * SHARED_WINDOWS, "dkv": summed}
    sizes |= {"recurrent": states, "drecurrent": states if problem.trains else []}
    return {name: each if any(each) else [] for name, each in sizes.items()}


def shared_window_bytes(problem: PlanInput) -> int:
    """A rank's part of them."""
    return sum(-(-sum(sizes) // problem.ranks) for sizes in shared_regions(problem).values())
