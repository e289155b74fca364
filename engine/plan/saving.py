"""What forward saves of a layer's chunks for backward, how many bytes that takes, and which of it stays on the GPU.

A chunk is named by its layer and its index in its group; see Plan.group_chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from penstock.engine.plan.chunks import cut_chunks, streams
from penstock.engine.plan.plan import Graph, aligned, graph_bytes, graph_location, saved_activations
from penstock.engine.plan.problem import BlockShape, PlanInput, PlanOptions

Key = tuple[int, int]
"""(block, chunk)."""

_QUARTERS = {"quarter": 1, "half": 2, "most": 3, "all": 4}


def spread(keys: Sequence[Key], quarters: int) -> list[Key]:
    """So many quarters of `keys`, evenly spread."""
    return [key for i, key in enumerate(keys) if (i + 1) * quarters // 4 > i * quarters // 4]


def fitting(keys: Iterable[Key], size_of: Callable[[Key], int], left: int) -> tuple[list[Key], int, bool]:
    """The first of `keys` that together take no more than `left` bytes, what they take, and whether they are all."""
    taken: list[Key] = []
    nbytes = 0
    for key in keys:
        size = size_of(key)
        if nbytes + size > left:
            return taken, nbytes, False
        taken.append(key)
        nbytes += size
    return taken, nbytes, True


class Saving:
    """What is saved of one group's chunks, as a choice says and as budgets allow."""

    def __init__(self, problem: PlanInput, choice: PlanOptions) -> None:
        self.problem = p = problem
        self.choice = choice
        self.chunks = cut_chunks(p)
        if p.sharded:  # another rank's may be longer by a tile
            longest = max(chunk.end - chunk.start for chunk in streams(p)[0])
            self.chunks = tuple(replace(chunk, end=chunk.start + longest) for chunk in self.chunks)
        self.group = p.group_of(choice.group)
        self.group_chunks = tuple(c for c in self.chunks if c.micro_batch < self.group)
        """The chunks of one group, whose saved activations those of the groups that follow take the place of."""
        self.grouped = self.group < p.micro_batches and not p.adds_replicas
        """Whether sums of gradients wait between groups."""
        self.max_chunk = max(c.end - c.start for c in self.chunks)
        self.layers = [i for i, block in enumerate(p.blocks) if block.saved_inputs]
        self.saving = [i for i in self.layers if p.blocks[i].backward]
        """Layers that save anything for a backward."""
        first = {groups[0] for groups in p.groups_of_experts if choice.spread}
        self.shared_keys = {(i, c.index) for i in self.saving if i in first for c in self.group_chunks}
        """(block, chunk) of what other ranks compute experts with, in RAM."""
        self.attending = [i for i in self.saving if p.blocks[i].attends and not p.blocks[i].recurrent]
        """Those of which attention may be recomputed."""
        self.streamed = choice.streamed or p.sharded
        self.saved_graphs: set[Key] = set()
        self.offloaded_graphs: set[Key] = set()
        self.saved_on_gpu: set[Key] = set()
        self.graphs_bytes = self.on_gpu_bytes = 0
        """Bytes on the GPU of the saved graphs and of the saved activations there."""
        numbers: dict[BlockShape, int] = {}
        self._kinds = [numbers.setdefault(block.nameless, len(numbers)) for block in p.blocks]
        """Blocks of the same shape have the same number."""
        self._sizes: dict[tuple[int, int, bool, str | None, bool], int] = {}
        self._layer_sizes: dict[tuple[int, bool], int] = {}
        count = {"none": 0, "half": -(-len(self.attending) // 2), "all": len(self.attending)}[choice.recompute]
        self.recomputed = set(self.attending[:count])
        may_offload = p.activation_checkpointing in ("auto", "none") and not self.streamed
        self.offloads = choice.offloaded_graphs != "none" and may_offload and bool(self.savable())
        """Whether graphs of some layer chunks may be offloaded."""

    def backward_order(self) -> Iterator[Key]:
        """(block, chunk) of all layers that backward passes, its first ones first."""
        return ((i, chunk.index) for i in reversed(self.saving) for chunk in reversed(self.group_chunks))

    def saved_activations(self, block: int, chunk: int) -> dict[str, int]:
        return saved_activations(self.problem, block, *self._how(block, chunk))

    def _how(self, block: int, chunk: int) -> tuple[int, bool, Graph, bool]:
        """(tokens, whether attention runs again, where the graph is, whether it begins a micro-batch)."""
        c, graph = self.group_chunks[chunk], graph_location((block, chunk), self.saved_graphs, self.offloaded_graphs)
        return c.end - c.start, block in self.recomputed, graph, c.local == 0 and not self.problem.sharded

    def saved_bytes(self, block: int, chunk: int) -> int:
        key = (self._kinds[block], *self._how(block, chunk))
        if key not in self._sizes:
            self._sizes[key] = sum(self.saved_activations(block, chunk).values())
        return self._sizes[key]

    def layer_bytes(self, block: int) -> int:
        """Bytes of what is saved of a layer of which nothing is saved on the GPU."""
        key = (self._kinds[block], block in self.recomputed)
        if key not in self._layer_sizes:
            self._layer_sizes[key] = sum(self.saved_bytes(block, chunk.index) for chunk in self.group_chunks)
        return self._layer_sizes[key]

    def all_saved_bytes(self) -> int:
        """Bytes of all saved activations outside the GPU."""
        touched = {i for i, _ in self.saved_on_gpu | self.saved_graphs}
        of_touched = {(i, c.index) for i in touched for c in self.group_chunks} - self.saved_on_gpu
        whole = sum(self.layer_bytes(i) for i in self.saving if i not in touched)
        return whole + sum(self.saved_bytes(*key) for key in of_touched)

    def graph_bytes(self, block: int, chunk: int) -> int:
        """Bytes of one saved graph, with attention's log-sum-exp."""
        c, shape, p = self.group_chunks[chunk], self.problem.blocks[block], self.problem
        # A graph that is cut at attention holds the layer's output and its keys and values as well.
        cut = p.hidden_size * p.compute_bytes + shape.kv_bytes_per_token if self.streamed else 0
        return aligned((c.end - c.start) * (graph_bytes(shape) + cut))

    def savable(self) -> list[Key]:
        """(block, chunk) in the order in which backward wants them; none of a layer whose attention runs again."""
        if self.problem.sharded:
            return []  # backward of a chunk ends long after it began
        graphs = [block.graph_bytes_per_token for block in self.problem.blocks]
        known = [i for i in self.saving if graphs[i] is not None and i not in self.recomputed]
        return [(i, chunk.index) for i in reversed(known) for chunk in reversed(self.group_chunks)]

    def save_graphs(self, left: int) -> bool:
        """Save graphs, backward's first ones first, while `left` bytes last; whether all that may be are."""
        p = self.problem
        free = p.activation_checkpointing == "auto" or (p.activation_checkpointing == "none" and self.offloads)
        may = free and self.choice.ram_first == "activations"
        taken, nbytes, whole = fitting(self.savable() if may else (), lambda key: self.graph_bytes(*key), left)
        self.saved_graphs.update(taken)
        self.graphs_bytes += nbytes
        return whole

    def hold(self, left: int) -> bool:
        """Let saved activations stay on the GPU, backward's first ones first, while `left` bytes last; whether all do.
        None where every graph has to be saved and may leave, as what is held is saved without its graph."""
        may = not (self.offloads and self.problem.activation_checkpointing == "none")
        keys = (key for key in self.backward_order() if may and key not in self.shared_keys)
        taken, nbytes, whole = fitting(keys, lambda key: self.saved_bytes(*key), left)
        self.saved_on_gpu.update(taken)
        self.on_gpu_bytes += nbytes
        return whole

    def choose_offloaded(self) -> None:
        """Choose graphs to offload before RAM is filled; "rest" is chosen when it has been."""
        if self.offloads and self.choice.offloaded_graphs != "rest":
            self.offload_graphs(spread(self.offloadable(), _QUARTERS[self.choice.offloaded_graphs]))

    def offloadable(self) -> list[Key]:
        """Layer chunks whose graph may be offloaded, backward's first ones first."""
        return [key for key in self.savable() if key not in self.saved_graphs and key not in self.saved_on_gpu]

    def offload_graphs(self, keys: Sequence[Key]) -> None:
        self.offloaded_graphs.update(keys)
        self.saved_graphs.update(keys)

    def more_bytes(self, key: Key) -> int:
        """What a layer's chunk takes more with its graph than without."""
        (block, chunk), p = key, self.problem
        tokens = self.group_chunks[chunk].end - self.group_chunks[chunk].start
        whole = saved_activations(p, block, tokens, False, "offloaded", chunk == 0)
        return sum(whole.values()) - self.saved_bytes(block, chunk)
