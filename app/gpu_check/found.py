"""How a stage's process hands over what it finds, line by line, so that what ends it loses nothing of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.app.bench.process import last_words, run_limited

_VARIABLE = "GPU_CHECK_FOUND"


def tell(values: Mapping[str, Any]) -> None:
    """Hand values to the parent; nothing happens where there is none."""
    if (path := os.environ.get(_VARIABLE)) is not None:
        with open(path, "a") as file:
            file.write(json.dumps(dict(values)) + "\n")


def run_telling(
    command: Sequence[str], limit_s: float, log: Path, found: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run a process that tells what it finds; all it prints goes to `log`.

    `found` is given what is new, some times a second. Returns `status` done, failed (with its last words as `reason`)
    or ended.
    """
    handed = log.with_suffix(".found")
    handed.write_text("")
    done = 0

    def look() -> None:
        nonlocal done
        with handed.open() as file:
            file.seek(done)
            lines = file.read()
        whole = lines.rfind("\n") + 1
        done += len(lines[:whole].encode())
        news: dict[str, Any] = {}
        for line in lines[:whole].splitlines():
            news |= json.loads(line)
        if news:  # at once, as every call writes all that is known
            found(news)

    try:
        with log.open("w") as out:
            code = run_limited(command, limit_s, stdout=out, stderr=out, more={_VARIABLE: str(handed)}, meanwhile=look)
    finally:
        handed.unlink()
    if code == 0:
        return {"status": "done"}
    last = log.read_text(errors="replace").strip()[-4000:]
    if code is None:
        return {"status": "ended", "reason": f"not finished after {limit_s:.0f} s, so it was stopped", "output": last}
    return {"status": "failed", "reason": f"exit {code}: {last_words(last) or 'no output'}", "output": last}
