"""The page docs/results/architectures.md, of what `penstock check --all --json` has printed."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from penstock.app.bench.process import markdown_table
from penstock.app.console.loading import versions
from penstock.app.planning.check_view import IN_CHUNKS, IN_DOCUMENTS, REFUSED, counts, short_reason, verdict
from penstock.engine.machine.platforms import usable_cpus

_EXPLAINED = """\
Each type's default config, without dropout, shrunk, with random weights, in float32: two sequences of several
documents, compared with transformers' own forward and autograd. The error is the worst parameter's |g - ref| / |ref| in
the L2 norm, where norms below 1e-3 of the largest one count as that. An error above 1e-5 is refused, unless it is
float32's rounding: then the same comparison in float64 is within it, and its error is the one listed."""
_SECTIONS = {
    IN_CHUNKS: "Each document of a sequence is cut into chunks; memory does not grow with its length.",
    IN_DOCUMENTS: "Layers carry a state from token to token: a document is one chunk, and the longest one must fit.",
}


def main(results: Annotated[Path, typer.Argument(metavar="FILE", help="What the command has printed.")]) -> None:
    """Print the page."""
    print(page([json.loads(line) for line in results.read_text().splitlines()], _about()))


def page(lines: Sequence[Mapping[str, Any]], about: str) -> str:
    """The page in Markdown; `about`: when and with what the lines were made."""
    results = sorted(lines[:-1], key=lambda result: str(result["model_type"]))
    found = counts(results)
    result = [f"# The self-check on all {len(results)} types of language model of transformers, CPU", "", about, ""]
    result += [_EXPLAINED, "", "```", "penstock check --all --json > all.jsonl"]
    result += ["python -m benchmarks architectures all.jsonl > docs/results/architectures.md", "```", ""]
    result += markdown_table(["verdict", "model types"], [(name, str(number)) for name, number in found.items()])
    for name, text in _SECTIONS.items():
        passed = [each for each in results if verdict(each) == name]
        rows = [(each["model_type"], f"{each['max_rel_error']:.1e}") for each in passed]
        result += ["", f"## {name[0].upper()}{name[1:]}", text, ""]
        result += markdown_table(["model type", "max relative error"], rows)
    result += ["", "## Refused, and why", ""]
    result += markdown_table(["reason", "model types"], _reasons(each for each in results if verdict(each) == REFUSED))
    return "\n".join(result)


def _reasons(refused: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Each reason and the types that it holds for, the most frequent first."""
    types: dict[str, list[str]] = {}
    for each in refused:
        reason = re.split(r";(?![^(]*\))", short_reason(each))[0]  # not what to do instead
        types.setdefault(reason, []).append(each["model_type"])
    return [(reason, ", ".join(names)) for reason, names in sorted(types.items(), key=lambda item: -len(item[1]))]


def _about() -> str:
    found = ", ".join(f"{name} {version}" for name, version in versions("torch", "transformers").items())
    kernels = torch.backends.cpu.get_cpu_capability()
    return f"{datetime.date.today()}, {found}, {usable_cpus()} CPU cores ({kernels})."
