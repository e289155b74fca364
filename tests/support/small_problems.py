"""Small problems for the planner, and plans of them: what the tests of plans, schedules and searches draw from."""

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from penstock.engine.forecast.choices import dimensions
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.planner import make_plan
from penstock.engine.plan.problem import (
    BlockShape,
    BufferShape,
    PlanInput,
    PlanOptions,
    Routing,
    SampleSpace,
)
from penstock.storage.files.errors import BudgetError
from penstock.storage.files.units import least_text

KV_DIM, HEAD_DIM, HEADS, HIDDEN = 16, 8, 4, 32
SENT = 2 * HIDDEN + 16
"""Bytes of a token that a router sends to experts which are a block of their own."""
STATE_KINDS = ("master", "exp_avg", "exp_avg_sq")
TIERS = {"gpu": "gpu_budget", "ram": "ram_budget", "nvme": "nvme_budget"}
"""Tier -> the field of PlanInput that is its budget."""


SIZES: dict[str, Any] = {"micro_batches": 2, "rows": 1, "row_tokens": 256, "chunk_tokens": 64, "chunk_per_row": False}
SIZES |= {"gpu_budget": 10**9, "ram_budget": 10**9, "activation_checkpointing": "selective", "kv_window": "whole"}
SIZES |= {"hidden_size": HIDDEN, "compute_dtype": "bfloat16", "workspace_bytes": 1000}
"""Fields of PlanInput that `problem` is given others of."""


def problem(
    *,
    layers: int = 3,
    tied: bool = False,
    own_head: bool = True,
    edge: int = 8,
    without_attention: frozenset[int] = frozenset(),
    sliding: frozenset[int] = frozenset(),
    wide: frozenset[int] = frozenset(),
    graph_bytes: int | None = 700,
    frozen: frozenset[int] = frozenset(),
    halves: frozenset[int] = frozenset(),
    experts: frozenset[int] = frozenset(),
    groups: int = 1,
    recurrent: frozenset[int] = frozenset(),
    kept: frozenset[int] = frozenset(),
    quantised: bool = False,
    skips: bool = False,
    vision: bool = False,
    references: bool = False,
    **more: Any,
) -> PlanInput:
    """A small model with four pages of parameters per layer and `edge` of them in embedding and head.

    Of the blocks `frozen`, by index, nothing is trained, but for the last layer; of those in `halves` a page is;
    those in `kept` have a page more, in float32, which is frozen where all of the block is. The layers in `experts`
    have those as a block of their own, or in so many `groups`;
    those in `recurrent` carry a state, and attend as well where the window is whole; heads of those in `wide` are twice
    as wide. `quantised`: of layers and experts what is frozen. `skips`: groups that nothing is sent to are skipped.
    `vision`: the first block is a tower. `references`: first values are kept of what is trained.
    """
    blocks = [BlockShape(name=name, kind=name, buffers=(name,)) for name in ("vision", "embed")[not vision :]]
    whole = more.get("kv_window", SIZES["kv_window"]) == "whole"
    for i in range(layers):
        times = 2 if i in wide else 1
        attention = {
            "out_bytes_per_token": times * HEADS * HEAD_DIM * 2,
            "lse_bytes_per_token": HEADS * 4,
            "kv_bytes_per_token": times * 2 * KV_DIM * 2,
            "kv_numel_per_token": times * 2 * KV_DIM,
            "q_numel_per_token": times * HEADS * HEAD_DIM,
            "out_numel_per_token": times * HEADS * HEAD_DIM,
            "projection_flops_per_token": 2 * 2048,
        }
        layer = BlockShape(
            name=f"layers.{i}",
            kind="layer",
            buffers=(f"layers.{i}",),
            inputs=(len(blocks) - 1,),
            saved_inputs=("x",),
            sliding_window=20 if i in sliding else None,
            graph_bytes_per_token=None if i in experts | recurrent else graph_bytes,
            recurrent_bytes=3000 if i in recurrent else 0,
            sent_bytes_per_token=SENT if i in experts else 0,
            elementwise_bytes_per_token=graph_bytes or 0,
            matmul_flops_per_token=2 * 4 * 2048,
            unread_flops_per_token=2 * 1024,
        )
        attends = i not in without_attention and (whole or i not in recurrent)
        blocks.append(replace(layer, **attention) if attends else layer)
        if i in experts:
            first = len(blocks)
            for group in range(groups):
                name = f"layers.{i}.experts" + f".{group}" * (groups > 1)
                own = BlockShape(
                    name=name,
                    kind="experts",
                    buffers=(name,),
                    inputs=(len(blocks) - 1,),
                    input_kinds=("x", "sent"),
                    saved_inputs=() if group else ("sent",),
                    sent_to=first if group else None,
                    sent_bytes_per_token=SENT,
                    matmul_flops_per_token=2 * 2 * 2048,
                )
                blocks.append(own)
    head = ("head",) if own_head else ()
    shared = (*head, "embed") if tied or not own_head else head
    flops = 2 * edge * 2048
    blocks.append(
        BlockShape(name="head", kind="head", buffers=shared, inputs=(len(blocks) - 1,), matmul_flops_per_token=flops)
    )
    sizes = {block.name: (4 if block.inputs else edge) * 2048 for block in blocks[:-1]}
    if own_head:
        sizes["head"] = 2048 if tied else edge * 2048
    # Groups of a layer's experts are alike.
    first = [i if block.sent_to is None else block.sent_to for i, block in enumerate(blocks)]
    chosen = (frozen - {first[-2]}, halves, kept)
    alike = (frozenset(i for i, one in enumerate(first) if one in each) for each in chosen)
    blocks, buffers = _freeze(blocks, sizes, *alike)
    if quantised:
        quantisable = (b.frozen and not b.float32 and b.name.startswith("layers.") for b in buffers)
        buffers = [_quantised(b) if yes else b for b, yes in zip(buffers, quantisable, strict=True)]
    buffers += [buffer.reference for buffer in buffers if references and not buffer.frozen]
    more |= {"routing": Routing(2 * groups, 1, groups)} if skips and experts and groups > 1 else {}
    return PlanInput(blocks=tuple(blocks), buffers=tuple(buffers), state_kinds=STATE_KINDS, **SIZES | more)


def _quantised(buffer: BufferShape) -> BufferShape:
    """The same in half of its bytes."""
    numel = max(2048, buffer.numel // 4096 * 2048)
    return replace(buffer, numel=numel, part_numel=min(numel, 4096), dtype="int16", copy_numel=buffer.numel)


def _freeze(
    blocks: list[BlockShape],
    sizes: dict[str, int],
    frozen: frozenset[int],
    halves: frozenset[int],
    kept: frozenset[int],
) -> tuple[list[BlockShape], list[BufferShape]]:
    """The blocks and their buffers, of `sizes`, with what is frozen, or kept in float32, in buffers of its own."""
    wholly = {blocks[i].name for i in frozen}
    partly = {blocks[i].name for i in halves} - wholly
    split: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        stays = size if name in wholly else max(2048, size - 2048) if name in partly else 0
        trained = 0 if name in wholly else 2048 if name in partly else size
        split[name] = {n: s for n, s in ((name, trained), (f"{name}.frozen", stays)) if s}
        if name in {blocks[i].name for i in kept}:
            split[name][f"{name}.float32" + ".frozen" * (name in wholly)] = 2048
    buffers = [
        BufferShape(
            name=n,
            numel=s,
            part_numel=min(s, 4096),
            dtype="float32" if ".float32" in n else "bfloat16",
            frozen=n.endswith(".frozen"),
            float32=".float32" in n,
        )
        for found in split.values()
        for n, s in found.items()
    ]
    names = [tuple(n for own in block.buffers for n in split[own]) for block in blocks]
    lowest = next(i for i, found in enumerate(names) if any(not n.endswith(".frozen") for n in found))
    shapes = []
    for i, (block, found) in enumerate(zip(blocks, names, strict=True)):
        stay = sum(n.endswith(".frozen") for n in found)
        flops = block.matmul_flops_per_token * stay // len(found) if found else 0
        shapes.append(replace(block, buffers=found, backward=i >= lowest, frozen_flops_per_token=flops))
    return shapes, buffers


spaces = st.none() | st.builds(
    SampleSpace,
    lengths=st.lists(st.integers(2, 90), min_size=1, max_size=3).map(tuple),
    keeps=st.booleans(),
    vocabulary=st.just(50),
    tier=st.sampled_from([None, "gpu", "ram"]),
)
some_blocks = st.just(frozenset[int]()) | st.frozensets(st.integers(0, 6))
BOTH = {
    "tied": st.booleans(),
    "rows": st.integers(1, 2),
    "activation_checkpointing": st.sampled_from(["auto", "full", "selective"]),
    "graph_bytes": st.sampled_from([None, 300, 3000]),
    "samples": spaces,
    "experts": some_blocks,
    "groups": st.integers(1, 3),
    "recurrent": some_blocks,
    "scores": st.booleans(),
    "frozen": some_blocks,
    "halves": some_blocks,
    "kept": some_blocks,
    "quantised": st.booleans(),
    "vision": st.booleans(),
    "references": st.booleans(),
}
general = st.builds(
    problem,
    **BOTH,
    layers=st.integers(1, 5),
    own_head=st.booleans(),
    edge=st.sampled_from([1, 4, 9]),
    micro_batches=st.integers(1, 5),
    row_tokens=st.integers(3, 80),
    chunk_tokens=st.integers(9, 120),
    chunk_per_row=st.booleans(),
    without_attention=st.frozensets(st.integers(0, 4), max_size=2),
    gpu_budget=st.integers(200_000, 3_000_000),
    ram_budget=st.integers(150_000, 3_000_000),
    nvme_budget=st.none() | st.integers(500_000, 5_000_000),
    retained_generations=st.integers(0, 2),
    device_reads=st.booleans(),
    reader_bytes=st.sampled_from([0, 70_000]),
    kv_window=st.sampled_from(["auto", "whole", "streamed"]),
    sliding=st.frozensets(st.integers(0, 4), max_size=2),
    wide=st.frozensets(st.integers(0, 4), max_size=2),
)
streaming = st.builds(
    problem,
    **BOTH,
    layers=st.integers(1, 3),
    edge=st.just(1),
    micro_batches=st.integers(1, 2),
    row_tokens=st.integers(30, 50),
    chunk_tokens=st.integers(7, 13),
    without_attention=st.frozensets(st.integers(0, 2), max_size=1),
    gpu_budget=st.integers(150_000, 600_000),
    ram_budget=st.integers(100_000, 1_000_000),
    kv_window=st.just("streamed"),
    sliding=st.frozensets(st.integers(0, 2), max_size=2),
    wide=st.frozensets(st.integers(0, 2), max_size=2),
)
problems = st.one_of(general, streaming)
skipping = st.builds(
    problem,
    **BOTH | {"groups": st.integers(2, 3), "experts": st.sets(st.integers(0, 2), min_size=1).map(frozenset)},
    layers=st.integers(1, 3),
    edge=st.just(1),
    micro_batches=st.integers(1, 3),
    row_tokens=st.integers(20, 50),
    chunk_tokens=st.integers(9, 60),
    gpu_budget=st.integers(150_000, 900_000),
    ram_budget=st.integers(100_000, 2_000_000),
    device_reads=st.booleans(),
    skips=st.just(True),
)
"""Those of mixtures whose idle experts are skipped."""


def window_chunks(shape: PlanInput) -> int:
    """Chunks of one micro-batch."""
    return shape.rows if shape.chunk_per_row else -(-shape.rows * shape.row_tokens // shape.chunk_tokens)


@st.composite
def planned(draw: Any, shapes: st.SearchStrategy[PlanInput] = problems) -> Plan:
    """A plan: of a problem, with one of the choices that the search would try."""
    shape = draw(shapes)
    values = dimensions(shape, window_chunks(shape))
    choice = PlanOptions(**{name: draw(st.sampled_from(found)) for name, found in values.items()})
    return some_plan(shape, choice)


def some_plan(shape: PlanInput, choice: PlanOptions | None = None) -> Plan:
    """A plan for `shape`; where a budget is too small, one for the budget that the refusal asks for."""
    for _ in range(5):
        try:
            return make_plan(shape, choice or PlanOptions())
        except BudgetError as refusal:
            shape = with_need(shape, refusal)
    raise AssertionError("the budgets that the refusals ask for are refused")


def with_need(shape: PlanInput, refusal: BudgetError) -> PlanInput:
    """`shape` with the budget that a refusal asks for."""
    assert refusal.tier is not None
    field = TIERS[refusal.tier]
    given = getattr(shape, field)
    assert refusal.budget_bytes <= given < refusal.need_bytes
    assert f"budgets.{refusal.tier}" in str(refusal)
    shares = shape.ranks if refusal.tier == "ram" else 1  # what is said is of all ranks
    assert f"give at least {least_text(shares * refusal.need_bytes)}" in str(refusal)
    return replace(shape, **{field: refusal.need_bytes})
