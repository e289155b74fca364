"""The table of actions: everything that a lane can be asked to do, each named once.

The emitter takes only actions of this table; handlers register for them (engine/runtime/handlers.py); costs, simulator,
calibration, traces and the terminal application read what an action is from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from penstock.engine.branches.base import BRANCHES
from penstock.engine.plan.activations import ACTIVATIONS, BETWEEN
from penstock.engine.schedule import resources as r
from penstock.engine.schedule.action import Action as Action
from penstock.engine.schedule.action import Cost, Lane, Move, Phase, Skips, Work

# Slots of an op, by role.
X, DY, OUT, SAVED, KV, DKV, GRAPH = "x", "dy", "out", "saved", "kv", "dkv", "graph"
SENT, DSENT, DSENT_OUT = "sent", "dsent", "dsent_out"
DRECURRENT = "drecurrent"
RECURRENT, BEHIND = "recurrent", "behind"
"""The recurrent state that a chunk begins with, and the one behind it."""
SLOT = "slot"
"""Of a copy: the slot that it fills or empties."""
STAGE, WEIGHTS_STAGE = "stage", "weights"
SAMPLE_KV = "sample_kv"
"""Stage of a layer's keys and values of the samples."""
MOVED_TOKENS = "moved_tokens"
"""Tokens whose keys and values there attention moves through memory, as often as it does; for forecasts."""
KEYS = "keys"
"""Position in its micro-batch of the chunk whose keys and values a streamed op attends to."""
DQ = "dq"
PLACE = "place"
"""Where keys and values, or their gradients, are in the windows that ranks share (plan/windows.py: shared_regions)."""
OF_RANK = "of_rank"
"""Who hands it on, or alone has found a gradient."""
OF_RANKS = "of_ranks"
"""Ranks whose gradients of a chunk's keys and values there are, a bit each."""
PIECES = "pieces"
"""Into how many copies a load is cut."""
CHAIN = "chain"
"""Which update of a buffer of experts it belongs to, by number: all of one is skipped, or nothing. Of a commit, and of
what is written for one: the last update before it."""
RING, SEQUENCE, FREED_BY = "ring", "sequence", "freed_by"
"""Slot of a rank's ring, the number of the part in it, counted from the run's first, and who has to have added what was
there before."""
KIND = "kind"
"""Which of the optimizer's kinds of state, by number."""

# Flags of an op.
ZERO_DKV = "zero:dkv"
FIRST, LAST = "first", "last"
"""Of a chunk's passes over chunks of keys."""
SKIPS = "skips"
"""The op is about a group of experts, and is left out where nothing is sent to that (engine/runtime/idle.py)."""
FORCED = "forced"
"""It is left out only where there is nothing to apply."""
APART = "apart"
"""The op adds what a buffer's upper block has found, by itself."""
COMPLETES = "completes"
"""The op adds the last replicas of a step."""
ZERO_ROUTED = "zero:routed"
"""The op is the first of its layer's to note whom tokens are sent to."""
SAVED_GRAPH = "saved_graph"
"""The chunk's graph is saved from forward to backward; where a slot of role GRAPH is named, what it holds is there."""


def gradient_of(buffer: str) -> str:
    """Role of the slot in which a buffer's gradient is summed."""
    return "gradient:" + buffer


def zero(buffer: str) -> str:
    """Flag: the op is the first to add to that buffer's gradient."""
    return "zero:" + buffer


ACTIONS: dict[str, Action] = {}
"""Name -> action."""


def _action(name: str, lane: Lane, cost: Cost, says: str, **what: object) -> Action:
    assert name not in ACTIONS, name
    if what.get("skips"):
        what["reads"] = (*what["reads"], r.RAM_ROUTED)  # type: ignore[misc]
    ACTIONS[name] = Action(name=name, lane=lane, cost=cost, says=says, **what)  # type: ignore[arg-type]
    return ACTIONS[name]


def _compute(name: str, phase: Phase, says: str, work: Work, **what: object) -> Action:
    return _action(name, "compute", Cost.BLOCK, says, phase=phase, work=work, **what)


def _evaluation(forward: Action, *writes: str) -> Action:
    """The same of a validation's pass, which saves nothing for a backward."""
    name, says = forward.name.replace("forward", "evaluate"), f"{forward.says}, for the validation loss"
    return _compute(name, "evaluate", says, forward.work, reads=forward.reads, writes=writes, measured_as=forward.name)


_MOVES: dict[Lane, Cost] = {"h2d": Cost.COPY, "d2h": Cost.COPY, "nvme_read": Cost.READ, "nvme_write": Cost.WRITE}


def _move(
    lane: Lane,
    name: str,
    says: str,
    reads: str,
    writes: str,
    move: Move | None = None,
    also: str = "",
    skips: Skips = "",
) -> Action:
    sources = (reads, also) if also else (reads,)
    return _action(name, lane, _MOVES[lane], says, reads=sources, writes=(writes,), move=move, skips=skips)


_load, _store = partial(_move, "h2d"), partial(_move, "d2h")
_read, _write = partial(_move, "nvme_read"), partial(_move, "nvme_write")

# ---------------------------------------------------------------------- blocks on a chunk

_WEIGHTS = (r.GPU_WEIGHTS, r.GPU_COPY)
_INPUT = (*_WEIGHTS, r.GPU_HIDDEN)
_HANDED = (*_INPUT, r.GPU_SENT)
_FORWARD = Work(matmul=1)
_LOOKS_UP = Work(looks_up=True)
_BACKWARD = Work(matmul=1, gradients=1, recompute=True, sums_gradients=True, fresh_gradients=True)
VISION_FORWARD = _compute(
    "vision_forward", "forward", "looks at the images that begin in a chunk", _FORWARD, reads=_WEIGHTS
)
VISION_EVALUATE = _evaluation(VISION_FORWARD)
VISION_BACKWARD = _compute(
    "vision_backward",
    "backward",
    "adds the vision tower's gradients",
    replace(_BACKWARD, fresh_gradients=False),
    reads=_WEIGHTS,
    adds=(r.GPU_GRADIENT,),
)
EMBED_FORWARD = _compute(
    "embed_forward", "forward", "looks up the embeddings", _LOOKS_UP, reads=_WEIGHTS, writes=(r.GPU_HIDDEN,)
)
EMBED_EVALUATE = _evaluation(EMBED_FORWARD, r.GPU_HIDDEN)
EMBED_BACKWARD = _compute(
    "embed_backward",
    "backward",
    "adds the embeddings' gradients",
    Work(looks_up=True, sums_gradients=True),
    reads=_INPUT,
    adds=(r.GPU_GRADIENT,),
)
LAYER_FORWARD = _compute(
    "layer_forward",
    "forward",
    "runs a layer forward",
    Work(matmul=1, pairs=(2, 2)),
    reads=(*_INPUT, r.GPU_KV, r.GPU_RECURRENT),
    writes=(r.GPU_HIDDEN, r.GPU_SENT, r.GPU_KV, r.GPU_RECURRENT, r.GPU_SAVED, r.GPU_GRAPH, r.GPU_GRAPH_SLOT),
    adds=(r.GPU_ROUTED,),
)
LAYER_EVALUATE = _evaluation(LAYER_FORWARD, r.GPU_HIDDEN, r.GPU_SENT, r.GPU_KV, r.GPU_RECURRENT, r.GPU_SAVED)
LAYER_RECOMPUTE = _compute(
    "layer_recompute",
    "recompute",
    "recomputes a layer's keys, values and attention",
    Work(projection=1, pairs=(2, 2)),
    reads=(*_INPUT, r.GPU_KV),
    writes=(r.GPU_KV, r.GPU_SAVED),
)
LAYER_BACKWARD = _compute(
    "layer_backward",
    "backward",
    "runs a layer backward",
    replace(_BACKWARD, pairs=(6, 4)),
    reads=(*_HANDED, r.GPU_KV, r.GPU_RECURRENT, r.GPU_SAVED, r.GPU_GRAPH_SLOT),
    writes=(r.GPU_HIDDEN,),
    adds=(r.GPU_GRADIENT, r.GPU_DKV, r.GPU_DRECURRENT, r.GPU_GRAPH),
)
LAYER_PROJECT = _compute(
    "layer_project",
    "forward",
    "computes queries, keys and values",
    Work(projection=1),
    reads=_INPUT,
    writes=(r.GPU_QUERIES, r.GPU_KV),
)
LAYER_PUBLISH = _compute(
    "layer_publish",
    "forward",
    "computes keys and values for all GPUs",
    Work(projection=1),
    reads=_INPUT,
    writes=(r.GPU_KV,),
    measured_as="layer_project",
)
ATTEND = _compute(
    "attend",
    "forward",
    "attends to one chunk of keys",
    Work(pairs=(2, 2), one_chunk_of_keys=True),
    reads=(r.GPU_QUERIES, r.GPU_KV),
    writes=(r.GPU_SAVED,),
    adds=(r.GPU_PARTIAL,),
)
LAYER_FORWARD_BOTTOM = _compute(
    "layer_forward_bottom",
    "forward",
    "runs what follows a layer's attention",
    _FORWARD,
    reads=(*_INPUT, r.GPU_SAVED),
    writes=(r.GPU_HIDDEN, r.GPU_SENT, r.GPU_GRAPH),
    adds=(r.GPU_ROUTED,),
)
LAYER_EVALUATE_BOTTOM = _evaluation(LAYER_FORWARD_BOTTOM, r.GPU_HIDDEN, r.GPU_SENT)
LAYER_BACKWARD_TOP = _compute(
    "layer_backward_top",
    "backward",
    "runs what follows a layer's attention backward",
    replace(_BACKWARD, projection=-1, projection_gradients=-1),
    reads=(*_HANDED, r.GPU_SAVED),
    writes=(r.GPU_QUERIES, r.GPU_DOUT, r.GPU_HIDDEN),
    adds=(r.GPU_GRADIENT, r.GPU_GRAPH),
)
ATTEND_BACKWARD = _compute(
    "attend_backward",
    "backward",
    "runs attention to one chunk of keys backward",
    Work(pairs=(6, 4), one_chunk_of_keys=True),
    reads=(r.GPU_QUERIES, r.GPU_DOUT, r.GPU_KV, r.GPU_SAVED, r.GPU_GRAPH),
    writes=(r.GPU_DQ,),
    adds=(r.GPU_PARTIAL, r.GPU_DKV),
)
LAYER_BACKWARD_BOTTOM = _compute(
    "layer_backward_bottom",
    "backward",
    "runs a layer's projections backward",
    Work(projection=1, projection_gradients=1),
    reads=(*_HANDED, r.GPU_PARTIAL, r.GPU_DKV, r.GPU_DQ),
    writes=(r.GPU_HIDDEN,),
    adds=(r.GPU_GRADIENT, r.GPU_GRAPH),
)
BRANCH_FORWARD = {
    name: _compute(f"{name}_forward", "forward", f"runs {branch.says}", _FORWARD, reads=_HANDED, writes=(r.GPU_HIDDEN,))
    for name, branch in BRANCHES.items()
}
BRANCH_EVALUATE = {kind: _evaluation(action, r.GPU_HIDDEN) for kind, action in BRANCH_FORWARD.items()}
BRANCH_BACKWARD = {
    name: _compute(
        f"{name}_backward",
        "backward",
        f"runs {branch.says} backward",
        _BACKWARD,
        reads=_HANDED,
        writes=(r.GPU_HIDDEN, r.GPU_SENT),
        adds=(r.GPU_GRADIENT,),
    )
    for name, branch in BRANCHES.items()
}
HEAD = _compute(
    "head",
    "backward",
    "computes the loss, forward and backward",
    Work(matmul=2, gradients=1, sums_gradients=True, logits=True),
    reads=(*_INPUT, r.GPU_EVALUATIONS),
    writes=(r.GPU_HIDDEN, r.GPU_LOSSES),
    adds=(r.GPU_GRADIENT,),
)
_LOGITS = Work(matmul=1, logits=True)
HEAD_EVALUATE = _compute(
    "head_evaluate",
    "evaluate",
    "computes the validation loss of a chunk",
    _LOGITS,
    reads=_INPUT,
    writes=(r.GPU_EVALUATIONS,),
    measured_as="head",
)
_SCORES = "finds the log-probabilities of a chunk's targets"
HEAD_SCORE = _compute("head_score", "forward", _SCORES, _LOGITS, reads=_INPUT, writes=(r.GPU_EVALUATIONS,))


def _sampling(forward: Action, says: str, writes: tuple[str, ...], *adds: str) -> Action:
    """The same of a pass that writes samples: so few tokens that what is measured of a chunk says nothing of them."""
    name, of = f"{forward.name.partition('_')[0]}_generate", forward.work
    reads = tuple(space for space in forward.reads if space in _HANDED)
    work = Work(matmul=1, pairs=of.pairs, looks_up=of.looks_up, logits=of.logits)
    return _compute(name, "generate", f"{says}, for samples", work, reads=reads, writes=writes, adds=adds)


VISION_GENERATE = _compute("vision_generate", "generate", "has no images to look at", _LOOKS_UP, reads=_WEIGHTS)
EMBED_GENERATE = _sampling(EMBED_FORWARD, EMBED_FORWARD.says, (r.GPU_HIDDEN,))
LAYER_GENERATE = _sampling(LAYER_FORWARD, LAYER_FORWARD.says, (r.GPU_HIDDEN, r.GPU_SENT), r.GPU_SAMPLE_KV)
BRANCH_GENERATE = {kind: _sampling(action, action.says, (r.GPU_HIDDEN,)) for kind, action in BRANCH_FORWARD.items()}
HEAD_GENERATE = _sampling(HEAD, "computes what may follow", (r.GPU_LOGITS,))

# ---------------------------------------------------------------------- whole buffers on the compute device

NORM = _action(
    "norm", "compute", Cost.BUFFER, "takes a gradient's norm", reads=(r.GPU_GRADIENT,), writes=(r.GPU_NORMS,)
)
DEQUANTISE = _action(
    "dequantise",
    "compute",
    Cost.DEQUANTISE,
    "dequantises a block's frozen weights",
    reads=(r.GPU_WEIGHTS,),
    writes=(r.GPU_COPY,),
    skips="load",
)
ADD_REPLICA = _action(
    "add_replica", "compute", Cost.BUFFER, "adds a replica's gradient to those before it", adds=(r.GPU_GRADIENT,)
)
UPDATE_ON_GPU = _action(
    "update_on_gpu",
    "compute",
    Cost.BUFFER,
    "updates a block on the GPU",
    reads=(r.GPU_GRADIENT, r.RAM_CLIP),
    adds=(r.GPU_STATE, r.GPU_WEIGHTS),
    phase="update",
)

# ---------------------------------------------------------------------- activations on their way

_SAVED = [kind for kind, row in ACTIVATIONS.items() if row.saved]


def _on_gpu(kind: str) -> tuple[str, ...]:
    return (ACTIVATIONS[kind].gpu,)


def _in_ram(kind: str) -> tuple[str, ...]:
    row = ACTIVATIONS[kind]
    waiting = () if row.ram is None else (row.ram,)
    return (r.SAVED[kind], *waiting, r.RAM_ACTIVATION_STAGE) if row.saved else waiting


def _on_nvme(kind: str) -> tuple[str, ...]:
    return (r.SPILLED[kind],)


def _of_kinds(
    verb: str, lane: Lane, says: str, kinds: Iterable[str], **spaces: Callable[[str], tuple[str, ...]]
) -> dict[str, Action]:
    """Kind -> the action that does this to activations of that kind."""

    def one(kind: str) -> Action:
        where = {access: of(kind) for access, of in spaces.items()}
        return _action(f"{verb}_{kind}", lane, _MOVES[lane], says.format(ACTIVATIONS[kind].says), kind=kind, **where)

    return {kind: one(kind) for kind in kinds}


LOAD = _of_kinds("load", "h2d", "copies {} to the GPU", ACTIVATIONS, reads=_in_ram, writes=_on_gpu)
STORE = _of_kinds("store", "d2h", "copies {} from the GPU", ACTIVATIONS, reads=_on_gpu, writes=_in_ram)
SPILL = _of_kinds("spill", "nvme_write", "writes {} to NVMe", _SAVED, reads=_in_ram, writes=_on_nvme)
UNSPILL = _of_kinds(
    "unspill", "nvme_read", "reads {} from NVMe for the last time", _SAVED, writes=_in_ram, adds=_on_nvme
)
PEEK = _of_kinds("peek", "nvme_read", "reads {} from NVMe", ["x", "sent"], reads=_on_nvme, writes=_in_ram)
DISCARD = _of_kinds("discard", "nvme_read", "removes {} from NVMe", _SAVED, writes=_on_nvme)

LOAD_SAMPLE_KV = _load(
    "load_sample_kv", "copies keys and values of the samples to the GPU", r.RAM_SAMPLE_KV, r.GPU_SAMPLE_KV
)
STORE_SAMPLE_KV = _store(
    "store_sample_kv", "copies keys and values of the samples from the GPU", r.GPU_SAMPLE_KV, r.RAM_SAMPLE_KV
)

# ---------------------------------------------------------------------- weights, gradients, state

_WEIGHTS_TO_GPU = Move("weights", "in", "gpu")
LOAD_WEIGHTS = _load(
    "load_weights", "copies weights to the GPU", r.RAM_WEIGHTS, r.GPU_WEIGHTS, _WEIGHTS_TO_GPU, skips="load"
)
LOAD_WEIGHTS_PART = _load(
    "load_weights_part",
    "copies a part of the weights to the GPU",
    r.RAM_PART_STAGE,
    r.GPU_WEIGHTS,
    _WEIGHTS_TO_GPU,
    skips="load",
)
READ_WEIGHTS = _read(
    "read_weights",
    "reads a part of the weights",
    r.NVME_WEIGHTS,
    r.RAM_PART_STAGE,
    Move("weights", "in", "ram"),
    skips="load",
)
READ_WEIGHTS_WHOLE = _action(
    "read_weights_whole",
    "nvme_read",
    Cost.READ_TO_DEVICE,
    "reads weights straight to the GPU",
    reads=(r.NVME_WEIGHTS,),
    writes=(r.GPU_WEIGHTS,),
    move=_WEIGHTS_TO_GPU,
    skips="load",
)
WRITE_WEIGHTS = _write(
    "write_weights",
    "writes a part of the weights",
    r.RAM_PART_STAGE,
    r.NVME_WEIGHTS,
    Move("weights", "out", "home"),
    skips="update",
)
_GRADIENT_LEAVES, _TO_RAM = Move("gradient", "out", "home"), Move("gradient", "out", "ram")
STORE_GRADIENT = _store(
    "store_gradient",
    "copies a gradient from the GPU",
    r.GPU_GRADIENT,
    r.RAM_GRADIENT,
    _GRADIENT_LEAVES,
    skips="gradient",
)
STORE_SUM = _store(
    "store_sum",
    "copies a gradient that other groups add to from the GPU",
    r.GPU_GRADIENT,
    r.RAM_GRADIENT,
    _TO_RAM,
    skips="gradient",
)
LOAD_SUM = _load(
    "load_sum",
    "copies a gradient back to the GPU, for the next group to add to",
    r.RAM_GRADIENT,
    r.GPU_GRADIENT,
    Move("gradient", "in", "gpu"),
    also=r.RAM_ROUTED,
)
STORE_GRADIENT_PART = _store(
    "store_gradient_part",
    "copies a part of a gradient from the GPU",
    r.GPU_GRADIENT,
    r.RAM_PART_STAGE,
    _TO_RAM,
    skips="gradient",
)
HAND_OVER = _store(
    "hand_over",
    "hands a part of a replica's gradient to the GPU that adds it",
    r.GPU_GRADIENT,
    r.RAM_RING,
    _GRADIENT_LEAVES,
)
SIGNAL_GRADIENT = _action(
    "signal_gradient", "ranks", Cost.SIGNAL, "tells that a part of a gradient is there", reads=(r.RAM_RING,)
)
READ_GRADIENT = _read(
    "read_gradient", "reads a part of a gradient", r.NVME_GRADIENT, r.RAM_PART_STAGE, Move("gradient", "in", "ram")
)
ADD_GRADIENT = _action(
    "add_gradient",
    "optimizer",
    Cost.ADD,
    "adds the replicas' gradients of a part",
    reads=(r.RAM_RING,),
    writes=(r.RAM_NORMS,),
    adds=(r.RAM_GRADIENT, r.RAM_PART_STAGE),
)
AWAIT_WEIGHTS = _action(
    "await_weights",
    "ranks",
    Cost.SIGNAL,
    "waits until all GPUs have updated their parts of a block",
    adds=(r.RAM_WEIGHTS, r.NVME_WEIGHTS),
    phase="update",
)
MEET = _action(
    "meet",
    "ranks",
    Cost.SIGNAL,
    "waits until all GPUs have got as far in a layer",
    reads=(r.RAM_WINDOW_KV, r.RAM_WINDOW_DKV, r.RAM_HANDED_ON),
    adds=(r.RAM_WINDOW_KV, r.RAM_WINDOW_DKV, r.RAM_HANDED_ON),
)
SIGNAL_STATE = _action(
    "signal_state", "ranks", Cost.SIGNAL, "tells that a recurrent state is there", reads=(r.RAM_HANDED_ON,)
)
AWAIT_STATE = _action(
    "await_state",
    "ranks",
    Cost.SIGNAL,
    "waits for the recurrent state that another GPU hands on",
    writes=(r.RAM_HANDED_ON,),
)
_BETWEEN = tuple(dict.fromkeys(space for kind in BETWEEN if (space := ACTIVATIONS[kind].ram) is not None))
SIGNAL_CHUNK = _action(
    "signal_chunk",
    "ranks",
    Cost.SIGNAL,
    "tells the GPU that goes on with a chunk that it may",
    reads=(*_BETWEEN, r.SAVED["sent"]),
)
AWAIT_CHUNK = _action(
    "await_chunk",
    "h2d",
    Cost.SIGNAL,
    "waits for a chunk that another GPU computes experts of",
    writes=(*_BETWEEN, r.SAVED["sent"]),
)
ADD_DKV = _action(
    "add_dkv",
    "optimizer",
    Cost.ADD,
    "adds all GPUs' gradients of a chunk's keys and values",
    reads=(r.RAM_WINDOW_DKV,),
    adds=(r.RAM_WINDOW_DKV,),
    phase="backward",
)
WRITE_GRADIENT = _write(
    "write_gradient",
    "writes a part of a gradient",
    r.RAM_PART_STAGE,
    r.NVME_GRADIENT,
    _GRADIENT_LEAVES,
    skips="gradient",
)
UPDATE = _action(
    "update",
    "optimizer",
    Cost.UPDATE,
    "updates a part of a block",
    reads=(r.RAM_CLIP, r.RAM_GRADIENT, r.RAM_STATE_STAGE),
    writes=(r.RAM_PART_STAGE,),
    adds=(r.RAM_STATE_STAGE, r.RAM_STATE, r.RAM_WEIGHTS, r.RAM_GRADIENT),
    phase="update",
    skips="update",
)
READ_STATE = _read(
    "read_state",
    "reads a part of the state",
    r.NVME_STATE,
    r.RAM_STATE_STAGE,
    Move("state", "in", "ram"),
    also=r.NVME_GRADIENT,
    skips="update",
)
_STATE_LEAVES = Move("state", "out", "home")
WRITE_STATE = _write(
    "write_state",
    "writes a part of the state",
    r.RAM_STATE_STAGE,
    r.NVME_STATE,
    _STATE_LEAVES,
    also=r.GENERATION,
    skips="update",
)
CHECKPOINT_STATE = _write(
    "checkpoint_state",
    "writes a part of the state in RAM, for a commit",
    r.RAM_STATE,
    r.NVME_STATE,
    _STATE_LEAVES,
    also=r.GENERATION,
    skips="commit",
)
STAGE_STATE = _store(
    "stage_state", "copies a part of the state from the GPU, for a commit", r.GPU_STATE, r.RAM_PART_STAGE, _STATE_LEAVES
)
CHECKPOINT_STAGED = _write(
    "checkpoint_staged",
    "writes a part of the state on the GPU, for a commit",
    r.RAM_PART_STAGE,
    r.NVME_STATE,
    also=r.GENERATION,
)

# ---------------------------------------------------------------------- once a step

TAKE_ROUTES = _action(
    "take_routes",
    "optimizer",
    Cost.REPORT,
    "takes which groups of a layer's experts are needed",
    reads=(r.GPU_ROUTED,),
    writes=(r.RAM_ROUTED,),
)
CLIP = _action(
    "clip",
    "optimizer",
    Cost.REPORT,
    "takes the step's loss and gradient norm",
    reads=(r.GPU_NORMS, r.RAM_NORMS, r.GPU_LOSSES),
    writes=(r.RAM_CLIP,),
)
EVALUATE = _action(
    "evaluate",
    "optimizer",
    Cost.REPORT,
    "takes a validation's loss",
    reads=(r.GPU_EVALUATIONS,),
    writes=(r.RAM_EVALUATION,),
)
CHOOSE = _action(
    "choose",
    "compute",
    Cost.REPORT,
    "chooses the tokens that follow",
    reads=(r.GPU_LOGITS,),
    writes=(r.RAM_CHOSEN,),
    phase="generate",
)
COMMIT = _action("commit", "nvme_write", Cost.COMMIT, "commits a generation", writes=(r.GENERATION,))
