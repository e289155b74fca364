"""Links in folders of models and data, which may come from anybody: which of them are followed.

A link may be the user's own, or come with an archive: then it leads where its author likes, to a private file that an
export would publish, and belongs to the user all the same. Followed are links that lead

- to a place within the folder itself, or within its entry of the Hugging Face cache (models--OWNER--NAME);
- into a folder that the user names in PENSTOCK_LINKS;
- elsewhere, if they belong to this user, and what they lead to is of its kind: from a model's folder a file of another
  model or of the hub's cache, from a folder of data what others may read as well and is in no hidden folder.

The folder itself may be reached through any links: its name is the user's. All else is refused, with the way to allow.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import parse_object, printable, read_regular

VARIABLE = "PENSTOCK_LINKS"
"""Folders, separated as in PATH, into which links of models and data may lead."""
MORE_TEMPLATES = "additional_chat_templates"
"""Folder in a model folder: chat templates other than the default one, as NAME.jinja."""
_ENTRY = re.compile(r"(models|datasets)--.+")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Name of a file of the hub's cache: its checksum, which nobody knows who does not know the file."""
_MODEL_FILE = re.compile(
    r"(([a-z]+_)*config|tokenizer|special_tokens_map|added_tokens|vocab|tekken|chat_template|model\.safetensors\.index)\.json|"
    r"(merges|vocab)\.txt|[\w-]+\.jinja|[a-z_]+ing_\w+\.py|[\w.-]+\.(safetensors|model|tiktoken)",
    re.ASCII,
)
"""Names that the files of models have."""
_MARKS = {"config.json": "model_type", "adapter_config.json": "peft_type", "tokenizer_config.json": "tokenizer_class"}
"""Files by which the folder of a model or of a tokenizer is known, each with a field that it has."""
_MARK_BYTES = 1 << 24
_MOST_LINKS = 8
"""From model folder to model folder."""


def real_target(path: Path) -> Path:
    """Where `path` leads. UserError where that does not exist, or the links run in a circle."""
    try:
        return path.resolve(strict=True)
    except FileNotFoundError:
        why = "does not exist"
    except (OSError, RuntimeError):
        why = "cannot be followed"
    target = os.readlink(path) if path.is_symlink() else "nowhere"
    raise UserError(
        f"{printable(path)}: it is a symbolic link to {printable(target)}, which {why}; remove or repair it"
    )


def of_model(folder: Path, name: str, most: int = _MOST_LINKS) -> Path:
    """What `name` of a model's `folder`, none of whose parts is a link, stands for. UserError for a link that is not
    followed."""
    path = folder / name
    if not path.is_symlink():
        return path
    real = real_target(path)
    if _is_within(real, folder):
        return real
    _require_own(path, real)
    if name.endswith(".safetensors") and real.name.endswith(".safetensors"):  # nothing but tensors is taken of it
        return real
    if _entry_of(folder) is None and _is_blob(real):
        return real
    target = Path(os.readlink(path))
    there = real_target((folder / target).parent)
    of_kind = _MODEL_FILE.fullmatch(target.name) is not None or target.name == name == MORE_TEMPLATES
    if most and of_kind and _is_model_folder(there):
        return of_model(there, target.name, most - 1)
    _refuse(path, real, "which is outside of the folder, and no file of another model")


def leads_out(folder: Path, name: str) -> Path | None:
    """Where the link `name` of a model's real `folder` leads, if that is elsewhere; else None. UserError."""
    target = of_model(folder, name)
    entry = _entry_of(folder)
    return None if target.is_relative_to(folder) or (entry and target.is_relative_to(entry)) else target


def require_no_entry(path: Path) -> None:
    """Raise UserError for an entry of the hub's cache in the place of one of its snapshots."""
    entry = path.parent if path.name == "snapshots" else path
    if _ENTRY.fullmatch(entry.name) is None or not (entry / "snapshots").is_dir():
        return
    result = sorted(target for target in (entry / "snapshots").iterdir() if target.is_dir())
    with contextlib.suppress(OSError, ValueError):
        main = entry / "snapshots" / read_regular(entry / "refs" / "main", most_bytes=_MARK_BYTES).decode().strip()
        result = [target for target in result if target == main] or result
    advice = f"name a snapshot of it, as {printable(result[0])}" if result else "which is empty; download it again"
    raise UserError(f"{printable(path)}: is an entry of the Hugging Face cache; {advice}")


def require_of_data(files: Iterable[Path], root: Path) -> None:
    """UserError where one of the `files` below a data set's folder is reached through a link that is not followed."""
    base, is_plain = root.resolve(), dict[Path, bool]()
    for file in files:
        folder = file.parent
        if folder not in is_plain:
            is_plain[folder] = folder.resolve().is_relative_to(base)
        if is_plain[folder] and not file.is_symlink():
            continue
        real = real_target(file)
        if _is_within(real, base):
            continue
        target = root
        for part in file.relative_to(root).parts:
            target /= part
            if target.is_symlink():
                _require_own(target, real)
        if not any(_ENTRY.fullmatch(parent.name) for parent in real.parents):
            _require_public(file, real)


def require_shown(file: Path, folder: Path) -> None:
    """UserError where a file that a row of data in `folder` names is elsewhere and private: hidden, or nobody else's to
    read. One that is not there is no matter."""
    with contextlib.suppress(OSError, RuntimeError):
        real = file.resolve(strict=True)
        if _is_within(real, folder.resolve()) or any(_ENTRY.fullmatch(parent.name) for parent in real.parents):
            return
        hidden = any(part.startswith(".") for part in real.parts)
        if hidden or not stat.S_IMODE(real.stat().st_mode) & 0o044:
            why = "hidden, or in a hidden folder" if hidden else "a file that nobody else may read"
            raise UserError(
                f"{printable(file)}: is outside of the data's folder and {why}; copy it into the folder, or, if you "
                f"trust the data, allow it with {VARIABLE}={printable(real.parent)}"
            )


def below_data(root: Path) -> Iterator[Path]:
    """All files below a folder of data, links to files among them (`require_of_data` judges those), also in folders
    that are linked from elsewhere. UserError for a link to a folder that is not followed, and for a pipe."""
    base = root.resolve()
    folders, seen = [root], {base}
    while folders:
        folder = folders.pop()
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path = folder / entry.name
            if entry.is_dir(follow_symlinks=False):
                folders.append(path)
            elif path.is_file():
                yield path
            elif not entry.name.startswith("."):  # else an editor's mark, say
                if not entry.is_symlink():
                    raise UserError(f"{printable(path)}: is neither a file nor a folder; remove it")
                real = _linked_folder(path, base)
                if real not in seen and not real.is_relative_to(base):
                    seen.add(real)
                    folders.append(path)


def _linked_folder(path: Path, base: Path) -> Path:
    """Where a link that leads to no file leads. UserError where that is no folder either, or it is not followed."""
    real = real_target(path)
    if not real.is_dir():
        raise UserError(f"{printable(path)}: it is a symbolic link to {printable(real)}, which is no file; remove it")
    if base.is_relative_to(real):
        raise UserError(f"{printable(path)}: is a link to {printable(real)}, in which it is itself; remove it")
    if not _is_within(real, base):
        _require_own(path, real)
        _require_public(path, real)
    return real


def _require_public(path: Path, real: Path) -> None:
    """UserError where nobody else may read what a link leads to, or a hidden folder is on the way."""
    if any(part.startswith(".") for part in real.parts):
        _refuse(path, real, "which is hidden, or in a hidden folder")
    if not stat.S_IMODE(real.stat().st_mode) & 0o044:
        _refuse(path, real, "which nobody else may read")


def _require_own(path: Path, real: Path) -> None:
    if path.lstat().st_uid != os.geteuid():
        _refuse(path, real, "which another user has made")


def _refuse(path: Path, real: Path, why: str) -> NoReturn:
    raise UserError(
        f"{printable(path)}: it is a symbolic link to {printable(real)}, {why}; copy the file itself into the folder, "
        f"or, if you trust the link, allow it with {VARIABLE}={printable(real.parent)}"
    )


def _is_within(real: Path, folder: Path) -> bool:
    """Whether a real path is in the folder, in its entry of the hub's cache, or where the user lets links lead."""
    allowed = [Path(text).expanduser().resolve() for text in os.environ.get(VARIABLE, "").split(os.pathsep) if text]
    entry = _entry_of(folder)
    return any(real.is_relative_to(target) for target in (folder, *allowed, *([] if entry is None else [entry])))


def _entry_of(folder: Path) -> Path | None:
    """The entry of the hub's cache that a snapshot, or a folder in one, belongs to."""
    for target in (folder, *folder.parents):
        if target.parent.name == "snapshots" and _ENTRY.fullmatch(target.parent.parent.name) is not None:
            return target.parent.parent
    return None


def _is_blob(real: Path) -> bool:
    """Whether a real path is that of a model's file in the hub's cache, as links of `hf download --local-dir` are."""
    in_blobs = real.parent.name == "blobs" and real.parents[1].name.startswith("models--")
    return in_blobs and _BLOB.fullmatch(real.name) is not None


def _is_model_folder(folder: Path) -> bool:
    """Whether a folder says of itself that it holds a model, an adapter or a tokenizer, or has templates of one."""
    folder = folder.parent if folder.name == MORE_TEMPLATES else folder
    for name, field in _MARKS.items():
        try:
            values = parse_object(read_regular((folder / name).resolve(), most_bytes=_MARK_BYTES))
        except (OSError, ValueError, RuntimeError):
            continue
        if isinstance(values.get(field), str):
            return True
    return False
