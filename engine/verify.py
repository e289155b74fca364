"""The files of a run beside its state: read whole, and checked against what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from penstock.engine.config import state_folder
from penstock.engine.data.corpus.files import verify_corpus
from penstock.engine.data.text import chat
from penstock.engine.data.text.made_tokenizer import ADDED_FOLDER, require_intact
from penstock.engine.hf.constants import CONSTANTS_FILE, verify_constants
from penstock.storage.files.errors import UserError


def verify_run_files(run_dir: Path, meta: dict[str, Any]) -> int:
    """Read and check a run's tokenizer, tokenised corpus and constants, those that are there; the bytes read. `meta`:
    the record of its committed generation. Raises UserError with a line for each damaged file."""
    tokenizer, corpus, state = run_dir / "data" / "tokenizer", run_dir / "data" / "corpus", state_folder(run_dir)
    added, template = run_dir / "data" / ADDED_FOLDER, run_dir / "data" / chat.FILE
    checks: list[tuple[Path, Callable[[], int]]] = [
        (tokenizer, lambda: require_intact(tokenizer)),
        (added, lambda: require_intact(added)),
        (corpus, lambda: verify_corpus(corpus)),
        (template, lambda: chat.verify_template(template)),
        (state, lambda: verify_constants(state / CONSTANTS_FILE, meta.get("constants"))),
    ]
    size, failures = run_checks(check for folder, check in checks if folder.exists())
    if failures:
        raise UserError("\n".join(failures))
    return size


def run_checks(checks: Iterable[Callable[[], int]]) -> tuple[int, list[str]]:
    """Carry out all checks; the bytes that they read, and what those say that raise UserError."""
    size, failures = 0, []
    for check in checks:
        try:
            size += check()
        except UserError as error:
            failures.append(str(error))
    return size, failures
