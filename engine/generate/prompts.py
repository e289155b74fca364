"""The prompts of a run's samples, as tokens: made once, when the run is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.engine.config import Recipe, SamplesConfig
from penstock.engine.data.text.chat import find_template, trained_ends
from penstock.engine.data.text.encode import Encoder
from penstock.engine.data.text.tokenizer import TextTokenizer, has_tokenizer, load_tokenizer
from penstock.engine.generate.text import text_behind
from penstock.engine.hf.generation import stop_ids
from penstock.engine.model.anatomy import context_of
from penstock.engine.model.spec import ModelSpec
from penstock.storage.files.errors import UserError


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a run's samples go on from."""

    config: SamplesConfig
    ids: list[list[int]]
    """Per prompt, in the recipe's order; none is empty."""
    tokenizer: TextTokenizer
    stop_ids: frozenset[int]
    """Tokens that end a text."""

    @property
    def lengths(self) -> list[int]:
        """Tokens that each comes to, with what is written behind it."""
        return [len(ids) + self.config.tokens for ids in self.ids]

    def text(self, prompt: int, ids: list[int]) -> str:
        """What `ids` say behind a prompt."""
        return text_behind(self.tokenizer, self.ids[prompt], ids)

    def describe(self) -> str:
        every, count, most = self.config.every, len(self.ids), max(map(len, self.ids))
        return (
            f"samples: every {every:,} steps, {self.config.tokens:,} tokens after each of {count:,} prompts of up to "
            f"{most:,} tokens"
        )


def find_stops(recipe: Recipe, spec: ModelSpec, tokenizer: TextTokenizer) -> frozenset[int]:
    """Tokens that end what the run's model writes."""
    folder = None if recipe.model.path is None else Path(recipe.model.path).expanduser()
    if folder is None or not folder.is_dir():
        return frozenset([tokenizer.eos_id])
    return stop_ids(folder, spec.config, tokenizer)


def prepare_prompts(recipe: Recipe, tokenizer: TextTokenizer | None, spec: ModelSpec) -> Prompts | None:
    """The prompts of the recipe's samples; None where it asks for none. Raises UserError for what cannot be sampled."""
    config, data = recipe.samples, recipe.data
    if config.every is None:
        return None
    folder = None if recipe.model.path is None else Path(recipe.model.path).expanduser()
    folder = folder if folder is not None and folder.is_dir() else None
    if tokenizer is None and data.tokenizer is not None:
        tokenizer = load_tokenizer(Path(data.tokenizer).expanduser())
    elif tokenizer is None and folder is not None and has_tokenizer(folder):
        tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise UserError(
            f"samples.prompts: data.source={data.source} has no tokenizer to read them; set data.tokenizer, or leave "
            "samples.every out"
        )
    template = find_template(data, tokenizer)
    texts = config.prompts
    if config.chat:
        if template is None:
            raise UserError(
                "samples.chat: the tokenizer has no chat template; set data.chat_template to a file with one, or set "
                "samples.chat=false"
            )
        texts = [template.prompt([{"role": "user", "content": text}]) for text in texts]
    begin = [tokenizer.bos_id] if not config.chat and Encoder(data, tokenizer).adds_bos else []
    result = [[*(i for i in begin if i is not None), *ids] for ids in tokenizer.encode_batch(texts)]
    for number, ids in enumerate(result, start=1):
        _check(number, ids, recipe, spec)
    ends = find_stops(recipe, spec, tokenizer)
    ends |= trained_ends(data, template)
    if config.chat and template is not None:
        ends |= template.turn_ends
    return Prompts(config, result, tokenizer, ends)


def _check(number: int, ids: list[int], recipe: Recipe, spec: ModelSpec) -> None:
    """UserError for a prompt that the model cannot go on from as far as is asked for."""
    if not ids:
        raise UserError(f"samples.prompts: prompt {number} has no tokens; give it a text")
    if max(ids) >= spec.vocab_size:
        raise UserError(
            f"samples.prompts: prompt {number} has token {max(ids)}, beyond the model's vocabulary of "
            f"{spec.vocab_size:,}; set data.tokenizer to the model's own tokenizer"
        )
    length, limit = len(ids) + recipe.samples.tokens, context_of(spec)
    why = f"the model's positions end at {limit}"
    row = recipe.data.sequence_length
    if spec.recurrent and (limit is None or row < limit):
        limit = row
        why = (
            f"this model carries state from token to token, so one sequence has at most {row:,} tokens (the run's "
            "data.sequence_length)"
        )
    if limit is not None and length > limit:
        raise UserError(
            f"samples.tokens: {recipe.samples.tokens:,} after prompt {number} of {len(ids):,} tokens make {length:,}, "
            f"but {why}; shorten the prompt, or lower samples.tokens"
        )
