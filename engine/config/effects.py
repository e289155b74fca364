"""Settings without effect: for every field of a recipe that does not always count, when it does.

A field that is set to something else than its default where it does not count is refused if it contradicts what would
be trained or stored, else reported in one line. Values only: what depends on the model or the data is checked elsewhere
(engine/hf/config.py, engine/data).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from penstock.engine.config.data import COMPARISONS, CONVERSATIONS, PATHLESS
from penstock.engine.config.grpo import SAMPLED
from penstock.engine.config.preference import LOSS_TYPES, PREFERENCES
from penstock.engine.config.recipe import Recipe
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line


class Rule(NamedTuple):
    """When a field counts. Of several rules of a field all must hold; the first that does not is reported."""

    key: str
    counts: Callable[[Recipe], bool]
    why: str
    """Why it does not count, and what makes it count. {r.train.lr_schedule}: a recipe's value; {sources}: its
    data's."""
    refused: bool
    """Whether it is an error, or is only reported."""


class Idle(NamedTuple):
    """A field that is set and has no effect."""

    key: str
    value: Any
    refused: bool
    said: str
    """One line: the field, its value, why it has no effect, and what would give it one."""


_ROWS = CONVERSATIONS | {"jsonl", "tokens"}
_TEXTS = frozenset({"text", "jsonl", "python_stdlib", "alpaca", "prompt_completion", *COMPARISONS})
"""Sources of texts that a begin-of-text token may be put before."""


def _read(recipe: Recipe, sources: frozenset[str], own: str = "") -> bool:
    """Whether data of one of these sources is read, or of one that is not known yet.

    Parts of a mixture with a field `own` of theirs do not count; if all have one, that is another rule's.
    """
    data = recipe.data
    parts = [part for part in data.mixture if own not in part] if data.mixture else [{}]
    return not parts or any(part.get("source", data.source) in sources | {"auto"} for part in parts)


def _inherited(name: str) -> Callable[[Recipe], bool]:
    """Whether a part of the mixture, if there is one, has no such field of its own."""
    return lambda recipe: not recipe.data.mixture or any(name not in part for part in recipe.data.mixture)


def _validates(recipe: Recipe) -> bool:
    return recipe.train.validate_every is not None


def _smooths(recipe: Recipe) -> bool:
    """Whether the loss takes labels to be wrong in a share of pairs."""
    kind = recipe.preference.loss_type
    return recipe.train.objective == "simpo" or kind in (None, "sigmoid", "sigmoid_norm", "robust")


def _rewards(recipe: Recipe) -> bool:
    return recipe.train.objective == "reward"


def _samples(recipe: Recipe) -> bool:
    return recipe.samples.every is not None


def _can_end_early(recipe: Recipe) -> bool:
    """Whether the last validation of so many in a row without a gain can come before the last step."""
    train = recipe.train
    if train.validate_every is None or train.early_stopping_patience is None:
        return True  # which is another rule's
    return train.early_stopping_patience + 1 < -(-train.steps // train.validate_every) + train.validate_first


_NO_ROWS = "data.source={sources} reads no rows; use data of rows"
_OWN = "every part of data.mixture has its own; leave it out of a part of the mixture"

_REFUSED: tuple[tuple[str, Callable[[Recipe], bool], str], ...] = (
    (
        "model.added_tokens",
        lambda r: not r.adapter.is_used,
        "with an adapter the base is frozen, so that the embeddings of new tokens would never be trained; set "
        "adapter.method=none",
    ),
    (
        "model.added_tokens",
        lambda r: bool(r.data.mixture) or r.data.source != "random",
        "data.source=random has no tokenizer; set data.source to that of a text",
    ),
    (
        "adapter.rank adapter.alpha adapter.targets adapter.start",
        lambda r: r.adapter.is_used,
        "adapter.method is none; set adapter.method to lora, dora or rslora",
    ),
    (
        "model.train_vision",
        lambda r: not r.adapter.is_used,
        "beside an adapter the model's own parameters are frozen; set adapter.method=none",
    ),
    (
        "model.train_vision",
        lambda r: r.model.path is not None,
        "a model without a folder has no processor of images; set model.path",
    ),
    (
        "model.frozen_format",
        lambda r: r.adapter.is_used or bool(r.train.freeze),
        "nothing is frozen; set adapter.method to lora, dora or rslora, or freeze matrices with train.freeze",
    ),
    (
        "train.expert_groups",
        lambda r: r.train.split_layers == "experts",
        "no experts are blocks of their own; set train.split_layers=experts",
    ),
    (
        "train.spread_experts train.skip_idle_experts",
        lambda r: r.train.split_layers == "experts" and r.train.expert_groups != 1,
        "experts are not in groups; set train.split_layers=experts and train.expert_groups above 1",
    ),
    (
        "data.path",
        lambda r: r.data.source not in PATHLESS,
        "data.source={sources} reads no path; set data.source=auto, or the format of the data",
    ),
    ("data.split", lambda r: _read(r, _ROWS, "split"), _NO_ROWS),
    ("data.columns", lambda r: _read(r, _ROWS, "columns"), _NO_ROWS),
    (
        "data.chat_template",
        lambda r: _read(r, CONVERSATIONS) or (_samples(r) and r.samples.chat),
        "data.source={sources} is no format of conversations; set data.source to the format of conversations, or "
        "sample with samples.chat=true",
    ),
    (
        "data.trained_tokens",
        lambda r: _read(r, CONVERSATIONS - {"prompts"}) or r.data.trained_tokens == "all",
        "data.source={sources} has no turns of an assistant; set data.source to the format of conversations",
    ),
    (
        "data.trained_tokens",
        lambda r: not r.data.comparison or r.data.trained_tokens != "all",
        "data.source={sources} compares answers, and a prompt is none; set data.trained_tokens to assistant or last",
    ),
    (
        "data.bos",
        lambda r: _read(r, _TEXTS) or (_samples(r) and not r.samples.chat),
        "data.source={sources} takes its begin-of-text tokens as they come; use data of texts",
    ),
    (
        "train.min_lr_ratio",
        lambda r: r.train.lr_schedule != "constant",
        "train.lr_schedule=constant never falls; set train.lr_schedule to cosine, linear or wsd",
    ),
    (
        "train.decay_steps",
        lambda r: r.train.lr_schedule == "wsd",
        "train.lr_schedule={r.train.lr_schedule} decays over all steps, or never; set train.lr_schedule=wsd",
    ),
    (
        "train.freeze",
        lambda r: not r.adapter.is_used,
        "beside an adapter the whole model is frozen; set adapter.method=none, or choose modules with adapter.targets",
    ),
    (
        "preference.beta",
        lambda r: r.train.objective in PREFERENCES,
        "train.objective={r.train.objective} weighs no log-probabilities of answers; set train.objective to dpo, cpo, "
        "simpo, orpo or kto",
    ),
    (
        "preference.center_rewards_coefficient",
        _rewards,
        "train.objective={r.train.objective} trains no reward model; set train.objective=reward",
    ),
    (
        "samples.every after.sample_prompt train.z_loss train.router_aux_loss",
        lambda r: not _rewards(r),
        "a reward model writes no text and has no loss but that of its rewards; set another train.objective",
    ),
    (
        "preference.loss_type",
        lambda r: r.train.objective in LOSS_TYPES,
        "train.objective={r.train.objective} has one form of the loss; set train.objective to dpo, cpo or kto",
    ),
    (
        "preference.label_smoothing",
        lambda r: r.train.objective in ("dpo", "cpo", "simpo"),
        "train.objective={r.train.objective} takes labels as they are; set train.objective to dpo, cpo or simpo",
    ),
    (
        "preference.label_smoothing",
        _smooths,
        "preference.loss_type={r.preference.loss_type} takes labels as they are; set preference.loss_type to sigmoid "
        "or robust",
    ),
    (
        "preference.simpo_gamma",
        lambda r: r.train.objective == "simpo",
        "train.objective={r.train.objective} has no such margin; set train.objective=simpo",
    ),
    (
        "preference.cpo_alpha",
        lambda r: r.train.objective == "cpo",
        "train.objective={r.train.objective} does not weigh a likelihood; set train.objective=cpo",
    ),
    (
        "preference.desirable_weight preference.undesirable_weight",
        lambda r: r.train.objective == "kto",
        "train.objective={r.train.objective} reads no verdicts; set train.objective=kto",
    ),
    (
        "grpo.reward grpo.reward_timeout_s grpo.num_generations grpo.num_generations_eval grpo.max_completion_length "
        "grpo.temperature grpo.top_p grpo.num_iterations grpo.steps_per_generation grpo.epsilon grpo.epsilon_high "
        "grpo.beta grpo.use_bias_correction_kl grpo.loss_type grpo.scale_rewards grpo.importance_sampling_level "
        "grpo.mask_truncated_completions",
        lambda r: r.train.objective in SAMPLED,
        "train.objective={r.train.objective} samples no completions; set train.objective to grpo or rloo",
    ),
    (
        "grpo.loss_type grpo.scale_rewards grpo.importance_sampling_level grpo.use_bias_correction_kl",
        lambda r: r.train.objective != "rloo",
        "train.objective=rloo has one form of the loss: the mean over completions, each with one ratio and an "
        "advantage that is not scaled; set train.objective=grpo",
    ),
    (
        "grpo.use_bias_correction_kl",
        lambda r: r.grpo.beta > 0,
        "grpo.beta=0 gives no divergence a weight; set grpo.beta",
    ),
    (
        "train.validate_every",
        lambda r: r.data.validation_documents is not None,
        "no documents are held out to validate on; set data.validation_documents",
    ),
    (
        "train.validation_sequences train.validate_first train.early_stopping_patience storage.keep_best",
        _validates,
        "no validation is made; set train.validate_every",
    ),
    (
        "grpo.num_generations_eval",
        _validates,
        "no validation is made; set train.validate_every",
    ),
    (
        "after.export_merged after.push after.sample_prompt",
        lambda r: r.after.export,
        "nothing is exported; set after.export=true",
    ),
    (
        "after.export_merged",
        lambda r: r.adapter.is_used,
        "there is no adapter to merge; set adapter.method to lora, dora or rslora",
    ),
)
"""Fields (several with a space between them), when they count, and why not."""

_REPORTED: tuple[tuple[str, Callable[[Recipe], bool], str], ...] = (
    (
        "model.embedding_std",
        lambda r: r.model.path is None,
        "the embeddings are those of model.path; begin with random weights (--from-scratch)",
    ),
    *((f"data.{name}", _inherited(name), _OWN) for name in ("source", "split", "columns", "max_documents")),
    ("data.bad_rows", lambda r: _read(r, _ROWS), _NO_ROWS),
    (
        "data.tokenizer",
        lambda r: bool(r.data.mixture) or r.data.source != "random" or _samples(r),
        "data.source=random has no text; set data.source to that of a text, or samples.every",
    ),
    (
        "data.tokenizer_vocab_size",
        lambda r: r.model.path is None and r.data.tokenizer is None and r.data.source not in ("needles", "random"),
        "no tokenizer is trained; train a model from scratch on a text, without data.tokenizer",
    ),
    (
        "data.seed",
        lambda r: r.data.order == "shuffled" or bool(r.data.mixture) or r.data.source in ("needles", "random"),
        "data.order=kept draws nothing; set data.order=shuffled",
    ),
    (
        "data.validation_documents",
        _validates,
        "no validation is made: the documents are left out of training, and of no further use; set "
        "train.validate_every",
    ),
    (
        "train.min_lr_ratio",
        lambda r: r.train.lr_schedule == "wsd" or r.train.steps - r.train.warmup_steps > 1,
        "the learning rate never falls in train.steps={r.train.steps} with train.warmup_steps={r.train.warmup_steps}; "
        "train more steps",
    ),
    (
        "train.early_stopping_patience",
        _can_end_early,
        "there are too few validations in train.steps={r.train.steps} to end the run early; train more steps, or "
        "validate more often with train.validate_every",
    ),
    (
        "train.seed",
        lambda r: r.model.path is None or (r.adapter.start is None and (r.adapter.is_used or _rewards(r))),
        "nothing begins with random weights: they are those of model.path; begin with random weights "
        "(--from-scratch), or with a new adapter",
    ),
    (
        "storage.keep_every",
        lambda r: r.storage.keep_every is None or r.storage.keep_every <= r.train.steps,
        "the run ends after train.steps={r.train.steps}, before the first generation that it would keep; train more "
        "steps, or set it to fewer",
    ),
    (
        "storage.offsite_every storage.offsite_bandwidth storage.offsite_keep",
        lambda r: r.storage.offsite is not None,
        "nothing is uploaded; set storage.offsite",
    ),
    (
        "samples.prompts samples.chat samples.tokens samples.temperature samples.top_p samples.seed",
        _samples,
        "no samples are generated; set samples.every",
    ),
    (
        "samples.top_p samples.seed",
        lambda r: r.samples.temperature > 0,
        "samples.temperature=0 always takes the most likely token; set samples.temperature above 0",
    ),
    (
        "after.sample_tokens",
        lambda r: r.after.sample_prompt is not None,
        "no sample is written after the export; set after.sample_prompt",
    ),
)

RULES = [
    Rule(key, counts, why, table is _REFUSED)
    for table in (_REFUSED, _REPORTED)
    for keys, counts, why in table
    for key in keys.split()
]
"""When fields count that do not always do."""


def idle_fields(recipe: Recipe) -> list[Idle]:
    """The fields that are not at their defaults and have no effect, each once; then those of the parts of a mixture."""
    result: dict[str, Idle] = {}
    for rule in RULES:
        section, _, name = rule.key.partition(".")
        values = getattr(recipe, section)
        value, usual = getattr(values, name), getattr(type(values)(), name)
        if value != usual and not rule.counts(recipe):
            result.setdefault(rule.key, _idle(rule, recipe, rule.key, value, f"leave it at {_short(usual)}"))
    for number, (entry, part) in enumerate(zip(recipe.data.mixture, recipe.data.parts, strict=False)):
        alone = dataclasses.replace(recipe, data=part)
        for rule in RULES:
            section, _, name = rule.key.partition(".")
            if section == "data" and entry.get(name) and not rule.counts(alone):
                key = f"data.mixture[{number}].{name}"
                result.setdefault(key, _idle(rule, alone, key, entry[name], "leave it out"))
    return list(result.values())


def _idle(rule: Rule, recipe: Recipe, key: str, value: Any, leave: str) -> Idle:
    sources = ", ".join(dict.fromkeys(str(part.source) for part in recipe.data.parts))
    why = rule.why.format(r=recipe, sources=sources)
    return Idle(key, value, rule.refused, f"{key}: {_short(value)} has no effect, as {why}, or {leave}")


def _short(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return one_line(text, 80)


def _new(recipe: Recipe, before: Recipe | None) -> list[Idle]:
    """`idle_fields`, without those that were so `before` already, in the recipe of a run that goes on."""
    known = set() if before is None else {(idle.key, repr(idle.value)) for idle in idle_fields(before)}
    return [idle for idle in idle_fields(recipe) if (idle.key, repr(idle.value)) not in known]


def require_effect(recipe: Recipe, before: Recipe | None = None) -> None:
    """Raise UserError for the first field that contradicts what is trained or stored, as it has no effect.

    `before`: the recipe of a run that goes on; what was so there already stays as it is.
    """
    for idle in _new(recipe, before):
        if idle.refused:
            raise UserError(idle.said)


def idle_notes(recipe: Recipe, before: Recipe | None = None) -> list[str]:
    """A line for each field without effect that is not refused; `before`: as above."""
    return [idle.said for idle in _new(recipe, before) if not idle.refused]


def whole_document_notes(recipe: Recipe) -> list[str]:
    """The same for a model that carries a state from token to token and cannot hand it from chunk to chunk, which only
    the model shows."""
    why, said = "has no effect, as the model carries a state from token to token", []
    if recipe.data.packing == "best_fit":
        said.append(f"data.packing: best_fit {why}: a row holds one document; set none")
    chunk = recipe.train.chunk_tokens
    if chunk is not None and chunk < recipe.data.sequence_length:
        said.append(f"train.chunk_tokens: {chunk} {why}: a chunk is a whole row; leave it at none")
    return said
