"""Makes docs/cuda-branches.md: the code that only a GPU executes, function by function, with why no CPU test does.

    make cuda-branches                                      the whole suite under coverage, then the page
    python tests/cuda_branches.py --data FILE [--data ...]  the page from coverage data that is there already
    python tests/cuda_branches.py -- -n0 tests/storage      the page from a part of the suite: for working on this file

The reasons are kept by hand in tests/cuda_reasons.py. Lines about CUDA that nothing has executed and that no reason
explains are an error, and so is a reason whose function has been executed throughout: the page cannot rot.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import coverage
from coverage.regions import code_regions

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "cuda-branches.md"
PACKAGES = ("app", "engine", "storage")
ABOUT_CUDA = re.compile(r"cuda|\bstreams?\b|event\b|pinned|pin_memory|kvikio|nvml|on_gpu|is_integrated", re.IGNORECASE)
ONLY_CUDA = frozenset({"engine/attention/torch_cuda.py", "engine/attention/flash_attn.py"})
"""Files of which every line is about CUDA."""


@dataclass(frozen=True, slots=True)
class Group:
    """The lines of one function that nothing executed."""

    file: str
    function: str
    """Qualified name in its file; "(module)" outside of any."""
    lines: tuple[int, ...]
    about_cuda: bool

    @property
    def key(self) -> str:
        return f"{self.file}:{self.function}"


def functions(source: str) -> dict[int, str]:
    """Line -> qualified name of the innermost function that it is in."""
    regions = [region for region in code_regions(source) if region.kind == "function"]
    return {line: region.name for region in regions for line in region.lines}


def groups(file: str, source: str, missing: Iterable[int]) -> list[Group]:
    """The lines of a file that were not executed, by function."""
    where, text = functions(source), source.splitlines()
    of: dict[str, list[int]] = {}
    for line in sorted(missing):
        of.setdefault(where.get(line, "(module)"), []).append(line)

    def is_about_cuda(lines: Sequence[int]) -> bool:
        """Whether lines, or the condition right above a run of them, mention CUDA."""
        above = [line - 1 for line in lines if line - 1 not in lines]
        return any(ABOUT_CUDA.search(text[line - 1].partition("#")[0]) for line in [*lines, *above] if line > 0)

    return [Group(file, name, tuple(lines), file in ONLY_CUDA or is_about_cuda(lines)) for name, lines in of.items()]


def ranges(lines: Sequence[int]) -> str:
    """1, 2, 3, 7 -> "1-3, 7"."""
    runs: list[list[int]] = []
    for line in lines:
        if runs and line == runs[-1][1] + 1:
            runs[-1][1] = line
        else:
            runs.append([line, line])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def problems(found: Sequence[Group], reasons: dict[str, str]) -> list[str]:
    """What is wrong with the reasons: groups about CUDA without one, and reasons without a group."""
    unexplained = [
        f"{group.key}: lines {ranges(group.lines)} are executed by no test, and tests/cuda_reasons.py does not say why"
        for group in found
        if group.about_cuda and group.key not in reasons
    ]
    there = {group.key for group in found}
    stale = [f"{key}: has a reason, but tests execute all of it: take the reason out" for key in reasons.keys() - there]
    return unexplained + sorted(stale)


PAGE_TEXT = """# Code that no test on a CPU executes

Made by `make cuda-branches`, from a run of all tests under coverage on a machine without a GPU; the
reasons are kept in `tests/cuda_reasons.py`. Whoever has a card and sees something break looks here:
these lines have run on the emulated GPU at most (`make gpu-emulated`).

## What needs a GPU: {count:,} lines in {functions} functions

| file | function | lines | which | why no CPU test runs them |
|---|---|---|---|---|
{rows}

## The rest: {rest:,} lines that have nothing to do with CUDA

Refusals of rare faults, other kernels and other versions of libraries, and lines that run in processes
which end by a signal, where coverage loses count.

| file | lines | functions |
|---|---|---|
{short}
"""


def page(found: Sequence[Group], reasons: dict[str, str]) -> str:
    """The page, in Markdown."""
    cuda = [group for group in found if group.key in reasons]
    rows = [f"| `{g.file}` | `{g.function}` | {len(g.lines)} | {ranges(g.lines)} | {reasons[g.key]} |" for g in cuda]
    others: dict[str, list[Group]] = {}
    for group in found:
        if group.key not in reasons:
            others.setdefault(group.file, []).append(group)
    counts = {file: sum(len(group.lines) for group in each) for file, each in sorted(others.items())}
    short = [f"| `{file}` | {n} | {', '.join(f'`{g.function}`' for g in others[file])} |" for file, n in counts.items()]
    figures = {"count": sum(len(group.lines) for group in cuda), "functions": len(cuda), "rest": sum(counts.values())}
    return PAGE_TEXT.format(rows="\n".join(rows), short="\n".join(short), **figures)


def read_groups(data_files: Sequence[Path]) -> list[Group]:
    """The groups of all files of the packages, from coverage data."""
    with tempfile.TemporaryDirectory() as folder:
        measured = coverage.Coverage(data_file=str(Path(folder) / "all"), source=[str(ROOT / p) for p in PACKAGES])
        measured.combine([str(path) for path in data_files], keep=True, strict=True)
        found: list[Group] = []
        for package in PACKAGES:
            for path in sorted((ROOT / package).rglob("*.py")):
                _, _, _, missing, _ = measured.analysis2(str(path))
                found += groups(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"), missing)
    return found


SETTINGS = """[run]
source =
{source}
parallel = true
data_file = {data}
concurrency = thread
patch = subprocess
sigterm = true
"""


def run_suite(folder: Path, tests: Sequence[str]) -> list[Path]:
    """Run tests under coverage, with the processes that they start; the data files."""
    settings = folder / "coverage.ini"
    source = "\n".join(f"    {ROOT / package}" for package in PACKAGES)
    settings.write_text(SETTINGS.format(source=source, data=folder / "data"), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-m", "", *tests]
    code = subprocess.run(command, cwd=ROOT, env=environment).returncode
    if code != 0:
        raise SystemExit(f"the tests failed (exit {code}): lines behind a failure would be missing for another reason")
    return sorted(folder.glob("data.*"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, action="append", help="coverage data; instead of running tests")
    parser.add_argument("tests", nargs="*", help="behind --: arguments for pytest; all tests where none is given")
    given = parser.parse_args()
    from cuda_reasons import REASONS

    with tempfile.TemporaryDirectory() as folder:
        found = read_groups(given.data or run_suite(Path(folder), given.tests))
    wrong = problems(found, REASONS)
    for line in wrong:
        print(line, file=sys.stderr)
    if wrong:
        raise SystemExit(f"{len(wrong)} groups: {PAGE.relative_to(ROOT)} is left as it is")
    PAGE.write_text(page(found, REASONS), encoding="utf-8")


if __name__ == "__main__":
    main()
