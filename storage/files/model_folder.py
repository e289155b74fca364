"""Files of a model folder, which may come from anybody: plain names, regular files, links by storage/files/links.py.

The Hugging Face cache keeps models--OWNER--NAME/snapshots/REVISION/FILE as links to ../../blobs/DIGEST.
"""

from __future__ import annotations

import os
from pathlib import Path

from penstock.storage.files import links
from penstock.storage.files.disk import reporting
from penstock.storage.files.errors import UserError
from penstock.storage.files.links import MORE_TEMPLATES as MORE_TEMPLATES
from penstock.storage.files.untrusted import RefusedFileError, one_line, open_regular, parse_object, real_path

CONFIG_NAME = "config.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_CONFIG_BYTES = 1 << 24
MOST_HEADER_BYTES = 100_000_000
"""Of a safetensors file, and of an index: the format's own limit."""
_SUFFIXES = {".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
"""Of files that are read, or that an export takes along."""
_ADVICE = "copy the file itself into the folder, or download the model into a new folder"


def is_plain_name(name: object) -> bool:
    """Whether `name` is the name of a file in a folder: no path, nothing that leads out."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\0"} and len(name) <= 255


def open_model_file(folder: Path, name: str) -> int:
    """A descriptor of regular file `name` of a model folder, for reading. OSError; UserError where it is refused."""
    assert is_plain_name(name), name
    folder = folder.resolve()
    try:
        return open_regular(links.of_model(folder, name))
    except RefusedFileError as error:
        raise UserError(f"{folder / name}: {error.strerror}; {_ADVICE}") from None


def is_followed(folder: Path, name: str) -> bool:
    """Whether `name` of a model folder is no link, or one that is followed."""
    try:
        links.of_model(folder.resolve(), name)
    except UserError:
        return False
    return True


def more_templates(folder: Path) -> list[Path]:
    """A model folder's further chat templates. UserError where their folder is a link that is not followed."""
    return sorted(links.of_model(folder.resolve(), MORE_TEMPLATES).glob("*.jinja"))


def linked_files(folder: Path) -> dict[str, Path]:
    """The files of a model folder (or of none) that are links out of it, and where they lead. UserError for one that
    would be refused once it is read."""
    result: dict[str, Path] = {}
    real = folder.resolve()
    for path in [*sorted(real.iterdir()), *more_templates(real)] if folder.is_dir() else ():
        is_read = path.suffix in _SUFFIXES or path.name == MORE_TEMPLATES
        if is_read and path.is_symlink() and (target := links.leads_out(path.parent, path.name)) is not None:
            result[path.name] = target
    return result


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
    target = file if path.is_dir() else real_path(file)
    return file, read_model_file(target.parent, target.name, _CONFIG_BYTES)


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
    said: list[str] = []
    if (taken := weights_file(folder)) is None:
        return said
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
