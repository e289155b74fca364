"""An independent reading of an op list: whether dependencies order every two ops that touch a resource, and what every
slot, region and file holds when an op looks there."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from penstock.engine.attention.spans import prefixes_of
from penstock.engine.plan.activations import GRADIENT_OF
from penstock.engine.plan.chunks import Chunk
from penstock.engine.plan.plan import Plan
from penstock.engine.schedule import actions as a
from penstock.engine.schedule import resources as r
from penstock.engine.schedule.ops import Op
from penstock.engine.schedule.resources import Resource

_WHOLE_FORWARD = (a.LAYER_FORWARD, a.LAYER_EVALUATE)
_BOTTOM_FORWARD = (a.LAYER_FORWARD_BOTTOM, a.LAYER_EVALUATE_BOTTOM)


class Replay:
    """Follows activations through a schedule; the content of a place is (kind, block, chunk, step), and for the
    gradients of keys and values also the queries that have added to them."""

    def __init__(
        self,
        plan: Plan,
        documents: Sequence[Sequence[int]],
        cut: Mapping[tuple[int, int], Sequence[Chunk]] | None = None,
    ) -> None:
        """`cut`: (step, batch) -> the chunks that it computes, where those are not all of the plan's."""
        self.plan, self.documents = plan, documents
        self._cut = {of: {chunk.index: chunk for chunk in chunks} for of, chunks in (cut or {}).items()}
        self._whole = {chunk.index: chunk for chunk in plan.chunks}
        self._nbytes: dict[tuple[Any, ...], int] = {}
        self.held: dict[Resource, Any] = {}
        self._widths: dict[int, tuple[int, int]] = {}
        """Number of a window -> of the layer whose keys and values are in it."""
        self.spilled: set[tuple[int, int]] = set()
        self.graphs = 0
        self._sampled: dict[int, tuple[int, int]] = {}
        """Layer -> (step, batch) of the last pass that has added to what is kept of it for samples."""
        self._number = {block.name: i for i, block in enumerate(plan.blocks)}
        self._dequantised: str | None = None
        """Buffer whose dequantised weights are on the compute device."""
        self.sums: dict[Resource, tuple[str, tuple[int, ...]]] = {}
        """Where a gradient is being summed, or waits between groups -> its buffer and the chunks that have been added;
        of chunk i of block b the number (b, i)."""

    def _chunks(self, op: Op) -> dict[int, Chunk]:
        return self._cut.get((op.step, op.batch), self._whole)

    def perform(self, op: Op) -> None:
        if op.action in (a.LOAD_SAMPLE_KV, a.STORE_SAMPLE_KV):
            self._move_sample_kv(op)
        elif op.action in (a.LOAD_SUM, a.STORE_SUM):
            (source,), (target,) = op.reads, op.writes
            assert self.sums[source][0] == op.block
            self.sums[target] = self.sums[source]
        elif op.action is a.DEQUANTISE:
            assert self.plan.buffers[op.block].copy_numel
            assert op.block != self._dequantised, "once for all chunks"
            self._dequantised = op.block
        elif op.action is a.NORM:
            self._complete(op)
        elif op.action.kind:
            self._move(op.action.name.partition("_")[0], op.action.kind, op)
        elif op.lane == "compute" and op.index >= 0:
            quantised = [name for name in op.slots if name in self.plan.buffers and self.plan.buffers[name].copy_numel]
            assert quantised in ([], [self._dequantised]), "an op finds its own block's weights"
            assert bool(quantised) == (r.resource(r.GPU_COPY) in op.reads), op
            getattr(self, "_" + op.action.name, self._block)(op)

    def _content(self, kind: str, op: Op, chunk: int | None = None) -> tuple[Any, ...]:
        number = self._number[op.block]
        number = self._saver(number) if kind == "sent" else number
        return (kind, number, op.index if chunk is None else chunk, (op.step, op.batch))

    def _saver(self, number: int) -> int:
        """The block under which what it takes from the layer that it is a branch of is known."""
        first = self.plan.blocks[number].sent_to
        return number if first is None else first

    def _move(self, verb: str, kind: str, op: Op) -> None:
        content = self._content(kind, op)
        assert verb == "discard" or self._nbytes.setdefault(content, op.nbytes) == op.nbytes, "cut in between"
        assert not op.batch or (verb in ("load", "store") and kind in ("x", "sent", "kv")), "a validation saves nothing"
        if verb in ("unspill", "discard"):  # the file goes with its content
            assert self.held[op.writes[0]] == content
            self.held[op.writes[0]] = None
            if verb == "unspill":
                self.held[op.writes[1]] = content
            return
        found = self.held[op.reads[0]]
        assert found[:4] == content, op
        if not self.plan.blocks[content[1]].backward:
            assert verb != "spill", "saved for no backward"
            assert op.writes[0][0] not in r.SAVED_SPACES, "saved for no backward"
        if op.writes[0][0] == r.GPU_KV and not self.plan.streamed:
            self._lay_out(op, op.writes[0])
        self.held[op.writes[0]] = found
        if verb == "spill":
            self.spilled.add((content[1], self.plan.index_in_group(op.index)))

    def _move_sample_kv(self, op: Op) -> None:
        (source,), (target,) = op.reads, op.writes
        layer = self._number[op.block]
        assert self.held[source] == ("sample_kv", layer, self._sampled[layer]), op
        self.held[target] = self.held[source]

    def _layer_generate(self, op: Op) -> None:
        """What the passes before have cached is there, as is what the pass's other chunks have added."""
        layer, now = self._number[op.block], (op.step, op.batch)
        if a.SAMPLE_KV in op.slots:
            place = r.resource(r.GPU_SAMPLE_KV, op.slots[a.SAMPLE_KV])
            assert place in op.writes
            before = self._sampled.get(layer)
            cached = self.plan.problem.samples.tier != "nowhere"
            if before is not None and (before[0] == op.step if cached else before == now):
                assert self.held[place] == ("sample_kv", layer, before), op
            self._sampled[layer] = now
            self.held[place] = ("sample_kv", layer, now)
        self._block(op)

    def _wants(self, place: Resource, content: tuple[Any, ...], op: Op) -> None:
        assert place in op.reads or place in op.writes, (op, place)
        assert self.held[place][:4] == content, op

    def _hidden(self, role: str, op: Op) -> None:
        if role in op.slots:
            self._wants(r.activation(a.X, op.slots[role]), self._content(role, op), op)

    def _window(self, op: Op) -> list[int]:
        """Chunks of the op's micro-batch up to its own."""
        chunk = self._chunks(op)[op.index]
        return [chunk.index - chunk.local + i for i in range(chunk.local + 1)]

    def _places(self, op: Op) -> list[tuple[Resource, int]]:
        """Where keys and values of these chunks are: micro-batches take the windows in turn."""
        first = self._chunks(op)[op.index].micro_batch % self.plan.windows * self.plan.window_chunks
        return [(r.activation(a.KV, first + i), chunk) for i, chunk in enumerate(self._window(op))]

    def _attending(self, op: Op) -> bool:
        return self.plan.blocks[self._number[op.block]].attends

    # ------------------------------------------------------------------ one method per compute action

    def _block(self, op: Op) -> None:
        """A block from its input to its output."""
        evaluates, backward = op.action.phase == "evaluate", op.action.phase == "backward" and op.action is not a.HEAD
        generates = op.action.phase == "generate"
        key = (self._number[op.block], self.plan.index_in_group(op.index))
        has_graph = not op.batch and key in self.plan.saved_graphs
        assert evaluates == (op.batch > 0)
        assert generates == (op.batch < 0)
        assert not (op.batch and any(place[0] == r.GPU_GRAPH for place in op.writes))
        assert has_graph == (a.SAVED_GRAPH in op.flags)
        number = self._number[op.block]
        shape = self.plan.blocks[number]
        following = next((i for i, other in enumerate(self.plan.blocks) if number in other.inputs), None)
        taken = shape.input_kinds if shape.inputs else ()
        if backward:
            taken = () if has_graph else self.plan.blocks[self._saver(number)].saved_inputs
        for kind in taken:
            self._wants(r.activation(kind, op.slots[kind]), self._content(kind, op), op)
        tower = shape.kind == "vision"  # what it finds is in its batch, not in slots
        assert tower == (following is None and shape.kind != "head")
        if backward and not tower:
            assert following is not None
            for kind in self.plan.blocks[following].input_kinds:
                gradient = GRADIENT_OF[kind]
                self._wants(r.activation(gradient, op.slots[gradient]), self._content(gradient, op), op)
        if has_graph:
            self.graphs += -1 if backward else 1
        assert (a.GRAPH in op.slots) == (has_graph and key in self.plan.offloaded_graphs)
        if a.GRAPH in op.slots:
            slot = r.activation(a.GRAPH, op.slots[a.GRAPH])
            if not backward:
                self.held[slot] = self._content("graph", op)
            self._wants(slot, self._content("graph", op), op)
        self._add(op)
        if shape.recurrent and not generates:
            self._hand_on(op, backward)
        if op.action in _BOTTOM_FORWARD:
            self._wants(r.activation(a.SAVED, op.slots[a.SAVED]), self._content("saved", op), op)
        elif op.action in _WHOLE_FORWARD and self._attending(op):
            self._attend_whole(op)
        elif op.action is a.LAYER_BACKWARD_BOTTOM:
            self._own_gradients(op)
        elif op.action is a.LAYER_BACKWARD and self._attending(op):
            for place, chunk in self._places(op):
                self._wants(place, self._content("kv", op, chunk), op)
            if not has_graph:
                self._wants(r.activation(a.SAVED, op.slots[a.SAVED]), self._content("saved", op), op)
        batch = (op.step, op.batch)
        if op.action in (a.HEAD_SCORE, a.HEAD_EVALUATE, a.HEAD_GENERATE) or tower:
            assert a.OUT not in op.slots
        elif op.action.phase in ("forward", "evaluate", "generate"):
            assert following is not None
            kinds = self.plan.blocks[following].input_kinds
            made = ("x",) if self._saver(following) != following else kinds
            self._make(op, {kind: (kind, following, op.index, batch) for kind in made})
        elif not shape.inputs or not self.plan.blocks[shape.inputs[0]].backward:
            assert a.OUT not in op.slots
        else:
            made = (GRADIENT_OF[kind] for kind in shape.input_kinds)
            self._make(op, {kind: (kind, shape.inputs[0], op.index, batch) for kind in made})

    def _hand_on(self, op: Op, backward: bool) -> None:
        """A chunk begins with the recurrent state in which the one before ended; its gradient goes the other way."""
        chunks, gradient = self._chunks(op), r.resource(r.GPU_DRECURRENT)
        chunk, following = chunks[op.index], chunks.get(op.index + 1)
        goes_on = following is not None and following.micro_batch == chunk.micro_batch
        assert (a.RECURRENT in op.slots) == bool(chunk.local)
        assert (a.BEHIND in op.slots) == (goes_on and not backward)
        if chunk.local:
            self._wants(r.activation(a.RECURRENT, op.slots[a.RECURRENT]), self._content("recurrent", op), op)
        if a.BEHIND in op.slots:
            place = r.activation(a.RECURRENT, op.slots[a.BEHIND])
            assert place in op.writes
            assert place not in op.reads
            self.held[place] = self._content("recurrent", op, op.index + 1)
        if backward:
            assert gradient in op.writes
            if goes_on:
                self._wants(gradient, self._content("drecurrent", op, op.index + 1), op)
            self.held[gradient] = self._content("drecurrent", op) if chunk.local else None

    def _make(self, op: Op, contents: Mapping[str, tuple[Any, ...]]) -> None:
        for kind, content in contents.items():
            role = a.OUT if kind in (a.X, a.DY) else a.DSENT_OUT if kind == a.DSENT else kind
            place = r.activation(kind, op.slots[role])
            assert place in op.writes
            self.held[place] = content

    def _add(self, op: Op, *, begins: bool = False) -> None:
        """The op's gradients join the sums in their places; `begins`: those of the rest of its chunk follow."""
        for name in self.plan.blocks[self._number[op.block]].buffers:
            if a.gradient_of(name) not in op.slots:
                continue
            place = self._sum_place(name, op.slots[a.gradient_of(name)])
            assert place in op.writes
            if a.zero(name) in op.flags:
                self.sums[place] = (name, ())
            assert self.sums[place][0] == name
            if not begins:
                self.sums[place] = (name, (*self.sums[place][1], (self._number[op.block], op.index)))

    def _sum_place(self, name: str, slot: int) -> Resource:
        pool = self.plan.buffers[name].pool
        return r.resource(r.GPU_GRADIENT, name) if slot < 0 else r.resource(r.GPU_GRADIENT, pool, slot)

    def _complete(self, op: Op) -> None:
        """A gradient whose norm is taken has had every chunk of the step's added, the last ones first."""
        name, found = self.sums.pop(self._sum_place(op.block, op.slots[op.block]))
        assert name == op.block
        chunks = sorted(self._chunks(op), reverse=True)
        blocks = [i for i, block in enumerate(self.plan.blocks) if name in block.buffers]
        assert sorted(found) == sorted((block, chunk) for block in blocks for chunk in chunks)
        for block in blocks:
            assert [chunk for one, chunk in found if one == block] == chunks

    def _attend_whole(self, op: Op) -> None:
        *before, (here, own) = self._places(op)
        for place, chunk in before:
            self._wants(place, self._content("kv", op, chunk), op)
        self._lay_out(op, here)
        self.held[here] = self._content("kv", op, own)
        self.held[r.activation(a.SAVED, op.slots[a.SAVED])] = self._content("saved", op)

    def _lay_out(self, op: Op, place: Resource) -> None:
        """Before the op writes a part of a window: where that held keys and values of other widths, nothing of them is
        left, as parts of these lie elsewhere in the same memory."""
        block, parts = self.plan.blocks[self._number[op.block]], self.plan.window_chunks
        window, widths = place[-1] // parts, (block.kv_numel_per_token, block.q_numel_per_token)
        if self._widths.setdefault(window, widths) != widths:
            self._widths[window] = widths
            for part in range(window * parts, (window + 1) * parts):
                assert r.activation(a.KV, part) in op.writes
                self.held[r.activation(a.KV, part)] = None

    def _layer_recompute(self, op: Op) -> None:
        assert self._number[op.block] in self.plan.recomputed
        self._hidden("x", op)
        self._attend_whole(op)

    def _layer_project(self, op: Op) -> None:
        self._hidden("x", op)
        self.held[r.activation(a.KV, op.slots[a.KV])] = self._content("kv", op)
        self._seen: list[int] = []

    def _attend(self, op: Op) -> None:
        assert (a.FIRST in op.flags) == (not self._seen)
        self._keys(op)
        if a.LAST in op.flags:
            assert set(self._seen) == self._visible(op)
            self.held[r.activation(a.SAVED, op.slots[a.SAVED])] = self._content("saved", op)

    def _keys(self, op: Op) -> None:
        keys = self._index(op)
        self._wants(r.activation(a.KV, op.slots[a.KV]), self._content("kv", op, keys), op)
        assert keys not in self._seen
        self._seen.append(keys)

    def _index(self, op: Op) -> int:
        """Of the chunk of keys that a streamed op names."""
        return self.plan.chunks[op.index].micro_batch * self.plan.window_chunks + op.slots[a.KEYS]

    def _visible(self, op: Op) -> set[int]:
        """Chunks of which some key is seen by some query of the op's chunk, counted one by one."""
        reach = self.plan.blocks[self._number[op.block]].sliding_window or 10**9
        chunks = self._chunks(op)
        chunk = chunks[op.index]
        starts = self.documents[chunk.micro_batch]
        prefixes = {prefix.document: prefix for prefix in prefixes_of(starts)}
        seen: set[int] = set()
        for query in range(chunk.start, chunk.end):
            document = max(start for start in starts if start <= query)
            seen.update(range(max(document, query - reach + 1), query + 1))
            if (prefix := prefixes.get(document)) is not None:
                seen.update(range(max(prefix.first, prefix.end + query - document - reach + 1), prefix.end))
        return {c for c in self._window(op) if seen & set(range(chunks[c].start, chunks[c].end))}

    def _layer_backward_top(self, op: Op) -> None:
        self._add(op, begins=True)
        self._hidden("x", op)
        self._hidden("dy", op)
        if a.SAVED in op.slots:
            self._wants(r.activation(a.SAVED, op.slots[a.SAVED]), self._content("saved", op), op)
        self._seen = []

    def _attend_backward(self, op: Op) -> None:
        assert (a.FIRST in op.flags) == (not self._seen)
        self._keys(op)
        place = r.activation(a.DKV, op.slots[a.DKV])
        content = self._content("dkv", op, self._index(op))
        if a.ZERO_DKV in op.flags:
            self.held[place] = (*content, ())
        self._wants(place, content, op)
        self.held[place] = (*content, (*self.held[place][4], op.index))

    def _own_gradients(self, op: Op) -> None:
        assert set(self._seen) == self._visible(op)
        place = r.activation(a.DKV, op.slots[a.DKV])
        self._wants(place, self._content("dkv", op), op)
        queries = self.held[place][4]
        chunks = self._chunks(op)
        chunk = chunks[op.index]
        later = [c for c in chunks.values() if c.micro_batch == chunk.micro_batch and c.local >= chunk.local]
        expected = [c.index for c in later if op.index in self._visible(structs.replace(op, index=c.index))]
        assert sorted(queries) == expected, "each query that sees these keys has added to them once"


def races(ops: Iterable[Op]) -> Iterator[str]:
    """Violations: a dependency on a later op, or two ops on one resource, one of them writing, that no chain orders.

    Follows the transitive closure of the dependencies alone: lanes may complete out of order.
    """
    items = list(ops)
    position = {op.id: i for i, op in enumerate(items)}
    ancestors: list[int] = []
    touched: dict[tuple[Resource, bool], int] = {}
    """(Resource, whether only writing counts) -> the ops that have touched it, a bit each."""
    for i, op in enumerate(items):
        before = 0
        for dep in op.deps:
            parent = position.get(dep)
            if parent is None or parent >= i:
                yield f"op {op.id} ({op.action.name}) depends on op {dep}, which is not before it"
                continue
            before |= ancestors[parent] | (1 << parent)
        ancestors.append(before)
        accesses = [(resource, False) for resource in op.reads] + [(resource, True) for resource in op.writes]
        for resource, writing in accesses:
            unordered = touched.get((resource, not writing), 0) & ~(before | 1 << i)
            while unordered:
                first = items[unordered.bit_length() - 1]
                unordered ^= 1 << position[first.id]
                yield f"op {op.id} ({op.action.name}) and op {first.id} ({first.action.name}) race on {resource}"
            for writes in (False, True)[: 1 + writing]:
                touched[resource, writes] = touched.get((resource, writes), 0) | 1 << i
