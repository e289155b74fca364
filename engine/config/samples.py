"""The samples section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.engine.config.values import MOST_STEPS, require, require_counts, require_kinds

MOST_SAMPLE_TOKENS = 2**20


@dataclass(kw_only=True, slots=True)
class SamplesConfig:
    """Sample texts generated during training, from the same prompts each time."""

    every: int | None = None
    """Generate samples every so many steps and after the last one. none generates none."""
    prompts: list[str] = field(default_factory=list)
    """Prompts to continue."""
    chat: bool = False
    """Treat the prompts as user messages and put them into the tokenizer's chat template."""
    tokens: int = 64
    """Most tokens to generate per prompt."""
    temperature: float = 0.0
    """Sampling temperature. 0 always takes the most likely token; higher values give more random text."""
    top_p: float = 1.0
    """Sample only from the most likely tokens whose probabilities add up to this."""
    seed: int = 0
    """Seed of the sampling, the same each time."""

    def __post_init__(self) -> None:
        require_kinds("samples", self)
        require_counts("samples", self, ("every",), MOST_STEPS)
        require(
            self.every is None or bool(self.prompts),
            f"samples.every: {self.every}, but there are no prompts; set samples.prompts, or leave samples.every out",
        )
        require("" not in self.prompts, "samples.prompts: a prompt is empty; write a text")
        require(
            1 <= self.tokens <= MOST_SAMPLE_TOKENS,
            f"samples.tokens: {self.tokens} must be from 1 to {MOST_SAMPLE_TOKENS:,}",
        )
        require(self.temperature >= 0, f"samples.temperature: {self.temperature} must not be negative")
        require(0 < self.top_p <= 1, f"samples.top_p: {self.top_p} must be above 0, at most 1")
        require(-(2**63) <= self.seed < 2**63, f"samples.seed: {self.seed} has more than 64 bits")
