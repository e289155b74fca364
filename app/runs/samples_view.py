"""A run's samples as they are written and shown: lines of samples.jsonl, of the log and of the console."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.app.runs.files import MOST_LINE_BYTES, JsonLines
from penstock.engine.events import Sample, SampleMetrics

CONSOLE_SAMPLES = 4
"""Samples of a step that the console shows; the others are in the files."""
_CONSOLE_CHARS = 160
_PROMPT_CHARS = 48
_ESCAPED = 12
"""Bytes of a character in JSON, at most."""


def samples_line(metrics: SampleMetrics) -> dict[str, Any]:
    """What samples.jsonl has of a step's samples; texts are cut where the line would be longer than readers take."""
    most = MOST_LINE_BYTES // (4 * _ESCAPED * len(metrics.samples))
    samples = [asdict(sample) for sample in metrics.samples]
    for sample in samples:
        sample |= {name: _cut(sample[name], most) for name in ("prompt", "text")}
    return asdict(metrics) | {"samples": samples}


def sample_text(step: int, sample: Sample, most: int | None = None) -> str:
    """One sample in a line: `step 200: 'Once upon' -> ' a time'`, of its text at most so many characters; `reward 1`
    behind it where it has one."""
    text = sample.text if most is None else _cut(sample.text, most)
    reward = "" if sample.reward is None else f"  reward {sample.reward:.4g}"
    return f"step {step:,}: {_cut(sample.prompt, _PROMPT_CHARS)!r} -> {text!r}{reward}"


def console_lines(metrics: SampleMetrics) -> list[str]:
    """What the console shows of a step's samples."""
    shown = [sample_text(metrics.step, sample, _CONSOLE_CHARS) for sample in metrics.samples[:CONSOLE_SAMPLES]]
    more = len(metrics.samples) - len(shown)
    return [*shown, *([f"step {metrics.step:,}: {more:,} more samples in samples.jsonl"] if more else [])]


def first_and_last(run_path: Path) -> tuple[dict[str, Any] | None, str | None]:
    """The first and the last line of a run's samples.jsonl, None where it has none; what to say of damaged lines."""
    lines, first, last = JsonLines(run_path / "samples.jsonl"), None, None
    for last in lines.steps():
        first = first or last
    return None if first is None else {"first": first, "last": last}, lines.warning()


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
