"""`make gpu-check`: ten minutes of a card, a list of commands by worth, each with a limit and in a process of its own.

Nothing is installed or fetched. A command that fails, hangs or crashes keeps no other from running. The results folder
has gpu-check.md, fit for docs/results, gpu-check.json with all that was printed, and every command's log, as far as
they go, at any time.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.parts.process import ENVIRONMENT, REPOSITORY, command, nvidia_smi
from penstock.app.bench.process import last_words, markdown_table, raised_by_signals, run_limited, scratch
from penstock.storage.files import child
from penstock.storage.files.errors import UserError


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    about: str
    command: list[str]
    limit_s: float
    """Ends what hangs; it is no estimate of what the command takes."""
    shows: str
    """Names in the JSON that it prints that go into the page, with all below them; gpu-check.json has everything."""


_STEP = "model label tokens_per_s step_s mfu hfu ratio ratio_once exposed_io compute_idle attention_tflops"
_STEP += " matmul_tflops attention_executed_over_once tiers"
TESTS = ("pinned_arena", "gpu_training", "gpu_readers", "gpu_attention", "gpu_validation", "gpu_bench")
"""Files of tests/gpu, test_*.py, most telling first."""
PLANS = ("268m-ram", "268m-nvme", "268m-gpu", "268m-64k", "moe", "218m-windowed", "268m-fp32")
"""Of `bench plan`'s cases, those at the end of the list."""


def commands(*, small: bool) -> list[Command]:
    """All of them; `small` gives each a size that takes seconds on any machine, and whose figures say nothing."""
    tiny = ["--small"] if small else []

    def step(case: str, about: str, limit_s: float, more: str = "") -> Command:
        return Command(case, about, command("shapes", case, *tiny), limit_s, f"{_STEP} {more}")

    def plan(case: str, about: str = "a plan against its run") -> Command:
        words = child.command("app.cli.main", "bench", "plan", "--case", case, *tiny, "--json")
        return Command(f"plan-{case}", about, words, 60, "state bound_by tiers step_s")

    pytest = [sys.executable, "-P", "-m", "pytest", "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
    pytest += ["-o", "addopts=", "-o", "faulthandler_timeout=60", f"--rootdir={REPOSITORY}"]
    pytest += [str(REPOSITORY / "tests" / "gpu" / f"test_{name}.py") for name in (TESTS[:1] if small else TESTS)]
    device, smoke = (command(name, *tiny) for name in ("device", "smoke"))
    result = "machine packages memory matmul_flops links attention reads pinned compile_s"
    trained = "model parameters state_bytes penstock plain wrong"
    drive = "drives.1.read_bytes_per_s drives.1.write_bytes_per_s drives.1.size_bytes"
    size = ["--size", "64MiB", "--chunk", "1MiB"] if small else ["--size", "1GiB"]
    storage = child.command("app.cli.main", "bench", "storage", ".", *size, "--rounds", "1", "--json")
    listed = [
        Command("device", "what this machine is and what works on it", device, 100, result),
        Command("smoke", "six steps through all three tiers beside plain PyTorch", smoke, 130, trained),
        Command("tests", "tests/gpu", pytest, 150, "collected passed failed error skipped failing"),
        step("long-7b", "a step of Qwen2.5-7B's shape at 524,288 tokens against its kernels alone", 120),
        step("short", "a step of Llama-3-8B's shape at 8,192 tokens", 150, "kernel_idle best_plain_ratio plain"),
        plan("268m-tiers", "a plan against its run, state in all three tiers"),
        plan("268m-64k-streamed", "a plan against its run, long context with a streamed window"),
        Command("drive", "this folder's drive", [*device, "--drive"], 60, drive),
        Command("storage", "the NVMe tier against raw I/O", storage, 60, "read_ratio write_ratio"),
        # What is left of the time is for these; --only begins with them.
        step("tiers", "the largest model whose state this machine holds, spilled to NVMe", 150),
        step("short-24gb", "the same as short within 24 GiB", 120),
        step("long-24gb-7b", "the same as long-7b within 24 GiB", 120),
        step("long-8b", "a step of Llama-3-8B's shape at 524,288 tokens", 120),
        step("short-32b", "a step of Qwen3-32B's shape at 8,192 tokens", 150, "best_plain_ratio plain"),
        step("long-24gb-8b", "the same as long-8b within 24 GiB", 120),
        *map(plan, PLANS),
    ]
    # An emulated card and the compilers of two cores are slow.
    return [replace(each, limit_s=5 * each.limit_s) for each in listed] if small else listed


# ---------------------------------------------------------------------- running them

LIMIT_S = 560.0
"""The end comes inside ten minutes, the interpreter's start included."""
END_S = 5.0
"""What a command that has met its limit is given to end by itself and say what it has found."""
_LOOK = "import torch as t; print(t.__version__, t.version.cuda, t.cuda.is_available() and t.cuda.get_device_name())"
_CLOCKS = ["nvidia-smi", "--query-gpu=clocks.sm,utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=500"]
_BUSY = 50
"""Per cent of use from which a sample of the GPU's clock counts."""


class Ended(BaseException):
    """A signal asked the check to end."""


def main(
    results: Path = Path("gpu-check-results"),
    limit_s: float = LIMIT_S,
    only: str | None = None,
    small: bool = False,
    scratch: Path | None = None,
) -> None:
    """Run the list within --limit-s seconds; exit code 1 where something failed.

    --results: folder for what they gave. --only NAME[,NAME]: these commands; results of others in the folder are kept.
    --small: tiny sizes, to try the commands without a GPU. --scratch: a folder on the drive to use; default the
    current one.
    """
    sys.exit(check(commands(small=small), results, limit_s=limit_s, only=only, small=small, scratch_in=scratch))


def check(
    listed: Sequence[Command],
    results: Path,
    *,
    limit_s: float = LIMIT_S,
    only: str | None = None,
    small: bool = False,
    scratch_in: Path | None = None,
) -> int:
    """0 where nothing failed, 1 otherwise. Raises UserError for options or a machine that cannot be used."""
    started = time.monotonic()
    names = [each.name for each in listed]
    wanted = names if only is None else [name.strip() for name in only.split(",")]
    if unknown := [name for name in wanted if name not in names]:
        raise UserError(f"--only {unknown[0]}: no such command; choose from {', '.join(names)}")
    if scratch_in is not None and not scratch_in.is_dir():
        raise UserError(f"--scratch {scratch_in}: no such folder; create it first")
    head, folder = _head(small=small), results.resolve()
    words = [*["--small"] * small, *(["--only", only] if only else []), f"--limit-s {limit_s:g}"]
    head["command"] = f'make gpu-check ARGS="{" ".join(words)}"'
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = _kept(folder, head, wanted) if only else {}
        records = {each.name: kept.get(each.name) or _record(each) for each in listed if each.name in {*wanted, *kept}}
        _write(folder, head, records)
    except OSError as error:
        raise UserError(f"--results {folder}: cannot be used ({error.strerror})") from None
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    try:
        with (
            raised_by_signals(lambda number: Ended(signal.Signals(number).name), *numbers),
            scratch(scratch_in) as cwd,
        ):
            for each in (each for each in listed if each.name in records and each.name not in kept):
                left_s = limit_s - (time.monotonic() - started)
                if left_s > 0:
                    _one(each, left_s, cwd, folder, head, records)
                else:
                    records[each.name]["reason"] = f"the {limit_s:.0f} s were over"
    except Ended as end:
        print(f"gpu-check: ended by {end}; {folder} has what was found", flush=True)
        return 1
    head["took"] = f"{time.monotonic() - started:.0f} s of {limit_s:.0f} s"
    _write(folder, head, records)
    failed, left = (
        ",".join(name for name, record in records.items() if record["status"] == status)
        for status in ("failed", "not measured")
    )
    print(f"failed: {failed or 'nothing'}; results in {folder}/gpu-check.md and gpu-check.json")
    if left:
        print(f"not measured: {left}; ARGS='{'--small ' * small}--only {left}' adds them to the same folder")
    return 1 if failed else 0


def _head(*, small: bool) -> dict[str, str]:
    """What figures depend on. UserError where torch is missing, or there is no GPU and the sizes are not small."""
    done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"no PyTorch starts in {sys.executable}: {last_words(done.stderr)}; give PYTHON=an interpreter")
    torch, cuda, gpu = done.stdout.splitlines()[-1].split(" ", 2)
    if gpu == "False" and not small:
        raise UserError(f"PyTorch {torch} of {sys.executable} sees no CUDA device; run it where there is one")
    said = {name: nvidia_smi(field) for name, field in (("driver", "driver_version"), ("GPU clock", "clocks.max.sm"))}
    head = {"GPU": "none" if gpu == "False" else gpu, "torch": f"{torch}, CUDA: {cuda}", "date": _now()}
    head |= {name: value or "not measured: nvidia-smi says nothing" for name, value in said.items()}
    return head | ({"sizes": "small: the figures say nothing about this machine"} if small else {})


def _kept(folder: Path, head: Mapping[str, str], wanted: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What an earlier check of this machine in the same folder has of commands that are not wanted now."""
    try:
        earlier = json.loads((folder / "gpu-check.json").read_text())
        same = all(earlier["head"].get(name) == head.get(name) for name in ("GPU", "torch", "driver", "sizes"))
        return {r["name"]: r for r in earlier["commands"] if r["date"] and r["name"] not in wanted} if same else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _record(each: Command) -> dict[str, Any]:
    """What is known of a command that has not begun."""
    text = shlex.join(["python" if word == sys.executable else word for word in each.command])
    text = text.replace(f"{REPOSITORY}/", "").replace(str(REPOSITORY), ".")
    record: dict[str, Any] = {"name": each.name, "about": each.about, "command": text, "shows": each.shows}
    record |= {"status": "not measured", "reason": "not begun", "date": None, "took_s": None}
    return record | {"clock_mhz": None, "figures": {}, "log": ""}


def _one(
    each: Command, left_s: float, cwd: str, folder: Path, head: dict[str, str], records: dict[str, dict[str, Any]]
) -> None:
    """Run a command and write its record, which says that it is running while it is."""
    record, begun, limit_s = records[each.name], time.monotonic(), min(left_s, each.limit_s)
    record |= {"date": _now(), "reason": "still running when this was written"}
    _write(folder, head, records)
    print(f"{each.name}: {each.about}; at most {limit_s:.0f} s", flush=True)
    status, reason = "not measured", "gpu-check was ended"
    log, clocks = folder / f"{each.name}.log", folder / f"{each.name}.clocks"
    with log.open("w") as out, clocks.open("w") as samples:
        try:  # samples of the GPU's clock and use, where there is an nvidia-smi
            sampler = subprocess.Popen(
                _CLOCKS, stdout=samples, stderr=subprocess.DEVNULL, preexec_fn=child.end_with_parent
            )
        except OSError:
            sampler = None
        more = ENVIRONMENT | {"PYTHONUNBUFFERED": "1"}
        try:
            code = run_limited(each.command, limit_s, stdout=out, stderr=out, more=more, cwd=cwd, grace_s=END_S)
            status, reason = _outcome(code, log.read_text(errors="replace"), limit_s, left_s)
        finally:
            if sampler is not None:
                sampler.kill()
                sampler.wait()
            text = log.read_text(errors="replace")
            record |= {"status": status, "reason": reason, "took_s": time.monotonic() - begun, "log": text[-4000:]}
            pairs = re.findall(r"^(\d+), (\d+)$", clocks.read_text(), re.MULTILINE)
            busy = [int(clock) for clock, use in pairs if int(use) >= _BUSY]
            record |= {"figures": figures(text), "clock_mhz": int(statistics.median(busy)) if busy else None}
            clocks.unlink()
            _write(folder, head, records)
    print(f"  {status} after {record['took_s']:.0f} s{reason and f': {reason}'}", flush=True)


def _outcome(code: int | None, log: str, limit_s: float, left_s: float) -> tuple[str, str]:
    """Status and reason of a command that ended with `code`, None where its time did."""
    result = figures(log)
    if code == 0:
        return ("not measured", str(result["reason"])) if result.get("status") == "skipped" else ("done", "")
    if code is None and limit_s == left_s:
        return "not measured", f"stopped after {limit_s:.0f} s, when the time for all commands was over"
    if code is None:
        return "failed", f"not finished after {limit_s:.0f} s, so it was stopped"
    if code < 0:
        return "failed", f"crashed by {signal.Signals(-code).name}"
    said = str(result.get("reason") or result.get("error") or last_words(log) or "it said nothing").splitlines()[0]
    if (missing := re.search(r"No module named '?([\w.]+)", said)) is not None:
        return "not measured", f"{sys.executable} has no package {missing[1]}"
    return "failed", f"exit {code}: {said}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _write(folder: Path, head: Mapping[str, str], records: Mapping[str, dict[str, Any]]) -> None:
    """Both files, whole at any time."""
    result = [*records.values()]
    whole = json.dumps({"head": head, "commands": result}, indent=1) + "\n"
    for name, text in (("gpu-check.json", whole), ("gpu-check.md", page(head, result))):
        new = folder / f"{name}.new"
        new.write_text(text)
        os.replace(new, folder / name)


# ---------------------------------------------------------------------- what they printed, and the page of it

LOG_LINES = 15
"""Of the end of the log of what is not done."""


def figures(log: str) -> dict[str, Any]:
    """All JSON objects that begin a line of what a command has printed, merged, and the outcomes of pytest's tests.

    The one case of a benchmark's report stands for the report.
    """
    result: dict[str, Any] = {}
    at, decoder = 0, json.JSONDecoder()
    while (begin := re.compile(r"^\{", re.MULTILINE).search(log, at)) is not None:
        try:
            values, at = decoder.raw_decode(log, begin.start())
            result |= values
        except ValueError:  # cut off, or something else
            at = begin.end()
    if len(result.get("cases", ())) == 1:
        result |= result.pop("cases")[0]
    if (collected := re.search(r"\bcollected (\d+) items?", log)) is not None:  # pytest -v -rfE
        ended = Counter(re.findall(r"^\S+::.* (PASSED|FAILED|SKIPPED|ERROR)(?: .*)?$", log, re.MULTILINE))
        failing = re.findall(r"^(?:FAILED|ERROR) \S*?([^/\s]+::.*)$", log, re.MULTILINE)
        result |= {"collected": int(collected[1])}
        result |= {name: ended[name.upper()] for name in ("passed", "failed", "skipped", "error")}
        result["failing"] = dict(enumerate(failing, start=1))
    return result


def page(head: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """All of it as Markdown. A figure that was not measured says so, and why."""
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
    missing = f"not measured: {' '.join(str(record['reason'] or 'this machine gives none').split())[:200]}"
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
