"""The self-check: a shrunk copy of a model, trained for one pass by the engine, against transformers' own forward and
autograd."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from transformers import PretrainedConfig, PreTrainedModel

from penstock.engine import passes, preparing
from penstock.engine.attention.spans import Documents, Prefix
from penstock.engine.computing import Computing
from penstock.engine.config import AdapterConfig
from penstock.engine.forecast.problem import block_shapes, whole_buffers
from penstock.engine.model.adapters import inject, is_adapter, smallest_side
from penstock.engine.model.anatomy import refuse_unsupported, take_apart
from penstock.engine.model.groups import cut, joined, num_experts, own_values
from penstock.engine.model.quantise import as_held, quantised
from penstock.engine.model.reference import forward_backward, in_buffers
from penstock.engine.model.reward import is_reward, last_token, padding_of, trained_whole
from penstock.engine.model.router import balancing_loss, router_coefficient
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.shrink import shrink
from penstock.engine.model.skeleton import LengthState, build, find_layers, from_config
from penstock.engine.model.spec import ModelSpec
from penstock.engine.model.tokens import IGNORE_LABEL, MicroBatch
from penstock.engine.model.trace import one_thread, random_model
from penstock.engine.optim.base import MASTER
from penstock.engine.plan.planner import make_plan
from penstock.engine.plan.problem import PlanInput, PlanOptions
from penstock.engine.runtime.handlers import gather
from penstock.storage.files.errors import BudgetError, UserError, refused

TOLERANCE = 1e-5
"""Largest relative error of the loss and of any parameter's gradient that passes."""

_NARROW = 1e-2
"""Errors below this may be rounding noise of float32."""
_OTHER_SEEDS = 3
"""Larger ones may be of an input that rounding takes over a kink, if one of so many other random models has none."""

CPU = torch.device("cpu")
_KERNELS_DIFFER = 4
"""Times what kernels of a GPU differ by from Python on whole documents, chunks of them may differ from these."""

_CHUNK = 29
_LOGITS_BYTES = 1 << 14
_ROWS = ((61, 35), (30, 28, 38))
"""Document lengths of two micro-batches of 96 tokens: documents end within chunks, one with a chunk, and one a token
behind one."""
_LONG_ROWS = ((96,), (96,))
"""For models which carry state: whole documents only."""
_PREFIX = 16
"""Tokens of a document from which another goes on, as a pair's second answer does from its prompt."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Outcome of a self-check; `penstock check --json` prints exactly these fields."""

    model_type: str
    ok: bool
    max_rel_error: float | None
    """max of ||g - reference|| / ||reference|| over the loss and all parameters; None when it could not be computed."""
    worst_parameter: str | None
    reason: str | None
    """Why the model is refused; None when it passes."""
    cut: str | None = None
    """"chunks" where a document is cut along its tokens, "documents" where each is one chunk, whatever its length; None
    where that is not known, as the model could not be taken apart."""


@one_thread()
def check_model(
    config: PretrainedConfig,
    *,
    pieces: bool = False,
    shards: int = 1,
    chunk_tokens: int = _CHUNK,
    seed: int = 0,
    router_aux_loss: float | None = None,
    adapter: AdapterConfig | None = None,
    split_layers: str | None = None,
    expert_groups: int | None = None,
    device: torch.device = CPU,
    frozen_format: str = "compute",
) -> CheckResult:
    """Stream a shrunk copy of the model of `config` and compare loss and gradients with plain transformers (float32).
    Where the model can, a document goes on from the beginning of another, as a pair's second answer from the prompt.

    With `pieces` attention goes over one chunk of keys at a time, as a run with a streamed window does it; with several
    `shards` as one does whose GPUs share each sequence, by one of them in turn. With
    `router_aux_loss`, or where the config switches it on (TrainConfig), a mixture of experts balances its routers. With
    an `adapter` transformers' model has peft's layers, and what is compared is the adapter's gradients. With
    `split_layers` that part of a layer is a block of its own, with `expert_groups` experts about as many. With a
    `frozen_format` what is frozen is streamed so, and transformers' model has it dequantised.

    Some architectures amplify float32 rounding beyond the tolerance, in plain transformers as well (attention scores
    that are not scaled down, for example). What fails narrowly is therefore compared once more in float64, where such
    noise vanishes and a mistake does not. Where activations have kinks, rounding may take an input over one, which
    changes gradients by more: such an error is in float32 alone and in few random models, a mistake in all.

    On a GPU as `device` a model whose layers carry a state, for which transformers takes a package's kernels there, is
    compared there once more: a chunk's state and its gradient may be wrong in a kernel and right in Python. What the
    kernels themselves differ from Python by is allowed for, and what float32 rounds on the CPU.

    Never raises for a model that cannot be trained: the result says why.
    """
    kind, cut = config.model_type, None
    try:
        small, spec = _small_model(config, adapter, split_layers, expert_groups, frozen_format)
        cut = "documents" if spec.whole_documents else "chunks"
        aux = router_coefficient(small, router_aux_loss, whole_documents=spec.whole_documents)
        errors = _compare(small, spec, pieces, shards, chunk_tokens, seed, torch.float32, aux)
        error, worst = _largest(errors)
        if TOLERANCE < error < math.inf:
            with contextlib.suppress(UserError):  # no float64 reference: the float32 result stands
                exact = _largest(_compare(small, spec, pieces, shards, chunk_tokens, seed, torch.float64, aux))
                others = (
                    _largest(_compare(small, spec, pieces, shards, chunk_tokens, seed + i, torch.float32, aux))[0]
                    < _NARROW
                    for i in range(1, 1 + _OTHER_SEEDS)
                )
                if error < _NARROW or (exact[0] <= TOLERANCE and any(others)):
                    error, worst = exact
        if error <= TOLERANCE and spec.states and device.type != "cpu":
            there = _compare(small, spec, pieces, shards, chunk_tokens, seed, torch.float32, aux, device)
            torch.cuda.empty_cache()
            beyond = {name: max(0.0, found - errors[name]) for name, found in there.items()}
            error, worst = max((error, worst), _largest(beyond))
    except UserError as refusal:
        return CheckResult(kind, False, None, None, str(refusal), cut)
    if error <= TOLERANCE:
        return CheckResult(kind, True, error, worst, None, cut)
    what = "value" if worst == "loss" else "gradient"
    reason = f"{worst}: streamed {what} differs from transformers' by {error:.2g} (relative; {TOLERANCE:g} is allowed)"
    return CheckResult(kind, False, error, worst, reason, cut)


def _small_model(
    config: PretrainedConfig,
    adapter: AdapterConfig | None,
    split_layers: str | None,
    expert_groups: int | None,
    frozen_format: str,
) -> tuple[PretrainedConfig, ModelSpec]:
    refuse_unsupported(config)
    preparing.report(detail="making a small copy of the model")
    with refused("could not be reduced to a small copy"):
        small, _ = shrink(config, adapter)
        if adapter is not None:
            bare = build(small)
            adapter = replace(adapter, rank=min(adapter.rank, smallest_side(bare, find_layers(bare)[0], adapter)))
        spec = take_apart(small, adapter=adapter, split_layers=split_layers, frozen_format=frozen_format)
        if expert_groups is not None:
            experts = num_experts(spec)  # fewer than the model has
            spec = cut(spec, max(n for n in range(1, experts + 1) if experts % n == 0 and n <= expert_groups))
        return small, spec


class _InFloat64(TorchFunctionMode):
    """What asks for float32 gets float64: models take softmax, norms and recurrences in float32 whatever the dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        given = ([*args], kwargs or {})
        args, kwargs = pytree.tree_map_only(torch.dtype, lambda t: torch.float64 if t == torch.float32 else t, given)
        return func(*args, **kwargs)


def _compare(
    small: PretrainedConfig,
    spec: ModelSpec,
    pieces: bool,
    shards: int,
    chunk_tokens: int,
    seed: int,
    dtype: torch.dtype,
    aux: float = 0.0,
    device: torch.device = CPU,
) -> dict[str, float]:
    """Relative errors by parameter; "loss" is the loss. On a GPU the error beyond what transformers' own differ by from
    those of the CPU. Raises UserError saying what cannot be computed."""
    generator = torch.Generator().manual_seed(seed)
    rows = [
        [torch.randint(spec.vocab_size, (length,), generator=generator) for length in row]
        for row in (_LONG_ROWS if spec.whole_documents else _ROWS)
    ]
    shares = spec.takes_prefixes and not aux
    if shares:  # with the token behind, which the last one of the prefix predicts
        rows[-1][-1][: _PREFIX + 1] = rows[-1][0][: _PREFIX + 1]
    if dtype == torch.float64:
        small = copy.deepcopy(small)
        small._experts_implementation = "eager"  # the others compute in at most float32
        spec = replace(spec, config=small)
    source = random_model(small, seed, adapter=spec.adapter)
    given = {name: p.detach() for name, p in source.named_parameters()}
    held: dict[str, Tensor] = {}
    for buffer in spec.buffers.values():
        if buffer.stored is not None:
            held |= as_held(buffer, own_values(buffer, given))
    for name, value in joined(spec.params, held).items():
        source.get_parameter(name).data = value
    preparing.report(detail=f"transformers' own gradients, {_name(dtype)}")
    precise = _InFloat64() if dtype == torch.float64 else contextlib.nullcontext()
    with refused("transformers' own forward fails"), precise:
        documents = list(itertools.chain.from_iterable(rows))
        reference_loss, reference = reference_gradients(small, source, documents, dtype, aux, spec.adapter)
    constants = {name: buffer for name, buffer in source.named_buffers() if name in spec.constants}
    if dtype == torch.float64:
        constants = {name: b.double() if b.is_floating_point() else b for name, b in constants.items()}
    parameters = {name: p.detach().to(dtype) for name, p in source.named_parameters()}
    preparing.report(detail=f"streamed gradients, {_name(dtype)}")
    with refused("streaming fails"):
        runner = ModelRunner(spec, device=device, dtype=dtype, constants=constants, router_aux_loss=aux)
        batch = [MicroBatch.of(row, _reward_labels(small, row) if is_reward(small) else None) for row in rows]
        if shares:
            batch[-1] = _sharing(batch[-1])
        if dtype == torch.float32:
            loss, grads = streamed_gradients(runner, given, batch, chunk_tokens, pieces, shards)
        else:  # by the step in plain words, which any dtype has
            weights = in_buffers(spec, parameters)
            grads = in_buffers(spec, {name: torch.zeros_like(weight) for name, weight in weights.items()})
            with _InFloat64():
                loss = forward_backward(
                    runner, weights, grads, batch, chunk_tokens, _LOGITS_BYTES, in_pieces=pieces or shards > 1
                )
    grads = joined(spec.params, grads)
    errors = _errors(grads, loss, reference, reference_loss)
    if device.type != "cpu":
        with refused("transformers' own forward fails on the GPU"):
            there_loss, there = reference_gradients(small, source, documents, dtype, aux, spec.adapter, device)
        noise = _errors(there, there_loss, reference, reference_loss)
        found = _errors(grads, loss, there, there_loss)
        errors = {name: max(0.0, error - _KERNELS_DIFFER * noise[name]) for name, error in found.items()}
    return {name: math.inf if math.isnan(error) else error for name, error in errors.items()}


def _sharing(stream: MicroBatch) -> MicroBatch:
    """Whose last document goes on from the first one, with which it begins: what is predicted there counts twice."""
    start = stream.documents[-1]
    kept = torch.cat([torch.arange(start), torch.arange(start + _PREFIX, len(stream.ids))])
    weights = torch.ones(len(kept))
    weights[:_PREFIX] = 2
    return replace(
        stream,
        **{name: getattr(stream, name)[kept] for name in ("ids", "labels", "positions")},
        documents=Documents(stream.documents, [Prefix(start, 0, _PREFIX)]),
        lengths=[*stream.lengths[:-1], stream.lengths[-1] - _PREFIX],
        weights=weights,
        filled=len(kept),
    )


def _reward_labels(config: PretrainedConfig, row: Sequence[Tensor]) -> list[Tensor]:
    """Of the documents of a row the one target that each has for a reward model of `config`."""
    labels = [torch.full_like(document, IGNORE_LABEL) for document in row]
    for document, of_document in zip(row, labels, strict=True):
        place = last_token(document.numpy(), padding_of(config))
        of_document[place] = document[place]
    return labels


def _largest(errors: Mapping[str, float]) -> tuple[float, str]:
    """And where it is."""
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def _errors(
    grads: Mapping[str, Tensor], loss: float, reference: Mapping[str, Tensor], reference_loss: float
) -> dict[str, float]:
    return relative_errors(grads, reference) | {"loss": abs(loss - reference_loss) / abs(reference_loss)}


def streamed_gradients(
    runner: ModelRunner,
    parameters: Mapping[str, Tensor],
    batch: Sequence[MicroBatch],
    chunk_tokens: int,
    pieces: bool,
    shards: int = 1,
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a pass of the engine in float32: what a run's step is, in the least GPU memory, so that
    weights, activations and gradients wait in RAM."""
    problem = _problem(runner.spec, batch, chunk_tokens, shards)
    options = PlanOptions(streamed=pieces and any(runner.spec.attention) and problem.may_stream)
    try:
        make_plan(problem, options)
    except BudgetError as least:
        problem = replace(problem, gpu_budget=least.need_bytes)
    weights = _Parameters(runner.spec, parameters)
    with preparing.Checklist().step("a few buffers"):  # of which nobody needs to hear one by one
        computing = Computing(make_plan(problem, options), runner, weights, _LOGITS_BYTES)
    with closing(computing):
        loss = passes.gradients(computing, batch).loss
        return loss, {name: gradient.clone() for name, gradient in computing.gradients().items()}


def _problem(spec: ModelSpec, batch: Sequence[MicroBatch], chunk_tokens: int, shards: int) -> PlanInput:
    return PlanInput(
        blocks=block_shapes(spec, "float32"),
        buffers=whole_buffers(spec, "float32"),
        hidden_size=spec.hidden_size,
        compute_dtype="float32",
        micro_batches=len(batch),
        replicas=shards,
        sharded=shards > 1,
        rows=1,
        row_tokens=max(len(one.ids) for one in batch),
        chunk_tokens=chunk_tokens,
        chunk_per_row=spec.whole_documents,
        workspace_bytes=0,
        gpu_budget=0,
        ram_budget=2**40,
        state_kinds=(MASTER,),
        one_group=True,
    )


class _Parameters:
    """Where a plan's memory is filled from: parameters by name."""

    def __init__(self, spec: ModelSpec, parameters: Mapping[str, Tensor]) -> None:
        self._buffers, self._parameters = spec.buffers, parameters

    def read(self, buffer: str, kind: str, part: int, out: Tensor) -> Future[None]:
        """Fill all of a buffer, of the kind "master" or "weights"."""
        spec = self._buffers[buffer]
        values = own_values(spec, self._parameters)
        if spec.stored is not None:
            out.copy_(quantised(spec.stored, values)[0])
        else:
            for name, view in spec.layout.views(out).items():
                view.copy_(values[name])
        return gather([])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def relative_errors(grads: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """||g - reference|| / ||reference|| per parameter, inf where shapes or names differ.

    A gradient that is zero in exact arithmetic (a key bias without rotary positions) is rounding noise in both; norms
    below 1e-3 of the largest one are therefore measured against that.
    """
    floor = 1e-3 * max(float(g.norm()) for g in reference.values())
    return {
        name: float((grads[name] - expected).norm()) / max(float(expected.norm()), floor) if name in grads else math.inf
        for name, expected in reference.items()
    }


def reference_gradients(
    config: PretrainedConfig,
    source: PreTrainedModel,
    documents: Sequence[Tensor],
    dtype: torch.dtype = torch.float32,
    router_aux_loss: float = 0.0,
    adapter: AdapterConfig | None = None,
    device: torch.device = CPU,
) -> tuple[float, dict[str, Tensor]]:
    """Mean loss per target and all gradients by transformers alone, one document at a time; of a reward model the loss
    of a document is minus its reward.

    With an `adapter`, which `source` has as well, by transformers and peft, and the gradients of what is trained only.

    With `router_aux_loss` the gradients, not the loss, are those of transformers' load-balancing loss as well, over the
    routers' logits of all documents together.

    `source` gives the weights; `documents` are int64 [length].
    """
    config = copy.deepcopy(config)
    model = from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    if adapter is not None:
        inject(model, find_layers(model)[0], adapter)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_adapter(name) or name in trained_whole(config))
    model.load_state_dict(source.state_dict())
    model = model.to(device, dtype)
    num_targets = sum(len(document) - 1 for document in documents)
    total, routed = 0.0, []
    routing = {"output_router_logits": bool(router_aux_loss)} if hasattr(model, "router_aux_loss_coef") else {}
    if routing:
        model.router_aux_loss_coef = 0.0  # not document by document
    alone = LengthState(model, find_layers(model)[1])
    for document in documents:
        alone.reset()
        ids = document[None].to(device)
        if is_reward(config):
            loss = -model(input_ids=ids, use_cache=False).logits.sum() / len(documents)
        else:
            output = model(input_ids=ids, labels=ids, use_cache=False, **routing)
            loss = output.loss * ((len(document) - 1) / num_targets)
        loss.backward(retain_graph=bool(router_aux_loss))
        total += loss.item()
        if router_aux_loss:
            routed.append(output.router_logits)
    if router_aux_loss:
        (router_aux_loss * balancing_loss(model, routed)).backward()
    zero = torch.zeros(())
    return total, {
        n: zero.expand(p.shape) if p.grad is None else p.grad.cpu()
        for n, p in model.named_parameters()
        if p.requires_grad
    }
