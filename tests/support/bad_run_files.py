"""Damaged and hostile files of a run directory, by name: what it holds, and manifests whose checksum is right."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_model_files import NO_OBJECT
from recipe_texts import tiny_recipe

from penstock.app.recipes.recipe import to_json
from penstock.storage.files.crc import checksum
from penstock.storage.tier.manifest import ArraySpec, DriveRecord, Manifest, Stored

SPAN: dict[str, Any] = {"lane": "compute", "op": "clip", "block": "all", "chunk": -1, "bytes": 0, "step": 1}
SPAN |= {"start_s": 0.0, "end_s": 1.0}

OBSTACLES: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, target: path.symlink_to(target),
    "dangling link": lambda path, target: path.symlink_to(target.with_name("none")),
    "pipe": lambda path, target: os.mkfifo(path),
    "folder": lambda path, target: path.mkdir(),
}
"""What stands in place of a file, and leads to `target` if anywhere."""


def manifest() -> Manifest:
    """One that is right, of a store without its files."""
    spec = ArraySpec("layers.0", "master", 4096, "float32", 2048)
    drive = DriveRecord("d0", ".", True)
    meta = {"step": 3, "tokens": 100}
    return Manifest("s0", 3, {spec: Stored(0, ("d0",), (1, 2))}, (drive,), meta)


def make_run(path: Path) -> Path:
    """A finished run's directory, of which the state's chunk files are gone."""
    (path / "state").mkdir(parents=True)
    (path / "recipe.json").write_text(to_json(tiny_recipe()))
    (path / "state" / "manifest.json").write_bytes(manifest().encode())
    spans = [SPAN, SPAN | {"start_s": 1.0, "end_s": 2.0, "step": 2}]
    (path / "spans.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
    metrics = {"step": 2, "loss": 8.0, "tokens": 100, "step_s": 1.0, "tokens_per_s": 100.0, "model_flops": 1}
    (path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    status = {"state": "stopped", "pid": 1, "step": 2, "total_steps": 9, "heartbeat": 1.0}
    (path / "status.json").write_text(json.dumps(status))
    return path


def unchanged(run: Path) -> None:
    """A run's directory stays as it is."""


def damaged_run_files() -> dict[str, tuple[list[str], Callable[[Path], object]]]:
    """Name -> a command with its arguments behind the run's name, and what becomes of the run's directory."""
    texts = NO_OBJECT | {"escapes": b'{"name": "\\u001b]0;owned\\u0007"}'}
    found: dict[str, tuple[list[str], Callable[[Path], object]]] = {}
    for command, *rest in (["resume"], ["scrub"], ["export", "out"], ["checkpoint", "now"]):
        given = [command, *rest]
        if command != "checkpoint":
            damaged = {f"recipe.json {name}, {command}": at("recipe.json", content) for name, content in texts.items()}
            found |= {name: (given, damage) for name, damage in damaged.items()}
        found[f"run.lock a folder, {command}"] = (given, at("run.lock", Path.mkdir))
        found[f"run.lock a pipe, {command}"] = (given, at("run.lock", os.mkfifo))
        found[f"state a file, {command}"] = (given, _state_a_file)
        found[f"state gone, {command}"] = (given, lambda path: shutil.rmtree(path / "state"))
        found[f"chunk files gone, {command}"] = (given, unchanged)
    for command in ("lanes", "trace"):  # damaged lines they pass over and count
        found[f"spans.jsonl gone, {command}"] = ([command], at("spans.jsonl", lambda path: None))
        found[f"spans.jsonl a folder, {command}"] = ([command], at("spans.jsonl", Path.mkdir))
    names = (".", "..", "a/b", "../x", "a\0b", "a" * 300, "\x1b]0;owned\x07", "step-5", ".hidden", " ")
    words = [given for name in names for given in (["checkpoint", name], ["checkpoint", name, "--delete"])]
    words += [["export", "out", "--checkpoint", name] for name in names] + [["pause"], ["stop"]]
    settings = ("train.steps=0", "name=other", "model.num_layers=3", "data.seed=5", "train.lr=nan", "x=1")
    words += [["resume", "--set", setting] for setting in settings]
    return found | {repr(" ".join(given)): (given, unchanged) for given in words}


def put(path: Path, what: bytes | str | Callable[[Path], object]) -> None:
    """Write a file, or have something else take its place."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if callable(what):
        what(path)
    else:
        path.write_bytes(what if isinstance(what, bytes) else what.encode())


def at(name: str, what: bytes | str | Callable[[Path], object]) -> Callable[[Path], object]:
    """For a run's directory: `put` of one of its files."""
    return lambda run: put(run / name, what)


def _state_a_file(run: Path) -> None:
    shutil.rmtree(run / "state")
    put(run / "state", "mine\n")


def signed(content: dict[str, Any]) -> bytes:
    """A manifest's content with the checksum that makes it look right."""
    content = {name: value for name, value in content.items() if name != "crc32c"}
    text = json.dumps(content, separators=(",", ":"))
    return json.dumps(content | {"crc32c": f"{checksum(memoryview(text.encode())):08x}"}).encode()


def damaged_manifests() -> dict[str, bytes]:
    good = json.loads(manifest().encode())
    found: dict[str, bytes] = NO_OBJECT | {
        "a flipped digit": manifest().encode().replace(b"4096", b"4097"),
        "no checksum": json.dumps({k: v for k, v in good.items() if k != "crc32c"}).encode(),
    }
    top: dict[str, list[Any]] = {
        "format": ["other", None, 5],
        "version": [1, "2", None, [2]],
        "store": ["", None, 5, "a\0b"],
        "generation": [0, -1, 1.5, "3", True, None, 2**70],
        "meta": [None, [], 5],
        "drives": [None, 5, {}, [5], [{}], [{"id": "d0"}]],
        "arrays": [None, 5, {}, [5], [{}]],
        "checkpoint": [5, "", [], {}],
    }
    for field, values in top.items():
        for value in values:
            found[f"{field} {value!r}"] = signed(good | {field: value})
    for name in [name for name in top if name != "checkpoint"]:
        found[f"no {name}"] = signed({k: v for k, v in good.items() if k != name})
    parts: dict[str, list[Any]] = {
        "buffer": ["..", "a/b", "", ".x", "scratch", "a\0", 5, None],
        "kind": ["../../x", "checkpoints", []],
        "numel": [0, -1, 2**62, 4096.0, "4096", True],
        "dtype": ["float64", None, ["float32"]],
        "part_numel": [0, 1, -2048, 2**62 + 1, None],
        "slot": [2, -1, "0", None, True, 0.0],
        "drives": [[], ["d9"], "d0", [5], None],
        "crcs": [[], [1], ["1", "2"], None, 1, [-1, 2], [1, 2**32]],
    }
    (array,) = good["arrays"]
    for field, values in parts.items():
        for value in values:
            found[f"an array's {field} {value!r}"] = signed(good | {"arrays": [array | {field: value}]})
    for field in ("arrays", "drives"):
        found[f"{field} twice"] = signed(good | {field: good[field] * 2})
    return found
