"""Evaluating a run or a model folder: what is asked is made out first, then the model is opened and asked."""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

import penstock
from penstock.app.console.working import working
from penstock.app.evaluation import needles
from penstock.app.evaluation.queried import QueriedModel
from penstock.app.evaluation.report import Reporter
from penstock.app.evaluation.svg import heat_maps
from penstock.app.runs.files import json_text
from penstock.engine.data.needles.retrieval import FILLERS, KINDS, Filler, Haystacks
from penstock.engine.data.text.chat import ChatTemplate
from penstock.engine.opened_model import SCORED_TOKENS, OpenedModel
from penstock.storage.files.disk import atomic_write
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import printable

if TYPE_CHECKING:
    from penstock.app.evaluation.harness import TaskNames

_NAME_CHARS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What to ask, as `penstock eval` takes it."""

    tasks: tuple[str, ...]
    limit: int | None = None
    num_fewshot: int | None = None
    include_path: Path | None = None
    chat: bool = False
    system: str | None = None
    lengths: tuple[int, ...] | None = None
    depths: int = 5
    samples: int = 2
    answer_tokens: int = 128
    filler: Filler = "essay"
    batch_tokens: int = SCORED_TOKENS
    seed: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of needles that are asked for."""
        queried = {kind for name in self.tasks for kind in needles.NAMES.get(name, ())}
        return tuple(kind for kind in KINDS if kind in queried)

    @property
    def harness(self) -> list[str]:
        """Tasks that are not built in."""
        return [name for name in self.tasks if name not in needles.NAMES]


def require_possible(wanted: Wanted) -> None:
    """Raise UserError for options that mean nothing, before anything is loaded."""
    if not wanted.tasks:
        raise UserError(f"--tasks: no task given; name tasks of lm-evaluation-harness, or {', '.join(needles.NAMES)}")
    if wanted.filler not in FILLERS:
        raise UserError(f"--filler {printable(wanted.filler)}: write {' or '.join(FILLERS)}")
    for option, value, least in (
        ("--limit", wanted.limit, 1),
        ("--num-fewshot", wanted.num_fewshot, 0),
        ("--depths", wanted.depths, 1),
        ("--samples", wanted.samples, 1),
        ("--answer-tokens", wanted.answer_tokens, 1),
        ("--batch-tokens", wanted.batch_tokens, 1),
    ):
        if value is not None and value < least:
            raise UserError(f"{option} {value}: must be at least {least}")


def find_harness_tasks(wanted: Wanted) -> TaskNames | None:
    """The tasks that are not built in; None where there are none. UserError where no harness is, or no such task."""
    if not wanted.harness:
        return None
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"--tasks {printable(','.join(wanted.harness))}: needs lm-evaluation-harness, which is not installed: "
            f"pip install 'penstock[eval]'; built in are {', '.join(needles.NAMES)}"
        )
    from penstock.app.evaluation.harness import find_tasks

    return find_tasks(wanted.harness, wanted.include_path, tuple(needles.NAMES))


def query_all(open_model: Callable[[], AbstractContextManager[OpenedModel]], wanted: Wanted) -> dict[str, Any]:
    """Ask everything; the results as JSON, with `tasks`, `groups` and `needles`. What is going on is told on stderr."""
    require_possible(wanted)
    index = find_harness_tasks(wanted)
    result: dict[str, Any] = {"tasks": {}, "groups": {}, "needles": None}
    began = time.perf_counter()
    with working("opening the model") as shown, open_model() as model:
        reporter = Reporter(Console(file=sys.stderr), shown)
        reporter.say_all(model.take_remarks())
        queried = QueriedModel(model, batch_tokens=wanted.batch_tokens, seed=wanted.seed)
        chat = _template(queried) if wanted.chat else None
        report = partial(reporter.asks, queried)
        if wanted.kinds:
            haystacks = _haystacks(wanted, queried.context)
            result["needles"] = needles.query_needles(
                queried, haystacks, chat, wanted.system, report=report, on_done=reporter.done
            )
        if index is not None:
            from penstock.app.evaluation.harness import TaskOptions, query_tasks

            options = TaskOptions(limit=wanted.limit, num_fewshot=wanted.num_fewshot, chat=chat, system=wanted.system)
            result |= query_tasks(queried, index, options, report=report, say=reporter.say, on_done=reporter.done)
        reporter.say_all(model.take_remarks())
    return result | {"seconds": round(time.perf_counter() - began, 1)}


def _haystacks(wanted: Wanted, context: int) -> Haystacks:
    return Haystacks(
        kinds=tuple(kind for kind in KINDS if kind in wanted.kinds),
        lengths=needles.default_lengths(context) if wanted.lengths is None else tuple(sorted(set(wanted.lengths))),
        depths=wanted.depths,
        samples=wanted.samples,
        new_tokens=wanted.answer_tokens,
        filler=wanted.filler,
        seed=wanted.seed,
    )


def _template(queried: QueriedModel) -> ChatTemplate:
    if queried.template is None:
        raise UserError(f"--chat: {printable(queried.tokenizer.folder)} has no chat template; leave --chat out")
    return queried.template


def file_name(tasks: Sequence[str]) -> str:
    """Of results: what was asked, and when."""
    words = re.sub(r"[^\w.+-]+", "-", "+".join(tasks)).strip("-.")[:_NAME_CHARS] or "tasks"
    return f"{words}-{datetime.now():%Y%m%d-%H%M%S}.json"


def save(result: dict[str, Any], run: Path | None, out: Path | None, svg: Path | None) -> list[Path]:
    """Write results to the run's evals/ and to `out`, and the heat maps to `svg`; the files that were written.

    Of one that cannot be written stderr is told: the results are still to be shown.
    """
    text = json_text(result, indent=1)
    wanted = [] if run is None else [(run / "evals" / file_name(result["queried"]), text)]
    wanted += [] if out is None else [(out, text)]
    if svg is not None and result["needles"] is not None:
        maps = list(needles.maps(result["needles"]).values())
        wanted.append((svg, heat_maps(maps, f"{result['model']}: numbers found")))
    written = []
    for file, content in wanted:
        try:
            if run is not None and file.parent == run / "evals":
                file.parent.mkdir(exist_ok=True)
            atomic_write(file, content)
            written.append(file)
        except OSError as error:
            print(printable(f"{file}: not written ({error.strerror})"), file=sys.stderr)
    return written


def described(result: dict[str, Any], wanted: Wanted, model: str, checkpoint: str | None) -> dict[str, Any]:
    """The results with what was asked of which model, when and by which version."""
    about = {"penstock": penstock.__version__, "model": model, "checkpoint": checkpoint, "time": time.time()}
    names = ("limit", "num_fewshot", "chat", "system", "batch_tokens", "seed")
    options = {name: getattr(wanted, name) for name in names}
    return about | {"queried": list(wanted.tasks), "options": options} | result
