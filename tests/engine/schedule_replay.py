"""An independent reading of an op list: what every slot, region and file holds when an op looks there."""

from typing import Any

from engine.plan.plan import Plan
from engine.schedule.ops import Op, Resource

MOVES = ("load", "store", "spill", "unspill", "peek", "discard")
KINDS = ("x", "dy", "saved", "kv", "dkv")


class Replay:
    """Follows activations through a schedule; the content of a place is (kind, block, chunk, step), and for the
    gradients of keys and values also the queries that have added to them."""

    def __init__(self, plan: Plan, documents: list[list[int]]) -> None:
        self.plan, self.documents = plan, documents
        self.held: dict[Resource, Any] = {}
        self.spilled: set[tuple[int, int]] = set()
        self.graphs = 0
        self._number = {block.name: i for i, block in enumerate(plan.blocks)}

    def perform(self, op: Op) -> None:
        verb, _, kind = op.action.partition("_")
        if verb in MOVES and kind in KINDS:
            self._move(verb, kind, op)
        elif op.lane == "compute" and op.index >= 0:
            getattr(self, "_" + op.action, self._block)(op)

    def _content(self, kind: str, op: Op, chunk: int | None = None) -> tuple[Any, ...]:
        return (kind, self._number[op.block], op.index if chunk is None else chunk, (op.step, op.batch))

    def _move(self, verb: str, kind: str, op: Op) -> None:
        content = self._content(kind, op)
        assert not op.batch or (verb in ("load", "store") and kind in ("x", "kv")), "a validation saves nothing"
        if verb in ("unspill", "discard"):  # the file goes with its content
            assert self.held[op.writes[0]] == content
            self.held[op.writes[0]] = None
            if verb == "unspill":
                self.held[op.writes[1]] = content
            return
        found = self.held[op.reads[0]]
        assert found[:4] == content, op
        self.held[op.writes[0]] = found
        if verb == "spill":
            self.spilled.add((content[1], op.index))

    def _wants(self, place: Resource, content: tuple[Any, ...], op: Op) -> None:
        assert place in op.reads or place in op.writes, (op, place)
        assert self.held[place][:4] == content, op

    def _hidden(self, role: str, op: Op) -> None:
        if role in op.slots:
            self._wants(("gpu.hidden", op.slots[role]), self._content(role, op), op)

    def _window(self, op: Op) -> list[int]:
        """Chunks of the op's micro-batch up to its own."""
        chunk = self.plan.chunks[op.index]
        return [chunk.index - chunk.local + i for i in range(chunk.local + 1)]

    def _attending(self, op: Op) -> bool:
        return self.plan.blocks[self._number[op.block]].attends

    # ------------------------------------------------------------------ one method per compute action

    def _block(self, op: Op) -> None:
        """A block from its input to its output."""
        backward, scores = op.action.endswith("_backward"), op.action.endswith("_score")
        kept = not scores and (self._number[op.block], op.index) in self.plan.kept
        assert scores == (op.batch > 0)
        assert not (scores and any(place[0] == "gpu.graph" for place in op.writes))
        assert kept == ("kept" in op.flags)
        self._hidden("x", op)
        self._hidden("dy", op)
        assert op.block == "embed" or kept or "x" in op.slots
        assert not backward or "dy" in op.slots
        if kept and op.action in ("layer_forward", "layer_backward"):
            self.graphs += -1 if backward else 1
        if op.action in ("layer_forward", "layer_score") and self._attending(op):
            if "attended" in op.flags:
                self._wants(("gpu.saved", op.slots["saved"]), self._content("saved", op), op)
            else:
                self._attend_whole(op)
        if op.action == "layer_backward" and self._attending(op):
            if "attended" in op.flags:
                self._own_gradients(op)
            else:
                for place, chunk in enumerate(self._window(op)):
                    self._wants(("gpu.kv", place), self._content("kv", op, chunk), op)
                if not kept:
                    self._wants(("gpu.saved", op.slots["saved"]), self._content("saved", op), op)
        block = self._number[op.block]
        batch = (op.step, op.batch)
        if op.action == "head_score":
            assert "out" not in op.slots
        elif op.action.endswith(("_forward", "_score")):
            self.held["gpu.hidden", op.slots["out"]] = ("x", block + 1, op.index, batch)
        elif block > 0:
            self.held["gpu.hidden", op.slots["out"]] = ("dy", block - 1, op.index, batch)

    def _attend_whole(self, op: Op) -> None:
        *before, own = self._window(op)
        for place, chunk in enumerate(before):
            self._wants(("gpu.kv", place), self._content("kv", op, chunk), op)
        self.held["gpu.kv", len(before)] = self._content("kv", op, own)
        self.held["gpu.saved", op.slots["saved"]] = self._content("saved", op)

    def _layer_again(self, op: Op) -> None:
        assert self._number[op.block] in self.plan.recomputed
        self._hidden("x", op)
        self._attend_whole(op)

    def _layer_project(self, op: Op) -> None:
        self._hidden("x", op)
        self.held["gpu.kv", op.slots["kv"]] = self._content("kv", op)
        self._seen: list[int] = []

    def _attend(self, op: Op) -> None:
        assert ("first" in op.flags) == (not self._seen)
        self._keys(op)
        if "last" in op.flags:
            assert set(self._seen) == self._visible(op)
            self.held["gpu.saved", op.slots["saved"]] = self._content("saved", op)

    def _keys(self, op: Op) -> None:
        self._wants(("gpu.kv", op.slots["kv"]), self._content("kv", op, op.slots["keys"]), op)
        assert op.slots["keys"] not in self._seen
        self._seen.append(op.slots["keys"])

    def _visible(self, op: Op) -> set[int]:
        """Chunks of which some key is seen by some query of the op's chunk, counted one by one."""
        reach = self.plan.blocks[self._number[op.block]].window_tokens or 10**9
        chunk = self.plan.chunks[op.index]
        starts = self.documents[chunk.micro_batch]
        seen: set[int] = set()
        for query in range(chunk.start, chunk.end):
            document = max(start for start in starts if start <= query)
            seen.update(range(max(document, query - reach + 1), query + 1))
        return {c for c in self._window(op) if seen & set(range(self.plan.chunks[c].start, self.plan.chunks[c].end))}

    def _layer_backward_top(self, op: Op) -> None:
        self._hidden("x", op)
        self._hidden("dy", op)
        if "saved" in op.slots:
            self._wants(("gpu.saved", op.slots["saved"]), self._content("saved", op), op)
        self._seen = []

    def _attend_backward(self, op: Op) -> None:
        assert ("first" in op.flags) == (not self._seen)
        self._keys(op)
        place: Resource = ("gpu.dkv", op.slots["dkv"])
        content = self._content("dkv", op, op.slots["keys"])
        if "zero:dkv" in op.flags:
            self.held[place] = (*content, ())
        self._wants(place, content, op)
        self.held[place] = (*content, (*self.held[place][4], op.index))

    def _own_gradients(self, op: Op) -> None:
        assert set(self._seen) == self._visible(op)
        place: Resource = ("gpu.dkv", op.slots["dkv"])
        self._wants(place, self._content("dkv", op), op)
        queries = self.held[place][4]
        chunk = self.plan.chunks[op.index]
        later = [c for c in self.plan.chunks if c.micro_batch == chunk.micro_batch and c.local >= chunk.local]
        expected = [c.index for c in later if op.index in self._visible(op_like(op, c.index))]
        assert sorted(queries) == expected, "each query that sees these keys has added to them once"


def op_like(op: Op, index: int) -> Op:
    """`op` for another chunk."""
    fields = {name: getattr(op, name) for name in op.__slots__}
    return Op(**(fields | {"index": index}))
