"""The kinds of blocks: which action computes one in which mode."""

from __future__ import annotations

from typing import Literal, get_args

from penstock.engine.branches.base import BRANCHES
from penstock.engine.schedule import actions as a

Mode = Literal[
    "publish", "forward", "score", "loss", "republish", "recompute", "backward_top", "backward", "evaluate", "generate"
]
"""What a visit to a block does. "score" finds the log-probabilities of a chunk's targets, for an objective over whole
sequences; "loss" is forward and backward of the last block at once, so that a chunk's logits die where they are made;
"recompute" computes keys, values and attention of a layer that saved its input only; where ranks share each sequence,
"publish" and, in backward, "republish" compute keys and values for all of them, and "backward_top" is backward of a
layer up to these, which "backward" then ends; "evaluate" is forward with no
backward to follow: nothing is saved, and hidden states wait in RAM or their slots; "generate" is the same of samples,
whose keys and values have memory of their own (engine/schedule/samples.py)."""

ONWARD: frozenset[Mode] = frozenset({"forward", "evaluate", "generate"})
"""Modes whose result is an input of the blocks that follow."""
WITH_GRADIENTS: frozenset[Mode] = frozenset({"loss", "backward_top", "backward"})
"""Modes that add to the gradients of a block's parameters."""

KINDS: dict[str, dict[Mode, a.Action]] = {
    kind: {mode: a.ACTIONS[name] for mode in get_args(Mode) if (name := f"{kind}_{mode}") in a.ACTIONS}
    for kind in ("vision", "embed", "layer", "head", *BRANCHES)
}
"""Kind of block -> mode -> what computes the block whole: the action of both names."""
KINDS["head"]["loss"] = a.HEAD
