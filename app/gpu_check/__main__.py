"""Runs gpu-check's list of commands within its time limit and writes what they gave; see `make gpu-check`.

Nothing is installed or fetched. A command that fails, hangs or crashes keeps no other from running. The results folder
has gpu-check.md, gpu-check.json and every command's log, as far as they go, at any time.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NoReturn

from penstock.app.bench.process import REPOSITORY, last_words, nvidia_smi, raised_by_signals, run_limited, scratch
from penstock.app.gpu_check.commands import Command, commands
from penstock.app.gpu_check.page import figures, page
from penstock.storage.files import child

LIMIT_S = 560.0
"""The end comes inside ten minutes, the interpreter's start included."""
END_S = 5.0
"""What a command that has met its limit is given to end by itself and say what it has found."""
FAILED, BAD_INPUT = 1, 2
_LOOK = "import torch as t; print(t.__version__, t.version.cuda, t.cuda.is_available() and t.cuda.get_device_name())"
_CLOCKS = ["nvidia-smi", "--query-gpu=clocks.sm,utilization.gpu", "--format=csv,noheader,nounits", "--loop-ms=500"]
_BUSY = 50
"""Per cent of use from which a sample of the GPU's clock counts."""


class Ended(BaseException):
    """A signal asked the check to end."""


class Check:
    """The records (page.py) of a list of commands, in a results folder; those `kept` are an earlier check's."""

    def __init__(
        self, listed: Sequence[Command], folder: Path, head: dict[str, str], kept: Mapping[str, dict[str, Any]]
    ) -> None:
        self.folder, self.head = folder, head
        self.todo = [command for command in listed if command.name not in kept]
        self.records = {command.name: kept.get(command.name) or _record(command) for command in listed}
        self.write()

    def run(self, limit_s: float, started: float, scratch_in: Path | None) -> None:
        """All that is to be done within `limit_s` of `started`, by time.monotonic()."""
        with scratch(scratch_in) as folder:
            for command in self.todo:
                left_s = limit_s - (time.monotonic() - started)
                if left_s > 0:
                    self._one(command, left_s, folder)
                else:
                    self.records[command.name]["reason"] = f"the {limit_s:.0f} s were over"
        self.head["took"] = f"{time.monotonic() - started:.0f} s of {limit_s:.0f} s"
        self.write()

    def _one(self, command: Command, left_s: float, cwd: str) -> None:
        record, begun, limit_s = self.records[command.name], time.monotonic(), min(left_s, command.limit_s)
        record |= {"date": _now(), "reason": "still running when this was written"}
        self.write()
        print(f"{command.name}: {command.about}; at most {limit_s:.0f} s", flush=True)
        status, reason = "not measured", "gpu-check was ended"
        log, clocks = self.folder / f"{command.name}.log", self.folder / f"{command.name}.clocks"
        with log.open("w") as out, clocks.open("w") as samples:
            sampler = _sampler(samples)
            more = {"PYTHONUNBUFFERED": "1"}
            try:
                code = run_limited(command.command, limit_s, stdout=out, stderr=out, more=more, cwd=cwd, grace_s=END_S)
                status, reason = _outcome(code, log.read_text(errors="replace"), limit_s, left_s)
            finally:
                if sampler is not None:
                    sampler.kill()
                    sampler.wait()
                text = log.read_text(errors="replace")
                record |= {"status": status, "reason": reason, "took_s": time.monotonic() - begun, "log": text[-4000:]}
                record |= {"figures": figures(text), "clock_mhz": _clock_mhz(clocks.read_text())}
                clocks.unlink()
                self.write()
        print(f"  {status} after {record['took_s']:.0f} s{reason and f': {reason}'}", flush=True)

    def write(self) -> None:
        """Both files, whole at any time."""
        records = list(self.records.values())
        whole = json.dumps({"head": self.head, "commands": records}, indent=1) + "\n"
        for name, text in (("gpu-check.json", whole), ("gpu-check.md", page(self.head, records))):
            new = self.folder / f"{name}.new"
            new.write_text(text)
            new.replace(self.folder / name)

    def names(self, status: str) -> str:
        return ",".join(name for name, record in self.records.items() if record["status"] == status)


def _record(command: Command) -> dict[str, Any]:
    text = shlex.join(["python" if word == sys.executable else word for word in command.command])
    text = text.replace(f"{REPOSITORY}/", "").replace(str(REPOSITORY), ".")
    record: dict[str, Any] = {"name": command.name, "about": command.about, "command": text, "shows": command.shows}
    record |= {"status": "not measured", "reason": "not begun", "date": None, "took_s": None}
    return record | {"clock_mhz": None, "figures": {}, "log": ""}


def _outcome(code: int | None, log: str, limit_s: float, left_s: float) -> tuple[str, str]:
    """Status and reason of a command that ended with `code`, None where its time did."""
    found = figures(log)
    if code == 0:
        return ("not measured", str(found["reason"])) if found.get("status") == "skipped" else ("done", "")
    if code is None and limit_s == left_s:
        return "not measured", f"stopped after {limit_s:.0f} s, when the time for all commands was over"
    if code is None:
        return "failed", f"not finished after {limit_s:.0f} s, so it was stopped"
    if code < 0:
        return "failed", f"crashed by {signal.Signals(-code).name}"
    said = str(found.get("reason") or found.get("error") or last_words(log) or "it said nothing").splitlines()[0]
    if (missing := re.search(r"No module named '?([\w.]+)", said)) is not None:
        return "not measured", f"{sys.executable} has no package {missing[1]}"
    return "failed", f"exit {code}: {said}"


def _sampler(file: IO[str]) -> subprocess.Popen[bytes] | None:
    """Writes the GPU's clock and use to `file` until it is killed; None where there is no nvidia-smi."""
    try:
        return subprocess.Popen(_CLOCKS, stdout=file, stderr=subprocess.DEVNULL, preexec_fn=child.end_with_parent)
    except OSError:
        return None


def _clock_mhz(samples: str) -> int | None:
    """The median of the samples in which the GPU was busy."""
    pairs = re.findall(r"^(\d+), (\d+)$", samples, re.MULTILINE)
    busy = [int(clock) for clock, use in pairs if int(use) >= _BUSY]
    return int(statistics.median(busy)) if busy else None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _refuse(message: str) -> NoReturn:
    print(f"gpu-check: {message}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def _head(*, small: bool) -> dict[str, str]:
    """What figures depend on. Exits where torch is missing, or there is no GPU and the sizes are not small."""
    done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, env=child.environment())
    if done.returncode != 0:
        _refuse(f"no PyTorch starts in {sys.executable}: {last_words(done.stderr)}; give PYTHON=an interpreter")
    torch, cuda, gpu = done.stdout.splitlines()[-1].split(" ", 2)
    if gpu == "False" and not small:
        _refuse(f"PyTorch {torch} of {sys.executable} sees no CUDA device; run it where there is one")
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


def main(given: Sequence[str], listed: Sequence[Command] | None = None) -> int:
    """0 where nothing failed. `listed`: commands in place of gpu-check's own."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("gpu-check-results"), help="folder for the results")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for all commands; default %(default)s")
    parser.add_argument("--only", help="NAME[,NAME]: these commands; results of others in the folder are kept")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the commands; needs no GPU")
    parser.add_argument("--scratch", type=Path, help="folder on the drive to use; default the current one")
    chosen = parser.parse_args(given)
    listed = commands(small=chosen.small) if listed is None else listed
    names = [command.name for command in listed]
    wanted = names if chosen.only is None else [name.strip() for name in chosen.only.split(",")]
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"--only {unknown[0]}: no such command; choose from {', '.join(names)}")
    if chosen.scratch is not None and not chosen.scratch.is_dir():
        parser.error(f"--scratch {chosen.scratch}: no such folder; create it first")
    head = _head(small=chosen.small)
    words = [*["--small"] * chosen.small, *(["--only", chosen.only] if chosen.only else [])]
    head["command"] = f'make gpu-check ARGS="{" ".join([*words, f"--limit-s {chosen.limit_s:g}"])}"'
    folder = chosen.results.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = _kept(folder, head, wanted) if chosen.only else {}
        check = Check([c for c in listed if c.name in wanted or c.name in kept], folder, head, kept)
    except OSError as error:
        _refuse(f"--results {folder}: cannot be used ({error.strerror})")
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    try:
        with raised_by_signals(lambda number: Ended(signal.Signals(number).name), *numbers):
            check.run(chosen.limit_s, started, chosen.scratch)
    except Ended as end:
        print(f"gpu-check: ended by {end}; {folder} has what was found", flush=True)
        return FAILED
    print(f"failed: {check.names('failed') or 'nothing'}; results in {folder}/gpu-check.md and gpu-check.json")
    if left := check.names("not measured"):
        print(f"not measured: {left}; ARGS='{'--small ' * chosen.small}--only {left}' adds them to the same folder")
    return FAILED if check.names("failed") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
