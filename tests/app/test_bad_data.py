"""Data that cannot be trained, through `penstock train`: one line that names the row and the fix, and nothing left."""

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from chat_model import make_chat_model, talk, write_talks
from cli_process import json_lines, refusal

from penstock.app.cli import main

Content = bytes | str | Callable[[Path], object]
CHANGING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ loop.index }} of {{ messages | length }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""No rendering of the first messages begins that of all."""
GOOD = json.dumps(talk(0))


@dataclass(frozen=True)
class Bad:
    """A recipe's data section, and what is said of it."""

    data: dict[str, Any]
    parts: tuple[str, ...]
    """Of the message."""
    files: dict[str, Content] = field(default_factory=dict)
    """By their names below the current folder."""
    model: str = "marked"


def rows(*lines: object, name: str = "bad.jsonl") -> dict[str, Content]:
    """A file of lines: texts as they are, all else as JSON."""
    return {name: "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)}


def bad(source: str, *lines: object, said: str, **more: Any) -> Bad:
    """A second row that is wrong; the first one is right."""
    right: dict[str, object] = {
        "messages": talk(0),
        "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        "alpaca": {"instruction": "a", "output": "b"},
        "prompt_completion": {"prompt": "a", "completion": "b"},
        "tokens": {"input_ids": [5, 6, 7]},
        "jsonl": {"text": "a b c"},
    }
    data = {"source": source, "path": "bad.jsonl"} | more
    return Bad(data, ("bad.jsonl:2", said, "data.bad_rows=skip"), rows(right[source], *lines))


def messages(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def damaged_parquet(path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["a b c"] * 50}), path)
    path.write_bytes(path.read_bytes()[:-9])


TALKS = {"source": "messages", "path": "talks.jsonl"}
CASES = {
    "a malformed line": bad("messages", '{"messages": [', said="not a JSON object"),
    "a malformed element": Bad(
        {"source": "jsonl", "path": "bad.json"}, ("bad.json:2",), {"bad.json": '[{"text": "a"},\n{]'}
    ),
    "a quote out of place": Bad(
        {"source": "prompt_completion", "path": "bad.csv"},
        ("bad.csv:", "double quotes"),
        {"bad.csv": 'prompt,completion\na,b\n"c,"d"\n'},
    ),
    "a value too many": Bad(
        {"source": "prompt_completion", "path": "bad.csv"},
        ("bad.csv:3", "3 values for 2 columns"),
        {"bad.csv": "prompt,completion\na,b\nc,d,e\n"},
    ),
    "half a Parquet file": Bad(
        {"source": "jsonl", "path": "bad.parquet"}, ("bad.parquet", "again"), {"bad.parquet": damaged_parquet}
    ),
    "half a gzip": Bad(
        TALKS | {"path": "bad.jsonl.gz"},
        ("bad.jsonl.gz", "again"),
        {"bad.jsonl.gz": gzip.compress(GOOD.encode() * 99)[:-20]},
    ),
    "no messages": bad("messages", {"text": "a"}, said="no `messages` field; the row has text"),
    "no conversations": bad("sharegpt", {"turns": []}, said="no `conversations` field"),
    "no output": bad("alpaca", {"instruction": "a"}, said="no `output` field"),
    "no completion": bad("prompt_completion", {"prompt": "a"}, said="no `completion` field"),
    "no ids": bad("tokens", {"labels": [1]}, said="no `input_ids` field"),
    "no text": bad("jsonl", {"content": "a"}, said="no `text` field"),
    "an unknown role": bad("messages", messages(("wizard", "a")), said="messages[0] has the role 'wizard'"),
    "an unknown speaker": bad("sharegpt", {"conversations": [{"from": "elf", "value": "a"}]}, said="`from` 'elf'"),
    "a message without content": bad("messages", {"messages": [{"role": "user"}]}, said="has no `content`"),
    "an empty conversation": bad("messages", {"messages": []}, said="`messages` is empty"),
    "nobody says anything": bad(
        "messages", messages(("user", ""), ("assistant", "")), said="the conversation is empty"
    ),
    "an empty output": bad("alpaca", {"instruction": "a", "output": " "}, said="`output` is empty"),
    "an empty completion": bad("prompt_completion", {"prompt": "a", "completion": ""}, said="`completion` is empty"),
    "no assistant": bad("messages", messages(("user", "a")), said="there is no assistant message"),
    "all masked": bad("tokens", {"input_ids": [5, 6], "labels": [-100, -100]}, said="no token to train"),
    "labels that are shifted": bad("tokens", {"input_ids": [5, 6], "labels": [6, -100]}, said="labels[0] is 6"),
    "a mask too short": bad(
        "tokens", {"input_ids": [5, 6], "loss_mask": [1]}, said="`loss_mask` has 1 values for 2 ids"
    ),
    "an id that no tokenizer has": bad(
        "tokens", {"input_ids": [5, 9999]}, said="9999 is beyond the tokenizer's vocabulary"
    ),
    "all rows bad, and left out": Bad(
        {"source": "messages", "path": "bad.jsonl", "bad_rows": "skip"},
        ("data.source: the corpus is empty: 2 rows were skipped", "bad.jsonl:1"),
        rows(messages(("user", "a")), messages(("user", "b"))),
    ),
    "all longer than a row, and dropped": Bad(
        TALKS | {"sequence_length": 16, "packing": "best_fit", "long_documents": "drop"},
        ("data.long_documents: drop leaves nothing", "data.sequence_length=16"),
    ),
    "Latin-1": Bad(
        {"source": "jsonl", "path": "bad.jsonl"},
        ("bad.jsonl:1", "not UTF-8", "iconv"),
        {"bad.jsonl": '{"text": "é"}\n'.encode("latin-1")},
    ),
    "UTF-32": Bad(
        {"source": "jsonl", "path": "bad.jsonl"},
        ("bad.jsonl", "UTF-32", "iconv"),
        {"bad.jsonl": '{"text": "a"}\n'.encode("utf-32")},
    ),
    "UTF-16 without a mark": Bad(
        {"source": "jsonl", "path": "bad.jsonl"},
        ("bad.jsonl", "UTF-16LE text without a byte-order mark", "iconv"),
        {"bad.jsonl": '{"text": "a b c"}\n'.encode("utf-16-le")},
    ),
    "half UTF-16": Bad(
        {"source": "jsonl", "path": "bad.jsonl"},
        ("bad.jsonl", "not UTF-16 text"),
        {"bad.jsonl": '{"text": "a b c"}\n'.encode("utf-16")[:-1]},
    ),
    "a template that does not nest": Bad(
        TALKS | {"chat_template": "changing.jinja"},
        ("talks.jsonl:1", "messages[1]", "cannot tell which tokens to train", "data.trained_tokens=last or all"),
        {"changing.jinja": CHANGING},
    ),
    "a template that is none": Bad(
        TALKS | {"chat_template": "bad.jinja"}, ("bad.jinja", "line 1"), {"bad.jinja": "{% for %}"}
    ),
    "a template that is not there": Bad(TALKS | {"chat_template": "none.jinja"}, ("data.chat_template", "none.jinja")),
    "no template": Bad(TALKS, ("data.chat_template: ", "talks.jsonl:1", "has no chat template"), model="bare"),
    "a tokenizer larger than the embedding": Bad(TALKS, ("vocabulary",), model="small"),
    "more held out than there is": Bad(
        TALKS | {"validation_documents": 60}, ("data.validation_documents: 60", "hold out fewer")
    ),
    "a mixture with an unknown field": Bad(
        {"mixture": [{"path": "talks.jsonl", "source": "messages", "wieght": 2}]},
        ("data.mixture[0]: unknown field 'wieght'", "did you mean 'weight'?"),
    ),
    "a mixture of what is not there": Bad(
        {"mixture": [{"path": "talks.jsonl", "source": "messages"}, {"path": "none.jsonl", "source": "jsonl"}]},
        ("none.jsonl does not exist",),
    ),
    "a bad row of a mixture": Bad(
        {"mixture": [{"path": "talks.jsonl", "source": "messages"}, {"path": "bad.jsonl", "source": "jsonl"}]},
        ("bad.jsonl:1", "no `text` field"),
        rows({"content": "a"}),
    ),
    "a column that no row has": Bad(TALKS | {"columns": {"messages": "chat"}}, ("talks.jsonl:1", "messages")),
    "a column for no field": Bad(TALKS | {"columns": {"texts": "chat"}}, ("data.columns: 'texts' is not a field",)),
    "a split that is not there": Bad(TALKS | {"split": "tset"}, ("data.split: ", "no split 'tset'")),
    "a split of what has none": Bad(
        {"source": "text", "path": "note.txt", "split": "train"}, ("data.split: ",), {"note.txt": "a b c"}
    ),
    "no path": Bad({"source": "messages"}, ("data.path: the recipe names no data for data.source=messages",)),
    "a path to nothing": Bad(TALKS | {"path": "none.jsonl"}, ("data.path: ", "none.jsonl does not exist")),
    "a folder of two kinds": Bad(
        {"source": "jsonl", "path": "both"},
        ("both", "give a file"),
        {"both/a.json": '[{"text": "a"}]', "both/a.csv": "text\na\n"},
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and a file of conversations."""
    folder = tmp_path_factory.mktemp("data")
    make_chat_model(folder / "marked")
    make_chat_model(folder / "bare", template=None)
    make_chat_model(folder / "small", vocab_size=280)
    write_talks(folder / "talks.jsonl", 20)
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which has them."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_recipe(model: str, data: dict[str, Any], **train: Any) -> None:
    usual = {"compile": "off", "calibrate": False, "device": "cpu", "compute_dtype": "float32"}
    recipe = {
        "name": "bad",
        "model": {"path": model},
        "data": {"sequence_length": 64} | data,
        "train": usual | {"steps": 2} | train,
    }
    Path("bad-recipe.json").write_text(json.dumps(recipe))


def put(files: dict[str, Content]) -> None:
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        if callable(content):
            content(Path(name))
        else:
            Path(name).write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("name", CASES)
def test_bad_data_is_one_line_and_leaves_nothing(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    case = CASES[name]
    put(case.files)
    write_recipe(case.model, case.data)
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    error = refusal(capsys, "train", "bad-recipe.json", "--run-dir", "run")
    assert [part for part in case.parts if part not in error] == [], error
    assert len(error) < 800
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before
    assert not (here / "run").exists()


@pytest.mark.parametrize(
    "encoded",
    [("utf-8-sig", "\n"), ("utf-8", "\r\n"), ("utf-16", "\n"), ("utf-16-be", "\n")],
    ids=["BOM", "CRLF", "UTF-16", "UTF-16, its bytes the other way round"],
)
def test_marks_and_encodings_that_are_read(
    here: Path, capsys: pytest.CaptureFixture[str], encoded: tuple[str, str]
) -> None:
    encoding, end = encoded
    text = "".join(json.dumps({"text": f"é {number} a b c"}, ensure_ascii=False) + end for number in range(9))
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    (here / "odd.jsonl").write_bytes(mark + text.encode(encoding))
    (here / "plain.jsonl").write_text(text)
    found = []
    for name in ("odd.jsonl", "plain.jsonl"):
        assert main(["data", "marked", name, "--json"]) == 0
        found.append([json.loads(line)["ids"] for line in capsys.readouterr().out.splitlines()])
    assert found[0] == found[1]
    assert len(found[0]) == 9


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in json_lines(run / "metrics.jsonl")]


def test_a_file_that_changes_between_start_and_resume(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on with the tokens that it has, to the bit, and says so."""
    write_recipe("marked", TALKS, steps=2, lr=1e-2, lr_schedule="constant")
    train = ["train", "bad-recipe.json", "--run-dir"]
    assert main([*train, "whole", "--set", "train.steps=4"]) == 0
    assert main([*train, "run"]) == 0
    file = here / "talks.jsonl"
    changes: dict[str, Callable[[], object]] = {
        "": lambda: None,
        "has changed": lambda: write_talks(file, 30),
        "is gone": file.unlink,
    }
    for number, (said, change) in enumerate(changes.items()):
        shutil.copytree("run", f"run{number}")
        change()
        capsys.readouterr()
        assert main(["resume", f"run{number}", "--set", "train.steps=4"]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert ("since the run's data was tokenized" in printed) == bool(said), printed
        assert not said or f"talks.jsonl {said} since the run's data was tokenized; the run" in printed
        assert losses(here / f"run{number}") == losses(here / "whole")
