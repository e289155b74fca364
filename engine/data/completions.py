"""Batches of completions that the model has sampled: a generation of them is trained on in one or several steps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engine.config import Recipe
from penstock.engine.data.corpus.files import TokenCorpus
from penstock.engine.data.loader import DataLoader
from penstock.engine.data.stream import Stream
from penstock.engine.model.tokens import IGNORE_LABEL, MicroBatch
from penstock.engine.objectives.base import Objective
from penstock.engine.objectives.grpo import ADVANTAGE, BASE, GENERATED, OLD
from penstock.engine.objectives.sequences import CHOSEN, SIDE
from penstock.storage.files.disk import atomic_write
from penstock.storage.files.errors import UserError
from penstock.storage.files.sealed import seal, unseal
from penstock.storage.files.untrusted import is_whole, parse_object, read_regular, typed

FOLDER = "generations"
_MOST_BYTES = 1 << 36


@dataclass(kw_only=True)
class Generation:
    """Completions of some prompts, several of each side by side, and what is known of them."""

    step: int
    """The one whose weights sampled them."""
    made_by: str
    """Digest of what they depend on beside these weights."""
    rewarded_by: str = ""
    """Digest of the reward functions."""
    documents: list[int]
    """Per completion the prompt, a document of the corpus."""
    completions: list[list[int]]
    """Token ids, with the one that ended it."""
    ended: list[bool]
    """Whether the model ended it; else it has all tokens that it may have."""
    rewards: list[list[float | None]] = field(default_factory=list)
    """[functions][completions]; None: a function does not apply."""
    advantages: list[float] = field(default_factory=list)
    """Empty: not rewarded yet."""
    old: list[list[float]] = field(default_factory=list)
    """Log-probability of each token under the weights that sampled it; empty: the first step that trains on them has
    the same."""
    base: list[list[float]] = field(default_factory=list)
    """Under the reference model; empty: not needed."""
    measured: dict[str, float] = field(default_factory=dict)
    """What is reported of it, by TRL's names."""

    def save(self, folder: Path) -> None:
        """Durably."""
        atomic_write(_file(folder, self.step), json.dumps(seal(asdict(self))) + "\n")

    @staticmethod
    def read(folder: Path, step: int) -> Generation | None:
        """What `save` wrote; None: nothing. Raises UserError where it is damaged."""
        path = _file(folder, step)
        if not path.exists():
            return None
        try:
            content, sealed = unseal(parse_object(read_regular(path, most_bytes=_MOST_BYTES)))
            if not sealed:
                raise ValueError("its checksum is missing")
            return typed(content, Generation)
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path}: damaged ({error}); restore the file, or delete it and resume from a checkpoint of step {step}"
            ) from error


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06}.json"


class CompletionLoader(DataLoader):
    """Draws prompts as a DataLoader draws documents, and makes batches of a generation of their completions.

    `folder`: where generations are. `ready`: whether there is a step left of the present one; before another step one
    has to be given with `begin`.
    """

    def __init__(
        self,
        corpus: TokenCorpus,
        recipe: Recipe,
        *,
        vocab_size: int,
        objective: Objective,
        whole_documents: bool,
        share_prompts: bool,
        documents: NDArray[np.int64] | None = None,
        held_out: NDArray[np.int64] | None = None,
    ) -> None:
        """`share_prompts`: completions of a prompt in one micro-batch go on from one copy of it. `documents`: those to
        train on, None: all; `held_out`: for validations. Raises UserError where
        no prompt, or too long a one, leaves a row the tokens of a completion."""
        data, train, grpo = recipe.data, recipe.train, recipe.grpo
        room = recipe.prompt_room
        if whole_documents:
            raise UserError(
                "train.objective: this model computes one document per row, and completions are sampled side by side; "
                "use another model"
            )
        prompts = recipe.prompts_per_generation
        longest = int(np.diff(corpus.starts).max())
        if longest > room and data.long_documents != "drop":
            raise UserError(
                f"data.sequence_length: {data.sequence_length:,} leaves {room:,} tokens for a prompt before "
                f"grpo.max_completion_length={grpo.max_completion_length:,}, and the longest has {longest:,}; raise "
                "it, or set data.long_documents=drop"
            )
        self.longest_prompt = min(longest, room)
        super().__init__(
            corpus,
            replace(data, sequence_length=room, packing="none", long_documents="drop"),
            replace(train, global_batch_size=prompts, micro_batch_size=prompts),
            vocab_size=vocab_size,
            documents=documents,
            objective=objective,
        )
        fitting = [] if held_out is None else held_out[np.diff(corpus.starts)[held_out] <= room].tolist()
        self.held_out: list[int] = fitting[: recipe.prompts_per_validation]
        """Documents whose completions a validation rewards: the same ones every time, which no step trains on."""
        if recipe.prompts_per_validation and not self.held_out:
            raise UserError(
                f"data.validation_documents: each of the {data.validation_documents:,} held-out prompts has more "
                f"tokens than the {room:,} that data.sequence_length leaves; raise it, or hold out more"
            )
        self.folder = corpus.folder.with_name(FOLDER)
        self.shares_prompts = share_prompts
        self._recipe, self._used = recipe, 0
        self._generation: Generation | None = None
        self._prompts_cursor: dict[str, Any] = super().cursor
        """Where the prompts of the next generation begin."""
        self._behind = self._prompts_cursor
        """Where those begin that come behind the ones drawn last."""

    @property
    def num_steps(self) -> int:
        """That a generation is trained on."""
        return self._recipe.grpo.num_steps

    @property
    def ready(self) -> bool:
        return self._generation is not None

    @property
    def cursor(self) -> dict[str, Any]:
        begun = {} if self._generation is None else {"generation": self._generation.step, "used": self._used}
        return {"prompts": self._prompts_cursor, **begun}

    def seek(self, cursor: dict[str, Any]) -> None:
        prompts, step, used = cursor.get("prompts"), cursor.get("generation"), cursor.get("used")
        if not isinstance(prompts, dict) or (step is not None and not (is_whole(step) and is_whole(used))):
            raise self._lost("does not contain the position in the data")
        super().seek(prompts)
        self._prompts_cursor, self._generation = prompts, None
        if step is not None and used is not None:
            self._generation, self._used = Generation.read(self.folder, step), used
            if self._generation is None or not self._generation.advantages or not used < self.num_steps:
                raise UserError(
                    f"{self.folder}: the completions of step {step} that the run is training on are gone; restore the "
                    "folder, or resume from another checkpoint"
                )

    def draw(self) -> list[int]:
        """The prompts of the next generation, documents of the corpus, each for every completion; drawn again they are
        the same, until `begin`."""
        super().seek(self._prompts_cursor)
        sources = [source for batch in super().next_step() for source in batch.sources]
        self._behind = super().cursor
        count = self._recipe.grpo.num_generations
        return [document for source in sources for document in [self.corpus.document_at(source)] * count]

    def begin(self, generation: Generation) -> None:
        """Train on these completions of the prompts drawn last in the steps to come."""
        self._prompts_cursor, self._generation, self._used = self._behind, generation, 0

    @property
    def measured(self) -> Mapping[str, float]:
        return {} if self._generation is None else self._generation.measured

    def next_step(self) -> list[MicroBatch]:
        generation, each = self._generation, self._recipe.train.global_batch_size
        assert generation is not None, "no completions to train on"
        first = self._used % self._recipe.grpo.steps_per_generation * each
        result = self.batches(generation, range(first, first + each))
        self._used += 1
        if self._used == self.num_steps:
            self._generation = None
        return result

    def look_ahead(self, count: int) -> list[list[MicroBatch]]:
        """Batches such as steps may have: prompts with completions of all tokens that these may have."""
        documents = self.draw()
        some = [[0] * self._recipe.grpo.max_completion_length] * len(documents)
        like = Generation(
            step=0, made_by="", documents=documents, completions=some, ended=[True] * len(some),
            advantages=[1.0] * len(some),
        )  # fmt: skip
        return [self.batches(like, range(self._recipe.train.global_batch_size))] * count

    def batches(self, generation: Generation, some: Sequence[int]) -> list[MicroBatch]:
        """Of `some` of its completions, rows of a micro-batch at a time, fewer in the last one."""
        rows = self._recipe.train.micro_batch_size
        return [self._micro_batch(generation, some[at : at + rows]) for at in range(0, len(some), rows)]

    def _micro_batch(self, generation: Generation, some: Sequence[int]) -> MicroBatch:
        recipe = self._recipe
        stream = Stream(recipe.train.micro_batch_size * recipe.data.sequence_length, self.corpus)
        masked, steps = recipe.grpo.mask_truncated_completions, recipe.grpo.steps_per_generation
        trained = sum(
            len(ids) for ids, ended in zip(generation.completions, generation.ended, strict=True) if ended or not masked
        )
        known = [(name, values) for name, values in ((OLD, generation.old), (BASE, generation.base)) if values]
        at = 0
        laid: dict[int, int] = {}
        """Prompt -> where it begins in the stream."""
        for number in some:
            start, stop = self.corpus.starts[(document := generation.documents[number]) : document + 2].tolist()
            begins = None
            if self.shares_prompts:
                # Behind its last token, which comes again, stands the first target of each completion.
                begins = (laid[document], stop - start - 1) if document in laid else None
                laid.setdefault(document, at)
            completion = np.asarray(generation.completions[number], dtype=np.int64)
            ids = np.concatenate([self.corpus.tokens[start:stop].astype(np.int64), completion])
            labels = np.full(len(ids), IGNORE_LABEL, dtype=np.int64)
            if generation.ended[number] or not masked:
                labels[stop - start - 1 : -1] = completion
            columns: dict[str, float] = {SIDE: CHOSEN, GENERATED: trained / steps}
            if generation.advantages:
                columns[ADVANTAGE] = generation.advantages[number]
            of_targets = {name: (stop - start - 1, values[number]) for name, values in known}
            at += stream.add_tokens(at, ids, labels, start, columns, of_targets, begins)
        filled = at if at < len(stream.ids) else None
        if filled is not None:
            stream.documents.append(at)
        return stream.micro_batch(filled)
