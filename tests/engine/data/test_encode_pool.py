"""Processes give the tokens that one process gives, in order, and leave nothing behind however they end."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.engine.config import DataConfig
from penstock.engine.data import encode_pool
from penstock.engine.data.encode import Encoder
from penstock.engine.data.encode_pool import encode_all
from penstock.engine.data.samples import Conversation, Text
from penstock.engine.data.tokenizer import open_trained, train_tokenizer
from penstock.storage.errors import UserError

TEMPLATE = """\
{% for m in messages %}{% if m['role'] == 'raise' %}{{ raise_exception('no such role') }}{% endif %}\
<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture
def two_processors(monkeypatch):
    """And batches so small that the processes begin at once."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for name, value in (("BATCH_CHARS", 2000), ("SERIAL_BATCHES", 1), ("_SHARE_CHARS", 1500)):
        monkeypatch.setattr(encode_pool, name, value)


@pytest.fixture
def tokenizer(tmp_path):
    folder = train_tokenizer(
        [f"word {i} of many, and <user> too" for i in range(50)], 300, tmp_path / "tokenizer"
    ).folder
    (folder / "template.jinja").write_text(TEMPLATE)
    return open_trained(folder)


def encoder(tokenizer, bad_rows="refuse"):
    template = str(tokenizer.folder / "template.jinja")
    return Encoder(DataConfig(source="messages", path="x", chat_template=template, bad_rows=bad_rows), tokenizer)


def conversations(count, bad=()):
    for i in range(count):
        asked = {"role": "user", "content": f"what is {i}? " * (1 + i % 7)}
        answer = {"role": "assistant" if i not in bad else "user", "content": f"it is {i * i}"}
        yield Conversation(f"file:{i + 1}", [asked, answer])


def plain(encoded):
    return [(e.where, e.ids.tolist(), None if e.weights is None else e.weights.tolist(), e.last) for e in encoded]


def processes():
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def test_the_tokens_are_those_of_one_process_in_order_and_bad_rows_are_counted_once(tokenizer, two_processors):
    before, seen = processes(), set()
    bad = {1, 30, 90, 199}
    found, counted = [], encoder(tokenizer, "skip")
    for one in encode_all(counted, conversations(200, bad)):
        found.append(one)
        seen |= processes()
    assert len(seen - before) == 2
    assert processes() <= before
    alone = encoder(tokenizer, "skip")
    assert plain(found) == plain(alone.encode(list(conversations(200, bad))))
    count, first = counted.bad.take()
    assert (count, first) == alone.bad.take()
    assert count == 4


def test_what_is_wrong_is_said_as_one_process_says_it(tokenizer, two_processors):
    before = processes()
    with pytest.raises(UserError) as alone:
        encoder(tokenizer).encode(list(conversations(200, {150})))
    with pytest.raises(UserError) as error:
        list(encode_all(encoder(tokenizer), conversations(200, {150, 170})))
    assert str(error.value) == str(alone.value)
    assert "file:151: " in str(error.value)
    assert processes() <= before


def test_a_process_that_is_killed_fails_the_run_and_takes_the_others_along(tokenizer, two_processors):
    before = processes()
    stream = encode_all(encoder(tokenizer), conversations(800))
    for _ in range(100):
        next(stream)
    for pid in processes() - before:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(UserError, match="was killed by signal 9"):
        list(stream)
    assert processes() <= before


def test_plain_text_and_a_few_conversations_need_no_process(tokenizer, two_processors, monkeypatch):
    monkeypatch.setattr(encode_pool, "_Worker", lambda *_: pytest.fail("a process began"))
    texts = [Text(f"file:{i}", f"word {i} of many " * 20) for i in range(100)]
    assert len(list(encode_all(Encoder(DataConfig(), tokenizer), iter(texts)))) == 100
    assert len(list(encode_all(encoder(tokenizer), conversations(3)))) == 3
