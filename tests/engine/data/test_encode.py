"""Samples to ids and weights: begin- and end-of-text tokens, completions, ids, bad samples."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import BOS, CHATML, EOS, make_tokenizer, unmarked
from transformers import AutoTokenizer, ByT5Tokenizer

from penstock.engine.config import DataConfig
from penstock.engine.data.encode import Encoder, describe_specials
from penstock.engine.data.reading import read_samples
from penstock.engine.data.samples import Completion, Conversation, Encoded, Ids, Sample, Text
from penstock.engine.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from penstock.storage.errors import UserError

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
    for tokenizer, bos, begin in (
        (plain, "auto", ""),
        (plain, "on", BOS),
        (with_bos, "auto", BOS),
        (with_bos, "off", ""),
    ):
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


def test_a_trained_tokenizer_has_no_begin_of_text(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["2 + 3"], 300, tmp_path / "trained")
    assert text_of(tokenizer, Text("a", "2 + 3")) == "2 + 3<|endoftext|>"
    with pytest.raises(UserError, match=r"data\.bos: on, but the tokenizer has no begin-of-text token"):
        Encoder(DataConfig(bos="on"), tokenizer)


def test_specials_are_described(plain: TextTokenizer, with_bos: TextTokenizer) -> None:
    def said(tokenizer: TextTokenizer, **more: Any) -> str:
        return describe_specials(tokenizer, DataConfig(**more))

    assert said(with_bos) == f"{BOS} begins each document (as the tokenizer does), {EOS} ends each document"
    assert said(plain) == f"no begin-of-text token (the tokenizer adds none), {EOS} ends each document"
    assert said(with_bos, bos="off").startswith("no begin-of-text token (data.bos says so)")
    assert said(plain, source="messages").startswith("conversations follow the chat template, ")
    assert said(plain, source="tokens").startswith("tokens are used as given")


def test_of_a_completion_the_prompt_is_not_trained(plain: TextTokenizer) -> None:
    completion = Completion("a", "naïve ☃ 1 + 1 =", " 2 ☃")
    for bos in ("off", "on"):
        (found,) = Encoder(DataConfig(bos=bos), plain).encode([completion])  # type: ignore[arg-type]
        assert marked(plain, found) == f" 2 ☃{EOS}"
        assert found.ids.tolist()[bos == "on" :] == plain.encode_batch(["naïve ☃ 1 + 1 = 2 ☃"])[0] + [plain.eos_id]
    (found,) = Encoder(DataConfig(trained_tokens="all"), plain).encode([completion])
    assert found.weights is None


def test_alpaca_without_a_chat_template_is_a_completion(
    tmp_path: Path, plain: TextTokenizer, with_bos: TextTokenizer
) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"instruction": "Add.", "input": "1 2", "output": "3"}]))
    config = DataConfig(source="alpaca", path=str(tmp_path / "a.json"))
    (chat,) = Encoder(config, plain).encode(list(read_samples(config)))
    assert plain.decode(chat.ids.tolist()) == (
        "<|im_start|>user\nAdd.\n\n1 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"
    )
    (own,) = Encoder(config, with_bos).encode(list(read_samples(config)))
    text = with_bos.decode(own.ids.tolist())
    assert text.startswith(f"{BOS}Below is an instruction that describes a task, paired with an input")
    assert text.endswith(f"### Input:\n1 2\n\n### Response:\n3{EOS}")
    assert marked(with_bos, own) == f"3{EOS}"


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

    assert of(plain) == of(plain, source="jsonl") == of(with_bos, bos="off") == ""
    others = [
        of(with_bos),
        of(plain, source="messages"),
        of(plain, source="messages", trained_tokens="last"),
        of(with_bos, source="messages"),
        of(plain, source="messages", bos="on"),
    ]
    assert len({*others, ""}) == 6
    assert of(with_bos) == of(plain, bos="on")


def test_a_tokenizer_without_offsets_gives_the_same_mask(tmp_path: Path) -> None:
    """ByT5's is written in Python, and knows no offsets: a byte is a token."""
    ByT5Tokenizer().save_pretrained(tmp_path / "bytes")
    (tmp_path / "bytes" / "chat_template.jinja").write_text(unmarked(CHATML))
    tokenizer = load_tokenizer(tmp_path / "bytes")
    assert tokenizer.encode_spans(["a"])[0][1] is None
    found = Encoder(DataConfig(source="messages"), tokenizer).encode(
        [Conversation("c", CHAT), Completion("p", "ab", "c☃")]
    )
    assert marked(tokenizer, found[0]) == f"It is 5 ☃<|im_end|>\n{tokenizer.decode([tokenizer.eos_id])}"
    assert marked(tokenizer, found[1]) == f"c☃{tokenizer.decode([tokenizer.eos_id])}"
