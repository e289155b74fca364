"""Models and data sets of the Hugging Face hub, fetched into its cache when they are asked for, and checked. What goes
wrong is one line; complete files stay in the cache, so that the same command goes on from there."""

from __future__ import annotations

import glob
import hashlib
import re
import shutil
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from penstock.app.console.working import say, working
from penstock.app.hub.access import cache, elsewhere, explaining, is_unreachable, online, quiet, repo_folder
from penstock.app.hub.names import HubName, Kind, is_hub, offline_wanted, on_hub, parse_hub
from penstock.app.hub.progress import fetching
from penstock.engine import preparing
from penstock.engine.config import Recipe
from penstock.storage.files.errors import UserError
from penstock.storage.files.model_folder import INDEX_NAME, MORE_TEMPLATES, SINGLE_NAME
from penstock.storage.files.units import bytes_text
from penstock.storage.files.untrusted import one_line, parse_object, shell
from penstock.storage.files.user_cache import read_cached, write_cached

_MODEL_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken", ".py"}
"""Of the files beside a model's weights: config, tokenizer, chat template; code, which is never run here, for exports
whose config names it."""
_DATA_SUFFIXES = {".parquet", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".arrow", ".txt", ".md"}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip"}
_NO_DATA = {"readme.md", "license.md", "license.txt", "dataset_infos.json", "dataset_info.json", "dataset_dict.json"}
_NO_DATA |= {"state.json", "requirements.txt", "contributing.md", "changelog.md"}
_MOST_KEPT = 256


class _File(NamedTuple):
    """A file of a repository, as the hub describes it."""

    name: str
    size: int
    blob: str
    """Its name in the cache: the SHA-256 of a large file (LFS), the git object of a small one."""


def model_folder(name_or_path: str | Path, *, config_only: bool = False) -> Path:
    """The folder of a model: a local one as it is, one of the hub once its config, tokenizer and *.safetensors are in
    the cache; with `config_only` config.json alone. Raises UserError, one line, where it cannot be had."""
    hub = on_hub(name_or_path)
    return Path(name_or_path).expanduser() if hub is None else _folder(hub, "model", config_only=config_only)


def dataset_folder(name_or_path: str | Path) -> Path:
    """The same for a data set, whose data files are fetched."""
    hub = on_hub(name_or_path)
    return Path(name_or_path).expanduser() if hub is None else _folder(hub, "dataset")


def fetched(recipe: Recipe, *, weights: bool = True) -> Recipe:
    """The recipe with local folders in place of what it names on the hub, which is fetched; without `weights` only
    config and tokenizer of the model."""

    def local(name: Any, kind: Kind, *, weights: bool = False) -> Any:
        """The folder of what is on the hub; anything else as it is."""
        return str(_folder(parse_hub(name), kind, weights=weights)) if is_hub(name) else name

    data = recipe.data
    model = replace(recipe.model, path=local(recipe.model.path, "model", weights=weights))
    data = replace(data, tokenizer=local(data.tokenizer, "model"), path=local(data.path, "dataset"))
    mixture = [
        entry | {"path": local(entry["path"], "dataset")} if "path" in entry else entry for entry in data.mixture
    ]
    return replace(recipe, model=model, data=replace(data, mixture=mixture))


def for_plan(recipe: Recipe, *, fetch: bool = True) -> Recipe:
    """The recipe as a plan needs it: of a model on the hub config.json alone, of data sets nothing. Without `fetch`
    only the cache counts: nobody waits for a name that is being typed."""
    model, data = recipe.model, recipe.data
    if is_hub(model.path):
        hub = parse_hub(str(model.path))
        folder = _cached(hub, "model", config_only=True)
        if folder is None and fetch:
            folder = _folder(hub, "model", config_only=True)
        if folder is None and not model.has_shape:
            command = shell("penstock", "plan", str(hub))
            raise UserError(f"model.path: {hub} is not in the cache yet; `{command}` fetches its config.json")
        model = replace(model, path=None if folder is None else str(folder))
    path, tokenizer = (None if is_hub(name) else name for name in (data.path, data.tokenizer))
    mixture = [entry for entry in data.mixture if not is_hub(entry.get("path"))]
    data = replace(data, path=path, tokenizer=tokenizer, mixture=mixture)
    return replace(recipe, model=model, data=data)


def _folder(hub: HubName, kind: Kind, *, weights: bool = True, config_only: bool = False) -> Path:
    if offline_wanted():
        result = _cached(hub, kind, weights=weights, config_only=config_only)
        if result is None:
            raise UserError(f"{hub}: HF_HUB_OFFLINE is set and it is not in {cache()}; {elsewhere(hub, kind)}")
        return result
    with online(), explaining(hub, kind):
        try:
            files = _choose(hub, kind, _listing(hub, kind), weights=weights, config_only=config_only)
        except Exception as error:
            result = _cached(hub, kind, weights=weights, config_only=config_only) if is_unreachable(error) else None
            if result is None:
                raise
            say(f"{hub}: the hub cannot be reached; using the cached copy, {result.name[:12]}")
            return result
        return _fetch(hub, kind, files)


def _cached(hub: HubName, kind: Kind, *, weights: bool = True, config_only: bool = False) -> Path | None:
    """The folder in the cache where all that is wanted of the repository is there; None else. Asks nobody."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = ["config.json"]
    if kind == "dataset":  # those suffixes that nothing else has
        plain = _DATA_SUFFIXES - {".md", ".txt", ".json"}
        wanted = [f"*{suffix}{packed}" for suffix in plain for packed in ("", *_COMPRESSED)]
    try:
        folder = Path(
            snapshot_download(
                hub.name, repo_type=kind, revision=hub.revision, local_files_only=True, allow_patterns=wanted
            )
        )
    except (LocalEntryNotFoundError, ValueError):
        return None
    if kind == "dataset":
        return folder if any(_is_data(file.name) for file in folder.rglob("*")) else None
    whole = (folder / "config.json").is_file() and (config_only or not weights or _has_weights(folder))
    return folder if whole else None


def _has_weights(folder: Path) -> bool:
    if (folder / SINGLE_NAME).is_file():
        return True
    try:
        index = parse_object((folder / INDEX_NAME).read_bytes())
        shards = {str(shard) for shard in index["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError):
        return False
    return all((folder / shard).is_file() for shard in shards)


def _listing(hub: HubName, kind: Kind) -> tuple[str, list[_File]]:
    """The commit that the hub has of the revision, and its files. Raises what huggingface_hub raises."""
    from huggingface_hub import HfApi

    info: Any = HfApi().repo_info(hub.name, repo_type=kind, revision=hub.revision, files_metadata=True, timeout=30)
    files = []
    for item in info.siblings or []:
        sha256, size = (None, item.size) if item.lfs is None else (item.lfs.sha256, item.lfs.size)
        files.append(_File(item.rfilename, size or 0, sha256 or item.blob_id or ""))
    return str(info.sha), files


def _choose(
    hub: HubName, kind: Kind, listing: tuple[str, list[_File]], *, weights: bool, config_only: bool
) -> tuple[str, list[_File]]:
    """Of a listing the files that are fetched. UserError for a repository without anything that can be used."""
    commit, files = listing
    if kind == "dataset":
        chosen = [file for file in files if _is_data(file.name)]
        if not chosen and any(file.name.endswith(".py") for file in files):
            raise UserError(
                f"{hub}: has only a loading script, which is never run; use the hub's own conversion of it, "
                f"hf://{hub.name}@refs/convert/parquet, or save it as Parquet or JSONL"
            )
        if not chosen:
            raise UserError(f"{hub}: contains no data file (parquet, json, jsonl, csv, arrow, txt, md); give another")
        return commit, chosen
    top = [file for file in files if "/" not in file.name]
    if not any(file.name == "config.json" for file in top):
        raise UserError(f"{hub}: has no config.json; name the repository of a transformers model")
    if config_only:
        return commit, [file for file in top if file.name == "config.json"]
    chosen = [file for file in top if PurePosixPath(file.name).suffix in _MODEL_SUFFIXES]
    more = re.compile(re.escape(MORE_TEMPLATES) + r"/[^/]+\.jinja")
    chosen += [file for file in files if more.fullmatch(file.name)]
    if weights:
        tensors = [file for file in top if file.name.endswith(".safetensors")]
        if not (ours := [file for file in tensors if file.name.startswith("model")]):
            others = sorted({PurePosixPath(file.name).suffix for file in top} & {".bin", ".pt", ".pth", ".gguf", ".h5"})
            has = f"only {', '.join('*' + suffix for suffix in others)} weights" if others else "no weights of a model"
            raise UserError(
                f"{hub}: has {has}, and Penstock reads model*.safetensors; name a revision that has them "
                "(refs/pr/...), or save the model with transformers first and name that folder"
            )
        chosen += ours
    return commit, chosen


def _is_data(name: str) -> bool:
    path = PurePosixPath(name)
    if path.name.lower() in _NO_DATA or any(part.startswith(".") for part in path.parts):
        return False
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes = suffixes[:-1]
    return bool(suffixes) and suffixes[-1] in _DATA_SUFFIXES


def _fetch(hub: HubName, kind: Kind, chosen: tuple[str, list[_File]]) -> Path:
    """Bring the files into the cache and check them; the folder of the snapshot."""
    from huggingface_hub import snapshot_download

    commit, files = chosen
    blobs = repo_folder(hub, kind) / "blobs"
    missing = [file for file in files if not (blobs / file.blob).is_file()]
    need = sum(file.size for file in missing)
    if missing:
        _require_space(hub, need)
        number = f"{len(missing)} file" + ("s" if len(missing) > 1 else "")
        say(f"fetching {hub} ({commit[:12]}): {number}, {bytes_text(need)}, into {repo_folder(hub, kind)}")
    with quiet(), fetching(hub, need if missing else 0) as bars:
        folder = Path(
            snapshot_download(
                hub.name,
                repo_type=kind,
                revision=hub.revision,
                allow_patterns=[glob.escape(file.name) for file in files],
                tqdm_class=bars,
            )
        )
    with working(f"checking {hub}"):
        _check(hub, folder, files)
    return folder


def _require_space(hub: HubName, need: int) -> None:
    folder = cache()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if need > free:
        raise UserError(
            f"{hub}: needs {bytes_text(need)} and {folder} has {bytes_text(free)} free; free some, or set HF_HOME to a "
            "folder on a larger disk"
        )


def _check(hub: HubName, folder: Path, files: list[_File]) -> None:
    """Compare files with what the hub says of them, once each; one that differs is removed. UserError naming it."""
    key = hashlib.sha256(str(folder).encode()).hexdigest()
    known = read_cached("hub", key) or {}
    checked: dict[str, Any] = {}
    for number, file in enumerate(files):
        preparing.report(number / len(files), file.name)
        path = folder / file.name
        status = path.stat()
        stamp = [file.blob, status.st_size, status.st_mtime_ns]
        if known.get(file.name) != stamp:
            wrong = _difference(path, status.st_size, file)
            if wrong is not None:
                path.resolve().unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                raise UserError(f"{hub}: {one_line(file.name)} {wrong}; it is removed: run the same command again")
        checked[file.name] = stamp
    if checked != known:
        write_cached("hub", key, known | checked, _MOST_KEPT)


def _difference(path: Path, size: int, file: _File) -> str | None:
    if size != file.size:
        return f"has {size:,} bytes, and the hub says {file.size:,}"
    digest = hashlib.sha256()
    if len(file.blob) != 2 * digest.digest_size:  # git's name of an object
        digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with open(path, "rb") as stream:
        result = hashlib.file_digest(stream, lambda: digest).hexdigest()
    if result != file.blob:
        return f"came with digest {result[:16]}..., and the hub says {file.blob[:16]}..."
    return None
