"""Log-probabilities of the reference model, which is the model as it was before the first step: passes of the same
engine over all answers, once, before training.

They are kept in the run's folder `reference` beside the corpus. While they are made, `passes.jsonl` has a line for each
pass that is done, so that a run that was killed goes on behind the last one; in the end `logps.bin` has them all,
float64 [documents, 2], and `logps.json` its checksum and what they are of. A run that begins with what an earlier one
has begun with takes a copy of its values (engine/shared_logps.py).
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engine import shared_logps
from penstock.engine.config import Recipe
from penstock.engine.data.loader import DataLoader
from penstock.engine.data.packing import split_documents
from penstock.engine.events import Observer
from penstock.engine.model.sequences import sequences_of, totals_of
from penstock.engine.model.tokens import MicroBatch
from penstock.engine.objectives.sequences import MISMATCHED, REJECTED, SIDE
from penstock.engine.passes import evaluations
from penstock.engine.plan.plan import Plan
from penstock.engine.preparing import Checklist
from penstock.engine.runtime.batch import EvaluationData
from penstock.engine.session import Session
from penstock.storage.files.disk import atomic_write, make_folder, reporting
from penstock.storage.files.errors import UserError
from penstock.storage.files.sealed import hex_crc, seal, unseal
from penstock.storage.files.untrusted import parse_object, read_regular

FOLDER, VALUES, META, PASSES = "reference", "logps.bin", "logps.json", "passes.jsonl"
_MOST_META_BYTES = 1 << 16
_MOST_PASSES_BYTES = 1 << 36
_FIRST_PASS = 1 << 30
"""What the first pass is numbered: validations of the same step begin with 1."""


def complete(session: Session, observer: Observer) -> bool:
    """Give the session's batches the reference's log-probabilities, those of an earlier run or made now as far as they
    are not there; False: the observer wants the run to stop before they are.

    Raises UserError where they are damaged, or gone once training has begun.
    """
    if not session.objective.reference:
        return True
    folder, ranks = session.loader.corpus.folder.with_name(FOLDER), session.ranks
    values = ranks.of_first(lambda: _read(folder, session))
    if values is None:
        if session.step:
            raise UserError(
                f"{folder}: the reference model's log-probabilities are gone, and the model has changed since; restore "
                "the folder from a copy, or start a new run"
            )
        documents = _documents(session)
        digest = shared_logps.digest_of(session, documents)
        count = session.loader.corpus.info.num_documents
        values = ranks.of_first(lambda: shared_logps.take(digest, count))
        if values is not None:
            observer.on_message("reference log-probabilities: taken from an earlier run of this model on these answers")
        else:
            values = _make(folder, session, documents, observer)
            if values is None:
                return False
            if ranks.first:
                shared_logps.keep(digest, values)
        if ranks.first:
            _write(folder, session, values)
    session.loader.reference = values
    if session.validation is not None:
        session.validation.set_reference(values)
    return True


def _of_what(session: Session) -> dict[str, Any]:
    return {"corpus": session.loader.corpus.info.content, "mismatched": session.objective.mismatched}


def _read(folder: Path, session: Session) -> NDArray[np.float64] | None:
    """What a run has; None: nothing, or not all. UserError where it is damaged."""
    if not (folder / META).exists():
        return None
    try:
        meta = unseal(parse_object(read_regular(folder / META, most_bytes=_MOST_META_BYTES))).content
        count = session.loader.corpus.info.num_documents
        content = read_regular(folder / VALUES, most_bytes=16 * count)
        if meta.pop("crc") != hex_crc(content) or len(content) != 16 * count:
            raise ValueError(f"{VALUES} is not what was written")
        if meta != _of_what(session):
            raise ValueError("they are of other data")
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder}: damaged: {error}; restore the folder, or start a new run, which makes it anew"
        ) from error
    return np.frombuffer(content, dtype="<f8").reshape(count, 2)


def _make(
    folder: Path, session: Session, documents: Sequence[NDArray[np.int64]], observer: Observer
) -> NDArray[np.float64] | None:
    """All of them, by passes that go on behind the last one on record, and which the ranks take in turns; None where
    the run is to stop."""
    count = session.loader.corpus.info.num_documents
    header = _of_what(session) | {"plan": _shape(session.plan), "documents": count}
    header |= {"shares_prompts": session.loader.shares_prompts}
    ranks, checklist = session.ranks, Checklist(observer)

    def begun() -> tuple[int, NDArray[np.float64]]:
        values = np.full((count, 2), np.nan)
        make_folder(folder, folder.parent)
        return _on_record(folder / PASSES, header, values), values

    done, values = ranks.of_first(begun)
    record = (folder / PASSES).open("a" if done else "w") if ranks.first else nullcontext(None)
    with checklist.step("reference log-probabilities"), record as stream:
        if stream is not None and not done:
            _append(stream, header)
        batches = itertools.islice(_batches(session, documents), done, None)
        total = _num_passes(session)
        for number, found in enumerate(_found(session, batches), start=done + 1):
            for document, which, value in found:
                values[document, which] = value
            if stream is not None:
                _append(stream, {"logps": found})
            checklist.progress(number / total, f"pass {number:,} of {total:,}")
            if observer.wanted() == "stop":
                return None
    return values


def _found(session: Session, batches: Iterator[Sequence[MicroBatch]]) -> Iterator[list[tuple[int, int, float]]]:
    """What each pass finds, in their order, whoever carries it out."""
    ranks = session.ranks
    own = itertools.islice(batches, ranks.rank, None, ranks.count)
    results = (_of_pass(session, data) for data in evaluations(session, own, first=_FIRST_PASS))
    while any(found := ranks.all_of(next(results, None))):
        yield from itertools.takewhile(bool, found)


def _write(folder: Path, session: Session, values: NDArray[np.float64]) -> None:
    """Make them the run's own, durably."""
    content = values.astype("<f8").tobytes()
    make_folder(folder, folder.parent)
    atomic_write(folder / VALUES, content)
    atomic_write(folder / META, json.dumps(seal(_of_what(session) | {"crc": hex_crc(content)})) + "\n")
    (folder / PASSES).unlink(missing_ok=True)


def _shape(plan: Plan) -> list[int]:
    """What decides how texts are cut into passes, and so how sums in them are rounded."""
    return [plan.problem.chunk_tokens, plan.group, plan.problem.rows, plan.problem.row_tokens]


def _on_record(path: Path, header: dict[str, Any], values: NDArray[np.float64]) -> int:
    """How many passes are done; what they found goes into `values`. A torn last line counts as none."""
    try:
        lines = read_regular(path, most_bytes=_MOST_PASSES_BYTES).splitlines(keepends=True)
    except (OSError, ValueError):
        return 0
    done, length = 0, 0
    for number, line in enumerate(lines):
        try:
            content = unseal(parse_object(line)).content if line.endswith(b"\n") else None
        except ValueError:
            content = None
        if content is None or (number == 0 and content != header):
            break
        if number:
            for document, which, value in content["logps"]:
                values[document, which] = value
        done, length = number, length + len(line)
    os.truncate(path, length)
    return done


def _append(stream: Any, content: dict[str, Any]) -> None:
    """A line, durably."""
    with reporting(Path(stream.name), "writing"):
        stream.write(json.dumps(seal(content)) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def _documents(session: Session) -> list[NDArray[np.int64]]:
    """All of the corpus: those that are trained on, and those that are held out."""
    recipe, count = session.recipe, session.loader.corpus.info.num_documents
    held = recipe.data.validation_documents
    if held is None:
        return [np.arange(count)]
    return list(split_documents(count, held, recipe.data.seed, recipe.data.order))


def _batches(session: Session, documents: Sequence[NDArray[np.int64]]) -> Iterator[Sequence[MicroBatch]]:
    """All answers of the run, in as many micro-batches at a time as a group has."""
    for some in documents:
        loader = _loader(session, session.recipe, some)
        while batches := [loader.next_micro_batch() for _ in range(session.plan.group) if not loader.exhausted]:
            yield batches


def _num_passes(session: Session) -> int:
    """Of all answers; of many about so many."""
    rows = session.loader.num_rows + (0 if session.validation is None else session.validation.num_rows)
    return max(1, -(-rows // (session.plan.problem.rows * session.plan.group)))


def _loader(session: Session, recipe: Recipe, documents: NDArray[np.int64]) -> DataLoader:
    return DataLoader(
        session.loader.corpus,
        replace(recipe.data, order="kept"),
        recipe.train,
        vocab_size=session.spec.vocab_size,
        documents=documents,
        endless=False,
        objective=session.objective,
        share_prompts=session.loader.shares_prompts,
    )


def _of_pass(session: Session, data: EvaluationData) -> list[tuple[int, int, float]]:
    """(document, which of its two answers, log-probability) of each answer in a pass."""
    result = []
    logps = (
        sequences_of(data.micro_batches, data.scores, totals_of(data.micro_batches, session.objective)).logps().tolist()
    )
    paired, first = session.objective.compares == "pairs", 0
    for stream in data.micro_batches:
        for number, (source, side) in enumerate(zip(stream.sources, stream.columns[SIDE].tolist(), strict=True)):
            second = side == (REJECTED if paired else MISMATCHED)
            result.append((session.loader.corpus.document_at(source), int(second), logps[first + number]))
        first += len(stream.documents)
    return result
