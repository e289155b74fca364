"""What several machines would make of a recipe, for people: rows of `penstock plan --cluster`."""

from __future__ import annotations

from typing import Any

from penstock.app.console.rows import Page
from penstock.app.runs.speed import speed_figure
from penstock.storage.files.units import bytes_text, duration_text, of_text, percent_text, seconds_text

_PARTS = 4
"""Largest parts of a GPU's memory that are named."""


def cluster_rows(page: Page, forecast: dict[str, Any]) -> None:
    """The forecast's `cluster` beside its own machine: time to finish, memory of a GPU, what bounds the step."""
    if (found := forecast.get("cluster")) is None:
        return
    nodes = f"{found['nodes']:,} nodes" if found["nodes"] > 1 else "one node"
    gpu = str(found["gpu"]).removeprefix("NVIDIA ")
    page.head(f"FSDP2 on {nodes} of {found['gpus_per_node']} {gpu}", found["source"])
    here = (forecast.get("run") or {}).get("seconds") if forecast["fits"] else None
    there = found["run_s"] if found["fits"] else None
    first = f"to finish: {'does not fit' if here is None else duration_text(here)} here"
    if there is not None:
        faster = "" if here is None else f" ({here / there:.1f} times as fast)"
        page.wrapped(f"{first}, {duration_text(there)} there{faster}", "accent bold")
        page.wrapped(
            f"{found['steps']:,} steps of {seconds_text(found['step_s'])}, "
            f"{speed_figure(found['tokens_per_s'])} tokens/s, MFU {percent_text(found['mfu'])}; "
            f"a GPU's micro-batches in a step: {found['micro_batches_per_gpu']:,}",
            "text",
        )
    else:
        page.wrapped(f"{first}, does not fit there", "bad bold")
    parts = sorted(((size, name) for name, size in found["parts"].items()), reverse=True)
    named = ", ".join(f"{name} {bytes_text(size)}" for size, name in parts[:_PARTS])
    others = sum(size for size, _ in parts[_PARTS:])
    mark = page.glyphs.check if found["fits"] else page.glyphs.cross
    page.wrapped(
        f"{mark} memory of a GPU {of_text(found['peak_bytes'], found['budget_bytes'])}: {named}"
        + (f", others {bytes_text(others)}" if others else ""),
        "text" if found["fits"] else "bad",
    )
    if not found["fits"]:
        short = bytes_text(found["peak_bytes"] - found["budget_bytes"])
        would = (
            "would fit: " + " or ".join(found["would_fit"])
            if found["would_fit"]
            else "no single change was found that fits"
        )
        page.wrapped(f"too large by {short}; {would}", "text")
    page.wrapped(_bound(found), "dim")


def _bound(found: dict[str, Any]) -> str:
    """What bounds a step: computing, or what crosses the slower link meanwhile."""
    layers = "compiled layers" if found["compiled"] else "eager layers"
    words = [f"bound by {found['bound_by']}: compute takes {seconds_text(found['compute_s'])} a step ({layers})"]
    if found["nvlink_s"] or found["network_s"]:
        words.append("all-gather and reduce-scatter meanwhile")
    if found["nvlink_s"]:
        words.append(f"{seconds_text(found['nvlink_s'])} over NVLink")
    if found["network_s"]:
        network = f"the network, for each GPU {found['network_gbit_per_s']:g} Gbit/s, assumed"
        words.append(f"{seconds_text(found['network_s'])} over {network}")
    return ", ".join(words)
