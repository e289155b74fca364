"""Reference log-probabilities that runs share: taken by a run that would find the same to the bit, and by no other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import comparisons
import numpy as np
import pytest
import tiny

from penstock.engine import shared_logps
from penstock.engine.config import AdapterConfig, BudgetConfig, PreferenceConfig

TAKEN = "reference log-probabilities: taken from an earlier run"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where they are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "reference"


def sections(rows: Path, objective: str = "dpo") -> dict[str, Any]:
    return {
        "model": tiny.model(vocab_size=None),
        "data": comparisons.data(rows, sequence_length=192, validation_documents=4),
        "train": tiny.training(objective=objective, steps=2, global_batch_size=2, validate_every=2),
    }


def run(folder: Path, given: dict[str, Any], **options: Any) -> tiny.Silent:
    observer = tiny.Silent(**options)
    tiny.train_run(folder, observer, resume=folder.exists(), **given)
    return observer


def took(observer: tiny.Silent) -> bool:
    """Whether a run took what was shared; else it made the passes."""
    made = any(item.name == "reference log-probabilities" for item in observer.prepared)
    assert made != any(message.startswith(TAKEN) for message in observer.messages)
    return not made


def values(folder: Path) -> bytes:
    return (folder / "data" / "reference" / "logps.bin").read_bytes()


def pairs(tmp_path: Path, name: str = "rows", seed: int = 0) -> Path:
    return comparisons.write(tmp_path / f"{name}.jsonl", comparisons.pairs(14, seed))


def test_a_second_run_makes_no_pass_and_trains_to_the_same_bits(tmp_path: Path, cache: Path) -> None:
    given = sections(pairs(tmp_path))
    first = run(tmp_path / "first", given)
    # What the values do not depend on, and the same rows elsewhere.
    other = {
        "data": replace(given["data"], path=str(pairs(tmp_path, "copy"))),
        "budgets": BudgetConfig(gpu="least", ram="least"),
    }
    second = run(tmp_path / "second", given | other)
    assert (took(first), took(second)) == (False, True)
    assert tiny.digest_of(tmp_path / "first") == tiny.digest_of(tmp_path / "second")
    assert [m.loss for m in first.metrics] == [m.loss for m in second.metrics]
    assert [m.measured for m in first.validations] == [m.measured for m in second.validations]
    more = {"train": replace(given["train"], lr=1e-4, steps=3), "preference": PreferenceConfig(beta=0.7)}
    assert took(run(tmp_path / "third", given | more))
    (kept,) = cache.iterdir()
    # A run has its own: it goes on where nobody keeps what was shared.
    kept.unlink()
    before = values(tmp_path / "third")
    more["train"] = replace(more["train"], steps=4)
    assert not any(
        item.name == "reference log-probabilities" for item in run(tmp_path / "third", given | more).prepared
    )
    assert values(tmp_path / "third") == before


OTHERS: dict[str, dict[str, dict[str, Any]]] = {
    "weights": {"train": {"seed": 1}},
    "model": {"model": {"overrides": {"rms_norm_eps": 0.1}}},
    "adapter": {"adapter": {"method": "lora", "rank": 2}},
    "frozen": {"train": {"freeze": ["*embed*"]}},
    "held out": {"data": {"validation_documents": 3}},
    "row length": {"data": {"sequence_length": 200}},
    "packing": {"data": {"packing": "best_fit"}},
    "rows side by side": {"train": {"micro_batch_size": 2}},
    "chunks": {"train": {"chunk_tokens": 32}},
    "dtype": {"train": {"compute_dtype": "bfloat16"}},
    "attention in pieces": {"train": {"kv_window": "streamed"}},
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_makes_its_own(tmp_path: Path, cache: Path, name: str) -> None:
    given = sections(pairs(tmp_path)) | {"adapter": AdapterConfig()}
    assert not took(run(tmp_path / "first", given, stop_after=1))
    for section, changes in OTHERS[name].items():
        given |= {section: replace(given[section], **changes)}
    observer = run(tmp_path / "other", given, stop_after=1)
    assert not took(observer)
    assert len(list(cache.iterdir())) == 2


def test_other_answers_and_another_objective_make_their_own(tmp_path: Path, cache: Path) -> None:
    def made(name: str, rows: list[dict[str, Any]], objective: str, **options: Any) -> tiny.Silent:
        # The tokenizer of the first rows, so that only answers differ.
        tokenizer = str(tmp_path / "dpo" / "data" / "tokenizer") if (tmp_path / "dpo").exists() else None
        given = sections(comparisons.write(tmp_path / f"{name}.jsonl", rows), objective)
        given["data"] = replace(given["data"], tokenizer=tokenizer)
        return run(tmp_path / name, given | options, stop_after=1)

    rows, judged = comparisons.pairs(14), comparisons.verdicts(14)
    assert not took(made("dpo", rows, "dpo"))
    rows[3] = rows[3] | {"rejected": rows[3]["rejected"] + " mill"}
    assert not took(made("answer", rows, "dpo"))
    assert not took(made("kto", judged, "kto"))
    loss = PreferenceConfig(loss_type="apo_zero_unpaired")
    assert not took(made("no answers to other prompts", judged, "kto", preference=loss))
    # Whose answer stands behind another's prompt follows from the order.
    assert not took(made("order", judged[1:] + judged[:1], "kto"))
    assert took(made("again", judged, "kto"))
    assert len(list(cache.iterdir())) == 5


@pytest.mark.parametrize("how", ["torn", "changed", "of another", "empty", "others may write"])
def test_what_is_damaged_is_made_anew(tmp_path: Path, cache: Path, how: str) -> None:
    given = sections(pairs(tmp_path))
    run(tmp_path / "first", given, stop_after=1)
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    line, _, content = whole.partition(b"\n")
    damaged = {
        "torn": whole[:-8],
        "changed": whole[:-1] + bytes([whole[-1] ^ 1]),
        "of another": line.replace(kept.stem.encode(), b"0" * 64) + b"\n" + content,
        "empty": b"",
        "others may write": whole,
    }
    kept.write_bytes(damaged[how])
    kept.chmod(0o666 if how == "others may write" else 0o600)
    assert not took(run(tmp_path / "second", given, stop_after=1))
    assert values(tmp_path / "second") == values(tmp_path / "first")
    assert kept.read_bytes() == whole
    assert took(run(tmp_path / "third", given, stop_after=1))


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path: Path, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file in the way")
    given = sections(pairs(tmp_path))
    assert not took(run(tmp_path / "first", given, stop_after=1))
    assert not took(run(tmp_path / "second", given, stop_after=1))
    assert cache.read_text() == "a file in the way"


def test_runs_that_share_at_once_never_see_half_a_file(cache: Path) -> None:
    values = np.random.default_rng(0).normal(size=(50_000, 2))
    shared_logps.keep("digest", values)

    def write(_: int) -> None:
        for _ in range(20):
            shared_logps.keep("digest", values)

    with ThreadPoolExecutor(2) as pool:
        writing = [pool.submit(write, number) for number in range(2)]
        while not all(future.done() for future in writing):
            found = shared_logps.take("digest", len(values))
            assert found is not None
            assert np.array_equal(found, values)
    assert all(future.result() is None for future in writing)
    assert [path.name for path in cache.iterdir()] == ["digest.logps"]
    assert shared_logps.take("digest", len(values) - 1) is None
    assert shared_logps.take("another", len(values)) is None
