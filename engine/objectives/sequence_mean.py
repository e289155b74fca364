"""The mean over a step's sequences of each one's mean loss: short ones count as much as long ones."""

from __future__ import annotations

from penstock.engine.config import PreferenceConfig
from penstock.engine.objectives.sequences import Measured, Sequences


def measure(given: Sequences, options: PreferenceConfig) -> Measured:
    """Of each sequence with a target its mean by weight, over the sequences of the step."""
    lengths = given.lengths()
    some = lengths > 0
    return Measured(-given.logps()[some] / lengths[some] / given.totals.sequences, {})
