"""The lines of a run's files as trackers show them: names that are usual in the field, finite figures."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from penstock.app.runs.files import MOST_SECONDS, number
from penstock.app.trackers.base import Line, Stream

_METRICS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/learning_rate",
    "tokens": "train/tokens",
    "tokens_per_s": "train/tokens_per_second",
    "step_s": "train/step_seconds",
}
_VALIDATION = {"loss": "validation/loss", "accuracy": "validation/accuracy"}
_DRIVES = {"nvme_read_bytes": "drives/read_bytes", "nvme_written_bytes": "drives/written_bytes"}
_TIERS = ("gpu", "ram", "nvme")


def line_of(stream: Stream, line: dict[str, Any]) -> Line | None:
    """What is sent of a line; None where it has no step."""
    step, time = number(line.get("step")), number(line.get("time")) or 0.0
    if step is None or step != int(step) or step < 0:
        return None
    values = {"metrics": _metrics, "validation": _validation, "samples": lambda _: {}}[stream](line)
    samples = _samples(line.get("samples")) if stream == "samples" else []
    return Line(stream, int(step), min(max(time, 0.0), MOST_SECONDS), values, samples)


def _metrics(line: dict[str, Any]) -> dict[str, float]:
    found = _named(line, _METRICS)
    tiers = line.get("tier_bytes")
    if isinstance(tiers, dict):
        found |= _named(tiers, {tier: f"memory/{tier}_bytes" for tier in _TIERS})
    for name, shown in _DRIVES.items():
        drives = line.get(name)
        if isinstance(drives, dict) and drives:
            found[shown] = sum(number(value) or 0.0 for value in drives.values())
    return found


def _validation(line: dict[str, Any]) -> dict[str, float]:
    found = _named(line, _VALIDATION)
    loss = found.get("validation/loss")
    if loss is not None and loss < math.log(1e30):
        found["validation/perplexity"] = math.exp(loss)
    return found


def _named(line: dict[str, Any], names: dict[str, str]) -> dict[str, float]:
    return {shown: value for name, shown in names.items() if (value := number(line.get(name))) is not None}


def _samples(samples: object) -> list[dict[str, Any]]:
    found = samples if isinstance(samples, list) else []
    return [
        {"prompt": one["prompt"], "text": one["text"], "ended": one.get("ended") is True}
        for one in found
        if isinstance(one, dict) and isinstance(one.get("prompt"), str) and isinstance(one.get("text"), str)
    ]


def samples_text(samples: list[dict[str, Any]]) -> str:
    """Samples as Markdown, each behind its prompt."""
    parts = (f"**{_plain(one['prompt'])}**\n\n{_plain(one['text'])}{_end(one)}\n" for one in samples)
    return "\n---\n\n".join(parts)


def samples_html(samples: list[dict[str, Any]]) -> str:
    """The same as HTML."""
    parts = (f"<b>{escape(one['prompt'])}</b>{escape(one['text'])}{_end(one)}" for one in samples)
    return "<hr>".join(f'<div style="white-space: pre-wrap">{part}</div>' for part in parts)


def _end(sample: dict[str, Any]) -> str:
    return "" if sample["ended"] else " ..."


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    return "".join(f"\\{char}" if char in "\\`*_{}[]<>#|" else char for char in text)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dicts by dotted names; lists and nulls are leaves."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
