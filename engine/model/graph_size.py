"""How much memory autograd keeps of a layer's forward, found by running the layer on the meta device."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from engine.model import skeleton
from engine.model.layers import LayerInputs, LayerRunner, Projection
from engine.model.skeleton import LayerCall, Skeleton
from engine.model.spec import ModelSpec
from storage.layout import FlatLayout

_TOKENS = (64, 192)
"""Two lengths: what does not grow with the length (rotary constants, say) drops out."""

META = torch.device("meta")


def graph_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> tuple[int | None, ...]:
    """Per layer: bytes of a kept LayerGraph per token, when it runs eagerly; weights and log-sum-exp excluded.

    A compiled layer keeps no more. None for a layer that cannot run without data.
    """
    key = (spec.config.to_json_string(use_diff=False), type(spec.config).__name__, dtype)
    if key not in _measured:
        _measured[key] = _measure(spec, dtype)
    return _measured[key]


_measured: dict[tuple[str, str, torch.dtype], tuple[int | None, ...]] = {}


def _measure(spec: ModelSpec, dtype: torch.dtype) -> tuple[int | None, ...]:
    model = skeleton.build(spec.config)
    prefix, layers = skeleton.find_layers(model)
    runner = LayerRunner(spec, layers, prefix, device=META, dtype=dtype, compile=False)
    found: dict[int, int | None] = {}
    for index in sorted(set(spec.structures)):
        flat = FlatLayout.build(spec.buffers[f"layers.{index}"])
        weights = flat.views(torch.empty(flat.numel, dtype=dtype, device=META))
        try:
            sizes = [_graph_bytes(spec, runner, index, weights, dtype, tokens) for tokens in _TOKENS]
        except Exception:  # whatever a layer does that needs data
            found[index] = None
            continue
        found[index] = math.ceil((sizes[1] - sizes[0]) / (_TOKENS[1] - _TOKENS[0]))
    return tuple(found[index] for index in spec.structures)


def _graph_bytes(
    spec: ModelSpec, runner: LayerRunner, index: int, weights: dict[str, Tensor], dtype: torch.dtype, tokens: int
) -> int:
    shape = spec.attention[index]

    def attend(p: Projection) -> Tensor:
        assert shape is not None
        return p.q.new_empty(tokens, shape.heads, shape.v_dim)

    x = torch.empty(tokens, spec.hidden_size, dtype=dtype, device=META)
    inputs = _inputs(spec, dtype, tokens)
    if shape is None:
        return runner.keep(index, weights, x, inputs, None).nbytes
    return runner.graph(index, weights, x, inputs, attend, keep=True).nbytes


def _inputs(spec: ModelSpec, dtype: torch.dtype, tokens: int) -> LayerInputs:
    """Every layer's arguments, on the meta device; made on the CPU, where positions have values."""
    frame = Skeleton(skeleton.build(spec.config), device=torch.device("cpu"), dtype=dtype, returns=list(spec.returns))
    with torch.no_grad():
        calls = frame.calls(torch.arange(tokens))

    def on_meta(tensor: Tensor) -> Tensor:
        return tensor.to(META)

    return LayerInputs(
        tuple(LayerCall(*pytree.tree_map_only(Tensor, on_meta, (call.args, call.kwargs))) for call in calls)
    )
