"""The grpo section of a recipe."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from penstock.engine.config.values import MOST_SEQUENCES, MOST_TOKENS, require, require_counts, require_kinds
from penstock.storage.files.untrusted import one_line

SAMPLED = frozenset({"grpo", "rloo"})
"""Values of train.objective that train on completions which the model samples."""
COMMAND = "command:"
"""Before a program that rewards."""


@dataclass(kw_only=True, slots=True)
class GrpoConfig:
    """Options of reinforcement learning with rewards (train.objective=grpo or rloo), named as in TRL.

    A generation has train.global_batch_size x steps_per_generation / num_generations prompts.
    """

    reward: list[str] = field(default_factory=list)
    """What rewards completions, one or more of: FILE.py:FUNCTION, a Python function as TRL calls them; command:
    PROGRAM, run in a shell for each completion, which is its standard input: exit code 0 is a reward of 1, else 0."""
    reward_weights: list[float] = field(default_factory=list)
    """Factor on each reward before they are added up. Empty: 1 for all."""
    reward_timeout_s: float = 60.0
    """Seconds that a reward function may take for all completions of a call, and a program for one."""
    num_generations: int = 8
    """Completions of each prompt, which are compared with one another."""
    num_generations_eval: int | None = None
    """The same in a validation, at most num_generations. none: num_generations."""
    max_completion_length: int = 256
    """Most tokens of a completion."""
    temperature: float = 1.0
    """Sampling temperature of completions."""
    top_p: float = 1.0
    """Sample only from the most likely tokens whose probabilities add up to this."""
    num_iterations: int = 1
    """How often the completions of a generation are trained on."""
    steps_per_generation: int = 1
    """Optimizer steps that the completions of a generation are divided among."""
    epsilon: float = 0.2
    """Ratios of probabilities are clipped to 1 - epsilon and 1 + epsilon."""
    epsilon_high: float | None = None
    """Upper bound of ratios, instead of epsilon (DAPO recommends 0.28)."""
    beta: float = 0.0
    """Weight of the KL divergence from the model as it was before training, whose weights a run then keeps beside its
    own and streams once for each generation. 0 needs no reference."""
    use_bias_correction_kl: bool = True
    """Multiply the divergence of each token by its ratio of probabilities, so that its gradient is not biased
    (arXiv 2512.02556)."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    """How losses of tokens are averaged. grpo: over each completion, then over completions. bnpo: over all tokens of a
    step. dr_grpo: by a constant, max_completion_length. dapo: as bnpo, by the mean of the generation's steps."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of rewards: of the same prompt, of the batch, or not at all."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Whether each token has a ratio of its own, or each completion has one (GSPO)."""
    mask_truncated_completions: bool = False
    """Leave completions that reach max_completion_length out of the loss."""

    @property
    def num_steps(self) -> int:
        """That are trained on the same completions."""
        return self.num_iterations * self.steps_per_generation

    @property
    def num_validated(self) -> int:
        """Completions of each prompt in a validation."""
        return self.num_generations_eval or self.num_generations

    def __post_init__(self) -> None:
        require_kinds("grpo", self)
        for number, entry in enumerate(self.reward):
            _check_reward(entry, f"grpo.reward[{number}]")
        require(len({*self.reward}) == len(self.reward), "grpo.reward: one is listed twice; list each once")
        require(
            len(self.reward_weights) in (0, len(self.reward)),
            f"grpo.reward_weights: {len(self.reward_weights)} weights for {len(self.reward)} rewards of grpo.reward; "
            "give one for each, or none",
        )
        require(
            all(isinstance(weight, int | float) and math.isfinite(weight) for weight in self.reward_weights),
            f"grpo.reward_weights: {one_line(self.reward_weights, 60)} must be finite numbers",
        )
        require(0 < self.reward_timeout_s < math.inf, f"grpo.reward_timeout_s: {self.reward_timeout_s} must be above 0")
        require_counts("grpo", self, ("num_generations",), MOST_SEQUENCES, least=2)
        require_counts("grpo", self, ("num_generations_eval",), self.num_generations)
        require_counts("grpo", self, ("num_iterations", "steps_per_generation"), MOST_SEQUENCES)
        require_counts("grpo", self, ("max_completion_length",), MOST_TOKENS)
        require(
            0 < self.temperature < math.inf,
            f"grpo.temperature: {self.temperature} must be above 0, or all completions of a prompt would be the same",
        )
        require(0 < self.top_p <= 1, f"grpo.top_p: {self.top_p} must be above 0, at most 1")
        require(0 < self.epsilon < 1, f"grpo.epsilon: {self.epsilon} must be above 0 and below 1")
        require(
            self.epsilon_high is None or 0 < self.epsilon_high < math.inf,
            f"grpo.epsilon_high: {self.epsilon_high} must be above 0",
        )
        require(0 <= self.beta < math.inf, f"grpo.beta: {self.beta} must not be negative")


def reward_function(entry: str) -> tuple[str, str]:
    """File and function of an entry of grpo.reward that is no command."""
    file, _, name = entry.rpartition(":")
    return file, name


def _check_reward(entry: object, where: str) -> None:
    """Raise UserError for an entry that is neither a function of a file nor a command."""
    if isinstance(entry, str) and entry.startswith(COMMAND):
        require(bool(entry.removeprefix(COMMAND).strip()), f"{where}: names no program behind '{COMMAND}'")
        return
    file, name = reward_function(entry) if isinstance(entry, str) else ("", "")
    require(
        file.endswith(".py") and name.isidentifier(),
        f"{where}: '{one_line(entry, 80)}' is no reward; write FILE.py:FUNCTION, such as rewards.py:is_correct, or "
        f"{COMMAND} PROGRAM",
    )
