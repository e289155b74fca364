"""Comparisons of answers: pairs and answers with a verdict, from files as people have them to the corpus, and what is
refused of them."""

import csv
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from chat_templates import CHATML, EOS, make_tokenizer
from pyarrow import ipc, parquet

from penstock.engine.config import DataConfig
from penstock.engine.data.corpus.files import META, SIDES, TokenCorpus, verify_corpus
from penstock.engine.data.corpus.prepare import prepare_corpus
from penstock.engine.data.formats.detect import detect, found_source
from penstock.engine.data.formats.reading import read_samples
from penstock.engine.data.samples import BadRows, Comparison, Completion, Conversation
from penstock.engine.data.text import encode_pool
from penstock.engine.data.text.encode import Encoder, describe_specials, sides_of
from penstock.engine.data.text.tokenizer import TextTokenizer, load_tokenizer
from penstock.storage.files.errors import UserError
from penstock.storage.files.sealed import hex_crc, seal

Row = dict[str, Any]


def said(role: str, content: str) -> Row:
    return {"role": role, "content": content}


ASK, ASK_AGAIN = said("user", "Is it blue?"), said("user", "Sure?")
YES, NO = said("assistant", "Yes, it is."), said("assistant", "No.")
PAIR = {"prompt": [ASK], "chosen": [YES], "rejected": [NO]}
TEXTS = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
VERDICT = {"prompt": "The sky is", "completion": " green.", "label": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("preferences") / "tokenizer", CHATML))


def file_of(folder: Path, *rows: Row, name: str = "rows.jsonl") -> Path:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def comparison(folder: Path, row: Row, source: str = "preference", **more: Any) -> Comparison:
    (sample,) = read_samples(DataConfig(**({"source": source, "path": str(file_of(folder, row))} | more)))
    assert isinstance(sample, Comparison)
    return sample


def texts(sample: Comparison) -> list[tuple[Any, ...]]:
    """Of each side what comes before the answer, and the answer."""
    result: list[tuple[Any, ...]] = []
    for side in sample.sides:
        if isinstance(side, Completion):
            result.append((side.prompt, side.completion))
        else:
            at = next(i for i, message in enumerate(side.messages) if message.get("weight") != 0)
            bare = [{key: value for key, value in m.items() if key != "weight"} for m in side.messages]
            result.append((bare[:at], bare[at:]))
    return result


HUMAN = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Blue?\n\nAssistant:"
PAIRS: dict[str, tuple[Row, list[tuple[Any, ...]]]] = {
    "texts": (TEXTS | {"score_chosen": 9.5}, [("The sky is", " blue."), ("The sky is", " green.")]),
    "whole texts part at a word": (
        {"chosen": "The sky is blue.", "rejected": "The sky is black."},
        [("The sky is", " blue."), ("The sky is", " black.")],
    ),
    "whole texts part at a line": (
        {"chosen": "Q: a\nA:\nyes", "rejected": "Q: a\nA:\nno"},
        [("Q: a\nA:\n", "yes"), ("Q: a\nA:\n", "no")],
    ),
    "one whole text begins the other": (
        {"chosen": "Blue? Yes", "rejected": "Blue? Yes indeed"},
        [("Blue?", " Yes"), ("Blue?", " Yes indeed")],
    ),
    "whole texts without spaces": (
        {"chosen": "颜色？蓝色", "rejected": "颜色？绿色"},
        [("颜色？", "蓝色"), ("颜色？", "绿色")],
    ),
    "hh-rlhf": (
        {"chosen": f"{HUMAN} Yes, it is.", "rejected": f"{HUMAN} Yes, maybe."},
        [(HUMAN, " Yes, it is."), (HUMAN, " Yes, maybe.")],
    ),
    "messages": (PAIR, [([ASK], [YES]), ([ASK], [NO])]),
    "whole conversations": (
        {"chosen": [ASK, NO, ASK_AGAIN, YES], "rejected": [ASK, NO, ASK_AGAIN, NO]},
        [([ASK, NO, ASK_AGAIN], [YES]), ([ASK, NO, ASK_AGAIN], [NO])],
    ),
    "whole conversations that go on": (
        {"chosen": [ASK, YES, ASK_AGAIN, YES], "rejected": [ASK, NO]},
        [([ASK], [YES, ASK_AGAIN, YES]), ([ASK], [NO])],
    ),
    "whole conversations beside their prompt": (
        {"prompt": [ASK], "chosen": [ASK, YES], "rejected": [ASK, NO]},
        [([ASK], [YES]), ([ASK], [NO])],
    ),
    "UltraFeedback": (
        {
            "prompt": "Is it blue?",
            "chosen": [ASK, YES],
            "rejected": [ASK, NO],
            "messages": [ASK, YES],
            "score_chosen": 8.0,
        },
        [([ASK], [YES]), ([ASK], [NO])],
    ),
    "a text that asks, and messages that answer": (
        {"prompt": "Is it blue?", "chosen": [YES], "rejected": [NO]},
        [([ASK], [YES]), ([ASK], [NO])],
    ),
    "messages that ask, and texts that answer": (
        {"prompt": [ASK], "chosen": "Yes, it is.", "rejected": "No."},
        [([ASK], [YES]), ([ASK], [NO])],
    ),
    "ShareGPT": (
        {
            "conversations": [{"from": "human", "value": "Is it blue?"}],
            "chosen": {"from": "gpt", "value": "Yes, it is."},
            "rejected": said("assistant", "No."),
        },
        [([ASK], [YES]), ([ASK], [NO])],
    ),
    "system beside": (
        PAIR | {"system": "Be brief."},
        [([said("system", "Be brief."), ASK], [side]) for side in (YES, NO)],
    ),
    "answers that are JSON": (
        {"prompt": "Where?", "chosen": '{"from": "Oslo"}', "rejected": '[{"role": 1}]'},
        [("Where?", '{"from": "Oslo"}'), ("Where?", '[{"role": 1}]')],
    ),
    "columns of null": (PAIR | {"conversations": None, "tools": None, "images": None}, [([ASK], [YES]), ([ASK], [NO])]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_found_and_parted_into_prompt_and_answers(tmp_path: Path, name: str) -> None:
    row, expected = PAIRS[name]
    sample = comparison(tmp_path, row)
    assert texts(sample) == expected
    assert sample.wanted is None
    found = detect(tmp_path / "rows.jsonl")
    assert (found.source, found.rename) == ("preference", {})


def test_what_stands_beside_a_pair_reaches_the_template(tmp_path: Path) -> None:
    sample = comparison(tmp_path, PAIR | {"tools": json.dumps([TOOL]), "chat_template_kwargs": {"brief": True}})
    for side in sample.sides:
        assert isinstance(side, Conversation)
        assert (side.tools, side.given) == ([TOOL], {"brief": True})


def test_a_prompt_by_another_name_is_found(tmp_path: Path) -> None:
    row = {"question": "Blue?", "chosen": "Blue yes", "rejected": "Blue no", "input": ""}
    found = detect(file_of(tmp_path, row))
    assert (found.source, found.rename) == ("preference", {"prompt": "question"})
    sample = comparison(tmp_path, row, columns=found.rename)
    assert texts(sample) == [("Blue?", "Blue yes"), ("Blue?", "Blue no")]
    sample = comparison(
        tmp_path, {"q": "a", "win": "b", "lose": "c"}, columns={"prompt": "q", "chosen": "win", "rejected": "lose"}
    )
    assert texts(sample) == [("a", "b"), ("a", "c")]
    with pytest.raises(
        UserError, match=r'`rejected_answer` holds answers .*data\.columns={"chosen": "\.\.\.", "rejected"'
    ):
        detect(file_of(tmp_path, {"messages": [ASK, YES], "rejected_answer": "No."}))


@pytest.mark.parametrize(
    ("label", "wanted"),
    [(True, True), (False, False), (1, True), (0, False), (1.0, True), ("True", True), ("false", False), ("0", False)],
)
def test_a_verdict_is_read_as_others_write_it(tmp_path: Path, label: Any, wanted: bool) -> None:
    for name in ("label", "kto_tag"):
        row = {"prompt": "The sky is", "completion": " green.", name: label}
        sample = comparison(tmp_path, row, "unpaired_preference")
        assert (texts(sample), sample.wanted) == ([("The sky is", " green.")], wanted)
        if name == "kto_tag" or isinstance(label, bool):
            assert detect(tmp_path / "rows.jsonl").source == "unpaired_preference"


def test_an_answer_with_a_verdict_may_be_messages(tmp_path: Path) -> None:
    talk = [{"from": "human", "value": "Is it blue?"}, {"from": "gpt", "value": "No."}]
    for row in (
        {"prompt": [ASK], "completion": [NO]},
        {"prompt": "Is it blue?", "completion": [NO]},
        {"prompt": [ASK], "completion": "No."},
        {"messages": [ASK, NO]},
        {"conversations": talk},
    ):
        sample = comparison(tmp_path, row | {"label": False}, "unpaired_preference")
        assert texts(sample) == [([ASK], [NO])]
        assert detect(tmp_path / "rows.jsonl").source == "unpaired_preference"
    sample = comparison(tmp_path, {"prompt": "", "completion": [NO], "label": 1}, "unpaired_preference")
    assert texts(sample) == [([], [NO])]
    # Where nobody says true or false, it may mean anything.
    assert detect(file_of(tmp_path, {"prompt": "a", "completion": "b", "label": 3})).source == "prompt_completion"


@pytest.mark.parametrize("pair", PAIRS)
def test_the_sides_of_a_pair_may_be_answers_with_a_verdict(tmp_path: Path, pair: str) -> None:
    """As TRL takes them apart for KTO. A row with a label is one answer, whatever else it has."""
    row, expected = PAIRS[pair]
    path = file_of(tmp_path, row, VERDICT | {"chosen": "a", "rejected": "b"})
    config = DataConfig(source="unpaired_preference", path=str(path))
    found = [(texts(sample), sample.wanted) for sample in read_samples(config) if isinstance(sample, Comparison)]
    assert found == [(expected[:1], True), (expected[1:], False), ([("The sky is", " green.")], False)]


P, U = "preference", "unpaired_preference"
REQUESTS = {side: f"\n\nHuman: a {side}\n\nAssistant: c" for side in ("chosen", "rejected")}
PARTED = {"chosen": [ASK, YES, ASK, YES], "rejected": [ASK, YES, ASK_AGAIN, NO]}
ALIKE = {"chosen": "It is", "rejected": "It was"}
IMAGE = {"role": "user", "content": [{"type": "image"}]}
BAD: list[tuple[str, str, Row, str]] = [
    ("no rejected", P, {"prompt": "a", "chosen": "b"}, "no `rejected` field; the row has chosen, prompt; name the one"),
    ("nothing", P, {"other": None}, "no `chosen` field; the row has none"),
    ("equal texts", P, TEXTS | {"rejected": " blue."}, "`chosen` and `rejected` are equal"),
    ("equal messages", P, PAIR | {"rejected": [YES]}, "`chosen` and `rejected` are equal"),
    ("no answer", P, {"chosen": [ASK], "rejected": [ASK, NO]}, "chosen has no answer of the assistant"),
    ("blank answer", P, PAIR | {"rejected": [said("assistant", " ")]}, "rejected has no answer of the assistant"),
    ("empty text", P, TEXTS | {"chosen": " "}, "chosen is empty"),
    ("empty list", P, PAIR | {"rejected": []}, "`rejected` is empty"),
    ("kinds", P, PAIR | {"rejected": "No."}, "one of `chosen` and `rejected` is a text and the other a list"),
    ("number", P, TEXTS | {"rejected": 5}, "`rejected` is a number; expected a text or a list of messages"),
    ("object", P, TEXTS | {"rejected": {"a": 1}}, r"rejected\[0\] has no `role`"),
    ("role", P, PAIR | {"rejected": [said("critic", "No.")]}, r"rejected\[0\] has the role 'critic'"),
    ("null message", P, PAIR | {"chosen": [None]}, r"chosen\[0\] is null"),
    ("no beginning", P, {"chosen": "Yes", "rejected": "No"}, "do not begin with a prompt; name the column"),
    ("no word in common", P, {"chosen": "Yellow", "rejected": "Yesterday"}, "do not begin with a prompt"),
    ("no message in common", P, {"chosen": [YES, ASK], "rejected": [NO]}, "do not begin with the same message"),
    ("question", P, ALIKE | {"question": "?"}, r'if it is `question`, set data.columns={"prompt": "question"}'),
    ("questions", P, ALIKE | {"instruction": "?", "input": "x"}, "if it is `instruction` and `input`, join them"),
    ("prompts differ", P, PARTED, "answer different prompts: they part before"),
    ("one repeats the prompt", P, PAIR | {"chosen": [ASK, YES]}, "a message of role 'user' follows the prompt"),
    ("requests differ", P, REQUESTS, "answer different prompts"),
    ("system beside texts", P, TEXTS | {"system": "Be brief."}, "`system` cannot be used beside texts"),
    ("images", P, PAIR | {"images": ["a.png"]}, "images in comparisons of answers are not supported"),
    ("image part", P, PAIR | {"prompt": [IMAGE, ASK]}, "images in comparisons"),
    ("no label", U, {"prompt": "a", "completion": "b"}, "no `label` field"),
    ("label", U, VERDICT | {"label": "maybe"}, "`label` is maybe, which is no verdict; expected true or false"),
    ("label of 5", U, VERDICT | {"label": 5}, "`label` is 5, which is no verdict"),
    ("label of a list", U, VERDICT | {"label": [True]}, "`label` is a list, which is no verdict"),
    ("no completion", U, {"prompt": "a", "label": True}, "no `completion` field"),
    ("empty completion", U, VERDICT | {"completion": ""}, "completion is empty"),
    ("ends with the user", U, {"messages": [ASK], "label": True}, "`messages` does not end with the answer"),
    ("pair", U, TEXTS | {"label": True}, "this is a preference pair"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "row", "message"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_a_bad_row_is_named_or_left_out(tmp_path: Path, source: Any, row: Row, message: str) -> None:
    config = DataConfig(source=source, path=str(file_of(tmp_path, row)))
    with pytest.raises(UserError, match=rf"rows\.jsonl:1: .*{message}|rows\.jsonl:1: {message}") as caught:
        list(read_samples(config))
    assert "\n" not in str(caught.value)
    bad = BadRows("skip")
    assert (list(read_samples(config, bad)), bad.count) == ([], 1)


def test_pairs_whose_tokens_are_equal_or_whose_sides_have_none_to_train_are_bad_rows(
    tmp_path: Path, tokenizer: TextTokenizer
) -> None:
    def refused(*samples: Comparison, **more: Any) -> str:
        with pytest.raises(UserError) as caught:
            Encoder(DataConfig(source="preference", **more), tokenizer).encode(samples)
        return str(caught.value)

    # The template trims what the assistant says.
    (tmp_path / "t").write_text(CHATML.replace("message.content", "message.content | trim"))
    sides = ([said("user", "a"), said("assistant", text)] for text in ("Yes.", "Yes. "))
    trimmed = Comparison("a:2", tuple(Conversation("a:2: side", messages) for messages in sides))
    assert "a:2: `chosen` and `rejected` are the same tokens" in refused(trimmed, chat_template=str(tmp_path / "t"))
    mute = Conversation("a:3: rejected", [ASK, NO | {"weight": 0}])
    assert "a:3: rejected: no token to train" in refused(
        Comparison("a:3", (Conversation("a:3: chosen", [ASK, YES]), mute))
    )
    encoder = Encoder(DataConfig(source="preference", bad_rows="skip"), tokenizer)
    good = Comparison("a:4", (Completion("a:4", "x", " y"), Completion("a:4", "x", " z")))
    (found,) = encoder.encode([Comparison("a:3", (mute, mute)), good])
    assert (found.where, encoder.bad.count) == ("a:4", 1)


def corpus_of(folder: Path, tokenizer: TextTokenizer, config: DataConfig) -> TokenCorpus:
    return prepare_corpus(found_source(config)[0], tokenizer, folder / "corpus")


def test_each_side_of_a_pair_is_tokenised_as_a_row_of_its_own(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """Tokens, weights, where each side is; and so for verdicts."""
    rows = [TEXTS, PAIR, {"chosen": [ASK, YES, ASK_AGAIN, YES], "rejected": [ASK, NO]}]
    for source, given in (
        ("preference", rows),
        ("unpaired_preference", [VERDICT, PAIR | {"completion": [YES], "label": True}]),
    ):
        given = [
            {k: v for k, v in row.items() if source == "preference" or k not in ("chosen", "rejected")} for row in given
        ]
        config = DataConfig(source=source, path=str(file_of(tmp_path, *given)))  # type: ignore[arg-type]
        corpus = prepare_corpus(config, tokenizer, tmp_path / source)
        assert (
            corpus.comparison == config.comparison == {"preference": "pairs", "unpaired_preference": "unpaired"}[source]
        )
        assert corpus.sides is not None
        assert corpus.weights is not None
        assert corpus.sides.dtype == np.int64
        encoder = Encoder(config, tokenizer)
        for number, sample in enumerate(read_samples(config)):
            alone = encoder.encode(list(sides_of(sample)))
            start, stop = corpus.starts[number : number + 2]
            assert corpus.tokens[start:stop].tolist() == [token for side in alone for token in side.ids.tolist()]
            weights = [side.weights.tolist() for side in alone if side.weights is not None]
            assert corpus.weights[start:stop].tolist() == [weight for side in weights for weight in side]
            assert all(side[0] == 0 for side in weights)
            first = weights[0].index(1.0)
            assert isinstance(sample, Comparison)
            second = len(alone[0].ids) if sample.wanted is None else int(sample.wanted)
            assert corpus.sides[number].tolist() == [first, second]
        assert corpus.info.num_trained == int((corpus.weights[:] > 0).sum())
        assert TokenCorpus(tmp_path / source).sides is not None


def test_an_answer_without_a_prompt_begins_at_its_second_token(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """Before the first token there is none that it could follow."""
    sides = tuple(Completion("a:1", "", text) for text in ("abc def", "xyz uvw"))
    (found,) = Encoder(DataConfig(source="preference"), tokenizer).encode([Comparison("a:1", sides)])
    assert found.sides is not None
    assert found.weights is not None
    assert found.sides[0] == 1
    assert [found.weights[0], found.weights[found.sides[1]]] == [0, 0]
    assert (np.delete(found.weights, [0, found.sides[1]]) == 1).all()


def as_csv(path: Path, rows: list[Row], ends: str = "\n") -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator=ends)
        writer.writeheader()
        writer.writerows({key: v if isinstance(v, str) else json.dumps(v) for key, v in row.items()} for row in rows)


def test_every_container_gives_the_same_corpus(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """JSON with Windows' line ends, CSV with messages as JSON, Parquet and Arrow with messages as lists of structs,
    where messages without a field have null."""
    rows = [
        PAIR,
        {
            "prompt": [said("user", "Naïve ☃?\r\nnext")],
            "chosen": [said("assistant", "Ünï")],
            "rejected": [NO | {"name": "x"}],
        },
    ]
    path = file_of(tmp_path, *rows)
    want = corpus_of(tmp_path, tokenizer, DataConfig(path=str(path)))
    (tmp_path / "crlf.jsonl").write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    (tmp_path / "list.json").write_text(json.dumps(rows))
    as_csv(tmp_path / "rows.csv", rows)
    as_csv(tmp_path / "crlf.csv", rows, "\r\n")
    table = pa.Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "rows.parquet")
    with ipc.new_file(tmp_path / "rows.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("crlf.jsonl", "list.json", "rows.csv", "crlf.csv", "rows.parquet", "rows.arrow"):
        (tmp_path / f"of {name}").mkdir()
        found = corpus_of(tmp_path / f"of {name}", tokenizer, DataConfig(path=str(tmp_path / name)))
        assert (found.info.content, found.comparison) == (want.info.content, "pairs"), name
    (tmp_path / "one").mkdir()
    only = corpus_of(tmp_path / "one", tokenizer, DataConfig(path=str(file_of(tmp_path, VERDICT, name="one.jsonl"))))
    assert (only.comparison, len(only.starts)) == ("unpaired", 2)


def test_verdicts_from_csv_and_parquet(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    rows = [VERDICT, VERDICT | {"completion": " blue.", "label": True}]
    as_csv(tmp_path / "rows.csv", rows)
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in ("rows.csv", "rows.parquet"):
        (tmp_path / f"of {name}").mkdir()
        corpus = corpus_of(tmp_path / f"of {name}", tokenizer, DataConfig(path=str(tmp_path / name)))
        assert corpus.sides is not None
        assert corpus.sides[:, 1].tolist() == [0, 1]


def test_a_mixture_has_one_kind(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    files = {
        "pairs": file_of(tmp_path, PAIR, TEXTS, name="pairs.jsonl"),
        "more": file_of(tmp_path, TEXTS | {"chosen": " red."}, name="more.jsonl"),
        "verdicts": file_of(tmp_path, VERDICT, name="verdicts.jsonl"),
        "talks": file_of(tmp_path, {"messages": [ASK, YES]}, name="talks.jsonl"),
    }

    def mixed(*names: str) -> DataConfig:
        return found_source(DataConfig(mixture=[{"path": str(files[name])} for name in names]))[0]

    config = mixed("pairs", "more")
    corpus = prepare_corpus(config, tokenizer, tmp_path / "corpus")
    assert (corpus.comparison, corpus.info.part_documents) == ("pairs", [2, 1])
    assert corpus.sides is not None
    assert len(corpus.sides) == 3
    for names in (("pairs", "verdicts"), ("pairs", "talks"), ("talks", "verdicts")):
        with pytest.raises(UserError, match=r"data\.mixture: .* cannot be mixed: a run trains on preference pairs, on"):
            mixed(*names)


def test_damaged_sides_are_named(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    corpus = corpus_of(tmp_path, tokenizer, DataConfig(path=str(file_of(tmp_path, PAIR, TEXTS))))
    path, folder = corpus.folder / SIDES, corpus.folder
    content = path.read_bytes()
    assert verify_corpus(folder) > 0

    def refused() -> str:
        with pytest.raises(UserError) as caught:
            TokenCorpus(folder)
        return str(caught.value)

    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x20]) + content[at + 1 :])
        assert "sides.bin: damaged: it has CRC-32C" in refused()
    path.unlink()
    assert "sides.bin: damaged: it cannot be read" in refused()
    meta = json.loads((folder / META).read_text())

    def rewritten(sides: list[list[int]], **changes: Any) -> None:
        data = np.asarray(sides, dtype="<i8").tobytes()
        path.write_bytes(data)
        values = meta | {"checksums": meta["checksums"] | {SIDES: hex_crc(data)}} | changes
        (folder / META).write_text(json.dumps(seal({key: value for key, value in values.items() if key != "crc32c"})))

    assert corpus.sides is not None
    good, lengths = corpus.sides.tolist(), np.diff(corpus.starts).tolist()
    for wrong in ([5, 0], [-1, 5], [5, 5], [5, lengths[1]], [5, -3]):
        rewritten([good[0], wrong])
        assert "sides.bin: damaged: document 1 has no such sides" in refused()
    rewritten([good[0], [5, 2]], comparison="unpaired")
    assert "document 0 has no such sides" in refused(), "a verdict is 0 or 1"
    rewritten([[lengths[0] - 1, 1], [0, 0]], comparison="unpaired")
    assert TokenCorpus(folder).comparison == "unpaired"
    rewritten([[lengths[0], 1], [0, 0]], comparison="unpaired")
    assert "document 0 has no such sides" in refused()
    rewritten(good[:1])
    assert "it is not an array of 4 numbers" in refused()
    for kind in ("", "triples"):
        rewritten(good, comparison=kind)
        assert "not the description of a tokenised corpus" in refused()


def test_sides_are_part_of_the_content(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    contents = set()
    for label in (True, False):
        folder = tmp_path / str(label)
        folder.mkdir()
        corpus = corpus_of(folder, tokenizer, DataConfig(path=str(file_of(folder, VERDICT | {"label": label}))))
        contents.add(corpus.info.content)
    assert len(contents) == 2


def test_processes_tokenise_pairs_as_one_does(
    tmp_path: Path, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(encode_pool, "BATCH_CHARS", 1000)
    monkeypatch.setattr(encode_pool, "_SHARE_CHARS", 2000)
    rows = [PAIR | {"prompt": [said("user", f"Number {n}?")]} for n in range(200)]
    rows[150]["rejected"] = [YES]
    config = DataConfig(source="preference", path=str(file_of(tmp_path, *rows)), bad_rows="skip")
    bad = BadRows("skip")
    samples = list(read_samples(config, bad))
    encoder = Encoder(config, tokenizer)
    found = list(encode_pool.encode_all(encoder, iter(samples)))
    alone = Encoder(config, tokenizer).encode(samples)
    assert (len(samples), bad.count) == (199, 1)
    assert [(one.where, one.ids.tolist(), one.sides) for one in found] == [
        (one.where, one.ids.tolist(), one.sides) for one in alone
    ]


def test_fields_of_data_count_as_for_other_conversations(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    row = {"chosen": [ASK, YES, ASK_AGAIN, YES], "rejected": [ASK, NO], "tools": [TOOL]}
    config = DataConfig(source="preference", path=str(file_of(tmp_path, row)))
    encoder = Encoder(config, tokenizer)
    (sample,) = map(encoder.noticed, read_samples(config))
    assert encoder.unread == {"tools"}
    last = Encoder(DataConfig(source="preference", trained_tokens="last"), tokenizer)
    assert last.fingerprint != encoder.fingerprint
    (whole,), (of_last,) = encoder.encode([sample]), last.encode([sample])
    assert whole.sides is not None
    assert of_last.sides is not None
    assert (whole.ids == of_last.ids).all()
    assert of_last.sides[0] > whole.sides[0], "of the chosen side only the second answer"
    assert EOS in describe_specials(tokenizer, config)
    assert "conversations follow the chat template" in describe_specials(tokenizer, config)
