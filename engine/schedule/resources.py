"""Names of the pieces of memory and disk that ops read and write; nobody else spells one.

A resource is a tuple whose first item is its space: all pieces of one kind.
"""

from __future__ import annotations

from penstock.engine.plan.activations import ACTIVATIONS

Resource = tuple[str | int, ...]

GPU_WEIGHTS = "gpu.weights"
GPU_COPY = "gpu.copy"
"""The dequantised weights of one block."""
GPU_GRADIENT = "gpu.gradient"
GPU_STATE = "gpu.state"
GPU_HIDDEN = "gpu.hidden"
GPU_SAVED = "gpu.saved"
GPU_SENT = "gpu.sent"
GPU_KV = "gpu.kv"
GPU_DKV = "gpu.dkv"
GPU_RECURRENT = "gpu.recurrent"
GPU_DRECURRENT = "gpu.drecurrent"
GPU_QUERIES = "gpu.q"
GPU_DOUT = "gpu.dout"
GPU_DQ = "gpu.dq"
GPU_PARTIAL = "gpu.partial"
GPU_GRAPH = "gpu.graph"
GPU_GRAPH_SLOT = "gpu.graph_slot"
GPU_LOSSES = "gpu.losses"
GPU_EVALUATIONS = "gpu.evaluations"
GPU_LOGITS = "gpu.logits"
GPU_SAMPLE_KV = "gpu.sample_kv"
GPU_NORMS = "gpu.norms"
GPU_ROUTED = "gpu.routed"
"""Which groups of a layer's experts its tokens have been sent to."""
RAM_WEIGHTS = "ram.weights"
RAM_GRADIENT = "ram.gradient"
RAM_RING = "ram.ring"
"""Parts of gradients on their way to their owners."""
RAM_NORMS = "ram.norms"
"""Of gradients that their owners have added."""
RAM_STATE = "ram.state"
RAM_STATE_STAGE = "ram.state_stage"
RAM_PART_STAGE = "ram.part_stage"
RAM_ACTIVATION_STAGE = "ram.activation_stage"
RAM_WINDOW_SAVED = "ram.window_saved"
RAM_WINDOW_KV = "ram.window_kv"
RAM_WINDOW_DKV = "ram.window_dkv"
"""Where ranks share sequences: of the chunk of that position in the micro-batch what this rank adds, or with SUM the
sum of what all do."""
SUM = "sum"
RAM_WINDOW_DQ = "ram.window_dq"
RAM_HANDED_ON = "ram.handed_on"
"""By kind, and by the chunk that it is for: what goes from one rank's chunk to the next one."""
RAM_CLIP = "ram.clip"
RAM_ROUTED = "ram.routed"
RAM_EVALUATION = "ram.evaluation"
RAM_CHOSEN = "ram.chosen"
RAM_SAMPLE_KV = "ram.sample_kv"
NVME_WEIGHTS = "nvme.weights"
NVME_GRADIENT = "nvme.gradient"
NVME_STATE = "nvme.state"
GENERATION = "generation"

SAVED = {kind: f"saved.{kind}" for kind, row in ACTIVATIONS.items() if row.saved}
"""Kind of activation -> what is saved of it of a block's chunk for its backward; block and chunk follow."""
SPILLED = {kind: f"nvme.{kind}" for kind in SAVED}
"""The same on NVMe."""
SAVED_SPACES = frozenset(SAVED.values())


def resource(space: str, *where: str | int) -> Resource:
    """A piece of a space.

    By buffer: what is resident, and what a whole buffer has in RAM; with its part, and by itself its kind, on NVMe. By
    pool and slot: weights and gradients on the compute device. By slot: stages in RAM. By the index of a chunk in its
    group: the boundary between two blocks; by that in its micro-batch: one layer's pass; by block and that of the
    group: a saved graph. By nothing: what there is one of, such as the gradients of a whole window of keys and values.
    """
    return (space, *where)


def activation(kind: str, index: int) -> Resource:
    """An activation of a chunk on the compute device: by its slot, or by the chunk's index in a whole window."""
    return (ACTIVATIONS[kind].gpu, index)


def saved_activation(kind: str, block: int, chunk: int) -> Resource:
    """What is saved of kind `kind` of a layer's chunk."""
    return (SAVED[kind], block, chunk)


def spilled(kind: str, block: int, chunk: int) -> Resource:
    """The same on NVMe."""
    return (SPILLED[kind], block, chunk)
