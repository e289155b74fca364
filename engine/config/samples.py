"""The samples section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.engine.config.values import MOST_STEPS, require, require_most

MOST_SAMPLE_TOKENS = 2**20


@dataclass(kw_only=True, slots=True)
class SamplesConfig:
    """Texts that the model writes while it learns: the same prompts each time."""

    every: int | None = None
    """Steps between two times that samples are written, also after the last step; none writes none."""
    prompts: list[str] = field(default_factory=list)
    """Texts to go on from."""
    chat: bool = False
    """The prompts are what a user says, put into the tokenizer's chat template."""
    tokens: int = 64
    """Tokens to write behind each prompt, at most."""
    temperature: float = 0.0
    """0 takes the likeliest token each time; above, tokens are drawn, the flatter the higher."""
    top_p: float = 1.0
    """Tokens are drawn from the likeliest ones that together have so much of the probability."""
    seed: int = 0
    """Seed of what is drawn: the same at every time."""

    def __post_init__(self) -> None:
        require(self.every is None or self.every >= 1, f"samples.every: {self.every} must be at least 1")
        require_most("samples", self, ("every",), MOST_STEPS)
        require(
            self.every is None or bool(self.prompts),
            f"samples.every: {self.every}, but there is no prompt; set samples.prompts, or leave samples.every out",
        )
        require("" not in self.prompts, "samples.prompts: one is empty; give each a text")
        require(
            1 <= self.tokens <= MOST_SAMPLE_TOKENS,
            f"samples.tokens: {self.tokens} must be from 1 to {MOST_SAMPLE_TOKENS:,}",
        )
        require(self.temperature >= 0, f"samples.temperature: {self.temperature} must not be negative")
        require(0 < self.top_p <= 1, f"samples.top_p: {self.top_p} must be above 0, at most 1")
        require(-(2**63) <= self.seed < 2**63, f"samples.seed: {self.seed} has more than 64 bits")
