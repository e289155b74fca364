"""The heat map of `penstock bench planned`: tokens/s by model, context and machine, one panel for each machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.storage.files.units import tokens_text

LETTERS = {"compute": "C", "h2d": "H", "d2h": "D", "optimizer": "O", "nvme_read": "R", "nvme_write": "W"}
"""Lane -> how a cell names what bounds it."""
_GREY = "#e4e4e4"
_COLUMNS = 2


def short_rate(tokens_per_s: float) -> str:
    """Two or three figures: 0.42, 9.3, 928, 1.1k, 12k."""
    if tokens_per_s >= 999.5:
        thousands = tokens_per_s / 1000
        return f"{thousands:.0f}k" if thousands >= 9.95 else f"{thousands:.1f}k"
    if tokens_per_s >= 9.95:
        return f"{tokens_per_s:.0f}"
    return f"{tokens_per_s:.1f}" if tokens_per_s >= 0.95 else f"{tokens_per_s:.2f}"


def draw(grid: Sequence[Mapping[str, Any]], machines: Sequence[str], file: Path) -> None:
    """Write the PNG. Rows of `grid` have label, context, machine, fits, tokens_per_s, bound_by."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    labels = list(dict.fromkeys(row["label"] for row in grid))
    contexts = sorted({row["context"] for row in grid})
    rates = [row["tokens_per_s"] for row in grid if row["fits"]] or [1.0]
    norm = LogNorm(min(rates), max(max(rates), 1.01 * min(rates)))
    # The light part of the map, so that dark text can be read on every cell.
    colours = colormaps["YlGnBu"]
    lines = math.ceil(len(machines) / _COLUMNS)
    width, height = 1.5 + 0.95 * len(contexts), 1.0 + 0.5 * len(labels)
    figure = Figure(figsize=(_COLUMNS * width, lines * height + 0.6), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(lines, _COLUMNS, squeeze=False).flat)
    for axis in axes[len(machines) :]:
        axis.set_axis_off()
    for axis, machine in zip(axes, machines, strict=False):
        for row in grid:
            if row["machine"] != machine:
                continue
            x, y = contexts.index(row["context"]), labels.index(row["label"])
            face = colours(0.62 * norm(row["tokens_per_s"])) if row["fits"] else _GREY
            axis.add_patch(Rectangle((x, y), 1, 1, facecolor=face, edgecolor="white", linewidth=2))
            if row["fits"]:
                text = f"{short_rate(row['tokens_per_s'])} {LETTERS.get(row['bound_by'], '?')}"
                axis.text(x + 0.5, y + 0.52, text, ha="center", va="center", fontsize=11, color="#10202c")
        axis.set_xlim(0, len(contexts))
        axis.set_ylim(len(labels), 0)
        axis.set_xticks([i + 0.5 for i in range(len(contexts))], [tokens_text(c) for c in contexts])
        axis.set_yticks([i + 0.5 for i in range(len(labels))], labels)
        axis.tick_params(length=0, labelsize=11)
        for side in axis.spines.values():
            side.set_visible(False)
        axis.set_title(machine, fontsize=13, fontweight="bold", loc="left")
    legend = ", ".join(f"{letter} {lane}" for lane, letter in LETTERS.items())
    figure.suptitle(f"Planned tokens/s by model and context, not measured\nBound by: {legend}. Grey: does not fit")
    figure.savefig(file, metadata={"Software": None})
