"""Before a model is trained by plain transformers on packed rows: that its documents do not see each other."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.engine.cluster.context import NAME as GATHERED
from penstock.engine.cluster.context import Context
from penstock.engine.cluster.model import attention_candidates
from penstock.engine.cluster.step import Share, loss_sums, target_logits
from penstock.engine.model import skeleton
from penstock.engine.model.anatomy import take_apart
from penstock.engine.model.shrink import shrink
from penstock.engine.model.spec import ModelSpec, rotary_threshold
from penstock.engine.model.tokens import MicroBatch
from penstock.engine.model.trace import random_model
from penstock.engine.self_check import reference_gradients, relative_errors
from penstock.storage.files.errors import UserError, refused

_LENGTHS = (61, 35, 50, 17, 29)
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest relative error of the loss and of all gradients together, by the dtype of computing."""


def choose_attention(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    sequence_length: int,
    group: dist.ProcessGroup | None = None,
) -> str:
    """transformers' fastest implementation of attention that is right here: a shrunk copy of the model, its documents
    packed as in training, has the loss and the gradients of each document alone by eager attention in float32.

    In rows of `sequence_length` tokens a document may be longer than the rotary tables of all shorter ones hold, if the
    model's depend on its length. Plain transformers takes those of the longest document for all of a row.

    With `group` its tokens are spread over these ranks, which all call this. Raises UserError where none is right.
    """
    with refused(f"model type '{spec.model_type}': no small copy could be made for the self-check", with_type=False):
        small, _ = shrink(spec.config, spec.adapter)
    floor = getattr(spec.config.get_text_config(decoder=True), "floor_scale", None)
    if floor is not None and sequence_length < floor:
        small.get_text_config(decoder=True).floor_scale = floor  # positions, which it counts itself, do not reach it
    source = random_model(small, adapter=spec.adapter)
    by_length = spec.length_dependent_rotary and sequence_length > rotary_threshold(spec.config)
    whole = spec.recurrent or (spec.length_dependent_rotary and not by_length)
    generator = torch.Generator().manual_seed(0)
    lengths = (96, 96) if whole else _LENGTHS
    vocabulary = small.get_text_config(decoder=True).vocab_size
    documents = [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]
    with refused(f"model type '{spec.model_type}': transformers' own forward fails"):
        loss, gradients = reference_gradients(small, source, documents, adapter=spec.adapter)
    tried: dict[str, str] = {}
    small_spec = None if group is None else take_apart(small, adapter=spec.adapter)
    for name in attention_candidates(device, dtype, spread=group is not None):
        try:
            context = None if group is None or small_spec is None else Context(small_spec, group, name)
            model = skeleton.build(
                small, device="cpu", adapter=spec.adapter, attention_by=name if context is None else GATHERED
            )
            model.load_state_dict(source.state_dict())
            nn.Module.to(model, device=device, dtype=dtype)
            error = _error(model, documents, context, device, loss, gradients)
        except UserError:
            raise
        except Exception as failure:  # a kernel that cannot do this model says so as it likes
            tried[name] = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
            continue
        if error <= _TOLERANCE[dtype]:
            return name
        tried[name] = f"differs by {error:.2g} ({_TOLERANCE[dtype]:g} is allowed)"
    said = "; ".join(f"{name} {why}" for name, why in tried.items())
    raise UserError(
        f"model type '{spec.model_type}': plain transformers does not separate packed documents, so it cannot be "
        f"trained on several machines ({said}); train it on one with penstock train"
    )


def _error(
    model: PreTrainedModel,
    documents: list[Tensor],
    context: Context | None,
    device: torch.device,
    loss: float,
    gradients: dict[str, Tensor],
) -> float:
    """The model's largest relative error on packed documents, against their `loss` and `gradients` one by one."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in gradients)
    micro_batch = MicroBatch.of(documents)
    share = Share(0, 1, context)
    part = share.part(micro_batch, device)
    summed, objective = loss_sums(target_logits(model, part), part, 0.0)
    (objective / micro_batch.num_targets).backward()
    result = {
        name: torch.zeros(p.shape) if p.grad is None else p.grad.float().cpu()
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    if context is not None:
        for values in (summed, *result.values()):
            dist.all_reduce(values, group=context.group)
    if model.dtype == torch.float32:
        worst = max(relative_errors(result, gradients).values())
    else:
        difference = sum(float((result[name] - gradients[name]).norm()) ** 2 for name in gradients)
        worst = (difference / sum(float(g.norm()) ** 2 for g in gradients.values())) ** 0.5
    return max(worst, abs(float(summed) / micro_batch.num_targets - loss) / abs(loss))
