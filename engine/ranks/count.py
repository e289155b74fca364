"""How many ranks a run has, and what they cannot do yet."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

from penstock.engine.config import Recipe
from penstock.engine.model.spec import ModelSpec
from penstock.engine.objectives.base import find_objective
from penstock.storage.files.errors import UserError


class RankCount(NamedTuple):
    ranks: int
    visible: list[str] | None
    """CUDA_VISIBLE_DEVICES of each; None: they compute on the CPU."""


def rank_count(recipe: Recipe) -> RankCount:
    """As train.gpus says, else as many GPUs as there are of the first one's kind and train.replicas or the batch can be
    divided among, and all of them where these are more than the batch has parts and each sequence can be divided.
    Raises UserError for more than there are, or of one kind."""
    import torch

    from penstock.engine.machine.device import resolve_device

    train, wanted = recipe.train, recipe.train.gpus
    if train.device == "cpu" or not torch.cuda.is_available():
        resolve_device(train)  # which says what is wrong where it is to be a GPU
        return RankCount(wanted or 1, None)
    there = _visible()
    if wanted is not None and wanted > len(there):
        raise UserError(
            f"train.gpus: {wanted} GPUs are wanted and this machine has {len(there)}; set train.gpus to what there is"
            f"{', a divisor of train.replicas' if train.replicas else ''}: the run has the same bits on any number"
        )
    there = _of_one_kind(there, wanted, "train.gpus")
    count = usable_count(recipe, len(there))
    return RankCount(count, there[:count])


def usable_count(recipe: Recipe, there: int) -> int:
    """Of so many GPUs as many as a run uses: see `rank_count`."""
    train = recipe.train
    if train.gpus is not None:
        return train.gpus
    parts = train.replicas or train.micro_batches
    able = there if why_not(recipe) is None else 1
    count = max(n for n in range(1, able + 1) if parts % n == 0)
    if train.replicas is None and train.parallel != "data" and (train.parallel == "context" or parts < able):
        by_sequence = replace(train, replicas=able, parallel="context") if able > 1 else train
        if why_not(replace(recipe, train=by_sequence)) is None:
            return able
    return count


def query_count(wanted: int | None, device: str) -> RankCount:
    """Of a model that is queried: as many as are wanted, else all GPUs of the first one's kind. Raises UserError for
    more than there are, or of one kind."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return RankCount(wanted or 1, None)
    there = _visible()
    if wanted is not None and wanted > len(there):
        raise UserError(f"--gpus {wanted}: this machine has {len(there)}; use as many or fewer")
    alike = _of_one_kind(there, wanted, "--gpus")
    return RankCount(wanted or len(alike), alike[:wanted])


def _visible() -> list[str]:
    """CUDA_VISIBLE_DEVICES of each GPU that comes into question, by itself."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(torch.cuda.device_count())] if given is None else given.split(",")


def _of_one_kind(there: list[str], wanted: int | None, option: str) -> list[str]:
    """Those of the visible GPUs that are of the first one's kind. Raises UserError where `option` wants more."""
    import torch

    from penstock.engine.machine.device import gpus_like

    alike = gpus_like(0)
    if wanted is not None and wanted > len(alike):
        other = next(i for i in range(len(there)) if i not in alike)
        first, second = (torch.cuda.get_device_name(i) for i in (0, other))
        raise UserError(
            f"{option}: GPU 0 is {first} and GPU {other} {second}: all would wait for the slower one, and bits would "
            f"depend on which computes what; use {len(alike)}, or name GPUs of one kind in CUDA_VISIBLE_DEVICES"
        )
    return [there[i] for i in alike]


def with_replicas(recipe: Recipe, count: int) -> Recipe:
    """The recipe of a run on `count` ranks: as many replicas, unless it says how many. Raises UserError."""
    if count == 1 or recipe.train.replicas is not None:
        return recipe
    try:
        return replace(recipe, train=replace(recipe.train, replicas=count))
    except ValueError as error:
        raise UserError(f"train.gpus: {count} GPUs share a step: {error}; or use fewer GPUs (train.gpus)") from error


def why_not(recipe: Recipe, spec: ModelSpec | None = None) -> str | None:
    """Why a run cannot have several replicas, in words that follow "train.replicas: "; None: it can."""
    train = recipe.train
    objective = find_objective(recipe)
    if objective.whole_sequences and train.sharded:
        return f"train.objective={train.objective} needs whole sequences; train.parallel=data gives GPUs these"
    if train.gradient_dtype != "float32":
        return "gradients are added in float32; leave train.gradient_dtype out"
    if train.skip_idle_experts:
        return "train.skip_idle_experts skips what no token of one GPU is sent to"
    if train.sharded and (reason := _why_not_sharded(recipe, spec)) is not None:
        return reason + "; train.parallel=data divides the step's sequences instead" * train.divides_batch
    return None


def _why_not_sharded(recipe: Recipe, spec: ModelSpec | None) -> str | None:
    """Why the replicas cannot be shards of every sequence."""
    train, tokens = recipe.train, recipe.train.micro_batch_size * recipe.data.sequence_length
    least = 2 * (train.replicas or 1)
    if tokens < least:
        return f"sequences of {tokens} tokens cannot be cut into {least} pieces"
    if train.activation_checkpointing == "none":
        return "no graphs are kept of a sequence that GPUs share (train.activation_checkpointing=none)"
    if train.kv_window == "whole":
        return "keys and values that GPUs give one another are streamed (train.kv_window=whole)"
    if spec is not None and spec.vision is not None:
        return "a vision tower that is trained needs the gradients of all of an image's tokens (model.train_vision)"
    if spec is not None and spec.whole_documents:
        return f"the state of {spec.model_type} cannot be handed from GPU to GPU"
    if spec is not None and any(map(all, zip(spec.states, spec.attention, strict=False))):
        return f"layers of {spec.model_type} attend and carry a state at once"
    return None


def require_replicas(recipe: Recipe, spec: ModelSpec) -> None:
    """Raise UserError where the recipe has several replicas and cannot."""
    reason = why_not(recipe, spec) if (recipe.train.replicas or 1) > 1 else None
    if reason is not None:
        raise UserError(
            f"train.replicas: {recipe.train.replicas} replicas are not possible: {reason}; or use one GPU "
            "with train.gpus=1 and train.replicas=1"
        )
