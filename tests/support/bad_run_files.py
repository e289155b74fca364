"""Damaged and hostile files of a run directory, by name: what it holds, and manifests whose checksum is right."""

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_model_files import NO_OBJECT
from recipe_texts import tiny_recipe

from penstock.app.recipe import to_json
from penstock.storage.crc import checksum
from penstock.storage.manifest import ArraySpec, DriveRecord, Manifest, Stored

SPAN = {
    "lane": "compute",
    "op": "clip",
    "block": "all",
    "chunk": -1,
    "start_s": 0.0,
    "end_s": 1.0,
    "bytes": 0,
    "step": 1,
}


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
    commands = {"resume": [], "scrub": [], "export": ["out"]}
    for command, rest in commands.items():
        for name, content in texts.items():
            found[f"recipe.json {name}, {command}"] = ([command, *rest], at("recipe.json", content))
    for command in ("lanes", "trace"):  # damaged lines they pass over and count
        found[f"spans.jsonl gone, {command}"] = ([command], at("spans.jsonl", lambda path: None))
        found[f"spans.jsonl a folder, {command}"] = ([command], at("spans.jsonl", Path.mkdir))
    for command, rest in (commands | {"checkpoint": ["now"]}).items():
        found[f"run.lock a folder, {command}"] = ([command, *rest], at("run.lock", Path.mkdir))
        found[f"run.lock a pipe, {command}"] = ([command, *rest], at("run.lock", os.mkfifo))
        found[f"state a file, {command}"] = ([command, *rest], _state_a_file)
        found[f"state gone, {command}"] = ([command, *rest], lambda path: shutil.rmtree(path / "state"))
        found[f"chunk files gone, {command}"] = ([command, *rest], unchanged)
    names = ("", ".", "..", "a/b", "../x", "a\0b", "a" * 300, "\x1b]0;owned\x07", "step-5", ".hidden", " ")
    for name in names:
        if name:
            shown = "long" if len(name) > 100 else repr(name)
            found[f"a checkpoint of name {shown}"] = (["checkpoint", name], unchanged)
            found[f"deleting a checkpoint of name {shown}"] = (["checkpoint", name, "--delete"], unchanged)
            found[f"exporting a checkpoint of name {shown}"] = (
                ["export", "out", "--checkpoint", name],
                unchanged,
            )
    for setting in ("train.steps=0", "name=other", "model.num_layers=3", "data.seed=5", "train.lr=nan", "x=1"):
        found[f"resume with {setting}"] = (["resume", "--set", setting], unchanged)
    found["pausing what is over"] = (["pause"], unchanged)
    found["stopping what is over"] = (["stop"], unchanged)
    return found


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
    return json.dumps(content | {"crc32c": f"{checksum(memoryview(text.encode()), 0):08x}"}).encode()


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
        "checkpoint": [5, "", []],
    }
    for field, values in top.items():
        for value in values:
            found[f"{field} {value!r}"] = signed(good | {field: value})
    for name in top:
        found[f"no {name}"] = signed(
            {k: v for k, v in good.items() if k != name or name == "checkpoint"}
            | ({"checkpoint": {}} if name == "checkpoint" else {})
        )
    parts: dict[str, list[Any]] = {
        "buffer": ["..", "a/b", "", ".x", "scratch", "a\0", 5, None],
        "kind": ["../../x", "checkpoints", []],
        "numel": [0, -1, 2**62, 4096.0, "4096", True],
        "dtype": ["float64", None, ["float32"]],
        "part_numel": [0, 1, -2048, 2**62 + 1, None],
        "slot": [2, -1, "0", None, True, 0.0],
        "drives": [[], ["d9"], "d0", [5], None],
        "crc32c": [[], ["00000001"], ["1", "2"], [1, 2], None, "00000001", ["-0000001", "00000002"]],
    }
    for field, values in parts.items():
        for value in values:
            changed = copy.deepcopy(good)
            changed["arrays"][0][field] = value
            found[f"an array's {field} {value!r}"] = signed(changed)
    changed = copy.deepcopy(good)
    changed["arrays"] *= 2
    found["an array twice"] = signed(changed)
    changed = copy.deepcopy(good)
    changed["drives"] *= 2
    found["a drive twice"] = signed(changed)
    return found
