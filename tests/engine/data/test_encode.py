"""Samples to ids and weights: begin- and end-of-text tokens, completions, ids, bad samples. Processes give the tokens
that one process gives, in order, and leave nothing behind however they end. Tokenizers from anybody: what is opened and
run of them."""

import json
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from chat_templates import BOS, CHATML, EOS, make_tokenizer, unmarked
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, ByT5Tokenizer

from penstock.engine.config import DataConfig
from penstock.engine.data.corpus.prepare import prepare_corpus
from penstock.engine.data.formats.reading import read_samples
from penstock.engine.data.samples import Completion, Conversation, Encoded, Ids, Sample, Text
from penstock.engine.data.text import encode_pool
from penstock.engine.data.text.encode import Encoder, describe_specials
from penstock.engine.data.text.encode_pool import encode_all
from penstock.engine.data.text.made_tokenizer import open_trained, train_tokenizer
from penstock.engine.data.text.tokenizer import TextTokenizer, load_tokenizer
from penstock.storage.files.errors import UserError

CHAT = [{"role": "user", "content": "And 2 + 3?"}, {"role": "assistant", "content": "It is 5 ☃"}]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("plain") / "tokenizer", unmarked(CHATML)))


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("bos") / "tokenizer", puts_bos=True))


def text_of(tokenizer: TextTokenizer, sample: Sample, **more: Any) -> str:
    (found,) = Encoder(DataConfig(**more), tokenizer).encode([sample])
    return tokenizer.decode(found.ids.tolist())


def marked(tokenizer: TextTokenizer, found: Encoded) -> str:
    return tokenizer.decode([int(token) for token, weight in zip(found.ids, found.weights, strict=True) if weight])


def test_begin_of_text_where_the_tokenizer_puts_it(plain: TextTokenizer, with_bos: TextTokenizer) -> None:
    assert (plain.puts_bos, with_bos.puts_bos) == (False, True)
    sample, completion = Text("a", "2 + 3"), Completion("a", "2 +", " 3")
    ways = [(plain, "auto", ""), (plain, "on", BOS), (with_bos, "auto", BOS), (with_bos, "off", "")]
    for tokenizer, bos, begin in ways:
        assert text_of(tokenizer, sample, bos=bos) == f"{begin}2 + 3{EOS}"
        assert text_of(tokenizer, completion, bos=bos) == f"{begin}2 + 3{EOS}"
        inner = [Text("a", "2", last=False), Text("a", "3", first=False)]
        found = Encoder(DataConfig(bos=bos), tokenizer).encode(inner)  # type: ignore[arg-type]
        assert [tokenizer.decode(one.ids.tolist()) for one in found] == [f"{begin}2", f"3{EOS}"]
        assert [one.last for one in found] == [False, True]
    hf = AutoTokenizer.from_pretrained(with_bos.folder, local_files_only=True)
    (found_text,) = Encoder(DataConfig(), with_bos).encode([sample])
    assert found_text.ids.tolist() == [*hf("2 + 3")["input_ids"], hf.eos_token_id]
    assert found_text.weights is None


def test_specials_are_described(tmp_path: Path, plain: TextTokenizer, with_bos: TextTokenizer) -> None:
    def said(tokenizer: TextTokenizer, **more: Any) -> str:
        return describe_specials(tokenizer, DataConfig(**more))

    assert said(with_bos) == f"{BOS} begins each document (as the tokenizer does), {EOS} ends each document"
    assert said(plain) == f"no begin-of-text token (the tokenizer adds none), {EOS} ends each document"
    assert said(with_bos, bos="off").startswith("no begin-of-text token (data.bos says so)")
    assert said(plain, source="messages").startswith("conversations follow the chat template, ")
    assert said(plain, source="tokens").startswith("tokens are used as given")
    tokenizer = train_tokenizer(["2 + 3"], 300, tmp_path / "trained")
    assert text_of(tokenizer, Text("a", "2 + 3")) == "2 + 3<|endoftext|>"
    with pytest.raises(UserError, match=r"data\.bos: on, but the tokenizer has no begin-of-text token"):
        Encoder(DataConfig(bos="on"), tokenizer)


def test_alpaca_without_a_chat_template_is_a_completion(
    tmp_path: Path, plain: TextTokenizer, with_bos: TextTokenizer
) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"instruction": "Add.", "input": "1 2", "output": "3"}]))
    config = DataConfig(source="alpaca", path=str(tmp_path / "a.json"))
    (chat,) = Encoder(config, plain).encode(list(read_samples(config)))
    turns = "<|im_start|>user\nAdd.\n\n1 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
    assert plain.decode(chat.ids.tolist()) == turns
    (own,) = Encoder(config, with_bos).encode(list(read_samples(config)))
    text = with_bos.decode(own.ids.tolist())
    assert text.startswith(f"{BOS}Below is an instruction that describes a task, paired with an input")
    assert text.endswith(f"### Input:\n1 2\n\n### Response:\n3{EOS}")
    assert marked(with_bos, own) == f"3{EOS}"
    completion = Completion("a", "naïve ☃ 1 + 1 =", " 2 ☃")  # of which the prompt is not trained
    for bos in ("off", "on"):
        (found,) = Encoder(DataConfig(bos=bos), plain).encode([completion])  # type: ignore[arg-type]
        assert marked(plain, found) == f" 2 ☃{EOS}"
        assert found.ids.tolist()[bos == "on" :] == plain.encode_batch(["naïve ☃ 1 + 1 = 2 ☃"])[0] + [plain.eos_id]
    (found,) = Encoder(DataConfig(trained_tokens="all"), plain).encode([completion])
    assert found.weights is None


def test_texts_that_have_their_own_begin_and_end_get_no_second(with_bos: TextTokenizer) -> None:
    for sample in (Text("a", f"{BOS}2 + 3{EOS}"), Completion("a", f"{BOS}2 +", f" 3{EOS}")):
        assert text_of(with_bos, sample) == f"{BOS}2 + 3{EOS}"
    (found,) = Encoder(DataConfig(), with_bos).encode([Completion("a", f"{BOS}2 +", f" 3{EOS}")])
    assert marked(with_bos, found) == f" 3{EOS}"
    pieces = [Text("a", f"{BOS}2", last=False), Text("a", f"{EOS}3{EOS}", first=False)]
    found_pieces = Encoder(DataConfig(), with_bos).encode(pieces)
    assert [with_bos.decode(one.ids.tolist()) for one in found_pieces] == [f"{BOS}2", f"{EOS}3{EOS}"]
    assert text_of(with_bos, Text("a", f"2{EOS}\n\n")) == f"{BOS}2{EOS}\n\n"
    assert text_of(with_bos, Text("a", f"{EOS}2{BOS}")) == f"{BOS}{EOS}2{BOS}{EOS}"


def test_white_space_that_a_token_swallows_does_not_make_it_trained(tmp_path: Path) -> None:
    """Phi-3's tokens take what is behind them; others what is before. Where a turn begins or ends at such white space,
    the token belongs to it only by its own text."""
    strips = [AddedToken("<|user|>", lstrip=True), AddedToken("<|assistant|>", rstrip=True), AddedToken("<|stop|>")]
    template = "{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content ~ '<|stop|>\\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "strips", template, special=strips))
    chat = [CHAT[0], {"role": "assistant", "content": "  yes"}, CHAT[0], {"role": "assistant", "content": "no"}]
    (found,) = Encoder(DataConfig(source="messages"), tokenizer).encode([Conversation("c", chat)])
    plain = AutoTokenizer.from_pretrained(tmp_path / "strips", local_files_only=True)
    assert found.ids.tolist() == plain.apply_chat_template(chat)["input_ids"]
    assert marked(tokenizer, found) == "yes<|stop|>no<|stop|>\n"


def test_offsets_that_a_tokenizer_trims_are_whole(tmp_path: Path) -> None:
    """GPT-2's post-processor may take blanks out of offsets: a token that is a blank alone would be nowhere."""
    folder = make_tokenizer(
        tmp_path / "trims", "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    for text in ("yes ", " ☃ ", "  no  \n "):
        chat = [CHAT[0], {"role": "assistant", "content": text}]
        (found,) = Encoder(DataConfig(source="messages"), tokenizer).encode([Conversation("c", chat)])
        assert marked(tokenizer, found).endswith(f"{text}{EOS}")


def test_ids_are_taken_as_they_are(with_bos: TextTokenizer) -> None:
    encoder = Encoder(DataConfig(source="tokens"), with_bos)
    found = encoder.encode([Ids("a", [7, 8, 9]), Ids("b", [7, 8], [0, 0.5])])
    assert [one.ids.tolist() for one in found] == [[7, 8, 9], [7, 8]]
    assert found[0].weights is None
    assert found[1].weights.tolist() == [0, 0.5]
    beyond = with_bos.vocab_size
    with pytest.raises(UserError, match=f"b: token id {beyond} is beyond the tokenizer's vocabulary of {beyond}"):
        encoder.encode([Ids("b", [7, beyond])])


def test_a_sample_without_a_token_to_train_is_refused_or_counted(plain: TextTokenizer) -> None:
    nothing: list[Sample] = [
        Ids("one token", [7]),
        Ids("masked", [7, 8, 9], [0, 0, 0]),
        Ids("only the first, which nothing comes before", [7, 8, 9], [1, 0, 0]),
        Conversation("no answer", CHAT[:1]),
    ]
    for sample in nothing:
        with pytest.raises(UserError, match=rf"^{sample.where}: no token to train.* data\.bad_rows=skip"):
            Encoder(DataConfig(source="messages"), plain).encode([sample])
    encoder = Encoder(DataConfig(source="messages", bad_rows="skip"), plain)
    mixed = [Text("t", "a"), nothing[0], Conversation("c", CHAT), *nothing[1:], Completion("p", "a", "b")]
    assert [one.where for one in encoder.encode(mixed)] == ["t", "c", "p"]
    assert encoder.bad.count == 4
    assert encoder.bad.first.startswith("one token: no token to train")


def test_the_fingerprint_changes_with_what_changes_the_tokens(plain: TextTokenizer, with_bos: TextTokenizer) -> None:
    def of(tokenizer: TextTokenizer, **more: Any) -> str:
        return Encoder(DataConfig(**more), tokenizer).fingerprint

    assert of(plain) == of(plain, source="jsonl") == of(with_bos, bos="off")
    chats = [of(plain, source="messages", **more) for more in ({}, {"trained_tokens": "last"}, {"bos": "on"})]
    assert len({*chats, of(with_bos), of(with_bos, source="messages"), ""}) == 6
    assert of(with_bos) == of(plain, bos="on")


def test_what_a_chat_template_does_not_read_is_told(tmp_path: Path, plain: TextTokenizer) -> None:
    """Where it is read at times only, as thoughts of earlier turns are, the template has it so."""
    asked, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    rows = [
        {"messages": [asked, answer | {"reasoning_content": "c", "thinking": ""}]},
        {"messages": [asked, answer], "tools": [], "chat_template_kwargs": {"enable_thinking": True}},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reads.jinja").write_text(f"{CHATML}{{% if enable_thinking or reasoning_content %}}{{% endif %}}")
    config = {"source": "messages", "path": str(tmp_path / "rows.jsonl")}
    unread = "the chat template does not read `enable_thinking`, `reasoning_content` of the conversations, which"
    for number in range(2):
        corpus = prepare_corpus(DataConfig(**config), plain, tmp_path / str(number))
        assert corpus.notes == [f"{unread} is left out"], "also of what was kept"
    reads = DataConfig(**config, chat_template=str(tmp_path / "reads.jinja"))
    assert prepare_corpus(reads, plain, tmp_path / "read").notes == []


def test_a_tokenizer_without_offsets_gives_the_same_mask(tmp_path: Path) -> None:
    """ByT5's is written in Python, and knows no offsets: a byte is a token."""
    ByT5Tokenizer().save_pretrained(tmp_path / "bytes")
    (tmp_path / "bytes" / "chat_template.jinja").write_text(unmarked(CHATML))
    tokenizer = load_tokenizer(tmp_path / "bytes")
    assert tokenizer.encode_spans(["a"])[0][1] is None
    samples: list[Sample] = [Conversation("c", CHAT), Completion("p", "ab", "c☃")]
    found = Encoder(DataConfig(source="messages"), tokenizer).encode(samples)
    assert marked(tokenizer, found[0]) == f"It is 5 ☃<|im_end|>\n{tokenizer.decode([tokenizer.eos_id])}"
    assert marked(tokenizer, found[1]) == f"c☃{tokenizer.decode([tokenizer.eos_id])}"


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
def trained(tmp_path):
    texts = [f"word {i} of many, and <user> too" for i in range(50)]
    folder = train_tokenizer(texts, 300, tmp_path / "trained").folder
    (folder / "template.jinja").write_text(TEMPLATE)
    return open_trained(folder)


def encoder_of(trained, bad_rows="refuse"):
    template = str(trained.folder / "template.jinja")
    return Encoder(DataConfig(source="messages", path="x", chat_template=template, bad_rows=bad_rows), trained)


def conversations(count, bad=()):
    for i in range(count):
        asked = {"role": "user", "content": f"what is {i}? " * (1 + i % 7)}
        answer = {"role": "assistant" if i not in bad else "user", "content": f"it is {i * i}"}
        yield Conversation(f"file:{i + 1}", [asked, answer])


def told_of(encoded):
    return [(e.where, e.ids.tolist(), None if e.weights is None else e.weights.tolist(), e.last) for e in encoded]


def processes():
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def test_the_tokens_are_those_of_one_process_in_order_and_bad_rows_are_counted_once(trained, two_processors):
    before, seen = processes(), set()
    bad = {1, 30, 90, 199}
    found, counted = [], encoder_of(trained, "skip")
    for one in encode_all(counted, conversations(200, bad)):
        found.append(one)
        seen |= processes()
    assert len(seen - before) == 2
    assert processes() <= before
    alone = encoder_of(trained, "skip")
    assert told_of(found) == told_of(alone.encode(list(conversations(200, bad))))
    count, first = counted.bad.take()
    assert (count, first) == alone.bad.take()
    assert count == 4
    with pytest.raises(UserError) as one:
        encoder_of(trained).encode(list(conversations(200, {150})))
    with pytest.raises(UserError) as several:
        list(encode_all(encoder_of(trained), conversations(200, {150, 170})))
    assert str(several.value) == str(one.value)
    assert "file:151: " in str(several.value)
    assert processes() <= before


def test_a_process_that_is_killed_fails_the_run_and_takes_the_others_along(trained, two_processors):
    before = processes()
    stream = encode_all(encoder_of(trained), conversations(800))
    for _ in range(100):
        next(stream)
    for pid in processes() - before:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(UserError, match="was killed by signal 9"):
        list(stream)
    assert processes() <= before


def test_plain_text_and_a_few_conversations_need_no_process(trained, two_processors, monkeypatch):
    monkeypatch.setattr(encode_pool, "_Worker", lambda *_: pytest.fail("a process began"))
    texts = [Text(f"file:{i}", f"word {i} of many " * 20) for i in range(100)]
    assert len(list(encode_all(Encoder(DataConfig(), trained), iter(texts)))) == 100
    assert len(list(encode_all(encoder_of(trained), conversations(3)))) == 3


@pytest.fixture
def brought(tmp_path: Path) -> Path:
    train_tokenizer(["def a(): pass\n" * 40], 300, tmp_path / "tokens")
    return tmp_path / "tokens"


def test_a_tokenizer_of_the_hub_s_cache_is_read(tmp_path: Path, brought: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / ("ab" * 20), tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(brought.iterdir())):
        shutil.copy(file, blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064x}")
    assert load_tokenizer(snapshot).fingerprint == load_tokenizer(brought).fingerprint


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"])
def test_a_link_out_of_a_tokenizer_s_folder_is_not_followed(tmp_path: Path, brought: Path, name: str) -> None:
    (tmp_path / "outside").write_text("{}")
    (brought / name).unlink(missing_ok=True)
    (brought / name).symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match=f"{name}: it is a symbolic link to .*, which is outside of the folder"):
        load_tokenizer(brought)


def test_code_in_a_folder_is_neither_run_nor_asked_about(brought: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("transformers asks whether to run it")

    monkeypatch.setattr("builtins.input", ask)
    (brought / "own.py").write_text(f"open({str(brought / 'ran')!r}, 'w')\nclass Own: pass\n")
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (brought / "tokenizer_config.json").write_text(json.dumps(config))
    (brought / "config.json").write_text(json.dumps({"model_type": "nonsense", "auto_map": {"AutoConfig": "own.Own"}}))
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(brought)
    assert not (brought / "ran").exists()


def test_ids_beyond_the_number_of_entries_and_a_pattern_that_takes_for_ever(tmp_path: Path) -> None:
    """The ids are below the vocabulary: else such a corpus would be written with too few bits."""
    file = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE(vocab={"a": 0, "b": 70_000, "</s>": 5}, merges=[])).save(str(file))
    values = json.loads(file.read_text())
    token = {"id": 5, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False}
    values["added_tokens"] = [token | {"normalized": False, "special": True}]
    file.write_text(json.dumps(values))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode_batch(["ab"]) == [[0, 70_000]]
    assert tokenizer.vocab_size == 70_001
    slow = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    slow.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")  # takes for ever
    slow.add_special_tokens([AddedToken("</s>", special=True)])
    slow.save(str(file))
    with pytest.raises(UserError, match=r"fails on the text: .*retry-limit"):
        load_tokenizer(tmp_path).encode_batch(["a" * 60 + "b"])
