"""A step whose loss leaps is told with the documents that it was trained on, wherever they come from."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from corpora import loader_of, make_corpus

from penstock.engine.config import DataConfig
from penstock.engine.data.corpus import prepare_text
from penstock.engine.data.documents import MOST_DOCUMENTS, step_documents
from penstock.engine.data.origins import Origins, OriginsWriter
from penstock.engine.plan.plan import Chunk
from penstock.engine.runtime.failures import DivergedError
from penstock.engine.runtime.health import LossSpikes
from penstock.engine.session import Session


def spikes_of(losses: list[float]) -> list[int]:
    """Which of the losses are spikes; the watch is recorded and taken up again after each."""
    watch, found = LossSpikes(), []
    for step, loss in enumerate(losses):
        watch = LossSpikes(json.loads(json.dumps(watch.to_json())))
        if watch.take(loss):
            found.append(step)
    return found


def test_what_a_spike_is() -> None:
    noise = np.random.default_rng(1).normal(0, 0.05, 400)
    falling = 2.0 + 6.0 * np.exp(-np.arange(400) / 40) + noise
    assert spikes_of(falling.tolist()) == []
    leaping = falling.copy()
    leaping[[100, 300]] += 1.5
    leaping[200:] += 0.1
    assert spikes_of(leaping.tolist()) == [100, 300]
    assert spikes_of([2.0] * 30 + [2.1, 2.3]) == [31], "losses that hardly vary"
    assert spikes_of([9.0, 2.0] * 5) == [], "the mean is not known yet"
    assert spikes_of([2.0, math.nan]) == [1]
    risen = spikes_of([2.0] * 30 + [4.0] * 60)
    assert risen == [30], "of losses that stay high the first"


def test_a_record_of_something_else_begins_anew() -> None:
    values: list[Any] = [[1.0, math.nan, 1.0, 3, False], ["a", 1.0, 1.0, 3, False], [1.0, 1.0, 1.0, -1, True]]
    for record in (None, 3, [1.0], *values):
        assert LossSpikes(record).to_json() == LossSpikes().to_json()


def test_origins_are_what_was_written() -> None:
    places = ["a.jsonl:12", "a.jsonl:13", "b.parquet:row 7", "c.txt", "d:row x", "odd:row:5", "", "a.jsonl:0", ":3"]
    places += [f"a.jsonl:{10**13}"]
    writer = OriginsWriter()
    for place in places:
        writer.add(place)
    packed, names = writer.finish()
    origins = Origins.of(np.frombuffer(packed[-8 * len(places) :], dtype="<i8"), names)
    assert [origins.where(number) for number in range(len(places))] == places


@pytest.mark.parametrize("packing", ["wrap", "best_fit", "none"])
def test_a_step_names_its_documents(tmp_path: Path, packing: str) -> None:
    """Of all sources of a mixture, rows of a file and texts in a folder; in whichever way rows are filled."""
    rows, texts = tmp_path / "rows.jsonl", tmp_path / "texts"
    rows.write_text("".join(json.dumps({"text": f"row number {n} " * n}) + "\n" for n in range(1, 9)))
    texts.mkdir()
    for name in ("one", "two"):
        (texts / f"{name}.txt").write_text(f"the text called {name} " * 20)
    sources = [{"source": "jsonl", "path": str(rows)}, {"source": "text", "path": str(texts)}]
    config = DataConfig(
        source="mixture", mixture=sources, tokenizer_vocab_size=300, sequence_length=64, packing=packing
    )
    tokenizer, made = prepare_text(config, None, tmp_path / "data")
    batches = loader_of(made, 64, 2, 2, packing=packing).next_step()
    places = [(n, n // 4, n % 4, 32 * (n % 4)) for n in range(8)]
    cut = {n: Chunk(index=n, micro_batch=m, local=i, start=at, end=at + 32) for n, m, i, at in places}
    documents, count = step_documents(made, tokenizer, batches, cut, dict.fromkeys(cut, 1.0) | {4: 1000.0})
    assert count == sum(len(batch.lengths) for batch in batches) == len(documents)
    ids = [token for batch in batches for token in batch.ids.tolist()]
    for told in documents:
        start = int(made.starts[told.document]) + told.first_token
        tokens = made.tokens[start : start + told.tokens].tolist()
        assert any(ids[at : at + told.tokens] == tokens for at in range(len(ids)))
        text = tokenizer.decode(made.tokens[made.starts[told.document] : made.starts[told.document + 1]].tolist())
        if "rows.jsonl" in told.where:
            assert f"row number {told.where.rpartition(':')[2]} " in text
        else:
            assert f"called {Path(told.where).stem}" in text
        assert tokenizer.decode(tokens).strip().startswith(told.excerpt.removesuffix("...")[:10])
    losses = [told.loss for told in documents if told.loss is not None]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 10
    batch = batches[1]
    worst = [at for at, n in zip(batch.documents, batch.lengths, strict=False) if at < 32]
    assert {batch.sources[batch.documents.index(at)] for at in worst} >= {
        int(made.starts[told.document]) + told.first_token for told in documents[:1]
    }


def test_no_more_are_told_than_anybody_reads(tmp_path: Path) -> None:
    made = make_corpus(tmp_path, [[1, 2, 3]] * 200)
    loader = loader_of(made, 300)
    documents, count = step_documents(made, None, loader.next_step(), {}, {})
    assert (len(documents), count) == (MOST_DOCUMENTS, 100)
    assert all(told.loss is None and told.excerpt == "" for told in documents)


def test_a_run_tells_the_step_that_leapt_resumed_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of step 24 is told ten times as high."""
    real = Session.observe

    def observe(self: Session, step: int, loss: float) -> None:
        self._data.loss = loss * 10 if step == 24 else loss
        real(self, step, self._data.loss)

    monkeypatch.setattr(Session, "observe", observe)
    train = tiny.training(steps=26, lr=1e-4, global_batch_size=1, chunk_tokens=48)
    run: dict[str, Any] = {"train": train, "storage": tiny.storage()}
    straight, first, second = tiny.Silent(), tiny.Silent(stop_after=23), tiny.Silent()
    tiny.train_run(tmp_path / "straight", straight, **run)
    tiny.train_run(tmp_path / "parts", first, **run)
    tiny.train_run(tmp_path / "parts", second, resume=True, **run)
    assert first.spikes == []
    for told in (straight.spikes, second.spikes):
        assert [spike.step for spike in told] == [24]
        assert told[0].loss > 9 * told[0].expected
        assert told[0].num_documents == len(told[0].documents) > 0
        assert told[0].documents[0].where.startswith("random document ")
        assert told[0].words().startswith("step 24: the loss jumped to ")
    assert second.spikes[0].documents == straight.spikes[0].documents
    assert second.spikes[0].expected == straight.spikes[0].expected


def test_what_is_not_finite_names_its_documents(tmp_path: Path) -> None:
    observer = tiny.Silent()
    train = tiny.training(steps=6, lr=1e18, lr_schedule="constant", global_batch_size=1, chunk_tokens=48)
    with pytest.raises(DivergedError, match=r"step \d: the .* is not finite"):
        tiny.train_run(tmp_path, observer, train=train)
    assert [spike.step for spike in observer.spikes] == [len(observer.metrics) + 1]
    spike = observer.spikes[0]
    assert math.isnan(spike.loss)
    assert spike.documents
    assert "a value is not finite; trained on random document" in spike.words()
