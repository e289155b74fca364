"""The transformers model of a recipe under PyTorch's FSDP2: sharded parameters, activation checkpointing, AdamW."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from penstock.engine.cluster.layout import State, moment
from penstock.engine.config import TrainConfig
from penstock.engine.machine.device import compute_dtype
from penstock.engine.model import skeleton
from penstock.engine.model.router import RouterBalance, find_router, router_coefficient
from penstock.engine.model.spec import ModelSpec, depths
from penstock.engine.optim.groups import lr_factors

_ATTENTION_OPS = frozenset(
    {
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""What selective activation checkpointing saves the outputs of."""


@dataclass(frozen=True, slots=True)
class Sharded:
    """A model whose parameters are spread over the ranks of `mesh`, and its optimizer."""

    spec: ModelSpec
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    mesh: DeviceMesh
    balance: RouterBalance | None
    """Of a mixture of experts that is trained to use all of them alike."""

    @property
    def device(self) -> torch.device:
        if self.mesh.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device(self.mesh.device_type)

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer has, by name."""
        return {name: param for name, param in self.model.named_parameters() if param.requires_grad}

    def tensors(self) -> State:
        """All that a checkpoint holds, by its names there: parameters, constants, the optimizer's state."""
        result: State = {name: param.detach() for name, param in self.model.named_parameters()}
        result |= {name: self.model.get_buffer(name) for name in self.spec.constants}
        for name, param in self.trained().items():
            result |= {moment(name, kind): tensor for kind, tensor in self.optimizer.state[param].items()}
        return result

    def load(self, buffers: Iterable[tuple[str, Mapping[str, Tensor]]], constants: Mapping[str, Tensor]) -> None:
        """Give the model its first values, of which every rank keeps its shards; one buffer is in memory at a time."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for _, values in buffers:
                for name, value in values.items():
                    parameter = parameters[name]
                    assert isinstance(parameter, DTensor)
                    # Every rank has the whole of it, so that none is sent to another.
                    whole = value.to(device=parameter.to_local().device, dtype=parameter.dtype)
                    where = parameter.device_mesh, parameter.placements
                    parameter.copy_(distribute_tensor(whole, *where, src_data_rank=None))
            for name, value in constants.items():
                self.model.get_buffer(name).copy_(value)


def make_sharded(spec: ModelSpec, train: TrainConfig, mesh: DeviceMesh, attention: str) -> Sharded:
    """The model over the ranks of `mesh`, without values: float32 where it is trained, else in the dtype of computing.

    `attention`: transformers' name of its implementation.
    """
    device, dtype = torch.device(mesh.device_type), compute_dtype(train)
    model = skeleton.build(spec.config, adapter=spec.adapter, attention_by=attention)
    skeleton.materialise_buffers(model, model.named_modules(), device)
    _freeze(model, spec, dtype)
    _, layers = skeleton.find_layers(model)
    balance = _balance(spec, train, model, layers, device)
    for layer in layers:
        _checkpoint_activations(layer, train)
        if train.compile == "on":
            layer.compile()
    rounded = None if dtype == torch.float32 else dtype
    parts: list[tuple[nn.Module, torch.dtype | None]] = [(part, None) for part in _kept_apart(model, spec, train)]
    for part, param_dtype in (*parts, *((part, rounded) for part in (*layers, model))):
        # One after the other: no more than one of them is whole at a time.
        _materialise(part, device)
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(part, mesh=mesh, mp_policy=policy)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)  # losses are shares of the whole batch's: their gradients add up
            part.set_force_sum_reduction_for_comms(True)
    return Sharded(spec, model, _optimizer(spec, train, model), mesh, balance)


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Give the parameters that are on meta memory on `device`."""
    _replace(module, lambda _, p: nn.Parameter(torch.empty_like(p, device=device), p.requires_grad) if p.is_meta else p)


def _kept_apart(model: PreTrainedModel, spec: ModelSpec, train: TrainConfig) -> list[nn.Module]:
    """Modules, none of them part of another, all of whose parameters are computed with in float32 whatever the rest
    is: FSDP2 rounds all that it gathers at once alike."""
    result: dict[str, nn.Module] = {}
    if train.activation_checkpointing == "selective":
        return []  # torch's takes the same ops in both forwards, and gathering a part of a layer is not the same twice
    for path, part in model.named_modules():
        names = {f"{path}.{name}" for name, _ in part.named_parameters()}
        if names and names <= spec.float32_params and not any(path.startswith(f"{other}.") for other in result):
            result[path] = part
    return list(result.values())


def rounded_alike(spec: ModelSpec, train: TrainConfig) -> list[str]:
    """Parameters that are to be computed with in float32, but are gathered with others, and so rounded like these."""
    model = skeleton.build(spec.config, adapter=spec.adapter)
    apart = {id(parameter) for part in _kept_apart(model, spec, train) for parameter in part.parameters()}
    return [n for n, p in model.named_parameters() if n in spec.float32_params and id(p) not in apart]


def _freeze(model: PreTrainedModel, spec: ModelSpec, dtype: torch.dtype) -> None:
    def frozen(name: str, p: nn.Parameter) -> nn.Parameter:
        own = skeleton.weight_dtype(dtype, float32=name in spec.float32_params)
        return nn.Parameter(p.detach().to(own), requires_grad=False) if name in spec.frozen_params else p

    _replace(model, frozen)


def _replace(module: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Put others in the place of a module's parameters, by their names; what is shared stays shared."""
    made = {id(param): make(name, param) for name, param in module.named_parameters()}
    for part in module.modules():
        for key, param in part._parameters.items():
            if param is not None:
                part._parameters[key] = made[id(param)]


def _balance(
    spec: ModelSpec, train: TrainConfig, model: PreTrainedModel, layers: nn.ModuleList, device: torch.device
) -> RouterBalance | None:
    weight = router_coefficient(spec.config, train.router_aux_loss, whole_documents=spec.recurrent)
    if not weight:
        return None
    router = find_router(model)
    routing = [layer for layer in layers if any(isinstance(part, router.module) for part in layer.modules())]
    balance = RouterBalance(router, weight, len(routing), device)
    for layer in routing:
        balance.listen(layer)
    return balance


def _checkpoint_activations(layer: nn.Module, train: TrainConfig) -> None:
    """Let backward recompute the layer, but for what train.activation_checkpointing saves; auto is full."""
    if train.activation_checkpointing == "none":
        return
    ways: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if train.activation_checkpointing == "selective":
        ways["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _saves)
    forward = layer.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **ways, **kwargs)

    layer.forward = functools.wraps(forward)(recomputed)


def _saves(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in _ATTENTION_OPS or "flash_attn" in str(op)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def _optimizer(spec: ModelSpec, train: TrainConfig, model: PreTrainedModel) -> torch.optim.Optimizer:
    """AdamW with a group for each learning rate and weight decay, its state zero, as of a run that begins."""
    factors = lr_factors(train, depths(spec), spec.frozen_params)
    decays = {param.name: param.decay for param in spec.params}
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            groups.setdefault((factors.get(name, 1.0), decays[name]), []).append(param)
    optimizer = torch.optim.AdamW(
        [
            {"params": params, "lr_factor": factor, "weight_decay": train.weight_decay if decay else 0.0}
            for (factor, decay), params in groups.items()
        ],
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        fused=True,
    )
    for params in groups.values():
        for param in params:
            step = torch.zeros((), device=param.device if param.device.type == "cuda" else "cpu")
            optimizer.state[param] = {"step": step} | {
                kind: torch.zeros_like(param, memory_format=torch.preserve_format) for kind in ("exp_avg", "exp_avg_sq")
            }
    return optimizer


def attention_candidates(device: torch.device, dtype: torch.dtype, *, spread: bool = False) -> list[str]:
    """transformers' attentions that may run here, the fastest first; with `spread` those that take a mask of ours."""
    flash = [
        name
        for name, package in (("flash_attention_3", "flash_attn_interface"), ("flash_attention_2", "flash_attn"))
        if device.type == "cuda" and dtype != torch.float32 and importlib.util.find_spec(package) is not None
    ]
    return [*(() if spread else flash), "sdpa", "eager"]
