"""Any damaged file that a run needs stops a resume and a scrub, by name; runs leave each other their memory; files that
are nearly right: mutated ones are read or refused by a UserError, and nothing else happens."""

import contextlib
import copy
import fcntl
import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_model_files import CONFIG, safetensors, tensor
from bad_run_files import SPAN, manifest, signed
from cli_process import json_lines, refusal
from hypothesis import given
from hypothesis import strategies as st
from recipe_texts import recipe_text, tiny_recipe
from samples import sampled

from penstock.app.cli.main import main
from penstock.app.recipes.recipe import from_json, from_run_json, to_dict, to_json, to_run_json
from penstock.app.runs.directory import RunDir, read_recipe
from penstock.app.runs.lanes import lanes_report
from penstock.engine.config import DataConfig
from penstock.engine.data.formats.reading import read_samples
from penstock.engine.hf.config import read_config
from penstock.engine.machine.presets import GENERIC
from penstock.engine.machine.profile import load_machine
from penstock.storage.files.errors import UserError
from penstock.storage.files.safetensors import CheckpointReader
from penstock.storage.files.units import bytes_text
from penstock.storage.files.untrusted import parse_object
from penstock.storage.tier.manifest import Manifest

RECIPE = recipe_text(data={"path": "texts"}, budgets={"gpu": "1MiB", "ram": "2MiB"})

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and a run `run` of one step."""
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "tiny.py").write_text(RECIPE)
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("def a(): pass\n" * 400)
    with contextlib.chdir(folder):
        assert main(["train", "tiny.py", "--run-dir", "run"]) == 0
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: Patch) -> Path:
    monkeypatch.chdir(folder)
    return folder / "run"


@pytest.fixture
def damaged(here: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file of the run with a byte of its middle changed; afterwards it is as it was."""
    file = here / request.param
    content = file.read_bytes()
    at = len(content) // 2
    while content[at : at + 1].isspace():
        at += 1
    file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    yield file
    file.write_bytes(content)


FILES = [
    "recipe.json", "data/tokenizer/tokenizer.json", "data/tokenizer/tokenizer_config.json",
    "data/tokenizer/trained_on.json", "data/corpus/meta.json", "data/corpus/tokens.bin", "data/corpus/tokens.crc32c",
    "data/corpus/documents.bin", "state/constants.safetensors", "state/manifest.json",
]  # fmt: skip
ORIGINS = ["data/corpus/origins.bin", "data/corpus/origins.json"]
"""They say where documents come from, and no token: a run goes on without them, and says of a spike less."""


@pytest.mark.parametrize("damaged", [*FILES, *ORIGINS], indirect=True)
def test_resume_and_scrub_refuse_by_the_files_name(damaged: Path, here: Path, capsys: Captured) -> None:
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file() and "state" in path.parts}
    assert damaged.name in refusal(capsys, "scrub", "run")
    if str(damaged.relative_to(here)) not in ORIGINS:
        assert damaged.name in refusal(capsys, "resume", "run", "--set", "train.steps=2")
    assert all(path.read_bytes() == content for path, content in before.items()), "the last generation is intact"


def test_what_no_test_damages_is_not_needed(here: Path) -> None:
    """Beside FILES a run has logs, reports, and in state/ what tests/storage damages: chunk files and copies."""
    names = {str(path.relative_to(here)) for path in here.rglob("*") if path.is_file()}
    logs = {f"{name}.jsonl" for name in ("log", "metrics", "predicted", "spans")}
    logs |= {"plan.json", "run.lock", "status.json", "summary.json"}
    assert {name for name in names if not name.startswith("state/")} == {*FILES[:-2], *ORIGINS, *logs}
    assert {*FILES, *ORIGINS} <= names


def test_a_corpus_that_is_deleted_is_made_again(here: Path, capsys: Captured, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(here, tmp_path / "run"))
    (copy / "data" / "corpus" / "tokens.bin").write_bytes(b"\xff" * 50)
    assert f"delete the folder {copy / 'data' / 'corpus'}" in refusal(capsys, "scrub", str(copy))
    shutil.rmtree(copy / "data")
    assert main(["resume", str(copy), "--set", "train.steps=2"]) == 0
    assert main(["scrub", str(copy)]) == 0
    assert "no damage" in capsys.readouterr().out


def test_every_byte_of_a_runs_recipe(here: Path) -> None:
    content, recipe = (here / "recipe.json").read_bytes(), read_recipe(here)
    assert json.loads(content)["crc32c"]
    for at in range(len(content)):
        text = (content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]).decode(errors="replace")
        with contextlib.suppress(UserError):
            assert from_run_json(text, "recipe.json") == recipe


def test_an_edited_recipe_is_taken_without_its_checksum_only(here: Path, capsys: Captured, tmp_path: Path) -> None:
    recipe = from_json((here / "recipe.json").read_text())
    edited = to_run_json(recipe).replace('"steps": 1,', '"steps": 3,')
    (tmp_path / "recipe.json").write_text(edited)
    message = refusal(capsys, "resume", str(tmp_path))
    assert f"{tmp_path / 'recipe.json'}: the file was changed or damaged since Penstock wrote it" in message
    assert "--set key=value" in message
    assert 'removing its "crc32c" line accepts an edit' in message
    lines = edited.splitlines()
    assert [line for line in lines if "crc32c" in line] == lines[-2:-1]
    accepted = "\n".join(lines[:-2]).rstrip(",") + "\n}\n"
    (tmp_path / "recipe.json").write_text(accepted)
    with RunDir.open(tmp_path) as run:
        assert run.recipe.train.steps == 3
        run.save_recipe()
    assert (tmp_path / "recipe.json").read_text() == to_run_json(run.recipe), "it has its checksum again"


@pytest.mark.long
def test_a_runs_recipe_starts_another_run_edited_or_not(here: Path, tmp_path: Path) -> None:
    recipe = from_json((here / "recipe.json").read_text())
    for text in (to_run_json(recipe), to_run_json(recipe).replace('"name": "tiny"', '"name": "tiny2"')):
        (tmp_path / "recipe.json").write_text(text)
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        assert main(["train", str(tmp_path / "recipe.json"), "--run-dir", str(tmp_path / "new")]) == 0
        assert read_recipe(tmp_path / "new").name == json.loads(text)["name"]


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: Patch) -> Iterator[str]:
    """A live process's record of more memory than any machine has; how it is named."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "penstock").mkdir(mode=0o700)
    record = {"run": "/runs/x", "pid": os.getppid(), "base_bytes": 2**50, "ram_bytes": 10**15, "gpu_bytes": {}}
    with (tmp_path / "penstock" / "run-1").open("w") as file:
        file.write(json.dumps(record))
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        yield f"/runs/x (process {os.getppid()}) has {bytes_text(10**15)} reserved"


def test_who_has_reserved_memory(
    holder: str, folder: Path, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    monkeypatch.chdir(folder)
    automatic = RECIPE.replace("gpu='1MiB', ram='2MiB', ", "")
    (tmp_path / "automatic.py").write_text(automatic.replace("'texts'", repr(str(folder / "texts"))))
    assert holder in refusal(capsys, "train", str(tmp_path / "automatic.py"), "--run-dir", str(tmp_path / "auto"))
    main(["plan", str(tmp_path / "automatic.py"), "--json"])
    assert holder in json.loads(capsys.readouterr().out)["budgets"]["ram"]
    assert main(["train", "tiny.py", "--run-dir", str(tmp_path / "given")]) == 0, "explicit budgets are only warned of"
    told = [line["text"] for line in json_lines(tmp_path / "given" / "log.jsonl")]
    assert [text for text in told if re.match(r"warning: this run plans [\d.]+ MiB of RAM", text) and holder in text]
    assert sorted(path.name for path in (tmp_path / "penstock").iterdir()) == ["lock", "run-1"], "and gone at the end"


ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, -0.0, float("nan"), float("inf"), "", "x", "\ud800", "a\0b",
    "../../etc/passwd", "\x1b[2J", [], [[]], {}, {"a": {}}, [None], "9" * 50,
]  # fmt: skip


def mutated(value: Any, choose: random.Random) -> Any:
    """A copy of JSON `value` with one to three of its parts replaced, doubled, renamed or removed."""
    value = copy.deepcopy(value)
    for _ in range(choose.randint(1, 3)):
        places = list(_places(value))
        if not places:
            break
        holder, key = choose.choice(places)
        kind = choose.randrange(5)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[choose.choice(["", "x", "name", "\ud800"])] = holder[key]
        elif kind == 2 and isinstance(holder[key], int | float):
            holder[key] = choose.choice([-holder[key], holder[key] * 2, holder[key] + 1, str(holder[key])])
        else:
            holder[key] = copy.deepcopy(choose.choice(ODD))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from _places(value[key])


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _read_header(folder: Path, text: bytes) -> None:
    _written(folder / "model.safetensors", safetensors(text, 24))
    reader = CheckpointReader(folder)
    for name in reader.tensors:
        reader.read(name)


def _read_index(folder: Path, text: bytes) -> None:
    _written(folder / "a.safetensors", safetensors({"w": tensor(0, 8)}, 8))
    _written(folder / "model.safetensors.index.json", text)
    CheckpointReader(folder).read("w")


def _read_manifest(folder: Path, text: bytes) -> None:
    with contextlib.suppress(ValueError):
        text = signed(parse_object(text))
    _written(folder / "manifest.json", text)
    Manifest.read(folder)


def _read_lines(folder: Path, text: bytes) -> None:
    for piece in read_samples(DataConfig(source="jsonl", path=str(_written(folder / "a.jsonl", text + b"\n")))):
        piece.text.encode()


def _read_spans(folder: Path, text: bytes) -> None:
    _written(folder / "spans.jsonl", 2 * (text.replace(b"\n", b"") + b"\n"))
    lanes_report(folder, None, as_json=True)


def _through_json(folder: Path, text: bytes) -> None:
    recipe = from_json(text.decode(errors="replace"))
    assert from_json(to_json(recipe)) == recipe


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
KINDS: dict[str, tuple[Any, Callable[[Path, bytes], object]]] = {
    "recipe": (to_dict(tiny_recipe()), _through_json),
    "header": ({"a": tensor(0, 8), "b": tensor(8, 24), "__metadata__": {"format": "pt"}}, _read_header),
    "index": ({"metadata": {"total_size": 8}, "weight_map": {"w": "a.safetensors"}}, _read_index),
    "manifest": (json.loads(manifest().encode()), _read_manifest),
    "jsonl": ({"text": "hello", "meta": {"a": [1, 2]}}, _read_lines),
    "machine": (GENERIC.to_json(), lambda folder, text: load_machine(_written(folder / "m.json", text))),
    "spans": (SPAN | {"id": 1, "waited": [0]}, _read_spans),
    "config": (CONFIG | ROPE, lambda folder, text: read_config(_written(folder / "config.json", text))),
}


@pytest.mark.parametrize("kind", KINDS)
@sampled(30, 120)
@given(seed=st.integers(0, 2**32))
def test_a_mutated_file_is_read_or_refused(kind: str, seed: int) -> None:
    good, read = KINDS[kind]
    choose = random.Random(seed)
    text = json.dumps(mutated(good, choose)).encode()
    if choose.random() < 0.3:  # damage to its bytes, too
        at = choose.randrange(len(text))
        text = text[:at] + choose.choice([b"", b"\0", b"\xff", b"{", b'"', b"[" * 3000, text[:at]]) + text[at + 1 :]
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(UserError):
        read(Path(folder), text)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_right_is_read(kind: str, tmp_path: Path) -> None:
    """Else every mutated one would be refused for another reason."""
    good, read = KINDS[kind]
    with contextlib.suppress(UserError) if kind == "spans" else contextlib.nullcontext():  # two steps are too few
        read(tmp_path, json.dumps(good).encode())
