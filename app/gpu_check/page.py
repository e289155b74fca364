"""What commands gave, as records, and the Markdown page of them. A figure that was not measured says so, and why.

A record is a JSON object: `name`, `about`, `command`, `limit_s`, `shows`, `status` (done, failed or not measured) with
its `reason`, `date`, `took_s`, `clock_mhz` and `figures`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.app.bench.process import markdown_table

LOG_LINES = 15
"""Of the end of the log of what is not done."""


def figures(log: str) -> dict[str, Any]:
    """All JSON objects that begin a line of what a command has printed, merged, and the outcomes of pytest's tests.

    The one case of a benchmark's report stands for the report.
    """
    found: dict[str, Any] = {}
    at, decoder = 0, json.JSONDecoder()
    while (begin := re.compile(r"^\{", re.MULTILINE).search(log, at)) is not None:
        try:
            values, at = decoder.raw_decode(log, begin.start())
            found |= values
        except ValueError:  # cut off, or something else
            at = begin.end()
    if len(found.get("cases", ())) == 1:
        found |= found.pop("cases")[0]
    return found | _outcomes(log)


def _outcomes(log: str) -> dict[str, Any]:
    """Of pytest -v -rfE: how many tests there are and came to what; a failing one with its last error."""
    collected = re.search(r"\bcollected (\d+) items?", log)
    if collected is None:
        return {}
    ended = Counter(re.findall(r"^\S+::.* (PASSED|FAILED|SKIPPED|ERROR)(?: .*)?$", log, re.MULTILINE))
    counts = {name: ended[name.upper()] for name in ("passed", "failed", "skipped", "error")}
    failing = re.findall(r"^(?:FAILED|ERROR) \S*?([^/\s]+::.*)$", log, re.MULTILINE)
    return {"collected": int(collected[1])} | counts | {"failing": {n: line for n, line in enumerate(failing, start=1)}}


def page(head: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """All of it, fit for docs/results/."""
    lines = ["# What gpu-check measured", "", *(f"- {name}: {value}" for name, value in head.items()), ""]
    rows = [(record["name"], record["about"], _status(record), _took(record)) for record in records]
    lines += markdown_table(("command", "what", "result", "took"), rows)
    for record in records:
        lines += ["", f"## {record['name']}: {record['about']}", "", "```", record["command"], "```"]
        if record["date"] is None:
            lines += [_status(record)]
            continue
        clock = record["clock_mhz"]
        lines += [
            f"{_status(record)}; {record['date']}; took: {_took(record)}; GPU clock while busy: "
            f"{'not measured' if clock is None else f'{clock} MHz'}.",
            "",
            *markdown_table(("figure", "value"), _rows(record)),
        ]
        if record["status"] != "done" and record["log"]:
            said = [line[:300] for line in record["log"].splitlines() if not line.startswith("{")]
            lines += ["", "```", *said[-LOG_LINES:], "```"]
    return "\n".join(lines) + "\n"


def _status(record: Mapping[str, Any]) -> str:
    why = " ".join(str(record["reason"] or "").split())[:300]
    return f"{record['status']}: {why}" if why else str(record["status"])


def _took(record: Mapping[str, Any]) -> str:
    return "not measured" if record["took_s"] is None else f"{record['took_s']:.0f} s"


def _rows(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Figures by dotted name, those that the command shows; of each that is not there the reason."""
    flat = dict(_flat("", record["figures"]))
    given = record["reason"] or "this machine gives none"
    missing = f"not measured: {' '.join(str(given).split())[:200]}"
    for name in record["shows"].split():
        there = {key: value for key, value in flat.items() if key == name or key.startswith(f"{name}.")}
        for key, value in (there or {name: None}).items():
            yield key, missing if value is None else _text(key, value)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = dict(enumerate(value, start=1))
    if isinstance(value, dict) and (value or not name):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    else:
        yield name, value


def _text(name: str, value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(_text(name, each) for each in value) or "none"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "none" if value in ("", {}) else str(value)
    for ending, unit, scale in _UNITS:
        if re.search(ending, name):
            return f"{value / scale:,.4g} {unit}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


_UNITS = (
    (r"bytes_per_s$", "GB/s", 1e9),
    (r"bytes(\.|$)|tiers\.\w+\.(planned|measured)$", "GiB", 2**30),
    (r"flops$", "TFLOP/s", 1e12),
    (r"tflops(\.|$)", "TFLOP/s", 1),
    (r"(?<!per)_s(\.(planned|measured|cuda|cpu))?$", "s", 1),
)
"""Endings of names, and how their figures are written."""
