"""State that leaves the machine: what lies at a place, whose it is, and who may go on with it.

    PLACE/penstock.json                      the index: whose state this is and the generations that are whole
    PLACE/NAME.ID/manifest.json              a generation, as in a checkpoint; written when all else of it is there
    PLACE/NAME.ID/run.json                   the run's small files, as pieces of shared/files
    PLACE/NAME.ID/BUFFER/KIND/               a zarr3 array: zarr.json and the chunk files c.PART.0, byte for byte
    PLACE/shared/fixed/BUFFER/KIND/          the same for what is written once: all generations share it
    PLACE/shared/files/SHA256                pieces of files

No object of a generation is ever written over: ID is another for every upload. The index alone changes, and only by a
conditional write: each gives it a new token, and a run may replace the index of a token that it wrote or fetched. So of
two runs, or two machines that go on with one run, the later one finds another's token and leaves the place alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

from msgspec import Meta, Struct, structs, to_builtins

from penstock.storage.files import sealed
from penstock.storage.files.disk import atomic_write
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import Size, open_regular, parse_object, read_regular, shell, typed
from penstock.storage.offsite.link import OffsiteError, PlaceChangedError, PlaceLink
from penstock.storage.tier.manifest import Manifest
from penstock.storage.tier.manifest import decode as decode_manifest

INDEX = "penstock.json"
MANIFEST, RUN_FILES = "manifest.json", "run.json"
FIXED, FILES = "shared/fixed", "shared/files"
RECORD_NAME, LOCK_NAME = "offsite.json", "offsite.lock"
"""In the folder of the store's manifest: the tokens that this run may go on from; held by who uploads."""
MANIFEST_BYTES = 1 << 28
_INDEX_BYTES = 1 << 24
_FORMAT, _VERSION = "penstock-offsite", 1
_WAIT_S = 0.2

_Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-][A-Za-z0-9._-]{0,219}\Z")]
_Word = Annotated[str, Meta(pattern=r"\A[\x21-\x7e]{1,200}\Z")]


class Entry(Struct, frozen=True, forbid_unknown_fields=True):
    """A generation that is whole at the place."""

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
    """What lies at a place."""

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

    def encode(self) -> str:
        return json.dumps(sealed.seal({"format": _FORMAT, "version": _VERSION, **to_builtins(self)}), indent=1) + "\n"

    @staticmethod
    def decode(text: str) -> Index:
        """ValueError where it is none."""
        content = sealed.unseal(parse_object(text.encode(), most_bytes=_INDEX_BYTES)).content
        found = (content.pop("format", None), content.pop("version", None))
        if found != (_FORMAT, _VERSION):
            raise ValueError(f"its format is {found[0]!r:.40}, version {found[1]!r:.20}")
        return typed(content, Index)

    @property
    def words(self) -> str:
        """Whose it is, for a message."""
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.time))
        last = (
            f", the newest being {self.entries[-1].name}"
            if self.entries
            else ", which holds no complete generation yet"
        )
        return f"run '{self.run}' (last written by {self.host or 'another machine'} on {since}{last})"


@dataclass(frozen=True, slots=True)
class Seen:
    """An index as it was read, and what a conditional write needs to replace it."""

    index: Index | None
    generation: bytes


def read_index(link: PlaceLink) -> Seen:
    """The index of a place. OffsiteError, or UserError where it is damaged."""
    text, generation = link.read(INDEX, _INDEX_BYTES)
    if text is None:
        return Seen(None, generation)
    try:
        return Seen(Index.decode(text), generation)
    except ValueError as error:
        raise OffsiteError(
            f"{link.place}/{INDEX}: is not a Penstock index, or is damaged ({error}); choose another prefix, or "
            f"resume from one of its folders: {shell('penstock', 'resume', str(link.place))}/FOLDER",
            permanent=True,
        ) from None


class Claim:
    """A run's hold on a place: it may replace the index as long as nobody else has."""

    def __init__(self, link: PlaceLink, root: Path, store: str, run: str) -> None:
        """`root`: folder of the store's manifest, which keeps the record; `run`: the recipe's name. What changes the
        index is called within `one_at_a_time` of `root`."""
        self.link = link
        self._root, self._store, self._run = root, store, run
        self.seen = Seen(None, b"")

    @property
    def index(self) -> Index:
        assert self.seen.index is not None, "look first"
        return self.seen.index

    def look(self) -> Index | None:
        """Read the index; None where there is none. PlaceChangedError where this run may not go on with it."""
        self.seen = read_index(self.link)
        index = self.seen.index
        if index is not None:
            if index.store != self._store:
                refuse_other(self.link, index)
            if index.token not in read_tokens(self._root, str(self.link.place)):
                self._refuse_changed(index)
        return index

    def take(self) -> None:
        """Make the index where there is none, else show that it can be replaced. Errors as of `look`."""
        index = self.look()
        self.change(lambda now: now) if index is not None else self._make()

    def change(self, act: Callable[[Index], Index]) -> None:
        """Replace the index by what `act` makes of it. PlaceChangedError where it is another's by now."""
        self._put(act(self.index))

    def give_up(self) -> None:
        """Remove the index of a run that never began, where nothing was uploaded."""
        index = self.look()
        if index is not None and not index.entries and not index.going:
            self.link.delete([INDEX])

    def _make(self) -> None:
        self._put(Index(self._store, self._run, "", 0.0, "none"))

    def _put(self, index: Index) -> None:
        token, place = uuid.uuid4().hex, str(self.link.place)
        host = "".join(c for c in socket.gethostname() if " " <= c <= "~")[:200]
        changed = structs.replace(index, token=token, host=host, time=time.time())
        before = [] if self.seen.index is None else [self.seen.index.token]
        write_tokens(self._root, place, [*before, token])  # whether it gets there or not, a next try knows
        generation = self.link.replace(INDEX, changed.encode(), self.seen.generation)
        if generation is None:
            now = read_index(self.link)
            if now.index is None:
                raise PlaceChangedError(
                    f"{self.link.place}: its {INDEX} was removed during the upload; nothing was committed"
                )
            if now.index.store != self._store:
                refuse_other(self.link, now.index)
            self._refuse_changed(now.index)
        self.seen = Seen(changed, generation)
        write_tokens(self._root, place, [token])

    def _refuse_changed(self, index: Index) -> NoReturn:
        raise PlaceChangedError(
            f"storage.offsite: {self.link.place}: another machine or copy has continued this {index.words}; nothing "
            "there was changed; choose another prefix, or resume from there: "
            f"{shell('penstock', 'resume', str(self.link.place))}"
        )


def refuse_other(link: PlaceLink, index: Index) -> NoReturn:
    """Raise PlaceChangedError: the place is another run's."""
    empty = f"delete {INDEX} there if that run is gone"
    way = f"resume that run: {shell('penstock', 'resume', str(link.place))}" if index.entries else empty
    raise PlaceChangedError(f"storage.offsite: {link.place}: holds {index.words}; choose another prefix, or {way}")


def require_usable(link: PlaceLink, root: Path, store: str | None) -> None:
    """Prove that a run may write to a place before it begins; nothing stays there.

    `store`: id of the run's store, None for a new run. OffsiteError, one line, for what is missing or another run's.
    """
    index = read_index(link).index
    if index is not None and store is None:
        refuse_other(link, index)
    probe = f"shared/probe-{uuid.uuid4().hex[:12]}"
    link.write(probe, "Whether this place can be written to.\n")
    link.delete([probe])
    if store is not None:
        Claim(link, root, store, "run").look()


def read_tokens(root: Path, place: str) -> list[str]:
    """Tokens of the index at `place` that the run of the store in `root` may replace."""
    places = _record(root)
    tokens = places.get(place, [])
    return [token for token in tokens if isinstance(token, str)] if isinstance(tokens, list) else []


def write_tokens(root: Path, place: str, tokens: list[str]) -> None:
    """Keep them, durably."""
    atomic_write(root / RECORD_NAME, json.dumps(sealed.seal({"places": {**_record(root), place: tokens}}), indent=1))


def _record(root: Path) -> dict[str, Any]:
    try:
        content = parse_object(read_regular(root / RECORD_NAME, most_bytes=1 << 20))
        places = sealed.unseal(content).content.get("places")
        return places if isinstance(places, dict) else {}
    except (OSError, ValueError):
        return {}


@contextlib.contextmanager
def one_at_a_time(root: Path, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Held by whoever uploads from the store in `root`; the others wait. `waits` is called once where that is so."""
    fd = open_regular(root / LOCK_NAME, flags=os.O_RDWR | os.O_CREAT)
    try:
        told = False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    told = True
                    waits()
                time.sleep(_WAIT_S)
        yield
    finally:
        os.close(fd)


def new_folder(name: str) -> str:
    """Where a generation called `name` is written: nobody writes to such a folder twice."""
    return f"{name}.{uuid.uuid4().hex[:8]}"


def array_folder(folder: str, buffer: str, kind: str, *, fixed: bool) -> str:
    """Where an array lies."""
    return f"{FIXED if fixed else folder}/{buffer}/{kind}"


def read_manifest(link: PlaceLink, folder: str) -> Manifest | None:
    """The manifest of a generation's folder, None where it has none. UserError where it is damaged."""
    text, _ = link.read(f"{folder}/{MANIFEST}", MANIFEST_BYTES)
    if text is None:
        return None
    try:
        return decode_manifest(text.encode())
    except ValueError as error:
        raise UserError(
            f"{link.place}/{folder}/{MANIFEST}: cannot be read ({error}); choose another with --checkpoint NAME"
        ) from None
