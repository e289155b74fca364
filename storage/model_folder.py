"""Files of a model folder, which may come from anybody: plain names in it, regular files, no link but the hub cache's.

The cache of the Hugging Face hub keeps models--OWNER--NAME/snapshots/REVISION/FILE as links to ../../blobs/DIGEST of
the same models-- folder. These are followed; nothing else is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from penstock.storage.disk import reporting
from penstock.storage.errors import UserError
from penstock.storage.untrusted import RefusedFileError, open_regular, real_path

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_CONFIG_BYTES = 1 << 24
_BLOB = re.compile(r"\.\./\.\./blobs/[0-9a-f]{40,64}")
_ADVICE = "copy the file itself into the folder, or download the model into a new folder"


def is_plain_name(name: object) -> bool:
    """Whether `name` is the name of a file in a folder: no path, nothing that leads out."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\0"} and len(name) <= 255


def open_model_file(folder: Path, name: str) -> int:
    """A descriptor of regular file `name` of a model folder, for reading. OSError; UserError where it is refused.

    Never waits, and never leads out of the folder.
    """
    assert is_plain_name(name), name
    folder = folder.resolve()
    try:
        blob = _blob_of(folder, name)
        if blob is not None:
            return open_regular(blob, below=folder.parent.parent)
        return open_regular(folder / name, below=folder)
    except RefusedFileError as error:
        raise UserError(f"{folder / name}: {error.strerror}; {_ADVICE}") from None


def has_model_file(folder: Path, name: str) -> bool:
    """Whether there is something of that name in a folder, whatever it is."""
    return os.path.lexists(folder / name)


def read_model_file(folder: Path, name: str, most_bytes: int) -> bytes:
    """The content of a file of a model folder. UserError where it cannot be read or has more than `most_bytes`."""
    with reporting(folder / name, "reading it"), open(open_model_file(folder, name), "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise UserError(f"{folder / name}: is larger than the limit of {most_bytes:,} bytes; {_ADVICE}")
    return content


def read_config_file(path: Path) -> tuple[Path, bytes]:
    """The config.json of a model folder, or the file that `path` is, and its content. UserError naming it."""
    file = path / "config.json" if path.is_dir() else path
    if not has_model_file(file.parent, file.name):
        raise UserError(f"{file}: no such file; give a Hugging Face folder or a config.json")
    # A file that the user names may be a link of the user's; what is in a folder may not.
    place = file if path.is_dir() else real_path(file)
    return file, read_model_file(place.parent, place.name, _CONFIG_BYTES)


def _blob_of(folder: Path, name: str) -> Path | None:
    """The file that a link of the hub's cache leads to; None for all else."""
    if folder.parent.name != "snapshots" or not folder.parent.parent.name.startswith("models--"):
        return None
    try:
        target = os.readlink(folder / name)
    except OSError:
        return None
    return folder.parent.parent / "blobs" / Path(target).name if _BLOB.fullmatch(target) else None
