"""Making a plan: the GPU's budget, then RAM's, filled as a PlanOptions says; NVMe takes the rest.

Reads shapes and budgets only: no torch, no device, no file. Which choice is best is found by engine/forecast/search.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import get_args

from penstock.engine.plan.chunks import cut_chunks
from penstock.engine.plan.gpu import GpuPlacement, listing
from penstock.engine.plan.plan import (
    BufferPlan,
    Plan,
    TierPlan,
    aligned,
    between_bytes,
    boundary_chunks,
    gib,
    graph_slot_bytes,
    sample_regions,
)
from penstock.engine.plan.problem import (
    FP32,
    LAST_GOOD,
    BufferShape,
    PlanInput,
    PlanOptions,
    SampleSpace,
    SampleTier,
    Tier,
)
from penstock.engine.plan.saving import fitting, spread
from penstock.engine.plan.windows import attention_regions, shared_window_bytes
from penstock.storage.files.errors import BudgetError
from penstock.storage.files.units import least_text
from penstock.storage.tier.chunk import ChunkFormat

SAMPLES_SHARE = 64
"""Keys and values of a run's samples stay on the GPU where they take no more than one part in so many of its budget."""
COMPLETIONS_SHARE = 2
"""The same of completions that are trained on."""
ACTIVATION_STAGES = {2: 2, 4: 9}
"""PlanOptions.stages -> saved activations on their way to or from NVMe at once."""


@dataclass(slots=True)
class _RamPlacement:
    tiers: dict[str, dict[str, Tier]]
    """Buffer -> kind -> tier, for buffers not on the GPU."""
    parts: dict[str, int]
    """Bytes of RAM by use."""
    state_stages: int = 0
    part_stages: int = 0
    activation_stages: int = 0
    activation_stage_bytes: int = 0
    spilled: set[tuple[int, int]] = field(default_factory=set)

    # ------------------------------------------------------------------ RAM


class _Planner(GpuPlacement):
    """Fills RAM's budget with what the GPU's does not hold; NVMe has the rest."""

    def __init__(self, problem: PlanInput, choice: PlanOptions) -> None:
        super().__init__(problem, choice)
        self.beside_bytes = problem.beside_bytes + problem.ring_bytes + self.samples.ram_bytes
        self.ram_budget = problem.ram_budget - self.beside_bytes
        self.part_stage_bytes = aligned(problem.part_stage_bytes)

    # ------------------------------------------------------------------ RAM

    def stream_bytes(self) -> int:
        """The chunks of one block boundary: activations going up, their gradients coming down."""
        lengths = Counter(chunk.end - chunk.start for chunk in boundary_chunks(self.problem, self.group_chunks))
        return sum(count * sum(between_bytes(self.problem, tokens).values()) for tokens, count in lengths.items())

    def block_bytes(self, spilling: bool) -> int:
        """RAM of one block's pass over a micro-batch, whatever is saved: see attention_regions, shared_regions."""
        regions = attention_regions(self.problem, self.group_chunks, self.streamed, bool(self.recomputed), spilling)
        return shared_window_bytes(self.problem) + sum(size for sizes in regions.values() for size in sizes)

    def place_ram(self) -> _RamPlacement:
        """Tier of every kind of the buffers not on the GPU and of every saved activation; RAM by use.

        RAM takes items in one order as long as they fit, and none after the first that does not: with more RAM a plan
        has all that it had with less.
        """
        rest = [b for b in self.in_order if b.name not in self.resident]
        kinds = {b.name: self.kinds_elsewhere(b) for b in rest}
        everything = sum(self.kind_bytes(b, kind) for b in rest for kind in kinds[b.name])
        part_stage = self.part_stage_bytes
        # State on the GPU passes through part stages when it is checkpointed, weights there when they are made.
        through = 0 if not part_stage else self.choice.stages if self.weights else 2 if self.resident else 0
        activations = self.stream_bytes() + self.all_saved_bytes() + self.block_bytes(False)
        whole = activations + everything + through * part_stage
        if whole <= self.ram_budget:
            tiers: dict[str, dict[str, Tier]] = {b.name: dict.fromkeys(kinds[b.name], "ram") for b in rest}
            parts = {"activations": activations, "resident blocks": everything, "stages": through * part_stage}
            placement = _RamPlacement(tiers, parts, part_stages=through)
            self.fill_ram(placement, self.ram_budget - sum(parts.values()))
            return placement
        spilling = self.choice.ram_first != "activations"
        placement = self._stages(spilling, whole)
        for buffer in rest:
            placement.tiers[buffer.name] = dict.fromkeys(kinds[buffer.name], "nvme")
        left = self.ram_budget - sum(placement.parts.values())
        for item, size in self._items(rest, spilling):
            if size > left:
                break
            left -= size
            if isinstance(item[0], str):
                name, kind = item
                placement.tiers[str(name)][str(kind)] = "ram"
                placement.parts["resident blocks"] += size
            else:
                placement.spilled.discard(item)
                placement.parts["activations"] += size
        self.fill_ram(placement, left)
        return placement

    def kinds_elsewhere(self, buffer: BufferShape) -> list[str]:
        """What of a buffer that is not resident has to find a place outside the GPU."""
        weights = [] if buffer.name in self.weights else ["weights"]
        return weights if buffer.frozen else [*weights, "gradient", "state"]

    def kind_bytes(self, buffer: BufferShape, kind: str) -> int:
        """Bytes that a kind takes in RAM, in whole pages: a rank's share. Where a gradient waits between groups, it
        does in float32."""
        p = self.problem
        gradient = FP32 if self.sums_tier(buffer) == "ram" else p.gradient_bytes
        sizes = {"weights": buffer.weight_bytes, "gradient": gradient, "state": len(p.state_kinds) * FP32}
        return aligned(-(-buffer.numel * sizes[kind] // p.ranks))

    def fill_ram(self, placement: _RamPlacement, left: int) -> None:
        """Let graphs leave for RAM while `left` bytes last: as many quarters of them as fit, then backward's first."""
        if not self.offloads or self.choice.offloaded_graphs != "rest":
            return
        offloadable = self.offloadable()
        more = {key: self.more_bytes(key) for key in offloadable if key not in placement.spilled}
        for quarters in (4, 3, 2, 1, 0):
            wanted = [key for key in spread(offloadable, quarters) if key in more]
            taken, nbytes, whole = fitting(wanted, more.__getitem__, left)
            if whole:
                break
        chosen = set(taken)
        rest, of_rest, _ = fitting([key for key in more if key not in chosen], more.__getitem__, left - nbytes)
        self.offload_graphs([*taken, *rest])
        placement.parts["activations"] += nbytes + of_rest

    def _items(
        self, rest: list[BufferShape], spilling: bool
    ) -> Iterator[tuple[tuple[int, int] | tuple[str, str], int]]:
        """(buffer, kind) and (block, chunk) of saved activations with their bytes, in the order in which RAM takes
        them. A byte of frozen weights saves as much reading as a byte of state, and no writing: it comes after it, but
        where weights are to be first. A byte of them saves a writing and a reading, and one of frozen weights two
        readings or three. The reference model's come last: no step needs them."""
        own = [b for b in rest if b.reference_of is None]
        trained, frozen = ([b for b in own if b.frozen is which] for which in (False, True))

        def of_kinds(of: list[BufferShape], *kinds: str) -> Iterator[tuple[tuple[str, str], int]]:
            result = ((b, kind) for kind in kinds for b in of if kind in self.kinds_elsewhere(b))
            return (((b.name, kind), self.kind_bytes(b, kind)) for b, kind in result)

        def saved() -> Iterator[tuple[tuple[int, int], int]]:
            elsewhere = (self.saved_graphs - self.offloaded_graphs) | self.saved_on_gpu | self.shared_keys
            return ((key, self.saved_bytes(*key)) for key in self.backward_order() if key not in elsewhere)

        first = self.choice.ram_first
        waiting = trained
        if self.grouped:  # those that must be there are the first ones
            yield from of_kinds(trained, "gradient")
            waiting = []
        yield from of_kinds(trained, "weights")
        if first != "weights":
            yield from of_kinds(waiting, "gradient")
            yield from of_kinds(trained, "state")
        if first == "frozen last":
            yield from saved()
        yield from of_kinds(frozen, "weights")
        if spilling and first != "frozen last":
            yield from saved()
        if first == "weights":
            yield from of_kinds(waiting, "gradient")
            yield from of_kinds(trained, "state")
        yield from of_kinds([b for b in rest if b.reference_of is not None], "weights")

    def _stages(self, spilling: bool, whole: int) -> _RamPlacement:
        """What passes through RAM: the hidden states, one block's pass, parts of state and, if `spilling`, saved
        activations. A saved graph needs its keys and values in RAM all the same. Raises BudgetError where that alone is
        too much; `whole`: what RAM would need to hold everything, which is less than that for a small model."""
        p, stages = self.problem, self.choice.stages
        own = ACTIVATION_STAGES[stages] if spilling and self.saving else 0
        longest = max(self.group_chunks, key=lambda c: c.end - c.start).index
        some = {longest, self.group_chunks[-1].index}  # the first of a micro-batch begins without a state
        sizes = (self.saved_activations(i, chunk) for i in self.layers for chunk in some)
        widest = max((size for each in sizes for size in each.values()), default=0)
        if self.offloaded_graphs:
            widest = max(widest, graph_slot_bytes(p, self.max_chunk))
        stream, passing = self.stream_bytes(), self.block_bytes(spilling)
        in_place = (self.saved_graphs - self.offloaded_graphs) | self.shared_keys
        pinned = sum(self.saved_bytes(*key) for key in in_place)
        saved = pinned if spilling else self.all_saved_bytes()
        part = p.state_part_numel
        state_stage = aligned(part * FP32) * len(p.state_kinds) + aligned(part * p.gradient_bytes)
        staged = stages * (state_stage + self.part_stage_bytes)
        summed = [b for b in p.buffers if b.name not in self.resident and self.sums_tier(b) == "ram"]
        sums = sum(self.kind_bytes(b, "gradient") for b in summed)
        least = stream + passing + saved + staged + own * widest + sums
        if least > self.ram_budget:
            need = min(least, whole) + self.beside_bytes
            parts = {
                "hidden states of the step": stream,
                "one block's pass": passing,
                "saved activations": saved,
                "staging": staged + own * widest,
                "gradients between groups": sums if self.grouped else 0,
                "gradient ring": p.ring_bytes,
                "samples": self.samples.ram_bytes if p.samples else 0,
                "uploads (storage.offsite)": p.offsite_bytes,
                "images": p.vision.features_bytes,
            }
            parts = {name: p.ranks * size for name, size in parts.items()}
            of_each = f" on each of {p.ranks} GPUs" if p.ranks > 1 else ""
            size = gib(p.ranks * (least + self.beside_bytes))
            what = f"one block's working set{of_each} of {size} ({listing(parts)})"
            if whole < least:
                what += f", nor all of the model's state and activations, {gib(p.ranks * need)}"
            there, wanted = gib(p.ranks * p.ram_budget), least_text(p.ranks * need)
            message = f"budgets.ram: {there} cannot hold {what}; give at least {wanted}"
            raise BudgetError(message, tier="ram", need_bytes=need, budget_bytes=p.ram_budget)
        spilled = {key for key in self.backward_order() if key not in self.saved_on_gpu and key not in in_place}
        parts = {"activations": stream + passing + saved + own * widest, "resident blocks": 0, "stages": staged}
        placement = _RamPlacement({}, parts, activation_stages=own, activation_stage_bytes=own and widest)
        placement.state_stages = stages if p.trains else 0
        placement.part_stages = stages if staged else 0
        placement.spilled = spilled if spilling else set()
        return placement

    def plan(self) -> Plan:
        p = self.problem
        self.place_gpu()
        ram = self.place_ram()
        if p.ring_bytes:
            ram.parts["gradient ring"] = p.ring_bytes
        if p.reader_bytes:
            ram.parts["reader buffers"] = p.reader_bytes
        if p.offsite_bytes:
            ram.parts["uploads"] = p.offsite_bytes
        if p.vision.features_bytes:
            ram.parts["images"] = p.vision.features_bytes
        if p.samples:
            ram.parts["samples"] = self.samples.ram_bytes
        weights_there: dict[str, Tier] = {"weights": "gpu"}
        on_gpu: dict[str, Tier] = {"weights": "gpu", "gradient": "gpu", "state": "gpu"}
        buffers = {}
        num_parts = 0
        for shape in p.buffers:
            kinds = on_gpu if shape.name in self.resident else weights_there | ram.tiers[shape.name]
            buffers[shape.name] = BufferPlan(
                name=shape.name,
                numel=shape.numel,
                part_numel=shape.part_numel,
                dtype=shape.dtype,
                frozen=shape.frozen,
                float32=shape.float32,
                copy_numel=shape.copy_numel,
                reference_of=shape.reference_of,
                pool=self.pool[shape.name],
                weights=kinds["weights"],
                state=None if shape.frozen else kinds["state"],
                gradient=None if shape.frozen else kinds["gradient"],
                sums=self.sums_tier(shape),
                ranks=p.ranks,
                first_owner=num_parts % p.ranks,
                by_part=p.adds_replicas,
            )
            num_parts += buffers[shape.name].num_parts
        weights, gradients, slot_bytes = self.slots()
        gpu = self.gpu_parts()
        nvme = self.nvme_parts(buffers, ram.spilled)
        return Plan(
            problem=p,
            choice=self.choice,
            buffers=buffers,
            chunks=cut_chunks(p),
            weight_slots=weights,
            weight_slot_bytes=slot_bytes,
            gradient_slots=gradients,
            state_stages=ram.state_stages,
            part_stages=ram.part_stages,
            activation_stages=ram.activation_stages,
            activation_stage_bytes=ram.activation_stage_bytes,
            spilled=frozenset(ram.spilled),
            recomputed=frozenset(self.recomputed),
            saved_on_gpu=frozenset(self.saved_on_gpu),
            saved_graphs=frozenset(self.saved_graphs),
            offloaded_graphs=frozenset(self.offloaded_graphs),
            streamed=self.streamed,
            windows=self.windows,
            tiers={
                "gpu": TierPlan(budget_bytes=p.gpu_budget, peak_bytes=sum(gpu.values()), parts=gpu),
                "ram": TierPlan(budget_bytes=p.ram_budget, peak_bytes=sum(ram.parts.values()), parts=ram.parts),
                "nvme": TierPlan(
                    budget_bytes=p.nvme_budget or p.nvme_capacity or sum(nvme.values()),
                    peak_bytes=sum(nvme.values()),
                    parts=nvme,
                ),
            },
        )

    def sums_tier(self, buffer: BufferShape) -> Tier | None:
        if not self.grouped or buffer.frozen:
            return None
        return "gpu" if buffer.name in self.resident or buffer.name in self.sums else "ram"

    # ------------------------------------------------------------------ NVMe

    def nvme_parts(self, buffers: dict[str, BufferPlan], spilled: set[tuple[int, int]]) -> dict[str, int]:
        """Bytes of disk by use: state has two slots, wherever it lives, and frozen weights have one
        (storage/tier/chunk.py)."""
        p, generation = self.problem, generation_bytes(self.problem)
        weights = [b for b in buffers.values() if b.weights == "nvme" and not b.frozen]
        parts = {
            "state, two generations": 2 * generation,
            "kept generations": p.retained_generations * generation,
            **({"frozen weights": frozen} if (frozen := frozen_bytes(p) - reference_bytes(p)) else {}),
            **({"reference weights": reference_bytes(p)} if p.references else {}),
            "weights": sum(_file_bytes(b, b.weight_bytes) for b in weights),
            "gradients": sum(_file_bytes(b, p.gradient_bytes) for b in buffers.values() if b.gradient == "nvme"),
            "spilled activations": p.ranks * sum(self.saved_bytes(*key) for key in spilled),
        }
        need = sum(parts.values())
        if p.nvme_budget is not None and need > p.nvme_budget:
            message = (
                f"budgets.nvme: {p.nvme_budget:,} bytes cannot hold {gib(need)} ({listing(parts)}); give at least "
            )
            message += f"{least_text(need)}, or name drives with more room (storage.nvme)"
            raise BudgetError(message, tier="nvme", need_bytes=need, budget_bytes=p.nvme_budget)
        if p.last_good and (p.nvme_budget is None or need + generation <= p.nvme_budget):
            parts[LAST_GOOD] = generation
        return parts


def generation_bytes(problem: PlanInput) -> int:
    """Bytes on disk of what one generation of the state does not share with others."""
    return len(problem.state_kinds) * sum(_file_bytes(b, FP32) for b in problem.buffers if not b.frozen)


def frozen_bytes(problem: PlanInput) -> int:
    """Bytes on disk of the frozen weights, the reference model's among them, which all generations share."""
    return sum(_file_bytes(b, b.weight_bytes) for b in problem.buffers if b.frozen)


def reference_bytes(problem: PlanInput) -> int:
    """Bytes on disk of the reference model's weights, as far as they are not the model's."""
    return sum(_file_bytes(b, b.weight_bytes) for b in problem.buffers if b.reference_of is not None)


def _file_bytes(buffer: BufferShape, item_bytes: int) -> int:
    return -(-buffer.numel // buffer.part_numel) * ChunkFormat(buffer.part_numel * item_bytes).file_bytes


def state_exceeds_disk(problem: PlanInput) -> bool:
    """Whether the generations of the state alone are more than the drives hold, whatever a plan chooses."""
    generations = 2 + problem.retained_generations
    need = generations * generation_bytes(problem) + frozen_bytes(problem)
    return problem.nvme_budget is not None and need > problem.nvme_budget


def sample_spaces(problem: PlanInput, space: SampleSpace) -> list[SampleSpace]:
    """Where keys and values of samples may be cached, and of how many prompts at once, the best first: what moves
    fewest bytes for one more token of all. A run that rarely writes samples gives them little of the compute device."""
    if not space.keeps:
        return [replace(some, tier="nowhere") for some in space.some]
    if not problem.trains:
        return [replace(space, tier=tier) for tier in get_args(SampleTier)]
    share = COMPLETIONS_SHARE if space.prompts else SAMPLES_SHARE
    found: list[tuple[int, SampleSpace]] = []
    weights = problem.weights_bytes
    for some in space.some:
        there = replace(some, tier="gpu")
        regions = sample_regions(replace(problem, samples=there))
        times = -(-space.prompts // some.prompts) if some.prompts else 1
        if regions.gpu_bytes * share <= problem.gpu_budget:
            found.append((times * weights, there))
        found.append((times * (weights + sum(regions.stages)), replace(some, tier="ram")))
    return [space for _, space in sorted(found, key=itemgetter(0))]


def make_plan(problem: PlanInput, choice: PlanOptions) -> Plan:
    """Place every kind of every buffer within the budgets, as `choice` says. Raises BudgetError, with the figures, when
    a budget cannot hold one block's working set."""
    if problem.samples is not None and problem.samples.tier is None:
        refusals: list[BudgetError] = []
        for space in sample_spaces(problem, problem.samples):
            try:
                return make_plan(replace(problem, samples=space), choice)
            except BudgetError as error:
                refusals.append(error)
        raise min((e for e in refusals if e.tier == refusals[-1].tier), key=lambda error: error.need_bytes)
    assert not choice.streamed or problem.may_stream, "a layer with a recurrent state is never cut at its attention"
    choice = replace(choice, spread=choice.spread and problem.may_spread)
    if problem.one_group or choice.spread:
        choice = replace(choice, group=0)  # whatever a run had chosen before it balanced its routers
    plan = _Planner(problem, choice).plan()
    if choice.offloaded_graphs != "none" and not plan.offloaded_graphs:
        without = make_plan(problem, replace(choice, offloaded_graphs="none"))  # which needs no slots for any
        return replace(without, choice=choice)
    return plan
