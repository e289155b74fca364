"""The reward of grpo.py: a function as TRL calls them. Each argument is a list with an entry for each completion."""

from typing import Any


def right_number(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the first word is the answer, else 0; `answer` is a column of prompts.jsonl."""
    return [float(text.split()[:1] == [wanted]) for text, wanted in zip(completions, answer, strict=True)]
