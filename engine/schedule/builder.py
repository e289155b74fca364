"""The schedule: a pass as a list of ops with every dependency, pure data, no torch.

`ScheduleBuilder` emits ops in program order. Each op names the resources (slots, regions, parts on disk) that it reads
and writes, and its dependencies follow (schedule/ops.py). Slots are assigned here, statically: any execution that
respects the dependencies computes the same bits. The tables live on from one step to the next, so that ops of step s+1
depend on ops of step s only where they share a resource: the updates of step s run under the forward pass of step s+1.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from penstock.engine.plan.activations import BETWEEN, GRADIENT_OF
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import LAYER_POOLS, BlockShape
from penstock.engine.schedule import actions as a
from penstock.engine.schedule import resources as r
from penstock.engine.schedule.activations import ActivationSchedule
from penstock.engine.schedule.kinds import KINDS, ONWARD, WITH_GRADIENTS
from penstock.engine.schedule.ops import WHOLE, Emitter, Op
from penstock.engine.schedule.passes import Group, Pass, Task, tasks
from penstock.engine.schedule.resources import Resource
from penstock.engine.schedule.samples import SampleSchedule
from penstock.engine.schedule.shared import SharedActivations, SharedStreaming
from penstock.engine.schedule.spreading import Spreading
from penstock.engine.schedule.state import Load, StateSchedule
from penstock.engine.schedule.streaming import Operands, Streaming, inputs, role


class ScheduleBuilder:
    """Emits the ops of consecutive passes. Those of a pass are preceded block by block by the updates of the gradient
    that still waits; `finish` is the updates alone."""

    def __init__(self, plan: Plan, *, behind_at: int | None = None) -> None:
        """`behind_at`: the run's step, where a group of experts has not been brought to it (engine/runtime/idle.py)."""
        self._plan = plan
        self._emitter = Emitter()
        self._emit = self._emitter.emit
        self._state = StateSchedule(plan, self._emitter, behind_at)
        self._senders = plan.problem.senders
        shared = plan.problem.sharded
        self._activations = (SharedActivations if shared else ActivationSchedule)(plan, self._emitter)
        ways = plan, self._emitter, self._activations, self._emit_block, self._outputs
        self._streaming = (SharedStreaming if shared else Streaming)(*ways)
        self._samples = SampleSchedule(plan, self._emitter)
        self._pass = Pass(step=0, groups=[], ends=a.CLIP)
        """The one whose ops are being emitted."""
        self._updated: set[int] = set()
        """Blocks that it has updated, or found nothing to update in."""
        self._next = {i: number for number, block in enumerate(plan.blocks) for i in block.inputs}
        """Block -> the one that takes its output."""
        self._spreading = Spreading(plan, self._emitter, self._activations, self._next)
        self._first_user: dict[str, int] = {}
        """Buffer -> the first block that computes with it, for which it is updated."""
        self._last_user: dict[str, int] = {}
        """Buffer that is trained -> the block that is the last to add to its gradient."""
        self._references = plan.problem.references
        for index, block in reversed(list(enumerate(plan.blocks))):
            self._first_user |= dict.fromkeys(block.buffers, index)
            self._last_user |= {name: index for name in block.buffers if not plan.buffers[name].frozen}

    @property
    def uncommitted(self) -> bool:
        """Whether `finish` would commit anything: a gradient waits, or has been applied since the last commit."""
        return self._state.waiting is not None or self._state.uncommitted is not None

    def stream(self, pass_: Pass, *, commit_previous: bool = False) -> Iterator[list[Op]]:
        """Ops of a pass block by block, so that the lanes start on the first while the rest is being built.

        What they find is known after the last one. `commit_previous` commits a generation once the waiting gradient is
        applied.
        """
        assert pass_.groups[-1].chunks[0].index == 0, "a pass has the first chunk, whatever that holds"
        visited = {block for group in pass_.groups for _, block, _ in group.visits}
        assert self._state.waiting is None or len(visited) == len(self._plan.blocks), "some updates would be left out"
        self._emitter.step, self._emitter.batch = pass_.step, pass_.batch
        self._pass = pass_
        self._state.whole = not pass_.trains
        self._spreading.begin(pass_)
        self._updated.clear()
        for _ in self._visits(tasks(pass_.groups), commit_previous):
            yield self._emitter.take()
        self._state.applied(committed=commit_previous)
        if pass_.trains:
            self._state.read_ahead(pass_.step)
            self._state.waiting = pass_.step
        self._emit(
            pass_.ends, "all", reads=map(r.resource, pass_.ends.reads), writes=map(r.resource, pass_.ends.writes)
        )
        yield self._emitter.take()

    def ops(self, pass_: Pass, *, commit_previous: bool = False) -> list[Op]:
        """The same in one list."""
        return list(itertools.chain.from_iterable(self.stream(pass_, commit_previous=commit_previous)))

    def follow(self, step: int) -> None:
        """Go on as if step `step` had been carried out and all of it were done: its gradient waits."""
        self._state.waiting = step

    def finish(self, *, commit: bool) -> list[Op]:
        """Ops that apply the waiting gradient, if one waits, and, with `commit`, commit the generation."""
        self._emitter.batch = 0
        self._state.whole = False
        for name in self._plan.buffers:
            _emit_share(deque(self._state.update(name, write_through=commit, fetched=False)), 1)
        if commit:
            self._state.commit()
        self._state.applied(committed=commit)
        return self._emitter.take()

    # ------------------------------------------------------------------ visits

    def _visits(self, tasks: list[Task], commit: bool) -> Iterator[None]:
        """Emit the ops of all visits, with a pause after each."""
        visits = [task for task in tasks if task.first]
        lengths = Counter(task.visit for task in tasks)
        ends = list(itertools.accumulate(lengths[visit] for visit in range(len(visits))))
        offloading: list[tuple[int, deque[Load]]] = []
        """Gradients that leave until the next group: the visit with which they have to be gone, and what moves them."""
        weights = deque(self._prepare(visits, 0, commit, 1))
        turns = 1
        _emit_share(weights, turns)
        self._begin(tasks[0].group)
        loaded = self._load(tasks[0])
        for number, (task, following) in enumerate(zip(tasks, [*tasks[1:], None], strict=True)):
            # The next operands travel while this op computes, unless this op makes them.
            early = following is not None and (following.visit - 1, following.chunk) != (task.visit, task.chunk)
            if early and following is not None and self._pass.spread and task.layer not in self._pass.spread:
                early = not self._spreading.waits(following)  # what this op may still load would come behind that
            next_loaded = self._load(following) if following is not None and early else None
            self._compute(task, loaded)
            # The next block's weights come between this one's small copies, and are there well before its end.
            turns = turns - 1 if not task.first else max(1, lengths[task.visit] // 2)
            routes = self._routes(task)
            late = routes or self._hands_on(task)  # then nothing of the next block comes between
            if task.last if late else task.first:
                if routes:
                    self._state.take_routes(self._plan.blocks[task.layer].name)
                turns = 1 if late else turns
                weights.extend(self._prepare(visits, task.visit + 1, commit, turns))
            _emit_share(weights, turns)
            for until, stores in offloading:
                _emit_share(stores, ends[until] - number)
            offloading = [(until, stores) for until, stores in offloading if stores]
            if task.last:
                assert not weights
                offloading += self._end_visit(task, visits)
            if following is not None and following.group is not task.group:
                self._begin(following.group)
            if following is not None:
                loaded = self._load(following) if next_loaded is None else next_loaded
            if task.last:
                yield

    def _routes(self, task: Task) -> bool:
        """Whether the block that follows is fetched once this one has sent something to it."""
        if task.following is None or task.mode != "forward" or not self._pass.trains:
            return False
        return self._senders.get(task.following) == task.layer

    def _begin(self, group: Group) -> None:
        self._state.begin()
        self._activations.begin(group.chunks, self._pass.documents, self._pass.streams)
        self._samples.begin(
            self._pass.read_tokens, self._pass.moved_tokens, sum(chunk.end - chunk.start for chunk in group.chunks)
        )

    def _prepare(self, visits: list[Task], visit: int, commit: bool, turns: int) -> list[Load]:
        """Update, where this step has not yet, the block of `visit`, ahead of its first op. Returns what fetches its
        weights, and the sums of its gradient, to be emitted in `turns` turns."""
        if visit >= len(visits):
            return []
        task = visits[visit]
        block = self._plan.blocks[task.layer]
        loads: list[Load] = []
        for layer in self._due(task):
            new = layer not in self._updated
            self._updated.add(layer)
            for name in self._plan.blocks[layer].buffers:
                if self._first_user[name] == layer:
                    loads += self._state.update(name, write_through=commit and new, fetched=True)
            if commit and layer == len(self._plan.blocks) - 1:
                if loads:
                    loads.append(self._state.commit)
                else:
                    self._state.commit()
        loads += self._state.fetch(self._weights(block), turns)
        if task.mode in WITH_GRADIENTS:
            self._state.replica = self._replica(task)
            for name in block.buffers:
                if not self._plan.buffers[name].frozen:
                    loads += self._state.fetch_sum(name, turns)
        return loads

    def _due(self, task: Task) -> list[int]:
        """Blocks to be updated before a visit. Whoever computes experts, all ranks update them, and the block behind
        them, at one place in their programs: behind the first chunk of the last block that each computes itself."""
        if task.layer in self._senders and task.mode == "forward":  # experts that the groups before needed not
            return [task.layer]
        first = last = task.layer
        while first - 1 in self._pass.spread:
            first -= 1
        while last in self._pass.spread:
            last += 1
        return [layer for layer in range(first, last + 1) if layer not in self._updated]

    def _end_visit(self, task: Task, visits: list[Task]) -> list[tuple[int, deque[Load]]]:
        """The block has seen all of the pass's chunks: its weights may go, and gradients that are complete do. Returns
        of those that wait for the next group the visit with whose end they have to be gone, and what moves them, to be
        emitted between small copies that are wanted sooner."""
        block, self._state.replica = self._plan.blocks[task.layer], self._replica(task)
        self._state.release(self._weights(block))
        if block.recurrent:
            self._activations.end_states(task.layer)
        done = self._closes(task) if task.mode == "backward" else task.mode == "loss"
        offloading: list[tuple[int, deque[Load]]] = []
        for name in block.buffers if done else ():
            is_last = self._last_user.get(name) == task.layer
            if task.layer in self._pass.spread and name in self._last_user:
                self._state.replica = self._replica(task)
                if self._state.replica:
                    self._state.add_replica(name)
                if self._spreading.ends(task):
                    self._state.hand_over(name, ends=True, last=True, of_rank=self._plan.rank)
            elif self._plan.problem.adds_replicas and name in self._last_user:
                for replica in self._ended(task):
                    self._state.replica = replica
                    self._state.hand_over(name, ends=is_last, last=is_last and task.chunk.index == replica == 0)
            elif is_last:
                if task.group is self._pass.groups[-1]:
                    self._state.close_gradient(name)
                    continue
                stores = deque(self._state.suspend_gradient(name))
                until = self._offload_deadline(task.visit, name, visits)
                if until > task.visit:
                    offloading.append((until, stores))
                else:
                    _emit_share(stores, 1)
        self._state.replica = 0
        for layer in task.left_out:
            for name in self._plan.blocks[layer].buffers:
                if name in self._last_user:
                    self._state.hand_over(name, ends=True, last=True, of_rank=self._pass.spread[layer])
        return offloading

    def _replica(self, task: Task) -> int:
        """Which of the sums that are open at once a task adds to: of several shards, where ranks share sequences; of
        experts of all ranks' chunks that of the first replicas, or one that is then added to it."""
        if task.layer in self._pass.spread:
            return int(not self._spreading.begins(task))
        return self._plan.replica(task.chunk) if self._plan.problem.sharded else 0

    def _ended(self, task: Task) -> Iterable[int]:
        """Which of them a visit ends."""
        return reversed(range(self._plan.problem.rounds)) if self._hands_on(task) else [self._replica(task)]

    def _hands_on(self, task: Task) -> bool:
        """Whether states go from rank to rank under the task's visit."""
        return self._plan.problem.sharded and self._plan.blocks[task.layer].recurrent

    def _shares_attention(self, block: BlockShape) -> bool:
        return block.attends and self._plan.problem.sharded

    def _closes(self, task: Task) -> bool:
        """Whether a backward's visit is the last to add to the block's gradient, in its group or of its replica."""
        if self._plan.problem.adds_replicas:
            return self._plan.begins_replica(task.chunk)
        return task.chunk is task.group.chunks[0]

    def _offload_deadline(self, visit: int, name: str, visits: list[Task]) -> int:
        """The last visit in which a gradient may leave its slot: the next one, where there are slots for one that comes
        and one that goes, else the one before that in which the slot's next sum begins to come."""
        pool = self._plan.buffers[name].pool
        if pool in LAYER_POOLS:
            return min(visit + 1, len(visits) - 1)
        buffers = self._plan.buffers
        for later in range(visit + 1, len(visits)):
            task = visits[later]
            users = self._plan.blocks[task.layer].buffers if task.mode in WITH_GRADIENTS else ()
            if any(buffers[user].pool == pool and not buffers[user].frozen for user in users):
                return later - 2
        return visit

    # ------------------------------------------------------------------ one block, one chunk

    def _load(self, task: Task) -> dict[str, int]:
        """Emit the loads of a task's activations; their slots by role."""
        block, layer, chunk = self._plan.blocks[task.layer], task.layer, task.chunk
        key = self._activations.key(layer, chunk)
        has_graph = task.mode == "backward" and key in self._plan.saved_graphs
        loaded: dict[str, int] = {}
        if has_graph and key in self._plan.offloaded_graphs:
            loaded[a.GRAPH] = self._activations.load_saved(a.GRAPH, layer, chunk)
        if task.mode == "generate" and task.first:
            self._samples.open(layer)
        kinds = block.input_kinds if block.inputs else ()
        giver = self._spreading.receive(task) if self._pass.spread else None
        ends = task.mode == "backward" and self._shares_attention(block)
        begins = task.mode in ("backward_top", "backward") and not ends
        if begins or ends:
            kinds = self._plan.blocks[block.sent_to or layer].saved_inputs
        if begins:
            of_output = self._plan.blocks[self._next[layer]].input_kinds if layer in self._next else ()
            kinds = (*(() if has_graph else kinds), *(GRADIENT_OF[kind] for kind in of_output))
        for kind in kinds:
            if kind == a.X and giver is not None and layer not in self._pass.spread and not begins:
                loaded[kind] = self._activations.take_home(kind, layer, giver, chunk)
            else:
                loaded[kind] = self._activations.load(kind, task.mode, layer, chunk)
        if ends:  # what backward has handed down so far
            assert isinstance(self._activations, SharedActivations)
            loaded[a.DQ] = self._activations.load_dq(layer, chunk)
            outputs, below = self._outputs(task)
            loaded |= {role(kind): self._activations.load(kind, task.mode, below, chunk) for kind in outputs}
        if begins and block.attends and not has_graph:
            loaded[a.SAVED] = self._activations.load_saved(a.SAVED, layer, chunk)
        if task.mode == "backward" and block.recurrent and chunk.ordinal:
            loaded[a.RECURRENT] = self._activations.load_saved(a.RECURRENT, layer, chunk)
        return loaded

    def _compute(self, task: Task, loaded: dict[str, int]) -> None:
        block, chunk, activations = self._plan.blocks[task.layer], task.chunk, self._activations
        operands = self._operands(task)
        reread = task.mode in ("publish", "republish", "backward_top")
        reread |= task.mode in ("forward", "recompute") and block.backward
        outputs, other = self._outputs(task)
        slots = dict(loaded)
        for kind in outputs:
            if role(kind) not in loaded:
                slots[role(kind)] = activations.pool(kind).take((kind, *activations.content(other, chunk)))
        if block.recurrent:
            activations.begin_state(task.mode, task.layer, chunk, slots)
        offloads = task.mode == "forward" and activations.key(task.layer, chunk) in self._plan.offloaded_graphs
        if offloads:
            slots[a.GRAPH] = activations.pool(a.GRAPH).take(activations.content(task.layer, chunk))
        if task.mode == "generate":
            self._compute_generated(task, operands, slots)
        elif not block.attends:
            self._emit_block(task, operands, slots)
        elif self._plan.streamed:
            self._streaming.compute(task, operands, slots)
        else:
            self._compute_whole(task, operands, slots)
        if offloads:
            activations.store_saved(a.GRAPH, task.mode, task.layer, chunk, slots[a.GRAPH])
        if block.recurrent:
            activations.end_state(task.mode, task.layer, chunk, slots, saves=reread and task.mode == "forward")
        leaves = bool(self._pass.spread and outputs) and self._spreading.leaves(task)
        if leaves and other not in self._pass.spread and task.mode == "forward":
            other = task.layer  # its owner saves what the block behind begins with
        for kind in outputs:
            activations.store(kind, task.mode, other, chunk, slots[role(kind)])
        if leaves:
            self._spreading.pass_on(task, outputs, other)
        for kind in loaded.keys() & BETWEEN:
            # What is saved of a block's inputs is read again in backward.
            more = kind == a.SENT and task.mode != "backward"  # there may be another branch
            activations.pool(kind).release(loaded[kind], keep=more or (kind in block.saved_inputs and reread))
        if a.SAVED in slots:
            activations.pool(a.SAVED).release(slots[a.SAVED], keep=reread and task.mode != "backward_top")
        if a.GRAPH in slots:
            activations.pool(a.GRAPH).release(slots[a.GRAPH], keep=reread)
        if a.RECURRENT in slots:
            activations.pool(a.RECURRENT).release(slots[a.RECURRENT], keep=reread)

    def _outputs(self, task: Task) -> tuple[Sequence[str], int]:
        """Which activations a task makes, and of which block: inputs of the one that the pass visits next, or the
        gradients of an input's output where that has a backward."""
        block = self._plan.blocks[task.layer]
        if task.mode in ONWARD and task.following is not None and self._plan.blocks[task.following].inputs:
            following = self._plan.blocks[task.following]
            # What a layer sends is there already for all of its branches but the first.
            kinds = following.input_kinds if following.sent_to is None else (a.X,)
            return kinds, task.following
        if block.inputs and task.mode in WITH_GRADIENTS and self._plan.blocks[block.inputs[0]].backward:
            return [GRADIENT_OF[kind] for kind in block.input_kinds], block.inputs[0]
        return (), task.layer

    def _weights(self, block: BlockShape) -> list[str]:
        """Buffers that the pass computes a block with."""
        references = self._references if self._pass.of_reference else {}
        return [references.get(name, name) for name in block.buffers]

    def _operands(self, task: Task) -> Operands:
        block, state = self._plan.blocks[task.layer], self._state
        operands, state.replica = Operands(), self._replica(task)
        for name in self._weights(block):
            operands.weights.append(state.operand(name))
            operands.slots[name] = state.weight_slot.get(name, WHOLE)
            if task.mode in WITH_GRADIENTS and not self._plan.buffers[name].frozen:
                if state.open_gradient(name):
                    operands.zero.append(a.zero(name))
                operands.slots[a.gradient_of(name)] = state.gradient_slot[name, state.replica]
                operands.gradients.append(state.gradient(name))
        return operands

    def _emit_block(
        self,
        task: Task,
        operands: Operands,
        slots: dict[str, int],
        action: a.Action | None = None,
        *,
        reads: Iterable[Resource] = (),
        writes: Iterable[Resource] = (),
        flags: Iterable[str] = (),
    ) -> None:
        """Emit the op that runs the block on the chunk from its input to its output; `action`: only its last part."""
        block = self._plan.blocks[task.layer]
        action = action or KINDS[block.kind][task.mode]
        made = {role(kind): kind for kind in self._outputs(task)[0]}
        reads = [*operands.weights, *inputs(slots, made), *reads]
        writes = [*writes, *operands.gradients, *(r.activation(kind, slots[role]) for role, kind in made.items())]
        if a.RECURRENT in slots:
            reads.append(r.activation(a.RECURRENT, slots[a.RECURRENT]))
        if a.BEHIND in slots:
            writes.append(r.activation(a.RECURRENT, slots[a.BEHIND]))
        if block.recurrent and task.mode == "backward":
            writes.append(r.resource(r.GPU_DRECURRENT))
        if action.result is not None:
            writes.append(r.resource(action.result))
        if task.mode == "loss" and self._plan.problem.scores:
            reads.append(r.resource(r.GPU_EVALUATIONS))
        flags = [*flags, *operands.zero]
        if self._routes(task):
            writes.append(r.resource(r.GPU_ROUTED, block.name))
            flags += [a.ZERO_ROUTED] * task.first
        key = self._activations.key(task.layer, task.chunk)
        if not self._emitter.batch and key in self._plan.saved_graphs:
            writes.append(r.resource(r.GPU_GRAPH, *key))
            flags.append(a.SAVED_GRAPH)
            if a.GRAPH in slots:
                held = r.activation(a.GRAPH, slots[a.GRAPH])
                if task.mode == "forward":
                    writes.append(held)
                else:
                    reads.append(held)
        self._emit(
            action, block.name, task.chunk.index, reads=reads, writes=writes, slots=operands.slots | slots, flags=flags
        )

    def _compute_generated(self, task: Task, operands: Operands, slots: dict[str, int]) -> None:
        """A block on tokens of samples, whose keys and values have memory of their own."""
        kept, stage = self._samples.operands(task.layer)
        self._emit_block(task, operands, slots | stage, writes=kept)
        if task.last:
            self._samples.close(task.layer)

    def _compute_whole(self, task: Task, operands: Operands, slots: dict[str, int]) -> None:
        """A layer whose keys and values are in the window over its micro-batch."""
        layer, chunk, activations = task.layer, task.chunk, self._activations
        window, last = activations.window(chunk), activations.ends_stream(chunk)
        if task.mode != "backward":
            slots[a.SAVED] = activations.pool(a.SAVED).take(activations.content(layer, chunk))
            written = [*activations.write_window(layer, chunk), r.activation(a.SAVED, slots[a.SAVED])]
            self._emit_block(task, operands, slots, reads=window[:-1], writes=written)
            activations.store_saved(a.SAVED, task.mode, layer, chunk, slots[a.SAVED])
            if task.mode == "forward":
                activations.store_window(layer, chunk)
            return
        if last:
            # A micro-batch's last chunk attends to all of its keys and values.
            activations.load_whole_window(layer, chunk)
        saved: list[Resource] = [r.activation(a.SAVED, slots[a.SAVED])] if a.SAVED in slots else []
        flags = [a.ZERO_DKV] if last else []
        self._emit_block(task, operands, slots, reads=[*window, *saved], writes=[r.resource(r.GPU_DKV)], flags=flags)
        activations.load_window_ahead(layer, chunk)


def _emit_share(loads: deque[Load], turns: int) -> None:
    """Emit what falls to the next of `turns` turns."""
    for _ in range(-(-len(loads) // max(1, turns))):
        loads.popleft()()
