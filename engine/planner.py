"""Making the plan: the GPU's budget, then RAM's, filled with what helps most; NVMe takes the rest.

Reads shapes and budgets only: no torch, no device, no file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.plan import (
    FP32,
    HIDDEN_SLOTS,
    KV_SLOTS,
    SAVED_SLOTS,
    BufferPlan,
    Plan,
    Pool,
    Problem,
    Tier,
    TierPlan,
    aligned,
    attention_regions,
    cut_chunks,
    gib,
    record,
    window_bytes,
)
from storage.errors import BudgetError

KEEP_FIRST_TOKENS = 16_384
"""Tokens per step from which GPU memory left over serves kept activations before resident blocks.

A layer of P parameters computes for 8 P tokens / rate and moves 8 P bytes; with 400 TFLOP/s and 25 GB/s to the GPU the
two take equal time at 16,000 tokens. Beyond, saved work shortens the step and saved traffic does not.
"""
AGAIN_SHARE = 0.12
"""A layer whose attention costs less than this share of its work is computed again rather than spilled to NVMe."""


@dataclass(slots=True)
class _RamPlacement:
    """What place_ram decides."""

    tiers: dict[str, dict[str, Tier]]
    """Buffer -> kind -> tier, for buffers not on the GPU."""
    parts: dict[str, int]
    """Bytes of RAM by use."""
    state_stages: int = 0
    part_stages: int = 0
    activation_stages: int = 0
    activation_stage_bytes: int = 0
    spilled: set[tuple[int, int]] = field(default_factory=set)


class _Planner:
    """Fills the GPU's budget with whole buffers and kept activations, then RAM's with activations, weights, gradients
    and state."""

    def __init__(self, problem: Problem) -> None:
        self.problem = p = problem
        self.chunks = cut_chunks(p.micro_batches, p.rows, p.row_tokens, p.chunk_tokens, p.chunk_per_row)
        self.max_chunk = max(c.end - c.start for c in self.chunks)
        self.window_chunks = max(c.local for c in self.chunks) + 1
        self.layers = [i for i, block in enumerate(p.blocks) if block.role == "layer"]
        self.attending = [i for i in self.layers if p.blocks[i].attends]
        layers = [buffers for i in self.layers for buffers in p.blocks[i].buffers]
        numel = {b.name: b.numel for b in p.buffers}
        self.layer_numel = max(numel[name] for name in layers)
        self.pool: dict[str, Pool] = {n: "layer" if size <= self.layer_numel else "edge" for n, size in numel.items()}
        self.part_numel = max(b.part_numel for b in p.buffers)
        self.ram_budget = p.ram_budget - p.reader_bytes
        # A block that computes with several buffers holds them all at once.
        self.at_once = {
            pool: max(sum(self.pool[n] == pool for n in block.buffers) for block in p.blocks)
            for pool in ("layer", "edge")
        }
        self.streamed = False
        self.resident: set[str] = set()
        self.kept: set[tuple[int, int]] = set()
        self.held: set[tuple[int, int]] = set()
        self.recomputed: set[int] = set(self.attending if p.save == "input" else ())

    # ------------------------------------------------------------------ GPU

    def slots(self, resident: set[str]) -> tuple[dict[Pool, int], dict[Pool, int], dict[Pool, int]]:
        """Weight slots, gradient slots and their elements per pool when `resident` buffers need none."""
        streamed = [b for b in self.problem.buffers if b.name not in resident]
        weights: dict[Pool, int] = {"layer": 0, "edge": 0}
        gradients: dict[Pool, int] = {"layer": 0, "edge": 0}
        numel: dict[Pool, int] = {"layer": 0, "edge": 0}
        for pool in ("layer", "edge"):
            members = [b for b in streamed if self.pool[b.name] == pool]
            if not members:
                continue
            numel[pool] = max(b.numel for b in members)
            extra = 1 if pool == "layer" else 0
            weights[pool] = min(len(members), self.at_once[pool] + extra)
            gradients[pool] = min(len(members), self.at_once[pool] + extra)
        return weights, gradients, numel

    def gpu_parts(self, resident: set[str]) -> dict[str, int]:
        """Bytes of everything on the GPU when `resident` buffers live there whole."""
        p = self.problem
        weights, gradients, numel = self.slots(resident)
        saved = max(b.saved_bytes_per_token for b in p.blocks)
        held = sum(b.numel for b in p.buffers if b.name in resident)
        pools: tuple[Pool, ...] = ("layer", "edge")
        return {
            "resident blocks": held * (p.compute_bytes + 4 * FP32),
            "weight slots": sum(weights[k] * aligned(numel[k] * p.compute_bytes) for k in pools),
            "gradient slots": sum(gradients[k] * aligned(numel[k] * FP32) for k in pools),
            "K/V window": sum(map(sum, window_bytes(p, self.max_chunk, self.streamed).values())),
            "activation slots": HIDDEN_SLOTS * aligned(self.max_chunk * p.hidden_size * p.compute_bytes)
            + SAVED_SLOTS * aligned(self.max_chunk * saved),
            "held activations": sum(sum(self.record(*key).values()) for key in self.held),
            "kept activations": sum(self.graph_bytes(*key) for key in self.kept),
            "workspace": p.workspace_bytes,
        }

    def graph_bytes(self, block: int, chunk: int) -> int:
        """Bytes of one kept graph, with attention's log-sum-exp."""
        shape, c = self.problem.blocks[block], self.chunks[chunk]
        assert shape.graph_bytes_per_token is not None
        return aligned((c.end - c.start) * (shape.graph_bytes_per_token + shape.lse_bytes_per_token))

    def gpu_need(self, resident: set[str]) -> int:
        return sum(self.gpu_parts(resident).values())

    def place_gpu(self) -> None:
        p = self.problem
        useful = bool(self.attending) and self.window_chunks > KV_SLOTS
        self.streamed = p.kv_window == "streamed" and useful
        need = self.gpu_need(set())
        if need > p.gpu_budget and p.kv_window == "auto" and useful:
            self.streamed = True
            if self.gpu_need(set()) >= need:
                self.streamed = False
            need = self.gpu_need(set())
        if need > p.gpu_budget:
            listing = ", ".join(f"{k} {gib(v)}" for k, v in self.gpu_parts(set()).items() if v)
            raise BudgetError(
                f"budgets.gpu: {gib(p.gpu_budget)} cannot hold one block's working set of {gib(need)} ({listing}); "
                f"give at least {need} bytes, or lower train.chunk_tokens, train.sequences_per_micro_batch or "
                "data.sequence_length"
            )
        if p.save == "everything":
            self.keep_all()
        keep_first = p.micro_batches * p.rows * p.row_tokens >= KEEP_FIRST_TOKENS
        for fill in (self.hold, self.keep, self.reside) if keep_first else (self.reside, self.hold, self.keep):
            fill()

    def keepable(self) -> list[tuple[int, int]]:
        """(block, chunk) in the order in which backward wants them."""
        known = [i for i in self.layers if self.problem.blocks[i].graph_bytes_per_token is not None]
        return [(i, chunk.index) for i in reversed(known) for chunk in reversed(self.chunks)]

    def keep_all(self) -> None:
        p = self.problem
        self.kept.update(self.keepable())
        need = self.gpu_need(set())
        unknown = [p.blocks[i].name for i in self.layers if p.blocks[i].graph_bytes_per_token is None]
        if unknown:
            raise BudgetError(
                f"train.save: what {unknown[0]} would have to keep is not known, so 'everything' is not possible; use "
                "auto, attention or input"
            )
        if need > p.gpu_budget:
            raise BudgetError(
                f"budgets.gpu: {gib(p.gpu_budget)} cannot hold all activations (train.save=everything needs "
                f"{gib(need)}); give at least {need} bytes, or use train.save=auto"
            )

    def hold(self) -> None:
        """Let records stay on the GPU, backward's first ones first, until RAM holds the rest and the weights."""
        p = self.problem
        left = p.gpu_budget - self.gpu_need(self.resident)
        weights = sum(aligned(b.numel * p.compute_bytes) for b in p.buffers if b.name not in self.resident)
        wanted = self.stream_bytes() + self.block_bytes(False) + self.least_stages() + weights
        short = wanted + sum(self.records().values()) - self.ram_budget
        for key, size in self.records().items():
            if short <= 0 or size > left:
                break
            self.held.add(key)
            short -= size
            left -= size

    def keep(self) -> None:
        """Keep graphs, backward's first ones first, as long as there is room."""
        if self.problem.save != "auto":
            return
        left = self.problem.gpu_budget - self.gpu_need(self.resident)
        for key in self.keepable():
            left -= self.graph_bytes(*key)
            if left < 0:
                break
            self.kept.add(key)

    def reside(self) -> None:
        """Let whole buffers live on the GPU as long as there is room."""
        for buffer in self.problem.buffers:
            if self.gpu_need(self.resident | {buffer.name}) <= self.problem.gpu_budget:
                self.resident.add(buffer.name)

    # ------------------------------------------------------------------ RAM

    def stream_bytes(self) -> int:
        """The chunks of one block boundary: the hidden states going up, their gradients coming down."""
        hidden = self.problem.hidden_size * self.problem.compute_bytes
        return sum(aligned((chunk.end - chunk.start) * hidden) for chunk in self.chunks)

    def records(self) -> dict[tuple[int, int], int]:
        """(block, chunk) -> bytes of its saved activations outside the GPU, backward's first ones first."""
        return {
            (i, chunk.index): sum(self.record(i, chunk.index).values())
            for i in reversed(self.layers)
            for chunk in reversed(self.chunks)
            if (i, chunk.index) not in self.held
        }

    def record(self, block: int, chunk: int) -> dict[str, int]:
        tokens = self.chunks[chunk].end - self.chunks[chunk].start
        return record(self.problem, block, tokens, block in self.recomputed, (block, chunk) in self.kept)

    def stage_bytes(self, grad_on_nvme: bool) -> tuple[int, int]:
        """Bytes of one state stage and of one part stage."""
        p = self.problem
        part = self.part_numel
        gradient = p.gradient_bytes if grad_on_nvme else 0
        return aligned(part * FP32) * 3 + aligned(part * gradient), aligned(part * FP32)

    def least_stages(self) -> int:
        """Bytes of the fewest stages that state and weights can pass through."""
        return 2 * (self.stage_bytes(True)[0] + self.stage_bytes(False)[1])

    def block_bytes(self, spilling: bool) -> int:
        """RAM of one block's pass over a micro-batch, whatever is saved: see attention_regions."""
        regions = attention_regions(self.problem, self.chunks, self.streamed, bool(self.recomputed), spilling)
        return sum(size for sizes in regions.values() for size in sizes)

    def recompute_for_ram(self, budget: int) -> None:
        """Save less of the layers that wait longest, where that is cheap, until the activations fit `budget` bytes."""
        p = self.problem
        if p.save != "auto":
            return
        for i in self.attending:
            if self.stream_bytes() + sum(self.records().values()) + self.block_bytes(False) <= budget:
                return
            here = {(i, chunk.index) for chunk in self.chunks}
            if p.blocks[i].again_share <= AGAIN_SHARE and not here & (self.kept | self.held):
                self.recomputed.add(i)

    def place_ram(self) -> _RamPlacement:
        """Tier of every kind of the buffers not on the GPU and of every saved activation; RAM by use.

        All activations go to RAM where they fit, or can be made to by computing attention again at little cost. Where
        they do not, weights come first: on NVMe each of their bytes would move three times a step (read, read,
        written), each byte of anything else twice.
        """
        p = self.problem
        rest = [b for b in p.buffers if b.name not in self.resident]
        sizes = {"weights": p.compute_bytes, "gradient": p.gradient_bytes, "state": 3 * FP32}
        everything = sum(aligned(b.numel * s) for b in rest for s in sizes.values())
        part_stage = self.stage_bytes(False)[1]
        # GPU-resident state passes through part stages when it is checkpointed.
        through = 2 if self.resident else 0
        activations = self.stream_bytes() + sum(self.records().values()) + self.block_bytes(False)
        if activations + everything + through * part_stage <= self.ram_budget:
            tiers: dict[str, dict[str, Tier]] = {b.name: {k: "ram" for k in sizes} for b in rest}
            parts = {"activations": activations, "resident blocks": everything, "stages": through * part_stage}
            return _RamPlacement(tiers, parts, part_stages=through)
        self.recompute_for_ram(self.ram_budget - self.least_stages())
        placement = self._stages()
        records = {key: size for key, size in self.records().items() if size}
        left = self.ram_budget - sum(placement.parts.values())
        spilling = placement.activation_stages > 0
        if spilling:
            placement.spilled.update(key for key in records if key not in self.kept)
        held = 0
        for buffer in rest:
            placement.tiers[buffer.name] = dict.fromkeys(sizes, "nvme")
        for kind, size in sizes.items():
            for buffer in rest:
                need = aligned(buffer.numel * size)
                if held + need <= left:
                    placement.tiers[buffer.name][kind] = "ram"
                    held += need
            if kind == "weights" and spilling:
                for key in [key for key in records if key in placement.spilled]:
                    if records[key] > left - held:
                        break
                    placement.spilled.remove(key)
                    placement.parts["activations"] += records[key]
                    left -= records[key]
        placement.parts["resident blocks"] = held
        return placement

    def _stages(self) -> _RamPlacement:
        """How many stages there are: as many as half of the budget holds beside the activations, or the least.

        Kept graphs need keys and values in RAM; where these alone are too many, nothing is kept.
        """
        p = self.problem
        state_stage, part_stage = self.stage_bytes(True)[0], self.stage_bytes(False)[1]
        stream = self.stream_bytes()
        least = self.least_stages()
        fixed = 0
        for spilling in (False, True):
            pinned = sum(sum(self.record(*key).values()) for key in self.kept - self.held)
            if (
                spilling
                and p.save == "auto"
                and stream + pinned + self.block_bytes(True) + least > self.ram_budget // 2
            ):
                self.kept.clear()
                pinned = 0
            saved = pinned if spilling else sum(self.records().values())
            fixed = stream + self.block_bytes(spilling) + saved
            widest = [max(self.record(i, c.index).values(), default=0) for i in self.layers for c in self.chunks]
            for each, own in ((4, 9), (3, 6), (2, 4), (2, 2)):
                staged = each * (state_stage + part_stage)
                moving = own * max(widest) if spilling else 0
                if fixed + staged + moving <= self.ram_budget * (1.0 if own == 2 else 0.5):
                    parts = {"activations": fixed + moving, "resident blocks": 0, "stages": staged}
                    stage = max(widest) if spilling else 0
                    return _RamPlacement({}, parts, each, each, own if spilling else 0, stage)
        need = fixed + 2 * max(widest) + least + p.reader_bytes
        raise BudgetError(
            f"budgets.ram: {gib(p.ram_budget)} cannot hold one block's working set of {gib(need)} (hidden states of "
            f"the step {gib(stream)}, one block's pass {gib(fixed - stream)}, staging of one part {gib(least)} and of "
            f"one chunk {gib(2 * max(widest))}); give at least {need} bytes, or lower train.sequences_per_step, "
            "data.sequence_length or storage.chunk_bytes"
        )

    def plan(self) -> Plan:
        p = self.problem
        self.place_gpu()
        ram = self.place_ram()
        if p.reader_bytes:
            ram.parts["reader buffers"] = p.reader_bytes
        on_gpu: dict[str, Tier] = {"weights": "gpu", "gradient": "gpu", "state": "gpu"}
        buffers = {}
        for shape in p.buffers:
            kinds = on_gpu if shape.name in self.resident else ram.tiers[shape.name]
            buffers[shape.name] = BufferPlan(
                name=shape.name,
                numel=shape.numel,
                part_numel=shape.part_numel,
                pool=self.pool[shape.name],
                weights=kinds["weights"],
                state=kinds["state"],
                gradient=kinds["gradient"],
            )
        weights, gradients, numel = self.slots(self.resident)
        gpu = self.gpu_parts(self.resident)
        return Plan(
            problem=p,
            buffers=buffers,
            chunks=self.chunks,
            weight_slots=weights,
            weight_slot_numel=numel,
            gradient_slots=gradients,
            state_stages=ram.state_stages,
            part_stages=ram.part_stages,
            activation_stages=ram.activation_stages,
            activation_stage_bytes=ram.activation_stage_bytes,
            spilled=frozenset(ram.spilled),
            recomputed=frozenset(self.recomputed),
            held=frozenset(self.held),
            kept=frozenset(self.kept),
            streamed=self.streamed,
            tiers={
                "gpu": TierPlan(budget_bytes=p.gpu_budget, peak_bytes=sum(gpu.values()), parts=gpu),
                "ram": TierPlan(budget_bytes=p.ram_budget, peak_bytes=sum(ram.parts.values()), parts=ram.parts),
            },
        )


def make_plan(problem: Problem) -> Plan:
    """Place every kind of every buffer within the budgets.

    Raises BudgetError, with the figures, when a budget cannot hold one block's working set.
    """
    return _Planner(problem).plan()
