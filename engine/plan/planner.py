"""Making a plan: the GPU's budget, then RAM's, filled as a PlanOptions says; NVMe takes the rest.

Reads shapes and budgets only: no torch, no device, no file. Which choice is best is found by engine/forecast/search.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from penstock.engine.plan.activations import ACTIVATIONS
from penstock.engine.plan.plan import (
    BufferPlan,
    Plan,
    TierPlan,
    activation_slots,
    aligned,
    attention_regions,
    between_bytes,
    boundary_chunks,
    gib,
    graph_slot_bytes,
    part_stage_bytes,
    sample_regions,
    sample_tiers,
    state_part_numel,
    window_bytes,
)
from penstock.engine.plan.problem import (
    FP32,
    LAST_GOOD,
    LAYER_POOLS,
    POOLS,
    BufferShape,
    PlanInput,
    PlanOptions,
    Pool,
    Tier,
)
from penstock.engine.plan.saving import Saving, fitting, spread
from penstock.storage.files.errors import BudgetError
from penstock.storage.files.units import least_text
from penstock.storage.tier.chunk import ChunkFormat

SMALL_WINDOW = 4
"""A window of keys and values is small where so many of them are no more than a layer's weights."""
GOLDEN = (5**0.5 - 1) / 2
"""The first multiples of it, however many, lie evenly in the unit interval, each taken modulo 1."""
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


class _Planner(Saving):
    """Fills the GPU's budget with whole buffers and saved activations, then RAM's with activations, weights, gradients
    and state."""

    def __init__(self, problem: PlanInput, choice: PlanOptions) -> None:
        super().__init__(problem, choice)
        p = problem
        self.pool = _pools(p)
        self.in_order = sorted(p.buffers, key=lambda b: (self.pool[b.name] not in LAYER_POOLS, not b.frozen))
        """Buffers in the order in which they find a place: layers first, embedding and head, which are large, last; of
        either the frozen ones first, which have more traffic a byte. Of a model that is only queried those of each tier
        are spread over its depth, so that disk and link are busy at once."""
        if not p.trains:
            numbers = {buffer.name: number for number, buffer in enumerate(p.buffers)}
            self.in_order.sort(key=lambda b: (self.pool[b.name] not in LAYER_POOLS, numbers[b.name] * GOLDEN % 1))
        self.part_numel = state_part_numel(p.buffers)
        self.samples = sample_regions(p)
        self.ram_budget = p.ram_budget - p.beside_bytes - self.samples.ram_bytes
        # A block that computes with several buffers holds them all at once.
        self.at_once = {
            pool: max(sum(self.pool[n] == pool for n in block.buffers) for block in p.blocks) for pool in POOLS
        }
        users = Counter(name for block in p.blocks for name in block.buffers)
        self.shares = {
            pool: any(self.pool[name] == pool for name, count in users.items() if count > 1) for pool in POOLS
        }
        """Whether two blocks compute with the same buffer of a pool."""
        slots = ACTIVATIONS["graph"].slots
        self.graph_slots_bytes = slots * graph_slot_bytes(p, self.max_chunk) if self.offloads else 0
        self.windows = self.num_windows()
        self.resident: set[str] = set()
        self.weights: set[str] = set()
        """Buffers not resident whose weights alone are on the GPU."""
        self.sums: set[str] = set()
        """Buffers not resident whose gradient stays on the GPU from group to group."""

    # ------------------------------------------------------------------ GPU

    def num_windows(self) -> int:
        """Two where they are small: the next micro-batch's keys and values need not wait until this one's have left."""
        p = self.problem
        if self.streamed or self.group == 1 or p.continues_only:
            return 1
        (one,) = window_bytes(p, self.max_chunk, False, 1)["kv"]
        largest = max(b.numel for b in p.buffers if self.pool[b.name] in LAYER_POOLS) * p.compute_bytes
        return 2 if one * SMALL_WINDOW <= largest else 1

    def slots(self, resident: set[str]) -> tuple[dict[Pool, int], dict[Pool, int], dict[Pool, int]]:
        """Weight slots, gradient slots and their elements per pool when `resident` buffers need none."""
        streamed = [b for b in self.problem.buffers if b.name not in resident]
        weights: dict[Pool, int] = dict.fromkeys(POOLS, 0)
        gradients: dict[Pool, int] = dict.fromkeys(POOLS, 0)
        numel: dict[Pool, int] = dict.fromkeys(POOLS, 0)
        for pool in POOLS:
            members = [b for b in streamed if self.pool[b.name] == pool]
            if not members:
                continue
            layer, moving = pool in LAYER_POOLS, sum(b.name not in self.weights for b in members)
            numel[pool] = max((b.numel for b in members if not b.frozen or b.name not in self.weights), default=0)
            # Embedding and head are large: both have a slot only where layers have one more than they need.
            spare = self.choice.spare_slots - (not layer)
            weights[pool] = min(moving, self.at_once[pool] + spare)
            if not members[0].frozen:
                # Between groups sums leave and come back: one more is on its way, while that of a buffer which two
                # blocks share stays from one to the other.
                summed = sum(b.name not in self.sums for b in members)
                more = 1 + self.shares[pool] if self.grouped else 0
                gradients[pool] = min(summed, self.at_once[pool] + layer * (1 + more))
        return weights, gradients, numel

    def gpu_parts(self, resident: set[str]) -> dict[str, int]:
        """Bytes of everything on the GPU when `resident` buffers live there whole."""
        p = self.problem
        weights, gradients, numel = self.slots(resident)
        trained = sum(b.numel for b in p.buffers if b.name in resident and not b.frozen)
        held = sum(b.numel for b in p.buffers if b.name in resident or b.name in self.weights)
        pools = POOLS
        parts = {
            "resident blocks": held * p.compute_bytes + trained * (1 + len(p.state_kinds)) * FP32,
            "weight slots": sum(weights[k] * aligned(numel[k] * p.compute_bytes) for k in pools),
            "gradient slots": sum(gradients[k] * aligned(numel[k] * FP32) for k in pools),
            "K/V window": sum(map(sum, window_bytes(p, self.max_chunk, self.streamed, self.windows).values())),
            "activation slots": sum(map(sum, activation_slots(p, self.max_chunk).values())),
            "saved activations": self.on_gpu_bytes,
            "saved graphs": self.graphs_bytes,
            "workspace": p.workspace_bytes + allocator_bytes(p),
        }
        if self.grouped:
            parts["gradient sums"] = sum(b.numel for b in p.buffers if b.name in self.sums - resident) * FP32
        if self.offloads:
            parts["graph slots"] = self.graph_slots_bytes
        return parts if p.samples is None else parts | {"samples": self.samples.gpu_bytes}

    def gpu_need(self, resident: set[str]) -> int:
        return sum(self.gpu_parts(resident).values())

    def place_gpu(self) -> None:
        p = self.problem
        all_graphs = p.activation_checkpointing == "none" and not self.offloads
        if p.activation_checkpointing == "none":
            self.require_graphs()
        if all_graphs:
            self.saved_graphs.update(self.savable())
            self.graphs_bytes = sum(self.graph_bytes(*key) for key in self.saved_graphs)
        taken = self.gpu_need(set())
        if taken > p.gpu_budget:
            need = with_share(taken - allocator_bytes(p), p.allocator_share)
            listing = ", ".join(f"{k} {gib(v)}" for k, v in self.gpu_parts(set()).items() if v)
            what = "one block's working set"
            if all_graphs:
                what += " and all activations, which train.activation_checkpointing=none needs,"
            raise BudgetError(
                f"budgets.gpu: {gib(p.gpu_budget)} cannot hold {what} of {gib(need)} ({listing}); "
                f"give at least {least_text(need)}",
                tier="gpu",
                need_bytes=need,
                budget_bytes=p.gpu_budget,
            )
        # Sums come before whole blocks, of which they are a fourth; graphs before both.
        graphs_first = self.choice.gpu_first in ("graphs", "graphs only")
        if not self.grouped or graphs_first or self.keep_sums(p.gpu_budget):
            self._fill_gpu(p.gpu_budget - self.gpu_need(set()))
        self.choose_offloaded()

    def _fill_gpu(self, left: int) -> None:
        """What the GPU's last `left` bytes go to."""
        p = self.problem
        match self.choice.gpu_first:
            case "graphs":
                self.save_graphs(left) and self.reside(p.gpu_budget)
            case "blocks":
                self.reside(p.gpu_budget) and self.save_graphs(p.gpu_budget - self.gpu_need(self.resident))
            case "half":
                self.reside(p.gpu_budget - left // 2)
                self.save_graphs(left // 2)
            case "graphs only":
                self.save_graphs(left)
            case "saved activations":
                self.hold(left) and self.reside(p.gpu_budget)
            case "weights":
                self.hold_weights(p.gpu_budget) and self.save_graphs(p.gpu_budget - self.gpu_need(set()))

    def keep_sums(self, budget: int) -> bool:
        """Let gradients stay on the GPU between groups as long as all there takes no more than `budget` bytes; whether
        all do. The last ones come first: those that find a place in RAM are the same ones with more of the GPU."""
        for buffer in reversed(self.in_order):
            if buffer.frozen:
                continue
            self.sums.add(buffer.name)
            if self.gpu_need(set()) > budget:
                self.sums.discard(buffer.name)
                return False
        return True

    def require_graphs(self) -> None:
        """Raise BudgetError unless it is known of every layer what its graph holds."""
        blocks = self.problem.blocks
        unknown = [blocks[i].name for i in self.saving if blocks[i].graph_bytes_per_token is None]
        if unknown:
            raise BudgetError(
                f"train.activation_checkpointing: what {unknown[0]} would have to keep is not known, so 'none' is not "
                "possible; use auto, selective or full"
            )

    def reside(self, budget: int) -> bool:
        """Let whole buffers live on the GPU as long as all there takes no more than `budget` bytes; whether all do."""
        for buffer in self.in_order:
            if self.gpu_need(self.resident | {buffer.name}) > budget:
                return False
            self.resident.add(buffer.name)
        return True

    def hold_weights(self, budget: int) -> bool:
        """Let weights alone live on the GPU as long as all there takes no more than `budget` bytes; whether all do."""
        for buffer in self.in_order:
            self.weights.add(buffer.name)
            if self.gpu_need(set()) > budget:
                self.weights.discard(buffer.name)
                return False
        return True

    # ------------------------------------------------------------------ RAM

    def stream_bytes(self) -> int:
        """The chunks of one block boundary: activations going up, their gradients coming down."""
        chunks = boundary_chunks(self.problem, self.group_chunks)
        return sum(sum(between_bytes(self.problem, c.end - c.start).values()) for c in chunks)

    def stage_bytes(self, grad_on_nvme: bool) -> tuple[int, int]:
        """Bytes of one state stage and of one part stage."""
        p = self.problem
        part = self.part_numel
        gradient = p.gradient_bytes if grad_on_nvme else 0
        state = aligned(part * FP32) * len(self.problem.state_kinds) + aligned(part * gradient)
        return state, aligned(part_stage_bytes(p.buffers, p))

    def block_bytes(self, spilling: bool) -> int:
        """RAM of one block's pass over a micro-batch, whatever is saved: see attention_regions."""
        regions = attention_regions(self.problem, self.group_chunks, self.streamed, bool(self.recomputed), spilling)
        return sum(size for sizes in regions.values() for size in sizes)

    def place_ram(self) -> _RamPlacement:
        """Tier of every kind of the buffers not on the GPU and of every saved activation; RAM by use.

        RAM takes items in one order as long as they fit, and none after the first that does not: with more RAM a plan
        has all that it had with less.
        """
        rest = [b for b in self.in_order if b.name not in self.resident]
        kinds = {b.name: self.kinds_elsewhere(b) for b in rest}
        everything = sum(self.kind_bytes(b, kind) for b in rest for kind in kinds[b.name])
        part_stage = self.stage_bytes(False)[1]
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
        """Bytes that a kind takes in RAM, in whole pages. Where a gradient waits between groups, it does in float32."""
        p = self.problem
        gradient = FP32 if self.sums_tier(buffer) == "ram" else p.gradient_bytes
        sizes = {"weights": p.compute_bytes, "gradient": gradient, "state": len(p.state_kinds) * FP32}
        return aligned(buffer.numel * sizes[kind])

    def fill_ram(self, placement: _RamPlacement, left: int) -> None:
        """Let graphs leave for RAM while `left` bytes last: as many quarters of them as fit, then backward's first."""
        if not self.offloads or self.choice.offloaded_graphs != "rest":
            return
        offloadable = self.offloadable()
        more = {key: self.more_bytes(key) for key in offloadable if key not in placement.spilled}
        for quarters in (4, 3, 2, 1):
            result, nbytes, whole = fitting(
                [key for key in spread(offloadable, quarters) if key in more], more.__getitem__, left
            )
            if whole:
                break
        else:
            result, nbytes = [], 0
        taken = set(result)
        rest, of_rest, _ = fitting([key for key in more if key not in taken], more.__getitem__, left - nbytes)
        self.offload_graphs([*result, *rest])
        placement.parts["activations"] += nbytes + of_rest

    def _items(
        self, rest: list[BufferShape], spilling: bool
    ) -> Iterator[tuple[tuple[int, int] | tuple[str, str], int]]:
        """(buffer, kind) and (block, chunk) of saved activations with their bytes, in the order in which RAM takes
        them.

        A byte of frozen weights saves as much reading as a byte of state, and no writing: it comes after it, but where
        weights are to be first. A byte of them saves a writing and a reading, and one of frozen weights two readings
        or three.
        """
        trained, frozen = ([b for b in rest if b.frozen is which] for which in (False, True))

        def of_kinds(of: list[BufferShape], *kinds: str) -> Iterator[tuple[tuple[str, str], int]]:
            result = ((b, kind) for kind in kinds for b in of if kind in self.kinds_elsewhere(b))
            return (((b.name, kind), self.kind_bytes(b, kind)) for b, kind in result)

        def saved() -> Iterator[tuple[tuple[int, int], int]]:
            elsewhere = (self.saved_graphs - self.offloaded_graphs) | self.saved_on_gpu
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

    def _stages(self, spilling: bool, whole: int) -> _RamPlacement:
        """What passes through RAM: the hidden states, one block's pass, parts of state and, if `spilling`, saved
        activations.

        A saved graph needs its keys and values in RAM all the same. Raises BudgetError where that alone is too much;
        `whole`: what RAM would need to hold everything, which is less than that for a small model.
        """
        p, stages = self.problem, self.choice.stages
        own = ACTIVATION_STAGES[stages] if spilling and self.saving else 0
        longest = max(self.group_chunks, key=lambda c: c.end - c.start).index
        widest = max((max(self.saved_activations(i, longest).values(), default=0) for i in self.layers), default=0)
        if self.offloaded_graphs:
            widest = max(widest, graph_slot_bytes(p, self.max_chunk))
        stream, passing = self.stream_bytes(), self.block_bytes(spilling)
        in_place = self.saved_graphs - self.offloaded_graphs
        pinned = sum(self.saved_bytes(*key) for key in in_place)
        saved = pinned if spilling else self.all_saved_bytes()
        staged = stages * sum((self.stage_bytes(True)[0], self.stage_bytes(False)[1]))
        summed = [b for b in p.buffers if b.name not in self.resident and self.sums_tier(b) == "ram"]
        sums = sum(self.kind_bytes(b, "gradient") for b in summed)
        least = stream + passing + saved + staged + own * widest + sums
        if least > self.ram_budget:
            beside = p.beside_bytes + self.samples.ram_bytes
            need = min(least, whole) + beside
            parts = {
                "hidden states of the step": stream,
                "one block's pass": passing,
                "saved activations": saved,
                "staging": staged + own * widest,
                "gradients between groups": sums if self.grouped else 0,
                "samples": self.samples.ram_bytes if p.samples else 0,
                "uploads (storage.offsite)": p.offsite_bytes,
            }
            listing = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
            needed = f"one block's working set of {gib(least + beside)} ({listing})"
            if whole < least:
                needed += f", nor all of the model's state and activations, {gib(need)}"
            raise BudgetError(
                f"budgets.ram: {gib(p.ram_budget)} cannot hold {needed}; give at least {least_text(need)}",
                tier="ram",
                need_bytes=need,
                budget_bytes=p.ram_budget,
            )
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
        if p.reader_bytes:
            ram.parts["reader buffers"] = p.reader_bytes
        if p.offsite_bytes:
            ram.parts["uploads"] = p.offsite_bytes
        if p.samples:
            ram.parts["samples"] = self.samples.ram_bytes
        weights_there: dict[str, Tier] = {"weights": "gpu"}
        on_gpu: dict[str, Tier] = {"weights": "gpu", "gradient": "gpu", "state": "gpu"}
        buffers = {}
        for shape in p.buffers:
            kinds = on_gpu if shape.name in self.resident else weights_there | ram.tiers[shape.name]
            buffers[shape.name] = BufferPlan(
                name=shape.name,
                numel=shape.numel,
                part_numel=shape.part_numel,
                pool=self.pool[shape.name],
                weights=kinds["weights"],
                state=None if shape.frozen else kinds["state"],
                gradient=None if shape.frozen else kinds["gradient"],
                sums=self.sums_tier(shape),
            )
        weights, gradients, numel = self.slots(self.resident)
        gpu = self.gpu_parts(self.resident)
        nvme = self.nvme_parts(buffers, ram.spilled)
        return Plan(
            problem=p,
            choice=self.choice,
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
        """Bytes of disk by use. A trained buffer's state has two slots, wherever it lives, and a frozen one's weights
        have one; see storage/tier/chunk.py."""
        p = self.problem

        def on_disk(buffer: BufferPlan, item: int) -> int:
            return buffer.num_parts * ChunkFormat(buffer.part_numel * item).file_bytes

        generation = generation_bytes(p)
        parts = {
            "state, two generations": 2 * generation,
            "kept generations": p.retained_generations * generation,
            **({"frozen weights": frozen} if (frozen := frozen_bytes(p)) else {}),
            "weights": sum(
                on_disk(b, p.compute_bytes) for b in buffers.values() if b.weights == "nvme" and not b.frozen
            ),
            "gradients": sum(on_disk(b, p.gradient_bytes) for b in buffers.values() if b.gradient == "nvme"),
            "spilled activations": sum(self.saved_bytes(*key) for key in spilled),
        }
        need = sum(parts.values())
        if p.nvme_budget is not None and need > p.nvme_budget:
            listing = ", ".join(f"{k} {gib(v)}" for k, v in parts.items() if v)
            raise BudgetError(
                f"budgets.nvme: {p.nvme_budget:,} bytes cannot hold {gib(need)} ({listing}); give at least "
                f"{least_text(need)}, or name drives with more room (storage.nvme)",
                tier="nvme",
                need_bytes=need,
                budget_bytes=p.nvme_budget,
            )
        if p.last_good and (p.nvme_budget is None or need + generation <= p.nvme_budget):
            parts[LAST_GOOD] = generation
        return parts


def allocator_bytes(problem: PlanInput) -> int:
    """The share of the GPU's budget that is left to the allocator."""
    return problem.gpu_budget // problem.allocator_share if problem.allocator_share else 0


def with_share(used_bytes: int, share: int) -> int:
    """The least budget that holds `used_bytes` and one part in `share` of itself; 0: no such part."""
    if not share:
        return used_bytes
    budget = -(-used_bytes * share // (share - 1))
    while (budget - 1) - (budget - 1) // share >= used_bytes:
        budget -= 1
    return budget


def _pools(problem: PlanInput) -> dict[str, Pool]:
    """Buffer -> the slots that it takes: a small embedding or head takes those of the layers."""
    layers = {name for block in problem.blocks if block.saved_inputs for name in block.buffers}
    most = {False: 0, True: 0}
    """Elements of the largest layer's buffer of those that are trained and of those that are frozen."""
    for buffer in problem.buffers:
        if buffer.name in layers:
            most[buffer.frozen] = max(most[buffer.frozen], buffer.numel)
    return {b.name: POOLS[2 * (b.numel > most[b.frozen]) + b.frozen] for b in problem.buffers}


def generation_bytes(problem: PlanInput) -> int:
    """Bytes on disk of what one generation of the state does not share with others."""
    return len(problem.state_kinds) * sum(_file_bytes(b, FP32) for b in problem.buffers if not b.frozen)


def frozen_bytes(problem: PlanInput) -> int:
    """Bytes on disk of the frozen weights, which all generations share."""
    return sum(_file_bytes(b, problem.compute_bytes) for b in problem.buffers if b.frozen)


def _file_bytes(buffer: BufferShape, item_bytes: int) -> int:
    return -(-buffer.numel // buffer.part_numel) * ChunkFormat(buffer.part_numel * item_bytes).file_bytes


def state_exceeds_disk(problem: PlanInput) -> bool:
    """Whether the generations of the state alone are more than the drives hold, whatever a plan chooses."""
    generations = 2 + problem.retained_generations
    need = generations * generation_bytes(problem) + frozen_bytes(problem)
    return problem.nvme_budget is not None and need > problem.nvme_budget


def make_plan(problem: PlanInput, choice: PlanOptions) -> Plan:
    """Place every kind of every buffer within the budgets, as `choice` says.

    Raises BudgetError, with the figures, when a budget cannot hold one block's working set.
    """
    if problem.samples is not None and problem.samples.tier is None:
        refusals: list[BudgetError] = []
        for tier in sample_tiers(problem):
            try:
                return make_plan(replace(problem, samples=replace(problem.samples, tier=tier)), choice)
            except BudgetError as error:
                refusals.append(error)
        raise min((e for e in refusals if e.tier == refusals[-1].tier), key=lambda error: error.need_bytes)
    plan = _Planner(problem, choice).plan()
    if choice.offloaded_graphs != "none" and not plan.offloaded_graphs:
        without = make_plan(problem, replace(choice, offloaded_graphs="none"))  # which needs no slots for any
        return replace(without, choice=choice)
    return plan
