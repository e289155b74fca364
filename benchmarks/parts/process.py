"""Work in processes of its own, what the driver says, and plots."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.app.bench import process
from penstock.storage.files.errors import UserError

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(
        [str(REPOSITORY / "src"), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
}
"""In which a child finds this checkout wherever it starts."""


def command(name: str, *arguments: str) -> list[str]:
    """What runs a benchmark in ENVIRONMENT."""
    return [sys.executable, "-P", "-m", "benchmarks", name, *arguments]


def call(work: Callable[..., Any], *arguments: Any, more: dict[str, str] | None = None, what: str = "") -> Any:
    """`app.bench.process.call` of one of our functions."""
    name = f"{work.__module__}:{work.__name__}"
    return process.call(name, *arguments, more=ENVIRONMENT | (more or {}), what=what)


def nvidia_smi(*fields: str) -> str | None:
    """What the driver says of the first GPU; None where it says nothing."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def require_matplotlib() -> None:
    """UserError where it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("plots need matplotlib: pip install 'penstock[dev]'")


def two_plots(*titles: str) -> tuple[Any, Any]:
    """A figure of two plots beside one another, and their axes; the same values give the same SVG."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "penstock", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), sharex=True, layout="tight")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
    return figure, axes


def save(report: dict[str, Any], figure: Any, file: Path) -> None:
    """Write FILE.json and FILE.svg."""
    file.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    figure.savefig(file.with_suffix(".svg"), metadata={"Date": None})
