"""What models are made of, kept between plans: taking one apart takes PyTorch and transformers, which take seconds.

A file a model, below XDG_CACHE_HOME, named by a digest of all that decides its content. Only a plan reads it, never a
training. A file that is damaged, or that somebody else could have written, counts as none, and so does a folder that
cannot be used.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from penstock import engine
from penstock.engine.config import Recipe
from penstock.engine.model.spec import ModelSpec
from penstock.storage.model_folder import read_config_file
from penstock.storage.sealed import seal, unseal
from penstock.storage.untrusted import open_regular, parse_object, typed

_MOST_FILES = 64
_MOST_BYTES = 1 << 22
_CODE = ("model", "attention", "hf")
"""Rooms of the engine whose code says what a model is made of."""


def kept_spec(recipe: Recipe, make: Callable[[], ModelSpec]) -> ModelSpec:
    """What the recipe's model is made of, without its `config`: as kept, else as `make` says, whose errors pass.

    The recipe's compute dtype is decided. `make` depends on the recipe and the model's config.json alone.
    """
    folder, digest = _folder(), _digest(recipe)
    spec = None if folder is None else _read(folder, digest)
    if spec is None:
        spec = replace(make(), config=None)
        if folder is not None:
            with contextlib.suppress(OSError):
                _write(folder, digest, spec)
    return spec


def _folder() -> Path | None:
    """None where no home is known. The XDG specification has relative paths ignored."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.cache")
    return Path(base) / "penstock" / "models" if os.path.isabs(base) else None


def _digest(recipe: Recipe) -> str:
    """Of everything that decides what the model is made of. UserError for a config.json that cannot be read."""
    config = None
    if recipe.model.path is not None and (path := Path(recipe.model.path).expanduser()).exists():
        config = hashlib.sha256(read_config_file(path)[1]).hexdigest()
    code = hashlib.sha256()
    for room in _CODE:
        for file in sorted((Path(engine.__path__[0]) / room).glob("*.py")):
            code.update(file.read_bytes())
    made_of = {
        "versions": [importlib.metadata.version(name) for name in ("penstock", "torch", "transformers")],
        "code": code.hexdigest(),
        "model": asdict(recipe.model),
        "config": config,
        "vocab_size": recipe.data.tokenizer_vocab_size,
        "sequence_length": recipe.data.sequence_length,
        "compute_dtype": recipe.train.compute_dtype,
    }
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def _read(folder: Path, digest: str) -> ModelSpec | None:
    try:
        with open(open_regular(folder / f"{digest}.json"), "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return None
            content, sealed = unseal(parse_object(file.read(_MOST_BYTES + 1), most_bytes=_MOST_BYTES))
        return typed(content["spec"], ModelSpec) if sealed and content["digest"] == digest else None
    except (OSError, ValueError, KeyError):
        return None


def _write(folder: Path, digest: str, spec: ModelSpec) -> None:
    """Keep `spec`, and the newest others. OSError."""
    content = json.dumps(seal({"digest": digest, "spec": msgspec.to_builtins(spec)})).encode()
    if len(content) > _MOST_BYTES:
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=folder)  # not synced: what a power cut leaves of it is known by its checksum
    try:
        with open(fd, "wb") as file:
            file.write(content)
        os.replace(temporary, folder / f"{digest}.json")
    except OSError:
        os.unlink(temporary)
        raise
    for old in sorted(folder.iterdir(), key=lambda path: path.lstat().st_mtime, reverse=True)[_MOST_FILES:]:
        old.unlink()
