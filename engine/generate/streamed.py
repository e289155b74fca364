"""A model opened to be asked: its weights pass through the compute device block by block, forward only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from penstock.engine.data.tokenizer import TextTokenizer
from penstock.engine.generate.decode import Continuation, Decoding, OnToken
from penstock.engine.model.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """How long continuing some sequences will take, and why."""

    first_s: float
    """Of the pass that reads the prompts."""
    pass_s: float
    """Of each further one, which gives every sequence a token."""
    total_s: float
    bound_by: str
    """What a pass waits for: disk, link or compute."""
    weights: dict[str, int]
    """Bytes of weights that live on each tier: gpu, ram, disk."""
    keys_values: str
    """Where keys and values are kept: gpu, ram, or nowhere."""
    assumed: bool
    """The rates are not this machine's own: it was never probed."""

    def describe(self) -> list[str]:
        """The same in words."""
        raise NotImplementedError


class StreamedModel:
    """A causal language model that need not fit anywhere but on disk. Close it, or use it as a context manager."""

    spec: ModelSpec
    tokenizer: TextTokenizer | None
    stop_ids: frozenset[int]
    """Tokens that end a text, as the model's generation_config.json and its tokenizer name them."""
    context: int | None
    """Tokens that a sequence may have; None where the config does not say."""
    device: torch.device

    @classmethod
    def open(
        cls,
        where: Path,
        *,
        checkpoint: str | None = None,
        gpu_bytes: int | None = None,
        ram_bytes: int | None = None,
        device: str = "auto",
        dtype: str = "auto",
    ) -> StreamedModel:
        """A Hugging Face folder, or a run directory: its last generation, or a checkpoint's.

        `gpu_bytes`, `ram_bytes`: what may be used of each; None: what is free. `device`: auto, cpu or cuda. `dtype`:
        auto, float32, bfloat16 or float16. Raises UserError for what is no model, and for budgets that are too small.
        """
        raise NotImplementedError

    def generate(
        self, prompts: Sequence[Sequence[int]], decoding: Decoding, on_token: OnToken | None = None
    ) -> list[Continuation]:
        """Continue token sequences, batched. Raises UserError where one would be longer than the context."""
        raise NotImplementedError

    def loglikelihoods(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """Per (context ids, continuation ids), neither empty: the natural logarithm of the continuation's probability
        behind the context, and whether greedy decoding would give it.

        Batched so that weights are streamed once for many tokens.
        """
        raise NotImplementedError

    def estimate(self, prompt_tokens: int, sequences: int, new_tokens: int) -> Estimate:
        """How long it would take to give `sequences` prompts, of `prompt_tokens` each, `new_tokens` more."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> StreamedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
