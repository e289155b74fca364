"""Inputs of hostile_kinds.py by their numbers, each given to the real command line in a process of its own.

usage: hostile_sweep.py FROM TO      prints what was not taken as promised, and a table by kind.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import forked
from bad_inputs import A_PROCESS_BEGINS, files_of, strange
from forked import REPOSITORY, Forked, default_signals
from hostile_kinds import KINDS, Spoil, kind_of, make_goods

MORE_BYTES = 1 << 30
MORE_CPU_S = 5.0
_PATIENCE_S = 300.0
"""Of a command that waits for something without computing."""
_PROGRAM = str(Path(__file__).with_name("hostile_process.py"))
MAY_CHANGE = ("out", "back", "run", "runs", "trace.json")
"""What a command that an input did not stop has been asked to write."""


class Taken(NamedTuple):
    code: int
    printed: str
    error: str
    bytes: int
    cpu_s: float


def carried_out(arguments: list[str], folder: Path, beside: Path) -> Taken:
    """A command in `folder`; what it takes of memory and time is written `beside`."""
    usage = beside / "usage.json"
    usage.unlink(missing_ok=True)
    process = Forked(
        [sys.executable, _PROGRAM, str(usage), *arguments],
        cwd=folder,
        env=forked.BEGUN_WITH,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=default_signals,
    )
    try:
        out, err = process.communicate(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    taken = json.loads(usage.read_text()) if usage.exists() else {"bytes": 0, "cpu_s": 0.0}
    return Taken(process.returncode, out, err, taken["bytes"], taken["cpu_s"])


class Sweep:
    """Runs inputs, and compares each with the same command on files as they are."""

    def __init__(self, place: Path) -> None:
        self._place = place
        (place / "good").mkdir()
        self.good = make_goods(place / "good")
        self._usual: dict[tuple[str, str], Taken] = {}
        self.codes: dict[str, Counter[int]] = {name: Counter() for name in KINDS}

    def faults(self, number: int) -> list[str]:
        """What is wrong with how input `number` was taken; [] where nothing is."""
        kind = kind_of(number)
        with tempfile.TemporaryDirectory(dir=self._place) as place:
            folder = Path(place, "here")
            folder.mkdir()
            Path(place, "outside").write_text("mine\n")
            arguments = KINDS[kind][0](self.good, folder, Spoil(number))
            usual = self._usual_of(kind, arguments[0])
            before, good = files_of(folder), files_of(self.good)
            taken = carried_out(arguments, folder, self._place)
            changed = [
                name
                for name in strange(before, files_of(folder))
                if Path(name).parts[0] not in (MAY_CHANGE if taken.code != 2 else ("run",))
                or (taken.code == 2 and Path(name).name not in A_PROCESS_BEGINS)
            ]
            outside = sorted(os.listdir(place)) != ["here", "outside"] or files_of(self.good) != good
            outside = outside or Path(place, "outside").read_text() != "mine\n"
        self.codes[kind][taken.code] += 1
        both, error = taken.printed + taken.error, taken.error
        signalled = signal.Signals(-taken.code).name if taken.code < 0 else ""
        wrong = {
            f"ended by {signalled}": bool(signalled),
            f"exit code {taken.code}": taken.code not in (0, 1, 2) and not signalled,
            "a traceback": "Traceback (most recent" in both,
            "control characters": "\x1b]0;owned" in both or "\x1b[2J" in both,
            "not one message": taken.code == 2 and _messages(error) != 1,
            "a message without end": len(error) > 20_000,
            f"{taken.cpu_s - usual.cpu_s:.1f} s": taken.cpu_s - usual.cpu_s > MORE_CPU_S,
            f"{(taken.bytes - usual.bytes) >> 20} MiB": taken.bytes - usual.bytes > MORE_BYTES,
            "wrote outside": outside,
            f"changed {', '.join(changed)[:200]}": bool(changed),
        }
        found = [name for name, there in wrong.items() if there]
        return [*found, f"{kind} {number}: {' '.join(arguments)[:200]}", both[-3000:]] if found else []

    def _usual_of(self, kind: str, command: str) -> Taken:
        """The least that files as they are take with a command of that name."""
        if (kind, command) not in self._usual:
            with tempfile.TemporaryDirectory(dir=self._place) as place:
                arguments = KINDS[kind][0](self.good, Path(place), Spoil(None))
                arguments = arguments if arguments[0] == command else [command, *arguments[1:]]
                self._usual[kind, command] = carried_out(arguments, Path(place), self._place)
        return self._usual[kind, command]

    def table(self) -> str:
        rows = [
            f"| {kind} | {codes.total()} | {', '.join(f'{code}: {codes[code]}' for code in sorted(codes))} |"
            for kind, codes in self.codes.items()
        ]
        return "\n".join(["| kind | inputs | exit codes |", "|---|---|---|", *rows])


def _messages(error: str) -> int:
    """How many messages of the command line there are; notes go before, a question about usage is one as well."""
    return sum(line.startswith("error: ") for line in error.splitlines()) or error.count("Usage: ")


def main(first: int, stop: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
            os.environ[name] = str(Path(place, name))
            Path(place, name, "penstock").mkdir(mode=0o700, parents=True)
        os.environ |= {"OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
        forked.BEGUN_WITH |= os.environ | forked.PATHS
        sweep, failures = Sweep(Path(place)), 0
        for number in range(first, stop):
            if found := sweep.faults(number):
                failures += 1
                print("\n".join(found), "\n", flush=True)
            if number % 100 == 99:
                print(f"{number + 1 - first} of {stop - first}", file=sys.stderr, flush=True)
        print(sweep.table())
        print(f"{stop - first} inputs; {failures} were not taken as promised")


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY / "src"))
    main(int(sys.argv[1]), int(sys.argv[2]))
