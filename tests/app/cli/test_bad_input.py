"""What a user may get wrong and what a machine does not give: one message that names it, exit code 2, nothing lost."""

import gzip
import json
import os
import resource
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import tiny
from bad_inputs import catalogue, faults, setting
from bad_inputs import tiny as tiny_recipe
from bad_model_files import CONFIG, damaged_indexes
from chat_model import make_chat_model, talk, write_talks
from cli_process import json_lines, refusal
from transformers import GPT2Config, PretrainedConfig, Qwen3Config

import penstock.app.cli.main
from penstock.app.cli.main import main
from penstock.app.runs.directory import find_run
from penstock.engine.config import DataConfig
from penstock.engine.data.corpus.prepare import random_corpus, require_text
from penstock.engine.model.anatomy import take_apart, validate_context
from penstock.engine.runtime.failures import explain
from penstock.storage.files.errors import UserError
from penstock.storage.files.safetensors import INDEX_NAME, CheckpointReader

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
Train = Callable[..., str]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> Train:
    """Trains a tiny recipe with `--set` texts, which must fail with exit code 2; returns the one message."""
    tiny_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)

    def train(*overrides: str) -> str:
        return refusal(capsys, *setting("train", *overrides))

    return train


NO_SIZES = ["0", "-1", "-5GiB", "0GiB", "0.1B", "nan", "inf", "1e999GiB", "", "5 apples"]
HUGE = ["2000000TB", "9" * 30, "9" * 400 + "GiB"]


def test_a_budget_that_is_no_size_or_that_no_machine_has(refused: Train) -> None:
    for tier, sizes in (("gpu", NO_SIZES + HUGE), ("ram", HUGE[:1]), ("nvme", NO_SIZES[:1])):
        for size in sizes:
            reason = "is larger than any machine" if size in HUGE else "is not a size; write for example"
            assert f"budgets.{tier}: '{size}' {reason}" in refused(f"budgets.{tier}={size}")


def test_data_without_a_token_files_of_rows_path_or_documents(refused: Train, tmp_path: Path) -> None:
    blank = {"a.txt": " \n \t \n", "b.txt": "\n"}
    cases: list[tuple[Any, dict[str, str]]] = [("text", {"a.txt": ""}), ("text", {}), ("text", blank)]
    cases += [("jsonl", {"a.jsonl": text}) for text in ("\n\n", '{"text": ""}\n{"text": "  "}\n')]
    for number, (source, files) in enumerate(cases):
        empty = tmp_path / f"empty{number}"
        empty.mkdir()
        for name, text in files.items():
            (empty / name).write_text(text)
        message = refused(f"data.source={source}", f"data.path={empty}")
        assert f"data.source: the corpus is empty: {source} found no text in {empty}" in message
    assert "empty2 holds no file of rows (.json, .jsonl" in refused("data.source=jsonl", "data.path=empty2")
    with pytest.raises(UserError, match=r"data\.path: required with data\.source=jsonl"):
        require_text(DataConfig(source="jsonl"))
    assert "data.max_documents: 0 must be at least 1" in refused("data.max_documents=0")
    (tmp_path / "empty2" / "c.txt").write_text(" a")
    for data in (
        DataConfig(source="text", path="empty2"),
        DataConfig(source="random"),
        DataConfig(source="python_stdlib"),
    ):
        require_text(data)


def test_a_context_beyond_the_model_s_positions(refused: Train) -> None:
    short = refused("model.max_position=32")
    assert "data.sequence_length: 64 tokens exceed the 32 positions" in short
    assert "'default'" in short
    assert "yarn with a factor of 2 over 32" in short
    yarn = '{"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 32, "rope_theta": 1e6}'
    message = refused(f"model.overrides.rope_parameters={yarn}", "model.overrides.max_position_embeddings=64")
    for part in ("64 tokens exceed the 48 positions", "max_position_embeddings 64", "'yarn'", "factor of 2 over 32"):
        assert part in message


def rope(kind: str, **values: object) -> PretrainedConfig:
    return Qwen3Config(**CONFIG, rope_parameters={"rope_type": kind, "rope_theta": 1e4, **values})


def test_how_far_positions_reach() -> None:
    small: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 300}
    absolute = GPT2Config(**small, n_positions=96, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    for config, reach in (
        (rope("default"), 128),
        (rope("linear", factor=4.0), 128),
        (rope("yarn", factor=2.0, original_max_position_embeddings=32), 64),
        (rope("yarn", factor=2.5, original_max_position_embeddings=128), 320),
        (absolute, 96),
    ):
        spec = take_apart(config)
        validate_context(spec, reach)
        with pytest.raises(UserError, match=f"{reach + 1} tokens exceed the {reach} positions") as caught:
            validate_context(spec, reach + 1)
        assert ("rope_parameters" in str(caught.value)) == (config.model_type != "gpt2")
    validate_context(take_apart(rope("dynamic", factor=2.0)), 10**6)
    nowhere = take_apart(rope("yarn", factor=4.0, original_max_position_embeddings=256))
    nowhere.config.rope_parameters["original_max_position_embeddings"] = 0
    with pytest.raises(UserError, match=r"positions of 0 tokens; correct max_position_embeddings, or original_max"):
        validate_context(nowhere, 64)


INPUTS = {f"{bad.family}: {bad.name}".encode("unicode_escape").decode(): bad for bad in catalogue()}


def test_the_catalogue_is_large() -> None:
    assert len(INPUTS) >= 300


@pytest.mark.parametrize("name", INPUTS)
def test_a_bad_input_is_one_message(name: str, tmp_path: Path) -> None:
    assert faults(INPUTS[name], tmp_path) == []


def test_a_damaged_index_of_weights_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    for name, content in damaged_indexes().items():
        (tmp_path / INDEX_NAME).write_bytes(content)
        with pytest.raises(UserError) as caught:
            CheckpointReader(tmp_path)
        assert (str(caught.value).count("\n"), len(str(caught.value)) < 1000) == (0, True), name


def test_an_adapter_that_does_not_fit(refused: Train, tmp_path: Path) -> None:
    for settings, message in (
        (['adapter.targets=["q_porj"]'], "'q_porj' matches no module of the model; the nearest are q_proj"),
        (["adapter.rank=100000"], "adapter.rank: 100000 is larger than the smallest side of 'model.layers.0."),
        (["adapter.rank=0"], "adapter.rank: 0 must be at least 1"),
        (["adapter.targets=[]"], "adapter.targets: the list is empty"),
        (["adapter.start=nowhere"], "nowhere: has no adapter_config.json"),
        (['train.freeze=["*lora_A*"]'], "has no effect, as beside an adapter the whole model is frozen"),
        (['model.added_tokens=["<new>"]'], "has no effect, as with an adapter the base is frozen"),
        (
            ["after.export_merged=true"],
            "after.export_merged: true has no effect, as nothing is exported; set after.export=true",
        ),
        (
            ["adapter.method=none", "adapter.start=nowhere"],
            "adapter.start: nowhere has no effect, as adapter.method is none; set adapter.method to lora",
        ),
    ):
        assert message in refused("adapter.method=lora", *settings)
    assert not list(tmp_path.glob("runs/*/state/manifest.json"))


@pytest.fixture
def unreadable() -> Iterator[Path]:
    """A run that one may not look into, in a folder that other users may."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    (folder / "run").mkdir()
    (folder / "run" / "recipe.json").write_text("{}")
    (folder / "run").chmod(0)
    yield folder / "run"
    (folder / "run").chmod(0o700)
    shutil.rmtree(folder)


def as_another(act: Callable[[], None]) -> None:
    """Carry out `act` as a user who is not root: as this one, or as nobody in a child."""
    if os.geteuid() != 0:
        return act()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            act()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_run_that_one_may_not_look_into_is_not_said_to_be_missing(unreadable: Path) -> None:
    def act() -> None:
        with pytest.raises(UserError, match=rf"{unreadable}: .*no permission to read it"):
            find_run(str(unreadable))

    as_another(act)


def test_no_folder_for_temporary_files_is_one_message(monkeypatch: Patch, capsys: Captured) -> None:
    """As where /tmp, /var/tmp and the current folder are read-only or full: libraries need one when they are loaded."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    monkeypatch.setattr(penstock.app.cli.main, "_all_commands", lambda: lambda *args, **kwargs: tempfile.mkdtemp())
    assert main(["runs"]) == 2
    said = capsys.readouterr().err
    assert "/proc/none" in said
    assert "set TMPDIR" in said


def test_tokens_that_find_no_room_are_one_message(tmp_path: Path) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
    try:
        with pytest.raises(UserError, match=rf"{tmp_path}/corpus.*ulimit -f"):
            random_corpus(tiny.data(), 300, tmp_path / "corpus")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert list(tmp_path.iterdir()) == []
    random_corpus(tiny.data(), 300, tmp_path / "corpus")
    assert (tmp_path / "corpus/meta.json").exists()


def test_a_compiler_without_room_is_the_disks_fault(tmp_path: Path) -> None:
    """What Inductor raises then, with pages of the compiler's command before and after it."""
    said = "C++ compile error\n\ng++ -O3 ...\n<built-in>: fatal error: when writing output to /tmp/x/header.i: "
    with tiny.session(tmp_path) as session:
        found = explain(RuntimeError(f"{said}No space left on device\nmore"), None, session.plan)
        assert found is not None
        assert "/tmp/x/header.i: No space left on device; free some space" in str(found)
        assert "TMPDIR" in str(found)
        assert "g++ -O3" not in str(found)
        assert explain(RuntimeError("C++ compile error: expected ';'"), None, session.plan) is None


CHANGING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ loop.index }} of {{ messages | length }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""No rendering of the first messages begins that of all."""
GOOD = json.dumps(talk(0))


class Bad(NamedTuple):
    """A recipe's data section, parts of what is said of it, and files by their names below the current folder."""

    data: dict[str, Any]
    parts: tuple[str, ...]
    files: Mapping[str, bytes | str] = MappingProxyType({})
    model: str = "marked"


def rows(*lines: object) -> dict[str, bytes | str]:
    """A file of lines: texts as they are, all else as JSON."""
    return {"bad.jsonl": "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)}


def bad(source: str, first: object, line: object, said: str) -> Bad:
    """A second row that is wrong; the first one is right."""
    data = {"source": source, "path": "bad.jsonl"}
    return Bad(data, ("bad.jsonl:2", said, "data.bad_rows=skip"), rows(first, line))


def of(source: str, name: str, content: bytes, *parts: str) -> Bad:
    return Bad({"source": source, "path": name}, (name, *parts), {name: content})


LINE = '{"text": "a b c"}\n'.encode("utf-16-le")
MUTE = {"messages": [{"role": "user", "content": "a"}]}
IDS = {"input_ids": [5, 6, 7]}
TALKS: dict[str, Any] = {"source": "messages", "path": "talks.jsonl"}
HELD = TALKS | {"validation_documents": 60}


def mixed(**second: Any) -> dict[str, Any]:
    """Data of two parts, of which the first is right."""
    return {"mixture": [TALKS, second]}


CASES = {
    "a malformed line": bad("messages", GOOD, '{"messages": [', "not a JSON object"),
    "no messages": bad("messages", GOOD, {"text": "a"}, "no `messages` field; the row has text"),
    "no assistant": bad("messages", GOOD, MUTE, "there is no assistant message"),
    "all masked": bad("tokens", IDS, {"input_ids": [5, 6], "labels": [-100, -100]}, "no token to train"),
    "an unknown id": bad("tokens", IDS, {"input_ids": [5, 9999]}, "9999 is beyond the tokenizer's vocabulary"),
    "half a gzip": of("messages", "bad.jsonl.gz", gzip.compress(GOOD.encode() * 99)[:-20], "again"),
    "UTF-16 without a mark": of("jsonl", "bad.jsonl", LINE, "UTF-16LE text without a byte-order mark", "iconv"),
    "all rows bad, and left out": Bad(
        {"source": "messages", "path": "bad.jsonl", "bad_rows": "skip"},
        ("data.source: the corpus is empty: 2 rows were skipped", "bad.jsonl:1"),
        rows(MUTE, MUTE),
    ),
    "all longer than a row, and dropped": Bad(
        TALKS | {"sequence_length": 16, "packing": "best_fit", "long_documents": "drop"},
        ("data.long_documents: drop leaves nothing", "data.sequence_length=16"),
    ),
    "a template that does not nest": Bad(
        TALKS | {"chat_template": "changing.jinja"},
        ("talks.jsonl:1", "messages[1]", "cannot tell which tokens to train", "data.trained_tokens=all"),
        {"changing.jinja": CHANGING},
    ),
    "a template that is not there": Bad(TALKS | {"chat_template": "none.jinja"}, ("data.chat_template", "none.jinja")),
    "no template": Bad(TALKS, ("data.chat_template: ", "talks.jsonl:1", "has no chat template"), model="bare"),
    "a tokenizer larger than the embedding": Bad(TALKS, ("vocabulary",), model="small"),
    "more held out than there is": Bad(HELD, ("data.validation_documents: 60", "hold out fewer")),
    "a mixture of what is not there": Bad(mixed(path="none.jsonl", source="jsonl"), ("none.jsonl does not exist",)),
    "a bad row of a mixture": Bad(
        mixed(path="bad.jsonl", source="jsonl"), ("bad.jsonl:1", "no `text` field"), rows({"content": "a"})
    ),
    "a column that no row has": Bad(TALKS | {"columns": {"messages": "chat"}}, ("talks.jsonl:1", "messages")),
    "a split of what has none": Bad(
        {"source": "text", "path": "note.txt", "split": "train"}, ("data.split: ",), {"note.txt": "a b c"}
    ),
    "no path": Bad({"source": "messages"}, ("data.path: the recipe names no data for data.source=messages",)),
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
def here(made: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    """The current folder, which has them."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_recipe(model: str, data: dict[str, Any], **train: Any) -> None:
    usual = {"compile": "off", "calibrate": False, "device": "cpu", "compute_dtype": "float32", "steps": 2}
    recipe = {"name": "bad", "model": {"path": model}, "data": {"sequence_length": 64} | data, "train": usual | train}
    Path("bad-recipe.json").write_text(json.dumps(recipe))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", CASES)
def test_bad_data_is_one_line_and_leaves_nothing(here: Path, capsys: Captured, name: str) -> None:
    case = CASES[name]
    for file, content in case.files.items():
        Path(file).write_bytes(content.encode() if isinstance(content, str) else content)
    write_recipe(case.model, case.data)
    before = contents(here)
    error = refusal(capsys, "train", "bad-recipe.json", "--run-dir", "run")
    assert [part for part in case.parts if part not in error] == [], error
    assert len(error) < 800
    assert contents(here) == before
    assert not (here / "run").exists()


def test_marks_and_encodings_that_are_read(here: Path, capsys: Captured) -> None:
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


def test_a_file_that_changes_between_start_and_resume(here: Path, capsys: Captured) -> None:
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
