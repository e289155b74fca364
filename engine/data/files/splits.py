"""The splits of a data set: which files of a folder are for training, which for something else."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from penstock.engine.data.files.base import COMPRESSIONS, CONTAINERS, bare_name, container_of
from penstock.storage.files.errors import UserError
from penstock.storage.files.links import below_data, require_of_data
from penstock.storage.files.model_folder import is_plain_name
from penstock.storage.files.untrusted import one_line, parse_object, printable, read_regular, real_path

TRAIN = "train"
_WORDS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_WORD_OF = {word: split for split, words in _WORDS.items() for word in words}
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")
"""As the hub names the files of a split: `train_sft-00000-of-00003.parquet`."""
_MOST_PATTERNS = 500  # each of which looks at all files
_ABOUT = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""What `datasets` writes beside its rows."""
_LINE = re.compile(r"^---[ \t\r]*$", re.MULTILINE)
_CONFIGS = re.compile(r"^configs[ \t]*:.*\n?(?:(?:[ \t\-#\]}].*|\r?)(?:\n|\Z))*", re.MULTILINE)
"""The field, and the lines behind it that belong to it: what is indented, and items of its list."""
_BEYOND = {"AnchorToken": "an anchor of YAML", "AliasToken": "an alias of YAML", "TagToken": "a tag of YAML"}
_MOST_BYTES = 1 << 20
_MOST_DEPTH = 12
_MOST_TOKENS = 200_000


def find_splits(root: Path) -> dict[str, list[Path]]:
    """Split -> its files, sorted; `train` alone where nothing distinguishes splits. Empty for a folder without rows.

    Splits are what `datasets` saved as such or a hub's README.md lists; else they follow from the hub's names of files,
    or by a word such as train, val or test in a path. UserError for a folder with rows in several kinds of files.
    """
    if not root.is_dir():
        return {TRAIN: [root]}
    if (root / "dataset_dict.json").is_file():
        names = _saved(root / "dataset_dict.json").get("splits")
        if not isinstance(names, list) or not all(is_plain_name(name) and (root / name).is_dir() for name in names):
            raise UserError(
                f"{printable(root)}: dataset_dict.json lists splits that do not exist; save the data set again"
            )
        return {name: _saved_files(root / name) for name in names}
    if (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        return {TRAIN: _saved_files(root)}
    named = _named_in_readme(root)
    if named is not None:
        return named
    files = sorted(file for file in below_data(root) if _is_rows(file, root))
    kinds = sorted({str(container_of(file)) for file in files})
    if len(kinds) > 1:
        raise UserError(
            f"data.path: {printable(root)} holds {' and '.join(kinds)} files, which may hold the same rows twice; "
            "give a file, or a folder with one kind"
        )
    result: dict[str, list[Path]] = defaultdict(list)
    for file in files:
        result[_split_of(file, root) or ""].append(file)
    rest = result.pop("", [])
    for split, listed in result.items():
        _require_one(root, split, listed)
    return dict(result) or ({TRAIN: rest} if rest else {})


def _named_in_readme(root: Path) -> dict[str, list[Path]] | None:
    """The splits that the head of a hub's README.md lists with their files; None where it lists none that are here.

    UserError where it lists several data sets and says of none that it is the default.
    """
    sets = _data_sets(root)
    if len(sets) > 1:
        sets = [one for one in sets if one.get("default") is True or one.get("config_name") == "default"] or sets
    if len(sets) > 1:
        names = ", ".join(printable(one.get("config_name")) for one in sets)
        raise UserError(
            f"data.path: {printable(root)} holds several data sets: {names} (README.md); give the folder or file of "
            "one of them"
        )
    result: dict[str, list[Path]] = {}
    looks = 0
    entries = sets[0]["data_files"] if sets else []
    for entry in entries if isinstance(entries, list) else [entries]:
        split, paths = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else (TRAIN, entry)
        patterns = [text for text in (paths if isinstance(paths, list) else [paths]) if isinstance(text, str)]
        looks += sum(not {"*", "?", "["}.isdisjoint(text) for text in patterns)
        if looks > _MOST_PATTERNS or any(text.count("**") > 2 for text in patterns):
            raise UserError(
                f"data.path: {printable(root)}/README.md: more patterns of names than any data set needs; give a file"
            )
        matching = {pattern: _matching(root, pattern) for pattern in patterns}
        rows = sorted({file for files in matching.values() for file in files})
        if isinstance(split, str) and rows:
            if missing := next((pattern for pattern, files in matching.items() if not files), None):
                raise UserError(
                    f"data.path: {printable(root)}/README.md lists {one_line(missing, 80)} in split "
                    f"{one_line(split, 40)}, which is not there beside the other files; download it, or name a file"
                )
            result.setdefault(split, []).extend(rows)
    return result or None


def _matching(root: Path, pattern: str) -> list[Path]:
    """Files of rows below `root`; none for a pattern that leaves it, or is none."""
    try:
        files = [] if ".." in pattern else root.glob(pattern)
        return [file for file in files if file.is_file() and container_of(file) is not None]
    except (ValueError, NotImplementedError):
        return []


def _data_sets(root: Path) -> list[dict[str, Any]]:
    """The `configs` of README.md that have files, each an object; none where nothing there can be read as such.

    UserError where they are more than a list of data sets and their files.
    """
    try:
        text = read_regular(real_path(root / "README.md"), most_bytes=1 << 24).decode("utf-8")
    except (OSError, ValueError):
        return []
    try:
        listed = read_configs(text)
    except ValueError as error:
        raise UserError(
            f"data.path: {printable(root)}/README.md: {error}, so it does not tell the splits of the files; give a "
            "file, or a folder without that README.md"
        ) from error
    return [one for one in listed if isinstance(one, dict) and one.get("data_files")]


def read_configs(text: str) -> list[Any]:
    """The list `configs` in the head of a README.md, YAML between two lines of dashes; empty where there is none or it
    is not YAML. Of the head only `configs` is read, which is short.

    Raises ValueError for a head that goes beyond what a list of data sets and their files has: a reference of YAML to
    another part of it can make a few lines into gigabytes, so there may be none.
    """
    lines = _configs(text[: 4 * _MOST_BYTES].removeprefix("\ufeff"))
    if not lines:
        return []
    if len(lines) > _MOST_BYTES:
        raise ValueError(f"`configs` is longer than {_MOST_BYTES >> 20} MiB")
    import yaml  # comes with huggingface_hub

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _require_simple(yaml.scan(lines, Loader=loader))
        configs = yaml.load(lines, Loader=loader)["configs"]
    except (yaml.YAMLError, RecursionError, TypeError, AttributeError, KeyError):
        return []
    return configs if isinstance(configs, list) else []


def _configs(text: str) -> str:
    """The lines of the head's `configs`; empty where there is no head, no end of it, or none in it."""
    begin = _LINE.match(text)
    end = begin and _LINE.search(text, begin.end())
    if begin is None or end is None:
        return ""
    result = _CONFIGS.search(text, begin.end(), end.start())
    return result[0] if result else ""


def _require_simple(tokens: Any) -> None:
    """ValueError for references, tags, and what is nested or long."""
    depth = 0
    for count, token in enumerate(tokens):
        kind = type(token).__name__
        if kind in _BEYOND:
            raise ValueError(f"`configs` has {_BEYOND[kind]}")
        depth += kind.endswith("StartToken") and not kind.startswith("Stream")
        depth -= kind.endswith("EndToken") and not kind.startswith("Stream")
        if depth > _MOST_DEPTH or count > _MOST_TOKENS:
            raise ValueError("`configs` is nested too deep, or has too many fields")


def _require_one(root: Path, split: str, files: list[Path]) -> None:
    """UserError where two of the hub's files are the same shard: each is of another data set."""
    seen: dict[str, Path] = {}
    for file in files:
        if _SHARD.fullmatch(bare_name(file).stem) is not None and (other := seen.setdefault(file.name, file)) != file:
            one, two = (printable(folder.relative_to(root)) for folder in (other.parent, file.parent))
            raise UserError(
                f"data.path: {printable(root)} holds several data sets, '{one}' and '{two}' among them, each with a "
                f"split {printable(split)}; name the folder of one"
            )


def split_files(root: Path, split: str | None) -> list[Path]:
    """The files of a split, of `train` where none is named. UserError telling which splits there are."""
    splits = find_splits(root)
    if not splits:
        raise UserError(
            f"data.path: {printable(root)} holds no file of rows ({', '.join(CONTAINERS)}, optionally followed by "
            f"{', '.join(COMPRESSIONS)})"
        )
    wanted = split or (TRAIN if len(splits) > 1 else next(iter(splits)))
    if wanted not in splits:
        names = ", ".join(map(printable, splits))
        only = "; leave data.split out" if root.is_file() else f"; set data.split to one of: {names}"
        raise UserError(f"data.split: {printable(root)} has no split '{printable(wanted)}'{only}")
    return splits[wanted]


def _is_rows(file: Path, root: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
    return not hidden and file.name not in _ABOUT and container_of(file) is not None and file.is_file()


def _split_of(file: Path, root: Path) -> str | None:
    """The split that a file's name says, or else that of a folder on the way to it."""
    name = bare_name(file).stem
    if (shard := _SHARD.fullmatch(name)) is not None:
        return shard[1]
    for part in (name, *reversed(file.relative_to(root).parts[:-1])):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _WORD_OF:
                return _WORD_OF[word]
    return None


def _saved_files(folder: Path) -> list[Path]:
    """The Arrow files of a data set that `datasets` saved, in its order."""
    files = _saved(folder / "state.json").get("_data_files")
    names = [entry.get("filename") for entry in files if isinstance(entry, dict)] if isinstance(files, list) else []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise UserError(f"{printable(folder)}: state.json names the file {printable(name)}, which is not there")
    return [folder / str(name) for name in names]


def _saved(file: Path) -> dict[str, Any]:
    try:
        require_of_data([file], file.parent)
        return parse_object(read_regular(real_path(file), most_bytes=1 << 26))
    except (OSError, ValueError) as error:
        raise UserError(f"{printable(file)}: cannot be read ({error}); save the data set again") from error
