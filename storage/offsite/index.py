"""State off the machine: what is at a location, whose it is, and who may go on with it.

    LOCATION/penstock.json                   the index: whose state this is and the generations that are whole
    LOCATION/NAME.ID/manifest.json           a generation, as in a checkpoint; written when all else of it is there
    LOCATION/NAME.ID/run.json                the run's small files, as pieces of shared/files
    LOCATION/NAME.ID/BUFFER/KIND/            a zarr3 array: zarr.json and the chunk files c.PART.0, byte for byte
    LOCATION/shared/fixed/BUFFER/KIND/       the same for what is written once: all generations share it
    LOCATION/shared/files/SHA256             pieces of files

No object of a generation is ever written over: ID is another for every upload. The index alone changes, and only by a
conditional write: each gives it a new token, and a run may replace the index of a token that it wrote or fetched. So of
two runs, or two machines that go on with one run, the later one finds another's token and leaves the location alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from msgspec import Meta, Struct, structs, to_builtins

from penstock.storage.files.disk import atomic_write, held
from penstock.storage.files.errors import UserError
from penstock.storage.files.sealed import seal, unseal
from penstock.storage.files.untrusted import Size, one_line, open_regular, parse_object, read_regular, shell, typed
from penstock.storage.offsite.link import Link, LocationChangedError, OffsiteError, Pieces
from penstock.storage.offsite.location import PIECE_BYTES, may_be_named
from penstock.storage.tier.manifest import ArraySpec, Manifest
from penstock.storage.tier.manifest import decode as decode_manifest

INDEX = "penstock.json"
MANIFEST, RUN_FILES = "manifest.json", "run.json"
FIXED, FILES = "shared/fixed", "shared/files"
RECORD_NAME, LOCK_NAME = "offsite.json", "offsite.lock"
"""In the folder of the store's manifest: the tokens that this run may go on from; held by who uploads."""
_MANIFEST_BYTES = _RUN_FILES_BYTES = 1 << 28
_INDEX_BYTES = 1 << 24
_FORMAT, _VERSION = "penstock-offsite", 1

_Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-][A-Za-z0-9._-]{0,219}\Z")]
_Word = Annotated[str, Meta(pattern=r"\A[\x21-\x7e]{1,200}\Z")]
_Piece = tuple[Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")], Annotated[int, Meta(ge=1, le=PIECE_BYTES)]]


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """A generation that is whole at the location."""

    name: _Name
    folder: _Name
    generation: Size
    step: Size | None
    bytes: Size
    """Of its own objects, what it shares with others left out."""
    time: float
    """Unix seconds of its end."""
    crc32c: _Word
    """Of its manifest's text."""
    automatic: bool
    """Whether storage.offsite made it, and storage.offsite_keep may delete it."""


class Index(Struct, frozen=True, forbid_unknown_fields=True):
    """What is at a location."""

    store: _Word
    run: _Name
    """Name of the run's recipe, for people."""
    host: Annotated[str, Meta(pattern=r"\A[\x20-\x7e]{0,200}\Z")]
    time: float
    token: _Word
    entries: tuple[Entry, ...] = ()
    """Oldest first."""
    going: tuple[_Name, ...] = ()
    """Folders that are being written, or deleted: whoever writes next removes them."""
    fixed: dict[str, _Word] = {}
    """BUFFER/KIND -> CRC-32C of the checksums of a fixed array that is whole in shared/fixed."""

    def encode(self) -> bytes:
        return _encode({"format": _FORMAT, "version": _VERSION, **to_builtins(self)})

    @staticmethod
    def decode(data: bytes) -> Index:
        """ValueError where it is none."""
        content = unseal(parse_object(data, most_bytes=_INDEX_BYTES)).content
        result = (content.pop("format", None), content.pop("version", None))
        if result != (_FORMAT, _VERSION):
            raise ValueError(f"its format is {result[0]!r:.40}, version {result[1]!r:.20}")
        return typed(content, Index)

    @property
    def words(self) -> str:
        """Whose it is, for a message."""
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.time))
        none = "which holds no complete generation yet"
        newest = f"the newest being {self.entries[-1].name}" if self.entries else none
        return f"run '{self.run}' (last written by {self.host or 'another machine'} on {since}, {newest})"


@dataclass(frozen=True, slots=True)
class Seen:
    """An index as it was read, and what a conditional write needs to replace it."""

    index: Index | None
    generation: bytes


def read_index(link: Link) -> Seen:
    """The index of a location. OffsiteError, also where it is damaged."""
    data, generation = link.read(INDEX, _INDEX_BYTES)
    try:
        return Seen(None if data is None else Index.decode(data), generation)
    except ValueError as error:
        raise OffsiteError(
            f"{link.location}/{INDEX}: is not a Penstock index, or is damaged ({error}); choose another prefix, or "
            f"resume from one of its folders: {shell('penstock', 'resume', str(link.location))}/FOLDER"
        ) from None


class Claim:
    """A run's hold on a location: it may replace the index as long as nobody else has."""

    def __init__(self, link: Link, root: Path, store: str, run: str) -> None:
        """`root`: the store's folder; `run`: the recipe's name. Whoever changes the index holds `one_at_a_time`."""
        self.link, self.seen = link, Seen(None, b"")
        self._root, self._store, self._run = root, store, run

    @property
    def index(self) -> Index:
        assert self.seen.index is not None, "look first"
        return self.seen.index

    def look(self) -> Index | None:
        """Read the index; None where there is none. LocationChangedError where this run may not go on with it."""
        self.seen = read_index(self.link)
        index = self.seen.index
        known = read_tokens(self._root, str(self.link.location))
        if index is not None and (index.store != self._store or index.token not in known):
            self._refuse(index)
        return index

    def take(self) -> None:
        """Make the index where there is none, else show that it can be replaced. Errors as of `look`."""
        self._put(self.look() or Index(self._store, self._run, "", 0.0, "none"))

    def change(self, act: Callable[[Index], Index]) -> None:
        """Replace the index by what `act` makes of it. LocationChangedError where it is another's by now."""
        self._put(act(self.index))

    def give_up(self) -> None:
        """Remove the index of a run that never began, where nothing was uploaded."""
        index = self.look()
        if index is not None and not index.entries and not index.going:
            self.link.delete([INDEX])

    def _put(self, index: Index) -> None:
        token, location = uuid.uuid4().hex, str(self.link.location)
        host = "".join(c for c in socket.gethostname() if " " <= c <= "~")[:200]
        changed = structs.replace(index, token=token, host=host, time=time.time())
        before = [] if self.seen.index is None else [self.seen.index.token]
        write_tokens(self._root, location, [*before, token])  # whether it gets there or not, a next try knows
        generation = self.link.replace(INDEX, changed.encode(), self.seen.generation)
        if generation is None:
            now = read_index(self.link).index
            if now is None:
                raise LocationChangedError(
                    f"{self.link.location}: its {INDEX} was removed during the upload; nothing was committed"
                )
            self._refuse(now)
        self.seen = Seen(changed, generation)
        write_tokens(self._root, location, [token])

    def _refuse(self, index: Index) -> NoReturn:
        """Raise LocationChangedError: the index is another run's, or another machine's that went on with this one."""
        if index.store != self._store:
            refuse_other(self.link, index)
        raise LocationChangedError(
            f"storage.offsite: {self.link.location}: another machine or copy has continued this {index.words}; nothing "
            "there was changed; choose another prefix, or resume from there: "
            f"{shell('penstock', 'resume', str(self.link.location))}"
        )


def refuse_other(link: Link, index: Index) -> NoReturn:
    """Raise LocationChangedError: the location is another run's."""
    way = f"delete {INDEX} there if that run is gone"
    if index.entries:
        way = f"resume that run: {shell('penstock', 'resume', str(link.location))}"
    raise LocationChangedError(
        f"storage.offsite: {link.location}: holds {index.words}; choose another prefix, or {way}"
    )


def require_usable(link: Link, root: Path, store: str | None) -> None:
    """Prove that a run of store id `store` (None: a new run) may write to a location; nothing is left there.
    OffsiteError, one line, for what is missing or another run's."""
    index = read_index(link).index
    if index is not None and store is None:
        refuse_other(link, index)
    probe = f"shared/probe-{uuid.uuid4().hex[:12]}"
    link.write(probe, b"Whether this location can be written to.\n")
    link.delete([probe])
    if store is not None:
        Claim(link, root, store, "run").look()


def read_tokens(root: Path, location: str) -> list[str]:
    """Tokens of the index at `location` that the run of the store in `root` may replace."""
    return _record(root).get(location, [])


def write_tokens(root: Path, location: str, tokens: list[str]) -> None:
    """Save them, durably."""
    atomic_write(root / RECORD_NAME, _encode({"locations": {**_record(root), location: tokens}}))


def _record(root: Path) -> dict[str, list[str]]:
    try:
        content = parse_object(read_regular(root / RECORD_NAME, most_bytes=1 << 20))
        return typed(unseal(content).content.get("locations"), dict[str, list[str]])
    except (OSError, ValueError):
        return {}


@contextlib.contextmanager
def one_at_a_time(root: Path, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Held by whoever uploads from the store in `root`; the others wait. `waits` is called once where that is so."""
    with held(open_regular(root / LOCK_NAME, flags=os.O_RDWR | os.O_CREAT)) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield


def array_folder(folder: str, spec: ArraySpec) -> str:
    """Where an array of the generation in `folder` is."""
    return f"{FIXED if spec.fixed else folder}/{spec.buffer}/{spec.kind}"


def read_manifest(link: Link, folder: str) -> Manifest | None:
    """The manifest of a generation's folder, None where it has none. UserError where it is damaged."""
    data, _ = link.read(f"{folder}/{MANIFEST}", _MANIFEST_BYTES)
    with _readable(link, folder, MANIFEST):
        return None if data is None else decode_manifest(data)


class _Files(Struct, forbid_unknown_fields=True):
    """A run's small files."""

    format: Literal["penstock-run-files"]
    files: dict[str, list[_Piece]]
    """Path within the run directory -> (SHA-256, bytes) of each piece."""


def encode_files(files: Mapping[str, Pieces]) -> bytes:
    """run.json of files, by their paths within the run directory."""
    return _encode(to_builtins(_Files("penstock-run-files", dict(files))))


def read_files(link: Link, folder: str) -> dict[str, Pieces]:
    """The files that run.json of a generation's folder lists. UserError where it is damaged or names what none is."""
    content, _ = link.read(f"{folder}/{RUN_FILES}", _RUN_FILES_BYTES)
    with _readable(link, folder, RUN_FILES):
        if content is None:
            raise ValueError("it is not there")
        files = typed(unseal(parse_object(content, most_bytes=_RUN_FILES_BYTES)).content, _Files).files
        for name in files:
            if not may_be_named(name):
                raise ValueError(f"it names '{one_line(name, 80)}', which is not a file of a run")
        return files


def file_bytes(pieces: Pieces) -> int:
    return sum(size for _, size in pieces)


def _encode(content: dict[str, Any]) -> bytes:
    return (json.dumps(seal(content), indent=1) + "\n").encode()


@contextlib.contextmanager
def _readable(link: Link, folder: str, name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise UserError(
            f"{link.location}/{folder}/{name}: cannot be read ({error}); choose another with --checkpoint NAME"
        ) from None
