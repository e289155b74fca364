"""How much memory a saved graph of a layer takes, found by running the layer on the meta device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import TorchDynamoException
from torch.utils import _pytree as pytree

from penstock.engine.attention.chunk import AttentionCall
from penstock.engine.model import skeleton
from penstock.engine.model.layers import LayerInputs, LayerRunner
from penstock.engine.model.skeleton import LayerCall, Skeleton
from penstock.engine.model.spec import ModelSpec, graph_key

_TOKENS = (64, 192)
"""Two lengths: what does not grow with the length (rotary constants, say) drops out."""

_MOST_STRUCTURES = 1024

_NEEDS_DATA = re.compile(
    r"(?<![a-z])meta(?![a-z])|data[- ](?:in)?dependent|Expected inputs of BF16 type|unsupported scalarType",
    re.IGNORECASE,
)
"""How torch says that a tensor has no data, or that an operation does not run without; the last two of grouped products
in float32 and of autocast, which it has on every device but this."""

META = torch.device("meta")


def find_graph_bytes(spec: ModelSpec, dtype: str, *, compiled: bool = False) -> None:
    """Note in `spec.graph_bytes`, unless it is there, what a saved LayerGraph takes of each layer, in bytes a token;
    `compiled` takes seconds per structure. Weights and log-sum-exp are excluded; None for a layer that cannot run
    without data, or not be compiled. Raises what else a layer raises."""
    kind = (spec.config.to_json_string(use_diff=False), type(spec.config).__name__, dtype, compiled)
    key = (*kind, spec.frozen_params, repr(spec.adapter))
    if key not in _measured:
        # Each structure is compiled for two lengths.
        with dynamo_config.patch(recompile_limit=_MOST_STRUCTURES, accumulated_recompile_limit=_MOST_STRUCTURES):
            try:
                _measured[key] = _measure(spec, getattr(torch, dtype), compiled)
            finally:
                if compiled:
                    torch._dynamo.reset()
    spec.graph_bytes[graph_key(dtype, compiled)] = _measured[key]


_measured: dict[Hashable, tuple[int | None, ...]] = {}


def _measure(spec: ModelSpec, dtype: torch.dtype, compiled: bool) -> tuple[int | None, ...]:
    model = skeleton.build(spec.config, adapter=spec.adapter)
    prefix, layers = skeleton.find_layers(model)
    runner = LayerRunner(spec, layers, prefix, device=META, dtype=dtype, compile=_backend() if compiled else False)
    # Every layer's arguments are made on the CPU, where positions have values.
    around = skeleton.build(spec.config, adapter=spec.adapter)
    frame = Skeleton(
        around, device=torch.device("cpu"), dtype=dtype, returns=spec.returns, counting=spec.counts_positions
    )
    inputs = [_inputs(frame, tokens) for tokens in _TOKENS]
    result: dict[int, int | None] = {}
    for index in sorted(set(spec.structures)):
        weights: dict[str, Tensor] = {}
        for name in spec.layers[index].buffers:
            buffer = spec.buffers[name]
            own = skeleton.weight_dtype(dtype, float32=buffer.float32)
            weights |= buffer.layout.views(torch.empty(buffer.layout.numel, dtype=own, device=META))
        try:
            xs = [torch.empty(tokens, spec.hidden_size, dtype=dtype, device=META) for tokens in _TOKENS]
            sizes = [_graph_bytes(spec, runner, index, weights, *of) for of in zip(xs, inputs, strict=True)]
        except (RuntimeError, TypeError) as error:  # torch's for what needs data; a TypeError from Tensor.numpy()
            if not _NEEDS_DATA.search(str(error)) and not isinstance(error, TorchDynamoException):
                error.add_note(f"in layer {index}, which was run without data to find what its graph takes")
                raise
            result[index] = None
            continue
        result[index] = math.ceil((sizes[1] - sizes[0]) / (_TOKENS[1] - _TOKENS[0]))
    return tuple(result[index] for index in spec.structures)


def _backend() -> Callable[..., Any]:
    """What torch.compile makes of a layer up to its kernels: the same graphs forward and backward."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def as_it_is(module: Any, inputs: Any) -> Any:
        return module

    backend: Callable[..., Any] = aot_autograd(
        fw_compiler=as_it_is,
        bw_compiler=as_it_is,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    return backend


def _graph_bytes(
    spec: ModelSpec, runner: LayerRunner, index: int, weights: dict[str, Tensor], x: Tensor, inputs: LayerInputs
) -> int:
    shape = spec.attention[index]

    def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        assert shape is not None
        out: Tensor = _Attention.apply(q, k, v, (len(x), shape.heads, shape.v_dim))  # type: ignore[no-untyped-call]
        return out

    return runner.save_graph(index, weights, x, inputs, None if shape is None else attend)[0].nbytes


class _Attention(torch.autograd.Function):
    """Keeps what attention in a saved graph keeps beside its output (engine/attention/chunk.py)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, size: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(q)
        return q.new_empty(size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise AssertionError("nothing goes backward on the meta device")


def _inputs(frame: Skeleton, tokens: int) -> LayerInputs:
    with torch.no_grad():
        calls = frame.calls(torch.arange(tokens))

    on_meta = pytree.tree_map_only(Tensor, lambda tensor: tensor.to(META), [(call.args, call.kwargs) for call in calls])
    return LayerInputs(tuple(LayerCall(*call) for call in on_meta))
