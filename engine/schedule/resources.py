"""Names of the pieces of memory and disk that ops read and write; nobody else spells one.

A resource is a tuple whose first item is its space: all pieces of one kind.
"""

from __future__ import annotations

Resource = tuple[str | int, ...]

GPU_WEIGHTS = "gpu.weights"
GPU_GRADIENT = "gpu.gradient"
GPU_STATE = "gpu.state"
GPU_HIDDEN = "gpu.hidden"
GPU_SAVED = "gpu.saved"
GPU_KV = "gpu.kv"
GPU_DKV = "gpu.dkv"
GPU_QUERIES = "gpu.q"
GPU_DOUT = "gpu.dout"
GPU_PARTIAL = "gpu.partial"
GPU_GRAPH = "gpu.graph"
GPU_LOSSES = "gpu.losses"
GPU_EVALUATIONS = "gpu.evaluations"
GPU_NORMS = "gpu.norms"
RAM_WEIGHTS = "ram.weights"
RAM_GRADIENT = "ram.gradient"
RAM_STATE = "ram.state"
RAM_STATE_STAGE = "ram.state_stage"
RAM_PART_STAGE = "ram.part_stage"
RAM_ACTIVATION_STAGE = "ram.activation_stage"
RAM_BOUNDARY = "ram.boundary"
RAM_WINDOW_SAVED = "ram.window_saved"
RAM_WINDOW_KV = "ram.window_kv"
RAM_WINDOW_DKV = "ram.window_dkv"
RAM_CLIP = "ram.clip"
RAM_EVALUATION = "ram.evaluation"
RECORD_X = "record.x"
RECORD_SAVED = "record.saved"
RECORD_KV = "record.kv"
NVME_WEIGHTS = "nvme.weights"
NVME_GRADIENT = "nvme.gradient"
NVME_STATE = "nvme.state"
NVME_X = "nvme.x"
NVME_SAVED = "nvme.saved"
NVME_KV = "nvme.kv"
GENERATION = "generation"

RECORDS = (RECORD_X, RECORD_SAVED, RECORD_KV)
"""What is put aside of a layer's chunk for its backward, wherever it waits; block and chunk follow."""
_RECORD = {"x": RECORD_X, "saved": RECORD_SAVED, "kv": RECORD_KV}
_SPILLED = {"x": NVME_X, "saved": NVME_SAVED, "kv": NVME_KV}


def resident_weights(buffer: str) -> Resource:
    """Weights that stay on the compute device."""
    return (GPU_WEIGHTS, buffer)


def weight_slot(pool: str, slot: int) -> Resource:
    """Weights in a slot on the compute device."""
    return (GPU_WEIGHTS, pool, slot)


def resident_gradient(buffer: str) -> Resource:
    """A gradient that stays on the compute device until its update."""
    return (GPU_GRADIENT, buffer)


def gradient_slot(pool: str, slot: int) -> Resource:
    """A gradient being summed in a slot on the compute device."""
    return (GPU_GRADIENT, pool, slot)


def resident_state(buffer: str) -> Resource:
    """The optimizer's state, where it stays on the compute device."""
    return (GPU_STATE, buffer)


def hidden(slot: int) -> Resource:
    """A chunk's hidden state, or its gradient, on the compute device."""
    return (GPU_HIDDEN, slot)


def saved(slot: int) -> Resource:
    """Attention's output and log-sum-exp of a chunk, on the compute device."""
    return (GPU_SAVED, slot)


def kv(place: int) -> Resource:
    """Keys and values on the compute device: of a chunk's place in the window, or in a slot where they are streamed."""
    return (GPU_KV, place)


def dkv(slot: int | None = None) -> Resource:
    """Gradients of keys and values: of the whole window, or of the chunk in a slot."""
    return (GPU_DKV,) if slot is None else (GPU_DKV, slot)


def running(space: str) -> Resource:
    """What the running chunk has one of: its queries, partial sums, a graph cut at its attention, the step's report."""
    return (space,)


def saved_graph(block: int, chunk: int) -> Resource:
    """The graph of a layer's chunk that waits for its backward."""
    return (GPU_GRAPH, block, chunk)


def ram(space: str, buffer: str) -> Resource:
    """Weights, gradient or state of a whole buffer in RAM."""
    return (space, buffer)


def stage(space: str, slot: int) -> Resource:
    """A slot in RAM through which something passes on its way to or from NVMe."""
    return (space, slot)


def boundary(chunk: int) -> Resource:
    """The hidden state of a chunk between two blocks, in RAM."""
    return (RAM_BOUNDARY, chunk)


def window(space: str, local: int) -> Resource:
    """A chunk's place, in RAM, in one layer's pass over a micro-batch."""
    return (space, local)


def record(kind: str, block: int, chunk: int) -> Resource:
    """Part `kind` of the record of a layer's chunk."""
    return (_RECORD[kind], block, chunk)


def spilled(kind: str, block: int, chunk: int) -> Resource:
    """Part `kind` of a record on NVMe."""
    return (_SPILLED[kind], block, chunk)


def on_nvme(space: str, buffer: str, part: int) -> Resource:
    """A part of a buffer's weights, gradient or state on NVMe."""
    return (space, buffer, part)


def state_kind_on_nvme(buffer: str, part: int, kind: str) -> Resource:
    """One kind of a part's state on NVMe, where each is written by itself."""
    return (NVME_STATE, buffer, part, kind)


def generation() -> Resource:
    """The committed generation."""
    return (GENERATION,)
