"""Several runs side by side: their losses, key figures, and the fields in which their recipes differ."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from penstock.app.runs.measured import by_weight
from penstock.app.runs.speed import speed_figure
from penstock.storage.files.sealed import KEY
from penstock.storage.files.units import bytes_text, duration_text, figure
from penstock.tui.data.fields import get, number
from penstock.tui.data.run_data import RunData

MOST_RUNS = 6
LETTERS = "ABCDEF"


def read_new(run: RunData) -> bool:
    """Read all that is new of a run; whether there was anything to show."""
    before, changed = (run.exists, run.state), run.poll()
    while run.behind:
        changed |= run.poll()
    return bool(changed & {"metrics", "plan"}) or before != (run.exists, run.state)


def state_text(run: RunData) -> str:
    return run.state if run.exists else "vanished"


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Sections' fields under dotted keys; a field that is itself an object stays one."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and not prefix:
            result |= _flat(value, f"{key}.")
        else:
            result[prefix + key] = value
    return result


def config_rows(runs: list[RunData], *, all_fields: bool) -> list[list[str]]:
    """A row per field, its key and each run's value; those that differ alone unless `all_fields`."""
    recipes = [_flat(run.recipe) for run in runs]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe if key != KEY)
    rows = [[key, *(_value(recipe, key) for recipe in recipes)] for key in keys]
    return [row for row in rows if all_fields or len(set(row[1:])) > 1]


def _value(recipe: dict[str, Any], key: str) -> str:
    if not recipe:
        return "n/a"
    value = recipe.get(key, "n/a")
    return value if isinstance(value, str) else json.dumps(value)


def figure_rows(runs: list[RunData]) -> list[list[str]]:
    """A row per figure, its name and each run's; n/a where it is not known."""
    figures = {
        "state": [state_text(run) for run in runs],
        "steps": [f"{run.metrics.last_step:,}" for run in runs],
        "tokens": [_last(run, "total_tokens", ",.0f") for run in runs],
        "training time": [duration_text(run.metrics.last("total_s")) for run in runs],
        "loss, last": [_last(run, "loss", ".4f") for run in runs],
        "loss, averaged": [_last(run, "ema", ".4f") for run in runs],
        "loss, least": [_text(_least(run), ".4f") for run in runs],
        "validation, last": [_text(next(iter(run.metrics.validation[1][::-1]), None), ".4f") for run in runs],
        "tokens/s, mean": [speed_figure(run.metrics.last("mean_tokens_per_s")) for run in runs],
        "tokens/s, last step": [speed_figure(run.metrics.last("tokens_per_s")) for run in runs],
        "tokens/s, planned": [speed_figure(number(run.plan, "tokens_per_s")) for run in runs],
        "step, mean": [_last(run, "mean_step_s", ".3g", " s") for run in runs],
        "gradient norm, last": [_last(run, "grad_norm", ".3g") for run in runs],
        "written to NVMe": [bytes_text(sum(run.metrics.written_bytes.values()) or None) for run in runs],
    }
    for name in measured_names(runs):
        figures[f"{name}, last"] = [figure(run.metrics.newest.get(name)) for run in runs]
        figures[f"{name}, validation"] = [_validated(run, name) for run in runs]
    for tier in ("gpu", "ram", "nvme"):
        figures[f"{tier} peak"] = [_peak(run, tier) for run in runs]
    return [[name, *texts] for name, texts in figures.items() if set(texts) != {"n/a"}]


def measured_names(runs: list[RunData]) -> list[str]:
    """What any of the runs measures beside its loss, those first that say most."""
    return by_weight(dict.fromkeys(name for run in runs for name in run.metrics.measured_names))


def _validated(run: RunData, name: str) -> str:
    known = run.metrics.validated.get(name)
    return figure(None if known is None or not len(known[1]) else known[1][-1])


def _last(run: RunData, name: str, form: str, unit: str = "") -> str:
    return _text(run.metrics.last(name), form, unit)


def _text(value: float | None, form: str, unit: str = "") -> str:
    return "n/a" if value is None else format(value, form) + unit


def _least(run: RunData) -> float | None:
    losses = run.metrics.column("loss")
    return min(losses[np.isfinite(losses)].tolist(), default=None)


def _peak(run: RunData, tier: str) -> str:
    figures = get(run.summary, "tiers", tier)
    peak = number(figures, "peak_bytes") if isinstance(figures, dict) else run.metrics.tier_bytes.get(tier)
    return bytes_text(peak or None)
