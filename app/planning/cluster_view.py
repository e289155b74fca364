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
    if (result := forecast.get("cluster")) is None:
        return
    nodes = f"{result['nodes']:,} nodes" if result["nodes"] > 1 else "one node"
    gpu = str(result["gpu"]).removeprefix("NVIDIA ")
    page.head(f"FSDP2 on {nodes} of {result['gpus_per_node']} {gpu}", result["source"])
    here = (forecast.get("run") or {}).get("seconds") if forecast["fits"] else None
    there = result["run_s"] if result["fits"] else None
    first = f"to finish: {'does not fit' if here is None else duration_text(here)} here"
    if there is not None:
        faster = "" if here is None else f" ({here / there:.1f} times as fast)"
        page.wrapped(f"{first}, {duration_text(there)} there{faster}", "accent bold")
        page.wrapped(
            f"{result['steps']:,} steps of {seconds_text(result['step_s'])}, "
            f"{speed_figure(result['tokens_per_s'])} tokens/s, MFU {percent_text(result['mfu'])}; "
            f"a GPU's micro-batches in a step: {result['micro_batches_per_gpu']:,}",
            "text",
        )
    else:
        page.wrapped(f"{first}, does not fit there", "bad bold")
    parts = sorted(((size, name) for name, size in result["parts"].items()), reverse=True)
    named = ", ".join(f"{name} {bytes_text(size)}" for size, name in parts[:_PARTS])
    others = sum(size for size, _ in parts[_PARTS:])
    mark = page.glyphs.check if result["fits"] else page.glyphs.cross
    page.wrapped(
        f"{mark} memory of a GPU {of_text(result['peak_bytes'], result['budget_bytes'])}: {named}"
        + (f", others {bytes_text(others)}" if others else ""),
        "text" if result["fits"] else "bad",
    )
    if not result["fits"]:
        short = bytes_text(result["peak_bytes"] - result["budget_bytes"])
        would = (
            "would fit: " + " or ".join(result["would_fit"])
            if result["would_fit"]
            else "no single change was found that fits"
        )
        page.wrapped(f"too large by {short}; {would}", "text")
    page.wrapped(_bound(result), "dim")


def _bound(result: dict[str, Any]) -> str:
    """What bounds a step: computing, or what crosses the slower link meanwhile."""
    layers = "compiled layers" if result["compiled"] else "eager layers"
    words = [f"bound by {result['bound_by']}: compute takes {seconds_text(result['compute_s'])} a step ({layers})"]
    if result["nvlink_s"] or result["network_s"]:
        words.append("all-gather and reduce-scatter meanwhile")
    if result["nvlink_s"]:
        words.append(f"{seconds_text(result['nvlink_s'])} over NVLink")
    if result["network_s"]:
        network = f"the network, for each GPU {result['network_gbit_per_s']:g} Gbit/s, assumed"
        words.append(f"{seconds_text(result['network_s'])} over {network}")
    return ", ".join(words)
