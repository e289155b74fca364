"""`penstock.evaluate`: what `penstock eval` does, from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from penstock.app.sampling.sample import find_model, opened
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import printable


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
    device: str = "auto",
    out: str | Path | None = None,
    svg: str | Path | None = None,
) -> dict[str, Any]:
    """Ask a run, by its directory or its name below runs/, or a model folder; the results, as `penstock eval --json`.

    `tasks`: of lm-evaluation-harness, or `needles`, which takes `lengths` (tokens), `depths`, `samples`,
    `answer_tokens` and `filler`. `limit`: the first documents of each task; `num_fewshot`: examples before each
    question; `include_path`: a folder of tasks; `chat`: prompts under the model's chat template, `system` before them.
    `batch_tokens`: read while weights stream by once. `checkpoint`: of a run, None its last generation; `gpu`, `ram`:
    what may be used of each.
    Results of a run are kept in its evals/, and written to `out`; heat maps to `svg`. Raises UserError.
    """
    from penstock.app.evaluation.run import Wanted, described, query_all, require_possible, save
    from penstock.engine.opened_model import SCORED_TOKENS

    wanted = Wanted(
        tasks=tuple(dict.fromkeys(tasks)),
        limit=limit,
        num_fewshot=num_fewshot,
        include_path=None if include_path is None else Path(include_path).expanduser(),
        chat=chat,
        system=system,
        lengths=None if lengths is None else tuple(lengths),
        depths=depths,
        samples=samples,
        answer_tokens=answer_tokens,
        filler=cast(Any, filler),
        batch_tokens=SCORED_TOKENS if batch_tokens is None else batch_tokens,
        seed=seed,
    )
    require_possible(wanted)
    files = [None if file is None else _new_file(file, option) for file, option in ((out, "--out"), (svg, "--svg"))]
    model, run = find_model(where)

    def ask() -> Any:
        return opened(model, checkpoint=checkpoint, gpu=gpu, ram=ram, device=device)

    result = described(query_all(ask, wanted), wanted, str(where), checkpoint)
    return result | {"files": [str(file) for file in save(result, run, *files)]}


def _new_file(file: str | Path, option: str) -> Path:
    path = Path(file).expanduser()
    if path.is_dir():
        raise UserError(f"{option} {printable(path)}: is a folder; give a file")
    if not path.parent.is_dir():
        raise UserError(f"{option} {printable(path)}: its folder does not exist; create it first")
    return path
