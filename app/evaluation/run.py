"""Evaluating a run or a model folder: what is asked is made out first, then the model is opened and asked."""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

import penstock
from penstock.app.console.loading import loading
from penstock.app.console.working import say, working
from penstock.app.evaluation.svg import heat_maps
from penstock.app.runs.files import json_text
from penstock.app.sampling.sample import find_model, opened
from penstock.engine.ranks.ranks import ALONE, Ranks
from penstock.storage.files import child
from penstock.storage.files.disk import atomic_write
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import printable

if TYPE_CHECKING:
    from penstock.app.evaluation.harness import TaskNames
    from penstock.app.evaluation.queried import QueriedModel
    from penstock.engine.data.text.chat import ChatTemplate

_NAME_CHARS = 60


def evaluate(
    where: str | Path,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include_path: str | Path | None = None,
    chat: bool = False,
    system: str | None = None,
    lengths: Sequence[int] | None = None,
    depths: int = 5,
    samples: int = 2,
    answer_tokens: int = 128,
    filler: str = "essay",
    batch_tokens: int | None = None,
    seed: int = 0,
    checkpoint: str | None = None,
    gpu: str | int | None = None,
    ram: str | int | None = None,
    gpus: int | None = None,
    device: str = "auto",
    out: str | Path | None = None,
    svg: str | Path | None = None,
) -> dict[str, Any]:
    """Ask a run, by its directory or its name below runs/, or a model folder; the results, as `penstock eval --json`.

    `tasks`: of lm-evaluation-harness, or `needles`, which takes `lengths` (tokens), `depths`, `samples`,
    `answer_tokens` and `filler`. `limit`: the first documents of each task; `num_fewshot`: examples before each
    question; `include_path`: a folder of tasks; `chat`: prompts under the model's chat template, `system` before them.
    `batch_tokens`: read while weights stream by once. `checkpoint`: of a run, None its last generation; `gpu`, `ram`:
    what may be used of each, `gpu` of each of `gpus` that take batches in turns (None: all of one kind).
    Results of a run are kept in its evals/, and written to `out`; heat maps to `svg`. Raises UserError.
    """
    from penstock.app.evaluation import needles
    from penstock.app.evaluation.queried import QueriedModel
    from penstock.app.evaluation.report import Reporter
    from penstock.engine.data.needles.retrieval import FILLERS, KINDS, Haystacks
    from penstock.engine.opened_model import SCORED_TOKENS

    tasks = list(dict.fromkeys(tasks))
    options: dict[str, Any] = {"limit": limit, "num_fewshot": num_fewshot, "chat": chat, "system": system}
    options |= {"batch_tokens": SCORED_TOKENS if batch_tokens is None else batch_tokens, "seed": seed}
    if not tasks:
        raise UserError(f"--tasks: no task given; name tasks of lm-evaluation-harness, or {', '.join(needles.NAMES)}")
    if filler not in FILLERS:
        raise UserError(f"--filler {printable(filler)}: write {' or '.join(FILLERS)}")
    counts = {"limit": limit, "depths": depths, "samples": samples, "answer_tokens": answer_tokens}
    for name, value in (counts | {"batch_tokens": batch_tokens, "num_fewshot": num_fewshot, "gpus": gpus}).items():
        least = 0 if name == "num_fewshot" else 1
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    files = [None if file is None else _new_file(file, option) for file, option in ((out, "--out"), (svg, "--svg"))]
    model, run = find_model(where)
    index = _find_harness_tasks([name for name in tasks if name not in needles.NAMES], include_path)
    kinds = {kind for name in tasks for kind in needles.NAMES.get(name, ())}
    haystacks = partial(
        Haystacks,
        kinds=tuple(kind for kind in KINDS if kind in kinds),
        depths=depths,
        samples=samples,
        new_tokens=answer_tokens,
        filler=filler,
        seed=seed,
    )
    result: dict[str, Any] = {"penstock": penstock.__version__, "model": str(where), "checkpoint": checkpoint}
    result |= {"time": time.time(), "queried": tasks, "options": options, "tasks": {}, "groups": {}, "needles": None}
    began = time.perf_counter()
    how: dict[str, Any] = {"checkpoint": checkpoint, "gpu": gpu, "ram": ram, "device": device}
    asking = {"batch_tokens": options["batch_tokens"], "seed": seed}
    with (
        working("opening the model") as shown,
        _ranks(gpus, device, (model, how, asking)) as ranks,
        opened(model, **how, ranks=ranks) as given,
    ):
        reporter = Reporter(Console(file=sys.stderr), shown)
        reporter.say_all(given.take_remarks())
        queried = QueriedModel(given, **asking)
        template = _template(queried) if chat else None
        report = partial(reporter.asks, queried)
        if kinds:
            wanted = needles.default_lengths(queried.context) if lengths is None else lengths
            made = haystacks(lengths=tuple(sorted(set(wanted))))
            result["needles"] = needles.query_needles(
                queried, made, template, system, report=report, on_done=reporter.done
            )
        if index is not None:
            from penstock.app.evaluation.harness import query_tasks

            result |= query_tasks(
                queried,
                index,
                limit=limit,
                num_fewshot=num_fewshot,
                chat=template,
                system=system,
                report=report,
                say=reporter.say,
                on_done=reporter.done,
            )
        queried.close()
        reporter.say_all(given.take_remarks())
    result |= {"time": time.time(), "seconds": round(time.perf_counter() - began, 1)}
    return result | {"files": [str(file) for file in _save(result, run, *files)]}


@contextmanager
def _ranks(gpus: int | None, device: str, given: Any) -> Iterator[Ranks]:
    """The processes that ask the model, of which this is the first, and the others know what is `given`."""
    with loading():
        from penstock.engine.ranks.count import query_count
        from penstock.engine.ranks.processes import Processes
    count, visible = query_count(gpus, device)
    if count == 1:
        yield ALONE
        return
    with Processes(child.command("app.launch.rank"), count, visible) as ranks:
        ranks.tell(("eval", given))
        yield ranks


def serve(ranks: Ranks, given: Any) -> None:
    """Ask the model with the first one of `ranks`, as that says; `given`: see `_ranks`."""
    from penstock.app.evaluation.queried import QueriedModel

    model, how, asking = given
    with opened(model, **how, ranks=ranks) as opened_model:
        QueriedModel(opened_model, **asking).serve()


def _new_file(file: str | Path, option: str) -> Path:
    path = Path(file).expanduser()
    if path.is_dir():
        raise UserError(f"{option} {printable(path)}: is a folder; give a file")
    if not path.parent.is_dir():
        raise UserError(f"{option} {printable(path)}: its folder does not exist; create it first")
    return path


def _find_harness_tasks(names: list[str], include_path: str | Path | None) -> TaskNames | None:
    """The tasks that are not built in; None where there are none. UserError where no harness is, or no such task."""
    if not names:
        return None
    from penstock.app.evaluation import needles

    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            f"--tasks {printable(','.join(names))}: needs lm-evaluation-harness, which is not installed: "
            f"pip install 'penstock[eval]'; built in are {', '.join(needles.NAMES)}"
        )
    from penstock.app.evaluation.harness import find_tasks

    folder = None if include_path is None else Path(include_path).expanduser()
    return find_tasks(names, folder, tuple(needles.NAMES))


def _template(queried: QueriedModel) -> ChatTemplate:
    if queried.template is None:
        raise UserError(f"--chat: {printable(queried.tokenizer.folder)} has no chat template; leave --chat out")
    return queried.template


def _file_name(tasks: Sequence[str]) -> str:
    """Of results: what was asked, and when."""
    words = re.sub(r"[^\w.+-]+", "-", "+".join(tasks)).strip("-.")[:_NAME_CHARS] or "tasks"
    return f"{words}-{datetime.now():%Y%m%d-%H%M%S}.json"


def _save(result: dict[str, Any], run: Path | None, out: Path | None, svg: Path | None) -> list[Path]:
    """Write results to evals/ of the run and to `out`, and the heat maps to `svg`; the files written. One that
    cannot be is reported on stderr: the results are still to be shown."""
    from penstock.app.evaluation import needles

    text = json_text(result, indent=1)
    wanted = [] if run is None else [(run / "evals" / _file_name(result["queried"]), text)]
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
            say(f"{file}: not written ({error.strerror})")
    return written
