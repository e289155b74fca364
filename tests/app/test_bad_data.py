"""Data that cannot be trained, through `penstock train`: one line that names the row and the fix, and nothing left."""

import gzip
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

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
LINE = '{"text": "a b c"}\n'


class Bad(NamedTuple):
    """A recipe's data section, parts of what is said of it, and files by their names below the current folder."""

    data: dict[str, Any]
    parts: tuple[str, ...]
    files: Mapping[str, Content] = MappingProxyType({})
    model: str = "marked"


def rows(*lines: object) -> dict[str, Content]:
    """A file of lines: texts as they are, all else as JSON."""
    return {"bad.jsonl": "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)}


def of(source: str, name: str, content: Content, *parts: str) -> Bad:
    """A file of that content."""
    return Bad({"source": source, "path": name}, parts, {name: content})


RIGHT: dict[str, dict[str, Any]] = {
    "messages": talk(0),
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "alpaca": {"instruction": "a", "output": "b"},
    "prompt_completion": {"prompt": "a", "completion": "b"},
    "tokens": {"input_ids": [5, 6, 7]},
    "jsonl": {"text": "a b c"},
}


def bad(source: str, line: object, said: str) -> Bad:
    """A second row that is wrong; the first one is right."""
    data = {"source": source, "path": "bad.jsonl"}
    return Bad(data, ("bad.jsonl:2", said, "data.bad_rows=skip"), rows(RIGHT[source], line))


def messages(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def damaged_parquet(path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["a b c"] * 50}), path)
    path.write_bytes(path.read_bytes()[:-9])


TALKS = {"source": "messages", "path": "talks.jsonl"}


def mixed(**second: Any) -> dict[str, Any]:
    """Data of two parts, of which the first is right."""
    return {"mixture": [TALKS, second]}


CASES = {
    "a malformed line": bad("messages", '{"messages": [', "not a JSON object"),
    "a malformed element": of("jsonl", "bad.json", '[{"text": "a"},\n{]', "bad.json:2"),
    "a quote out of place": of(
        "prompt_completion", "bad.csv", 'prompt,completion\na,b\n"c,"d"\n', "bad.csv:", "double quotes"
    ),
    "a value too many": of(
        "prompt_completion", "bad.csv", "prompt,completion\na,b\nc,d,e\n", "bad.csv:3", "3 values for 2 columns"
    ),
    "half a Parquet file": of("jsonl", "bad.parquet", damaged_parquet, "bad.parquet", "again"),
    "half a gzip": of("messages", "bad.jsonl.gz", gzip.compress(GOOD.encode() * 99)[:-20], "bad.jsonl.gz", "again"),
    "no messages": bad("messages", {"text": "a"}, "no `messages` field; the row has text"),
    "no conversations": bad("sharegpt", {"turns": []}, "no `conversations` field"),
    "no output": bad("alpaca", {"instruction": "a"}, "no `output` field"),
    "no completion": bad("prompt_completion", {"prompt": "a"}, "no `completion` field"),
    "no ids": bad("tokens", {"labels": [1]}, "no `input_ids` field"),
    "no text": bad("jsonl", {"content": "a"}, "no `text` field"),
    "an unknown role": bad("messages", messages(("wizard", "a")), "messages[0] has the role 'wizard'"),
    "an unknown speaker": bad("sharegpt", {"conversations": [{"from": "elf", "value": "a"}]}, "`from` 'elf'"),
    "a message without content": bad("messages", {"messages": [{"role": "user"}]}, "has no `content`"),
    "an empty conversation": bad("messages", {"messages": []}, "`messages` is empty"),
    "nobody says anything": bad("messages", messages(("user", ""), ("assistant", "")), "the conversation is empty"),
    "an empty output": bad("alpaca", {"instruction": "a", "output": " "}, "`output` is empty"),
    "an empty completion": bad("prompt_completion", {"prompt": "a", "completion": ""}, "`completion` is empty"),
    "no assistant": bad("messages", messages(("user", "a")), "there is no assistant message"),
    "all masked": bad("tokens", {"input_ids": [5, 6], "labels": [-100, -100]}, "no token to train"),
    "labels that are shifted": bad("tokens", {"input_ids": [5, 6], "labels": [6, -100]}, "labels[0] is 6"),
    "a mask too short": bad("tokens", {"input_ids": [5, 6], "loss_mask": [1]}, "`loss_mask` has 1 values for 2 ids"),
    "an id that no tokenizer has": bad("tokens", {"input_ids": [5, 9999]}, "9999 is beyond the tokenizer's vocabulary"),
    "all rows bad, and left out": Bad(
        {"source": "messages", "path": "bad.jsonl", "bad_rows": "skip"},
        ("data.source: the corpus is empty: 2 rows were skipped", "bad.jsonl:1"),
        rows(messages(("user", "a")), messages(("user", "b"))),
    ),
    "all longer than a row, and dropped": Bad(
        TALKS | {"sequence_length": 16, "packing": "best_fit", "long_documents": "drop"},
        ("data.long_documents: drop leaves nothing", "data.sequence_length=16"),
    ),
    "Latin-1": of("jsonl", "bad.jsonl", '{"text": "é"}\n'.encode("latin-1"), "bad.jsonl:1", "not UTF-8", "iconv"),
    "UTF-32": of("jsonl", "bad.jsonl", '{"text": "a"}\n'.encode("utf-32"), "bad.jsonl", "UTF-32", "iconv"),
    "UTF-16 without a mark": of(
        "jsonl", "bad.jsonl", LINE.encode("utf-16-le"), "bad.jsonl", "UTF-16LE text without a byte-order mark", "iconv"
    ),
    "half UTF-16": of("jsonl", "bad.jsonl", LINE.encode("utf-16")[:-1], "bad.jsonl", "not UTF-16 text"),
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
        mixed(path="talks.jsonl", source="messages", wieght=2),
        ("data.mixture[1]: unknown field 'wieght'", "did you mean 'weight'?"),
    ),
    "a mixture of what is not there": Bad(mixed(path="none.jsonl", source="jsonl"), ("none.jsonl does not exist",)),
    "a bad row of a mixture": Bad(
        mixed(path="bad.jsonl", source="jsonl"), ("bad.jsonl:1", "no `text` field"), rows({"content": "a"})
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
    usual = {"compile": "off", "calibrate": False, "device": "cpu", "compute_dtype": "float32", "steps": 2}
    recipe = {"name": "bad", "model": {"path": model}, "data": {"sequence_length": 64} | data, "train": usual | train}
    Path("bad-recipe.json").write_text(json.dumps(recipe))


def put(files: Mapping[str, Content]) -> None:
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        if callable(content):
            content(Path(name))
        else:
            Path(name).write_bytes(content.encode() if isinstance(content, str) else content)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", CASES)
def test_bad_data_is_one_line_and_leaves_nothing(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    case = CASES[name]
    put(case.files)
    write_recipe(case.model, case.data)
    before = contents(here)
    error = refusal(capsys, "train", "bad-recipe.json", "--run-dir", "run")
    assert [part for part in case.parts if part not in error] == [], error
    assert len(error) < 800
    assert contents(here) == before
    assert not (here / "run").exists()


def test_marks_and_encodings_that_are_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mark, encoding, end in (
        (b"", "utf-8-sig", "\n"),
        (b"", "utf-8", "\r\n"),
        (b"", "utf-16", "\n"),
        (b"\xfe\xff", "utf-16-be", "\n"),  # its bytes the other way round
    ):
        text = "".join(json.dumps({"text": f"é {number} a b c"}, ensure_ascii=False) + end for number in range(9))
        (here / "odd.jsonl").write_bytes(mark + text.encode(encoding))
        (here / "plain.jsonl").write_text(text)
        found = []
        for name in ("odd.jsonl", "plain.jsonl"):
            assert main(["data", "marked", name, "--json"]) == 0
            found.append([json.loads(line)["ids"] for line in capsys.readouterr().out.splitlines()])
        assert found[0] == found[1], (encoding, end)
        assert len(found[0]) == 9


def test_a_file_that_changes_between_start_and_resume(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run goes on with the tokens that it has, to the bit, and says so."""
    write_recipe("marked", TALKS, lr=1e-2, lr_schedule="constant")
    assert main(["train", "bad-recipe.json", "--run-dir", "run"]) == 0
    file = here / "talks.jsonl"
    changes: dict[str, Callable[[], object]] = {
        "": lambda: None,
        "has changed": lambda: write_talks(file, 30),
        "is gone": file.unlink,
    }
    losses = []
    for said, change in changes.items():
        run = Path(shutil.copytree("run", f"run {said}"))
        change()
        capsys.readouterr()
        assert main(["resume", str(run), "--set", "train.steps=4"]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert ("since the run's data was tokenized" in printed) == bool(said), printed
        assert not said or f"talks.jsonl {said} since the run's data was tokenized; the run" in printed
        losses.append([line["loss"] for line in json_lines(run / "metrics.jsonl")])
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 4
