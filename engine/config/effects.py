"""Settings without effect: for every field of a recipe, when it counts and what would make it count.

A field that is set to something else than its default where it does not count is refused if it contradicts what would
be trained or kept, else named in one line. Values only: what the model or the data turn out to be is looked at
elsewhere (engine/hf/config.py, engine/data).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from penstock.engine.config.data import CONVERSATIONS, PATHLESS
from penstock.engine.config.recipe import Recipe
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line


class Rule(NamedTuple):
    """When a field counts. Of several rules of a field all must hold; the first that does not is told."""

    key: str
    counts: Callable[[Recipe], bool]
    why: str
    """Why it does not count, behind 'as'. {r.train.lr_schedule} stands for a value of the recipe, {sources} for those
    of its data."""
    fix: str
    """What makes it count."""
    refused: bool = True
    """Whether it is an error, or is only told."""


class Idle(NamedTuple):
    """A field that is set and has no effect."""

    key: str
    value: Any
    refused: bool
    said: str
    """One line: the field, its value, why it has no effect, and what would give it one."""


_ROWS = CONVERSATIONS | {"jsonl", "tokens"}
_TEXTS = frozenset({"text", "jsonl", "python_stdlib", "alpaca", "prompt_completion"})
"""Sources of texts that a begin-of-text token may be put before."""


def _read(recipe: Recipe, sources: frozenset[str], own: str = "") -> bool:
    """Whether data of one of these sources is read, or of one that is not known yet.

    Parts of a mixture with a field `own` of theirs do not count.
    """
    data = recipe.data
    parts = [part for part in data.mixture if own not in part] if data.mixture else [{}]
    return any(part.get("source", data.source) in sources | {"auto"} for part in parts)


def _inherited(name: str) -> Callable[[Recipe], bool]:
    """Whether a part of the mixture, if there is one, has no such field of its own."""
    return lambda recipe: not recipe.data.mixture or any(name not in part for part in recipe.data.mixture)


def _validates(recipe: Recipe) -> bool:
    return recipe.train.validate_every is not None


def _exports(recipe: Recipe) -> bool:
    return recipe.after.export


def _samples(recipe: Recipe) -> bool:
    return recipe.samples.every is not None


def _uploads(recipe: Recipe) -> bool:
    return recipe.storage.offsite is not None


def _draws(recipe: Recipe) -> bool:
    """Whether data.seed decides anything: the order of documents, a mixture, or the documents themselves."""
    return recipe.data.order == "shuffled" or bool(recipe.data.mixture) or recipe.data.source in ("needles", "random")


def _can_end_early(recipe: Recipe) -> bool:
    """Whether the last validation of so many in a row without a gain can come before the last step."""
    train = recipe.train
    if not _validates(recipe) or train.early_stopping_patience is None:
        return True  # which is another rule's
    assert train.validate_every is not None
    return train.early_stopping_patience + 1 < -(-train.steps // train.validate_every) + train.validate_first


_ADAPTER = "set adapter.method to lora, dora or rslora"
_UNVALIDATED = "no validation loss is measured", "set train.validate_every"
_UNEXPORTED = "nothing is exported", "set after.export=true"
_UNSAMPLED = "no samples are generated", "set samples.every"
_NOWHERE = "nothing is uploaded", "set storage.offsite"
_NO_ROWS = "data.source={sources} reads no rows", "use data of rows"

RULES: tuple[Rule, ...] = (
    Rule(
        "model.embedding_std",
        lambda r: r.model.path is None,
        "the embeddings are those of model.path",
        "begin with random weights (--from-scratch)",
        refused=False,
    ),
    Rule(
        "model.added_tokens",
        lambda r: not r.adapter.is_used,
        "with an adapter the base is frozen, so that the embeddings of new tokens would never be trained",
        "set adapter.method=none",
    ),
    Rule(
        "model.added_tokens",
        lambda r: bool(r.data.mixture) or r.data.source != "random",
        "data.source=random has no tokenizer",
        "set data.source to that of a text",
    ),
    *(
        Rule(f"adapter.{name}", lambda r: r.adapter.is_used, "adapter.method is none", _ADAPTER)
        for name in ("rank", "alpha", "targets", "start")
    ),
    Rule(
        "data.source",
        _inherited("source"),
        "every part of data.mixture has its own",
        "leave it out of a part of the mixture",
        refused=False,
    ),
    Rule(
        "data.path",
        lambda r: r.data.source not in PATHLESS,
        "data.source={sources} reads no path",
        "set data.source=auto, or the format of the data",
    ),
    *(
        Rule(f"data.{name}", _inherited(name), "every part of data.mixture has its own", fix, refused=False)
        for name in ("split", "columns", "max_documents")
        for fix in ("leave it out of a part of the mixture",)
    ),
    Rule("data.split", lambda r: _read(r, _ROWS, "split"), *_NO_ROWS),
    Rule("data.columns", lambda r: _read(r, _ROWS, "columns"), *_NO_ROWS),
    Rule(
        "data.chat_template",
        lambda r: _read(r, CONVERSATIONS) or (_samples(r) and r.samples.chat),
        "data.source={sources} is no format of conversations",
        "set data.source to the format of conversations, or sample with samples.chat=true",
    ),
    Rule(
        "data.trained_tokens",
        lambda r: _read(r, CONVERSATIONS) or r.data.trained_tokens == "all",
        "data.source={sources} has no turns of an assistant",
        "set data.source to the format of conversations",
    ),
    Rule("data.bad_rows", lambda r: _read(r, _ROWS), *_NO_ROWS, refused=False),
    Rule(
        "data.bos",
        lambda r: _read(r, _TEXTS) or (_samples(r) and not r.samples.chat),
        "data.source={sources} takes its begin-of-text tokens as they come",
        "use data of texts",
    ),
    Rule(
        "data.tokenizer",
        lambda r: bool(r.data.mixture) or r.data.source != "random" or _samples(r),
        "data.source=random has no text",
        "set data.source to that of a text, or samples.every",
        refused=False,
    ),
    Rule(
        "data.tokenizer_vocab_size",
        lambda r: r.model.path is None and r.data.tokenizer is None and r.data.source not in ("needles", "random"),
        "no tokenizer is trained",
        "train a model from scratch on a text, without data.tokenizer",
        refused=False,
    ),
    Rule("data.seed", _draws, "data.order=kept draws nothing", "set data.order=shuffled", refused=False),
    Rule(
        "data.validation_documents",
        _validates,
        "no validation loss is measured: the documents are left out of training, and of no further use",
        "set train.validate_every",
        refused=False,
    ),
    Rule(
        "train.min_lr_ratio",
        lambda r: r.train.lr_schedule != "constant",
        "train.lr_schedule=constant never falls",
        "set train.lr_schedule to cosine, linear or wsd",
    ),
    Rule(
        "train.min_lr_ratio",
        lambda r: r.train.lr_schedule == "wsd" or r.train.steps - r.train.warmup_steps > 1,
        "the learning rate never falls in train.steps={r.train.steps} with train.warmup_steps={r.train.warmup_steps}",
        "train more steps",
        refused=False,
    ),
    Rule(
        "train.decay_steps",
        lambda r: r.train.lr_schedule == "wsd",
        "train.lr_schedule={r.train.lr_schedule} decays over all steps, or never",
        "set train.lr_schedule=wsd",
    ),
    Rule(
        "train.freeze",
        lambda r: not r.adapter.is_used,
        "beside an adapter the whole model is frozen",
        "set adapter.method=none, or choose modules with adapter.targets",
    ),
    Rule(
        "train.validate_every",
        lambda r: r.data.validation_documents is not None,
        "no documents are held out to validate on",
        "set data.validation_documents",
    ),
    *(
        Rule(f"train.{name}", _validates, *_UNVALIDATED)
        for name in ("validation_sequences", "validate_first", "early_stopping_patience")
    ),
    Rule(
        "train.early_stopping_patience",
        _can_end_early,
        "there are too few validations in train.steps={r.train.steps} to end the run early",
        "train more steps, or validate more often with train.validate_every",
        refused=False,
    ),
    Rule(
        "train.seed",
        lambda r: r.model.path is None or (r.adapter.is_used and r.adapter.start is None),
        "nothing begins with random weights: they are those of model.path",
        "begin with random weights (--from-scratch), or with a new adapter",
        refused=False,
    ),
    Rule(
        "storage.keep_every",
        lambda r: r.storage.keep_every is None or r.storage.keep_every <= r.train.steps,
        "the run ends after train.steps={r.train.steps}, before the first generation that it would keep",
        "train more steps, or set it to fewer",
        refused=False,
    ),
    Rule("storage.keep_best", _validates, *_UNVALIDATED),
    *(
        Rule(f"storage.{name}", _uploads, *_NOWHERE, refused=False)
        for name in ("offsite_every", "offsite_bandwidth", "offsite_keep")
    ),
    *(
        Rule(f"samples.{name}", _samples, *_UNSAMPLED, refused=False)
        for name in ("prompts", "chat", "tokens", "temperature", "top_p", "seed")
    ),
    *(
        Rule(
            f"samples.{name}",
            lambda r: r.samples.temperature > 0,
            "samples.temperature=0 always takes the most likely token",
            "set samples.temperature above 0",
            refused=False,
        )
        for name in ("top_p", "seed")
    ),
    Rule("after.export_merged", _exports, *_UNEXPORTED),
    Rule("after.export_merged", lambda r: r.adapter.is_used, "there is no adapter to merge", _ADAPTER),
    Rule("after.push", _exports, *_UNEXPORTED),
    Rule("after.sample_prompt", _exports, *_UNEXPORTED),
    Rule(
        "after.sample_tokens",
        lambda r: r.after.sample_prompt is not None,
        "no sample is written after the export",
        "set after.sample_prompt",
        refused=False,
    ),
)
"""When fields count that do not always do."""

_SECTIONS_THAT_COUNT = {
    "": ("name", "machine", "trackers"),
    # Beside a folder, what is said of the shape must agree with it.
    "model": (
        *("path", "model_type", "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads"),
        *("head_dim", "vocab_size", "max_position", "tie_embeddings", "overrides"),
    ),
    "adapter": ("method",),
    "data": ("mixture", "packing", "long_documents", "order", "sequence_length"),
    "train": (
        *("steps", "global_batch_size", "micro_batch_size", "chunk_tokens", "activation_checkpointing", "kv_window"),
        *("optimizer", "lr", "warmup_steps", "lr_schedule", "lr_groups", "layer_lr_decay", "beta1", "beta2", "eps"),
        *("weight_decay", "clip_norm", "z_loss", "router_aux_loss", "compute_dtype", "gradient_dtype", "compile"),
        *("device", "calibrate", "deterministic"),
    ),
    "budgets": ("gpu", "ram", "nvme"),
    "storage": ("nvme", "reader", "part_bytes", "checkpoint_every", "keep_last", "keep_good", "offsite"),
    "samples": ("every",),
    "after": ("export", "export_dtype", "export_shard"),  # the last two for `penstock export` as well
}
ALWAYS = frozenset(f"{section}.{name}".lstrip(".") for section, names in _SECTIONS_THAT_COUNT.items() for name in names)
"""Fields that count whatever the others say."""


def idle_fields(recipe: Recipe) -> list[Idle]:
    """The fields that are not at their defaults and have no effect, each once, in the order of the rules."""
    found: dict[str, Idle] = {}
    for idle in (*_idle(recipe), *_idle_parts(recipe)):
        found.setdefault(idle.key, idle)
    return list(found.values())


def require_effect(recipe: Recipe, before: Recipe | None = None) -> None:
    """Raise UserError for the first field that contradicts what is trained or kept, as it has no effect.

    `before`: the recipe of a run that goes on; what was so there already stays as it is.
    """
    known = set() if before is None else {(idle.key, repr(idle.value)) for idle in idle_fields(before)}
    for idle in idle_fields(recipe):
        if idle.refused and (idle.key, repr(idle.value)) not in known:
            raise UserError(idle.said)


def idle_notes(recipe: Recipe, before: Recipe | None = None) -> list[str]:
    """What is to be told, a line a field, of fields without effect that are not refused; `before`: as above."""
    known = set() if before is None else {(idle.key, repr(idle.value)) for idle in idle_fields(before)}
    return [idle.said for idle in idle_fields(recipe) if (idle.key, repr(idle.value)) not in known and not idle.refused]


def recurrent_notes(recipe: Recipe) -> list[str]:
    """The same of a model that carries a state from token to token, which only the model tells."""
    said = []
    if recipe.data.packing == "best_fit":
        said.append("data.packing: best_fit has no effect, as {}: a row holds one document; set none")
    chunk = recipe.train.chunk_tokens
    if chunk is not None and chunk < recipe.data.sequence_length:
        said.append(f"train.chunk_tokens: {chunk} has no effect, as {{}}: a chunk is a whole row; leave it at none")
    return [line.format("the model carries a state from token to token") for line in said]


def _idle(recipe: Recipe) -> Iterator[Idle]:
    for rule in RULES:
        section, _, name = rule.key.partition(".")
        values = getattr(recipe, section)
        value, usual = getattr(values, name), getattr(type(values)(), name)
        if value != usual and not rule.counts(recipe):
            yield _made(rule, recipe, rule.key, value, f"leave it at {_short(usual)}")


def _idle_parts(recipe: Recipe) -> Iterator[Idle]:
    """The same of what the parts of a mixture say for themselves."""
    for number, (entry, part) in enumerate(zip(recipe.data.mixture, recipe.data.parts, strict=False)):
        alone = dataclasses.replace(recipe, data=part)
        for rule in RULES:
            section, _, name = rule.key.partition(".")
            if section == "data" and entry.get(name) and not rule.counts(alone):
                yield _made(rule, alone, f"data.mixture[{number}].{name}", entry[name], "leave it out")


def _made(rule: Rule, recipe: Recipe, key: str, value: Any, leave: str) -> Idle:
    sources = ", ".join(dict.fromkeys(str(part.source) for part in recipe.data.parts))
    why = rule.why.format(r=recipe, sources=sources)
    return Idle(key, value, rule.refused, f"{key}: {_short(value)} has no effect, as {why}; {rule.fix}, or {leave}")


def _short(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return one_line(text, 80)
