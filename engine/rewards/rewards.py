"""The rewards of a run: each entry of grpo.reward, from when the run opens them until it ends."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from penstock.engine.config import COMMAND, GrpoConfig
from penstock.engine.rewards.functions import Function
from penstock.engine.rewards.programs import Program
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line

LOG = "rewards.log"
"""What functions and programs print, the newest of it."""
_MOST_LOG_BYTES = 1 << 24
_OWN = ("prompt", "prompts", "completion", "completions", "completion_ids")
"""Arguments that are no columns."""
Text = str | list[dict[str, Any]]
"""A text, or messages."""


class Rewards:
    """`identity`: entry -> SHA-256, in hex, of the function's file or the command's text."""

    def __init__(self, config: GrpoConfig, folder: Path) -> None:
        """Files of functions that are not absolute are taken from the current folder; `folder` gets `LOG`.

        Raises UserError where a file, a function or a program is not there, or a file cannot be imported.
        """
        self._config, self._scorers = config, list[Function | Program]()
        self._log = (folder / LOG).open("ab", buffering=0)
        try:
            for number, entry in enumerate(config.reward):
                scorer = Program if entry.startswith(COMMAND) else Function
                where = f"grpo.reward[{number}]"
                self._scorers.append(scorer(entry, where, config.reward_timeout_s, self._log))
        except BaseException:
            self.close()
            raise
        self.identity = {entry: scorer.identity for entry, scorer in zip(config.reward, self._scorers, strict=True)}

    @property
    def timed_out(self) -> int:
        """Programs that were ended as they took too long, so far."""
        return sum(scorer.timed_out for scorer in self._scorers if isinstance(scorer, Program))

    def scores(
        self,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]],
        rows: Sequence[dict[str, Any]],
    ) -> list[list[float]]:
        """The rewards [entries of grpo.reward][completions].

        A completion's messages are one of the assistant. `rows`: each completion's columns. Where a function says None
        for a completion its reward is 0, but NaN where all do. Raises UserError, in a line, where a function or program
        fails or returns what is no reward.
        """
        if os.fstat(self._log.fileno()).st_size > _MOST_LOG_BYTES:
            self._log.truncate(0)
        names = dict.fromkeys(name for row in rows for name in row if name not in _OWN)
        arguments = {name: [row.get(name) for row in rows] for name in names} | {
            "prompts": list(prompts),
            "completions": list(completions),
            "completion_ids": [list(map(int, ids)) for ids in completion_ids],
        }
        result: list[list[float | None]] = []
        for number, scorer in enumerate(self._scorers):
            if isinstance(scorer, Program):
                result.append(scorer.rewards([_text(completion) for completion in completions], list(rows)))
                continue
            result.append(scorer.rewards(arguments, len(completions)))
            for at, reward in enumerate(result[-1]):
                if reward is not None and not math.isfinite(reward):
                    raise UserError(
                        f"grpo.reward[{number}]: {one_line(self._config.reward[number], 200)}: its reward for "
                        f"completion {at} is {reward}, of the row {one_line(rows[at], 200)}; return a finite number, "
                        "or None"
                    )
        unscored = [all(reward is None for reward in of_one) for of_one in zip(*result, strict=True)]
        return [
            [math.nan if none else reward or 0.0 for reward, none in zip(of_entry, unscored, strict=True)]
            for of_entry in result
        ]

    def close(self) -> None:
        """End all processes, and all that they have started."""
        for scorer in self._scorers:
            if isinstance(scorer, Function):
                scorer.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _text(completion: Text) -> str:
    """What the assistant says."""
    if isinstance(completion, str):
        return completion
    return "".join(str(message.get("content") or "") for message in completion)
