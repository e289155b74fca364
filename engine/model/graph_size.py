"""How much memory autograd keeps of a layer's forward, found by running the layer on the meta device."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.engine.model import skeleton
from penstock.engine.model.layer_graph import Projection
from penstock.engine.model.layers import LayerInputs, LayerRunner
from penstock.engine.model.skeleton import LayerCall, Skeleton
from penstock.engine.model.spec import ModelSpec
from penstock.storage.layout import FlatLayout

_TOKENS = (64, 192)
"""Two lengths: what does not grow with the length (rotary constants, say) drops out."""

META = torch.device("meta")


def find_graph_bytes(spec: ModelSpec, dtype: str) -> None:
    """Note in `spec.graph_bytes`, unless it is there, what a saved LayerGraph takes of each layer, in bytes a token.

    Of a layer that runs eagerly, weights and log-sum-exp excluded; a compiled layer saves no more. None for a layer
    that cannot run without data.
    """
    kind = (spec.config.to_json_string(use_diff=False), type(spec.config).__name__, dtype)
    key = (*kind, spec.frozen_params, repr(spec.adapter))
    if key not in _measured:
        _measured[key] = _measure(spec, getattr(torch, dtype))
    spec.graph_bytes[dtype] = _measured[key]


_measured: dict[Hashable, tuple[int | None, ...]] = {}


def _measure(spec: ModelSpec, dtype: torch.dtype) -> tuple[int | None, ...]:
    model = skeleton.build(spec.config, adapter=spec.adapter)
    prefix, layers = skeleton.find_layers(model)
    runner = LayerRunner(spec, layers, prefix, device=META, dtype=dtype, compile=False)
    # Every layer's arguments are made on the CPU, where positions have values.
    around = skeleton.build(spec.config, adapter=spec.adapter)
    frame = Skeleton(around, device=torch.device("cpu"), dtype=dtype, returns=list(spec.returns))
    inputs = [_inputs(frame, tokens) for tokens in _TOKENS]
    found: dict[int, int | None] = {}
    for index in sorted(set(spec.structures)):
        weights: dict[str, Tensor] = {}
        for name in spec.blocks[index + 1].buffers:
            flat = FlatLayout.build(spec.buffers[name])
            weights |= flat.views(torch.empty(flat.numel, dtype=dtype, device=META))
        try:
            sizes = [_graph_bytes(spec, runner, index, weights, *of) for of in zip(_TOKENS, inputs, strict=True)]
        except Exception:  # whatever a layer does that needs data
            found[index] = None
            continue
        found[index] = math.ceil((sizes[1] - sizes[0]) / (_TOKENS[1] - _TOKENS[0]))
    return tuple(found[index] for index in spec.structures)


def _graph_bytes(
    spec: ModelSpec, runner: LayerRunner, index: int, weights: dict[str, Tensor], tokens: int, inputs: LayerInputs
) -> int:
    shape = spec.attention[index]

    def attend(p: Projection) -> Tensor:
        assert shape is not None
        return p.q.new_empty(tokens, shape.heads, shape.v_dim)

    x = torch.empty(tokens, spec.hidden_size, dtype=next(iter(weights.values())).dtype, device=META)
    if shape is None:
        return runner.keep(index, weights, x, inputs, None).nbytes
    return runner.graph(index, weights, x, inputs, attend, keep=True).nbytes


def _inputs(frame: Skeleton, tokens: int) -> LayerInputs:
    with torch.no_grad():
        calls = frame.calls(torch.arange(tokens))

    def on_meta(tensor: Tensor) -> Tensor:
        return tensor.to(META)

    return LayerInputs(
        tuple(LayerCall(*pytree.tree_map_only(Tensor, on_meta, (call.args, call.kwargs))) for call in calls)
    )
