"""Files that are nearly right: mutated ones are read or refused by a UserError, and nothing else happens."""

import contextlib
import copy
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_model_files import CONFIG, safetensors, tensor
from bad_run_files import SPAN, manifest, signed
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from recipe_texts import tiny_recipe
from samples import sampled

from penstock.app.lanes import lanes_report
from penstock.app.recipe import from_json, to_dict, to_json
from penstock.engine.config import DataConfig
from penstock.engine.data.reading import read_samples
from penstock.engine.hf.config import read_config
from penstock.engine.machine.presets import GENERIC
from penstock.engine.machine.profile import load_machine
from penstock.storage.errors import UserError
from penstock.storage.manifest import Manifest
from penstock.storage.safetensors_io import CheckpointReader
from penstock.storage.untrusted import parse_object

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


ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
KINDS: dict[str, tuple[Any, Callable[[Path, bytes], object]]] = {
    "recipe": (to_dict(tiny_recipe()), lambda folder, text: _through_json(text)),
    "header": ({"a": tensor(0, 8), "b": tensor(8, 24), "__metadata__": {"format": "pt"}}, _read_header),
    "index": ({"metadata": {"total_size": 8}, "weight_map": {"w": "a.safetensors"}}, _read_index),
    "manifest": (json.loads(manifest().encode()), _read_manifest),
    "jsonl": ({"text": "hello", "meta": {"a": [1, 2]}}, _read_lines),
    "machine": (GENERIC.to_json(), lambda folder, text: load_machine(_written(folder / "m.json", text))),
    "spans": (SPAN | {"id": 1, "waited": [0]}, _read_spans),
    "config": (CONFIG | ROPE, lambda folder, text: read_config(_written(folder / "config.json", text))),
}


def _through_json(text: bytes) -> None:
    recipe = from_json(text.decode(errors="replace"))
    assert from_json(to_json(recipe)) == recipe


@pytest.mark.parametrize("kind", KINDS)
@sampled(30, 120, suppress_health_check=[HealthCheck.too_slow])
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
