"""Several runs side by side: their losses, key figures, and the fields in which their recipes differ."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.app.runs.directory import read_info
from penstock.app.runs.files import read_object
from penstock.app.runs.speed import speed_figure
from penstock.storage.files.sealed import KEY
from penstock.storage.files.units import bytes_text, duration_text
from penstock.tui.data.catalog import MOST_PLAN_BYTES
from penstock.tui.data.fields import number
from penstock.tui.data.metrics import MetricsLog, MetricsReader

MOST_RUNS = 6
LETTERS = "ABCDEF"


@dataclass
class ComparedRun:
    """One of the runs, read as far as it goes."""

    path: Path
    recipe: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> value; {} where recipe.json cannot be read."""
    state: str = "unknown"
    peaks: dict[str, Any] = field(default_factory=dict)
    planned: float | None = None
    """Tokens/s of its plan; None where it has none."""

    def __post_init__(self) -> None:
        self._metrics = MetricsReader(self.path)

    @property
    def metrics(self) -> MetricsLog:
        return self._metrics.log

    def poll(self) -> bool:
        """Read what is new; whether there was anything."""
        before = self._known()
        added = self._metrics.read()
        while self._metrics.tail.behind:
            added |= self._metrics.read()
        self.recipe = self.recipe or _flat(read_object(self.path / "recipe.json") or {})
        self.recipe.pop(KEY, None)
        if self.planned is None:
            self.planned = number(read_object(self.path / "plan.json", MOST_PLAN_BYTES), "tokens_per_s")
        tiers = (read_object(self.path / "summary.json") or {}).get("tiers")
        self.peaks = tiers if isinstance(tiers, dict) else self.peaks
        self.state = str(read_info(self.path).state) if self.path.is_dir() else "vanished"
        return added or before != self._known()

    def _known(self) -> tuple[object, ...]:
        return self.state, bool(self.recipe), bool(self.peaks), self.planned


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Sections' fields under dotted keys; a field that is itself an object stays one."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and not prefix:
            result |= _flat(value, f"{key}.")
        else:
            result[prefix + key] = value
    return result


def config_rows(runs: list[ComparedRun], *, all_fields: bool) -> list[list[str]]:
    """A row per field, its key and each run's value; those that differ alone unless `all_fields`."""
    keys = list(dict.fromkeys(key for run in runs for key in run.recipe))
    rows = [[key, *(_value(run.recipe, key) for run in runs)] for key in keys]
    return [row for row in rows if all_fields or len(set(row[1:])) > 1]


def _value(recipe: dict[str, Any], key: str) -> str:
    if not recipe:
        return "n/a"
    value = recipe.get(key, "n/a")
    return value if isinstance(value, str) else json.dumps(value)


def figure_rows(runs: list[ComparedRun]) -> list[list[str]]:
    """A row per figure, its name and each run's; n/a where it is not known."""
    figures = {
        "state": [run.state for run in runs],
        "steps": [f"{run.metrics.last_step:,}" for run in runs],
        "tokens": [_last(run, "total_tokens", ",.0f") for run in runs],
        "training time": [duration_text(run.metrics.last("total_s")) for run in runs],
        "loss, last": [_last(run, "loss", ".4f") for run in runs],
        "loss, averaged": [_last(run, "ema", ".4f") for run in runs],
        "loss, least": [_over(run, "loss", np.nanmin, ".4f") for run in runs],
        "validation, last": [_validation(run) for run in runs],
        "tokens/s, mean": [speed_figure(run.metrics.last("mean_tokens_per_s")) for run in runs],
        "tokens/s, last step": [speed_figure(run.metrics.last("tokens_per_s")) for run in runs],
        "tokens/s, planned": [speed_figure(run.planned) for run in runs],
        "step, mean": [_last(run, "mean_step_s", ".3g", " s") for run in runs],
        "gradient norm, last": [_last(run, "grad_norm", ".3g") for run in runs],
        "written to NVMe": [bytes_text(sum(run.metrics.written_bytes.values()) or None) for run in runs],
    }
    for tier in ("gpu", "ram", "nvme"):
        figures[f"{tier} peak"] = [_peak(run, tier) for run in runs]
    return [[name, *texts] for name, texts in figures.items() if set(texts) != {"n/a"}]


def _last(run: ComparedRun, name: str, form: str, unit: str = "") -> str:
    value = run.metrics.last(name)
    return "n/a" if value is None else format(value, form) + unit


def _over(run: ComparedRun, name: str, function: Any, form: str) -> str:
    values = run.metrics.column(name)
    values = values[np.isfinite(values)]
    return format(float(function(values)), form) if len(values) else "n/a"


def _validation(run: ComparedRun) -> str:
    losses = run.metrics.validation[1]
    return f"{losses[-1]:.4f}" if len(losses) else "n/a"


def _peak(run: ComparedRun, tier: str) -> str:
    figures = run.peaks.get(tier)
    peak = number(figures, "peak_bytes") if isinstance(figures, dict) else run.metrics.tier_bytes.get(tier)
    return bytes_text(peak or None)
