"""Preference training: the bits of the step in plain words wherever state lives, and a reference pass that a kill does
not harm."""

import json
import math
import multiprocessing
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import comparisons
import pytest
import tiny
import torch
from killed import die_at_call
from samples import cases, samples

from penstock.engine import reference_logps
from penstock.engine.attention.spans import Documents, prefixes_of
from penstock.engine.config import AdapterConfig, PreferenceConfig
from penstock.engine.forecast.problem import LOGITS_BYTES
from penstock.engine.model.reference import Training
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.sequences import totals_of
from penstock.engine.model.tokens import MicroBatch
from penstock.engine.objectives.base import OBJECTIVES
from penstock.engine.objectives.sequences import CHOSEN, REJECTED, SIDE
from penstock.engine.optim.base import MASTER
from penstock.engine.session import Session
from penstock.storage.files.errors import UserError

PLACES: dict[str, dict[str, Any]] = {
    "GPU": {},
    "NVMe, in groups": {"gpu": tiny.FLOOR, "ram": tiny.FLOOR, "group": 1},
    "some on every tier": {"gpu": 1_100_000, "ram": 750_000},
    "keys in pieces": {"gpu": tiny.FLOOR, "ram": tiny.FLOOR, "streamed": True},
}
"""Where state and activations are, and with how many micro-batches at a time."""
HOW = {
    f"{objective}, {place}": (objective, place) for objective in ("dpo", "orpo", "kto", "reward") for place in PLACES
}


def opened(folder: Path, objective: str, **options: Any) -> Session:
    """A session of a small model on rows in the order of their file, ready to step."""
    rows = comparisons.verdicts(16) if objective == "kto" else comparisons.pairs(16)
    folder.mkdir(exist_ok=True)
    path = comparisons.write(folder / "rows.jsonl", rows)
    settings = {"objective": objective, "global_batch_size": 4, "chunk_tokens": 25} | options.pop("train", {})
    given: dict[str, Any] = {"m": tiny.model(vocab_size=None), "t": tiny.training(**settings)}
    session = tiny.session(
        folder, d=comparisons.data(path, sequence_length=256), **given | options, preference=PreferenceConfig(beta=0.4)
    )
    with own_cache(folder):
        assert reference_logps.complete(session, tiny.Silent())
    return session


@contextmanager
def own_cache(folder: Path) -> Iterator[None]:
    """Nothing is shared with runs in other folders, by this process or one that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", f"{folder}-cache")
        yield


def trimmed(stream: MicroBatch) -> MicroBatch:
    """Without its padding, which the engine does not compute."""
    end, tensors = stream.num_filled, ("ids", "labels", "positions", "weights", "prompts")
    cut = {name: None if (all_ := getattr(stream, name)) is None else all_[:end] for name in tensors}
    documents = Documents(stream.documents[: len(stream.lengths)], prefixes_of(stream.documents))
    return replace(stream, documents=documents, filled=None, **cut)


@pytest.mark.parametrize(
    "name",
    cases(
        HOW,
        "dpo, NVMe, in groups",
        "kto, some on every tier",
        "orpo, GPU",
        "reward, NVMe, in groups",
        "dpo, keys in pieces",
    ),
)
def test_the_engine_gives_the_references_bits(tmp_path: Path, name: str) -> None:
    """Also where a pair's second answer goes on from a prompt that is some chunks away."""
    objective, place = HOW[name]
    placed = {key: value for key, value in PLACES[place].items() if key != "group" or objective != "kto"}
    with opened(tmp_path, objective, train={"micro_batch_size": 1}, **placed) as session:
        spec, train, cursor = session.spec, session.recipe.train, session.loader.cursor
        runner = ModelRunner(spec, device="cpu", dtype=torch.float32)
        training = Training(runner, train, tiny.parameters(session.store, spec), session.objective)
        training.forward_backward.keywords["in_pieces"] = session.plan.streamed
        chunk = session.plan.max_chunk_tokens
        batches = [[trimmed(stream) for stream in session.loader.next_step()] for _ in range(2)]
        assert objective == "kto" or all(prefixes_of(s.documents) for batch in batches for s in batch)
        expected = [(*training.step(batch, chunk, LOGITS_BYTES["cpu"]), training.measured) for batch in batches]
        session.loader.seek(cursor)
        tiny.delay(session, random.Random(name))
        steps = tiny.steps(session, 2)
        weights = tiny.parameters(session.store, spec)
    assert [(m.loss, m.measured) for m in steps] == [(loss, measured) for loss, _, measured in expected]
    assert [m.grad_norm for m in steps] == [pytest.approx(norm, rel=1e-6) for _, norm, _ in expected]
    masters = training.by_name({buffer: kinds[MASTER] for buffer, kinds in training.state.items()})
    assert all(torch.equal(weight, masters[parameter]) for parameter, weight in weights.items())
    if objective == "dpo":
        assert steps[0].loss == pytest.approx(0.6931471805599453, abs=1e-12)  # the model is its own reference
        assert steps[1].measured["rewards/margins"] != 0
    if objective in ("dpo", "kto"):
        assert all(0 < m.measured["entropy"] < math.log(300) for m in steps)
        assert {"logits/chosen", "logits/rejected"} <= steps[0].measured.keys()


def run(folder: Path, observer: tiny.Silent, *, resume: bool = False, **sections: Any) -> None:
    """Three steps of DPO with LoRA, a generation each, with pairs held out."""
    path = comparisons.write(folder.with_suffix(".jsonl"), comparisons.pairs(14))
    train: dict[str, Any] = {"objective": "dpo", "steps": 3, "global_batch_size": 2, "validate_every": 3}
    given: dict[str, Any] = {
        "model": tiny.model(vocab_size=None),
        "data": comparisons.data(path, sequence_length=192, validation_documents=4),
        "adapter": AdapterConfig(method="lora", rank=2),
        "train": tiny.training(**train),
    }
    with own_cache(folder):
        tiny.train_run(folder, observer, resume=resume, **given | sections)


def outcome(folder: Path, observer: tiny.Silent) -> tuple[Any, ...]:
    """What a run comes to."""
    measured = [(m.step, m.loss, m.measured) for m in observer.metrics[-1:] + observer.validations]  # type: ignore[operator]
    return measured, tiny.digest_of(folder), (folder / "data" / "reference" / "logps.bin").read_bytes()


def dying(folder: Path, function: str, moment: int) -> None:
    """Train, and die by SIGKILL at the call of that number of a function of the reference pass."""
    die_at_call(reference_logps, function, moment)
    run(folder, tiny.Silent())


MOMENTS = [
    (function, moment) for function, count in (("_append", 7), ("atomic_write", 2)) for moment in range(1, count + 1)
]


@pytest.mark.sampled
def test_kill_9_in_the_reference_pass_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight = tiny.Silent()
    run(tmp_path / "straight", straight)
    expected = outcome(tmp_path / "straight", straight)
    processes = multiprocessing.get_context("forkserver")
    chance = random.Random(0)
    for function, moment in chance.sample(MOMENTS, samples(2, len(MOMENTS))):
        folder, observer = tmp_path / f"{function}-{moment}", tiny.Silent()
        child = processes.Process(target=dying, args=(folder, function, moment))
        child.start()
        child.join(600)
        assert child.exitcode == -signal.SIGKILL
        torn = folder / "data" / "reference" / "passes.jsonl"
        if torn.exists():  # a line that a power cut has torn counts as none
            with torn.open("ab") as stream:
                stream.write(b'{"logps": [[0, 0, ')
        run(folder, observer, resume=True)
        assert outcome(folder, observer) == expected, (function, moment)
        assert not torn.exists()


def test_a_run_that_is_stopped_in_the_reference_pass_goes_on(tmp_path: Path) -> None:
    class Impatient(tiny.Silent):
        def wanted(self) -> Any:
            return "stop"

    straight, observer = tiny.Silent(), tiny.Silent()
    run(tmp_path / "straight", straight)
    run(tmp_path / "run", Impatient())
    assert not (tmp_path / "run" / "data" / "reference" / "logps.bin").exists()
    run(tmp_path / "run", observer, resume=True)
    assert outcome(tmp_path / "run", observer) == outcome(tmp_path / "straight", straight)


@pytest.mark.parametrize("objective", ["dpo", "orpo"])
def test_a_validation_reports_the_statistics_of_its_own_answers(tmp_path: Path, objective: str) -> None:
    """With nothing learned between, those of a step on the same pairs."""
    path = comparisons.write(tmp_path / "rows.jsonl", [comparisons.pairs(1)[0]] * 8)
    train = tiny.training(objective=objective, steps=1, global_batch_size=2, validate_every=1, validate_first=True)
    observer = tiny.Silent()
    data = comparisons.data(path, sequence_length=192, validation_documents=4)
    run(tmp_path / "run", observer, train=train, data=data)
    names = {"entropy", "logits/chosen", "logits/rejected"} if objective == "dpo" else set()
    trained, before = observer.metrics[0].measured, observer.validations[0].measured
    assert {name for name in trained if name.partition("/")[0] in ("entropy", "logits")} == names
    assert {name: before[name] for name in names} == pytest.approx({name: trained[name] for name in names}, rel=1e-6)


@pytest.mark.parametrize("how", ["gone", "another", "torn"])
def test_a_reference_that_is_lost_or_damaged_is_named(tmp_path: Path, how: str) -> None:
    run(tmp_path / "run", tiny.Silent(stop_after=1))
    folder = tmp_path / "run" / "data" / "reference"
    values, meta = folder / "logps.bin", folder / "logps.json"
    if how == "gone":
        meta.unlink()
    elif how == "torn":
        values.write_bytes(values.read_bytes()[:-8])
    else:
        meta.write_text(json.dumps({"corpus": "x", "mismatched": False, "crc": "00000000"}))
    why = "are gone, and the model has changed since" if how == "gone" else "damaged: .*restore the folder"
    with pytest.raises(UserError, match=f"reference.*{why}"):
        run(tmp_path / "run", tiny.Silent(), resume=True)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "texts": (
        {"train": tiny.training(objective="next_token")},
        "next_token takes texts, and the data are pairs of ans",
    ),
    "verdicts": (
        {"train": tiny.training(objective="kto")},
        "kto takes answers with a verdict each, and the data are p",
    ),
    "unknown": ({"train": tiny.training(objective="dop")}, "'dop' is unknown; did you mean 'dpo'"),
    "form": (
        {"preference": PreferenceConfig(loss_type="kto")},
        "preference.loss_type: 'kto' does not belong to train.objective=dpo; choose from sigmoid",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_together_is_refused(tmp_path: Path, name: str) -> None:
    sections, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", tiny.Silent(), **sections)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"packing": "wrap"},
            "data.packing: wrap cuts documents .* and there are answers that are compared; set data.pac",
        ),
        ({"sequence_length": 24}, r"data.sequence_length: 24, but \d+ answers that are compared are longer"),
    ],
    ids=["wrapped", "long"],
)
def test_pairs_are_never_cut(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = comparisons.write(tmp_path / "rows.jsonl", comparisons.pairs(14))
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", tiny.Silent(), data=comparisons.data(path, **{"sequence_length": 192} | changes))
    observer = tiny.Silent()
    data = comparisons.data(path, sequence_length=24, long_documents="drop")
    run(tmp_path / "dropped", observer, data=data, train=tiny.training(objective="orpo", steps=1))
    assert any("longer than the context and left out" in message for message in observer.messages)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_verdicts_that_alternate_are_no_pairs(objective: str) -> None:
    """A wanted and an unwanted answer in turn, as a pair's sides are: each counts by itself."""
    stream = replace(MicroBatch.of([[1, 2, 3]] * 4), columns={SIDE: torch.tensor([CHOSEN, REJECTED] * 2).double()})
    assert totals_of([stream], OBJECTIVES[objective]).compared == (2 if objective == "dpo" else 4)
