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
from penstock.storage.untrusted import RefusedFileError, one_line, open_regular, parse_object, real_path

CONFIG_NAME = "config.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MORE_TEMPLATES = "additional_chat_templates"
"""Folder in a model folder: chat templates other than the default one, as NAME.jinja."""
_CONFIG_BYTES = 1 << 24
MOST_HEADER_BYTES = 100_000_000
"""Of a safetensors file, and of an index: the format's own limit."""
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


def weights_file(folder: Path) -> str | None:
    """The file in a folder by which transformers reads a whole model's weights: the one that config.json names, else
    model.safetensors, else the index of shards; None where there is none. UserError for a name that leads elsewhere."""
    if has_model_file(folder, CONFIG_NAME):
        try:
            named = parse_object(read_model_file(folder, CONFIG_NAME, _CONFIG_BYTES)).get("transformers_weights")
        except ValueError:
            named = None  # whoever reads the config says so
        if named is not None:
            if not is_plain_name(named) or not named.endswith((".safetensors", ".safetensors.index.json")):
                raise UserError(
                    f"{folder / CONFIG_NAME}: transformers_weights must be the name of a .safetensors file in the "
                    f"folder, or of its index, not {one_line(repr(named), 80)}; correct it"
                )
            return str(named)
    return next((name for name in (SINGLE_NAME, INDEX_NAME) if has_model_file(folder, name)), None)


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder is an adapter's: an adapter_config.json that was left beside a whole model makes it none."""
    if not has_model_file(folder, ADAPTER_CONFIG_NAME):
        return False
    return not has_model_file(folder, CONFIG_NAME) or weights_file(folder) is None


def remarks_on_weights(folder: Path) -> list[str]:
    """What is to be said of which weights of a whole model's folder are taken, where more than one could be meant."""
    taken = weights_file(folder)
    if taken is None:
        return []
    said = []
    if has_model_file(folder, ADAPTER_CONFIG_NAME):
        said.append(
            f"{folder}: has an {ADAPTER_CONFIG_NAME} beside a whole model: the model's weights in {taken} are used, "
            "the adapter is not; merge it with peft first if it was meant"
        )
    others = [name for name in (SINGLE_NAME, INDEX_NAME) if name != taken and has_model_file(folder, name)]
    if others:
        said.append(f"{folder}: has {taken} and {', '.join(others)}: {taken} is used, as transformers does")
    return said


def tensor_names(folder: Path) -> set[str]:
    """Names of a folder's tensors, without a look at them. OSError or ValueError for files that are none."""
    name = weights_file(folder)
    if name is None:
        raise ValueError("no weights")
    if name.endswith(".json"):
        return set(parse_object(read_model_file(folder, name, MOST_HEADER_BYTES))["weight_map"])
    with open(open_model_file(folder, name), "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return set(parse_object(file.read(min(length, MOST_HEADER_BYTES))))


def _blob_of(folder: Path, name: str) -> Path | None:
    """The file that a link of the hub's cache leads to; None for all else."""
    if folder.parent.name != "snapshots" or not folder.parent.parent.name.startswith("models--"):
        return None
    try:
        target = os.readlink(folder / name)
    except OSError:
        return None
    return folder.parent.parent / "blobs" / Path(target).name if _BLOB.fullmatch(target) else None
