"""A tokenised corpus on disk: its files, their checksums, and reading them so that no damaged token is trained on.

`tokens.bin` holds the ids of all documents end to end, `documents.npy` where each begins, `tokens.crc32c` the CRC-32C
(uint32, little-endian) of every BLOCK_BYTES of tokens.bin, and `meta.json` what they are, with the checksums of the
other two and one of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import weakref
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.storage.crc import checksum
from penstock.storage.disk import atomic_write, reporting
from penstock.storage.errors import UserError
from penstock.storage.sealed import hex_crc, seal, unseal
from penstock.storage.untrusted import Size, open_regular, parse_object, printable, read_regular, typed

BLOCK_BYTES = 1 << 16
"""Tokens under one checksum. Documents are drawn at random: a larger block would read much that is not wanted."""

META, TOKENS, SUMS, DOCUMENTS = "meta.json", "tokens.bin", "tokens.crc32c", "documents.npy"

_MOST_META_BYTES = 1 << 20
_MOST_BYTES = 1 << 50
_COPY_BYTES = 1 << 23  # a multiple of BLOCK_BYTES


@dataclass(frozen=True)
class CorpusInfo:
    """What a tokenised corpus holds; the content of its meta.json."""

    fingerprint: str
    """Of the source and tokenizer that it was made from: equal means that it need not be made again."""
    content: str
    """SHA-256 of the token file: equal means the same tokens."""
    dtype: Literal["uint16", "uint32"]
    num_tokens: Size
    num_documents: Size
    max_token_id: Size
    max_token_document: str
    """The first document that holds max_token_id."""
    eos_id: Size
    sums_crc32c: str = ""
    """Of tokens.crc32c; empty where an earlier version made the corpus, without checksums."""
    documents_crc32c: str = ""
    """Of documents.npy, likewise."""


class Tokens:
    """The token ids, uint16 or uint32: `tokens[start:stop]` reads those.

    Each block is checked before the first of its tokens is handed out, once per process; UserError where it is damaged.
    Read, not mapped: what a failing drive does to a mapping ends the process without a word.
    """

    def __init__(self, folder: Path, info: CorpusInfo, sums: NDArray[np.uint32]) -> None:
        """`sums`: of every block. OSError where the file cannot be opened, UserError where its size is wrong."""
        self.path, self.dtype = folder / TOKENS, np.dtype(info.dtype).newbyteorder("<")
        self._info, self._sums = info, sums
        fd = open_regular(self.path)
        weakref.finalize(self, os.close, fd)
        self._fd = fd
        self._num_bytes = _token_bytes(info)
        found = os.fstat(fd).st_size
        if found != self._num_bytes:
            raise damage(self.path, f"it has {found:,} bytes, and {self._num_bytes:,} were written")
        self._checked = np.zeros(len(sums), dtype=bool)

    def __len__(self) -> int:
        return self._info.num_tokens

    def __getitem__(self, span: slice) -> NDArray[Any]:
        start, stop, step = span.indices(len(self))
        assert step == 1
        start, stop = start * self.dtype.itemsize, max(start, stop) * self.dtype.itemsize
        first, end = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        if self._checked[first:end].all():
            return np.frombuffer(self.read_bytes(start, stop - start), dtype=self.dtype)
        begin = first * BLOCK_BYTES
        data = memoryview(self.read_bytes(begin, min(end * BLOCK_BYTES, self._num_bytes) - begin))
        for block in range(first, end):
            at = block * BLOCK_BYTES - begin
            if (why := self._fault(block, data[at : at + BLOCK_BYTES])) is not None:
                raise damage(self.path, why)
        self._checked[first:end] = True
        return np.frombuffer(data[start - begin : stop - begin], dtype=self.dtype)

    def read_bytes(self, start: int, count: int) -> bytes:
        """Bytes of the file as they are. UserError where the drive does not give them."""
        with reporting(self.path, f"reading {count:,} bytes of tokens"):
            data = os.pread(self._fd, count, start)
            while len(data) < count:
                more = os.pread(self._fd, count - len(data), start + len(data))
                if not more:
                    raise damage(self.path, f"it became shorter than {start + count:,} bytes while it was in use")
                data += more
        return data

    def _fault(self, block: int, data: memoryview) -> str | None:
        """What is wrong with a block."""
        crc, wanted = checksum(data, 0), int(self._sums[block])
        at = f"block {block:,} (bytes {block * BLOCK_BYTES:,} to {block * BLOCK_BYTES + len(data):,})"
        if crc != wanted:
            return f"{at} has CRC-32C {crc:08x}, and {wanted:08x} was written"
        # An id beyond what meta.json promises would index memory that is not the embedding's.
        if int(np.frombuffer(data, dtype=self.dtype).max()) > self._info.max_token_id:
            return f"{at} holds a token id above {self._info.max_token_id:,}, the largest of {META}"
        return None

    def verify(self) -> int:
        """Read and check every block; the bytes read. UserError telling how many are damaged, and the first."""
        faults = []
        for begin in range(0, self._num_bytes, _COPY_BYTES):
            data = memoryview(self.read_bytes(begin, min(_COPY_BYTES, self._num_bytes - begin)))
            for at in range(0, len(data), BLOCK_BYTES):
                fault = self._fault((begin + at) // BLOCK_BYTES, data[at : at + BLOCK_BYTES])
                faults += [] if fault is None else [fault]
        if faults:
            more = f", one of {len(faults):,} damaged blocks of {len(self._sums):,}" if len(faults) > 1 else ""
            raise damage(self.path, faults[0] + more)
        return self._num_bytes


class TokenCorpus:
    """A tokenised corpus: `tokens`, and `starts` [num_documents + 1] int64, the offset of each document in them.

    What `prepare_corpus` makes ends every document with the end-of-text token.
    """

    def __init__(self, folder: Path, info: CorpusInfo) -> None:
        """OSError and ValueError where a file is none of a corpus', UserError where it is damaged."""
        self.folder = folder
        self.starts = _read_starts(folder, info)
        self.info, sums = (info, _read_sums(folder, info)) if info.sums_crc32c else _take_over(folder, info)
        self.tokens = Tokens(folder, info, sums)

    @classmethod
    def open(cls, folder: Path) -> TokenCorpus:
        """Open a folder made by `prepare_corpus` or `random_corpus`; all but the tokens is checked.

        Of a corpus made before there were checksums the tokens are checked too, once, and checksums written.
        Raises UserError naming the file when it is none, or damaged.
        """
        info = read_info(folder)
        try:
            return cls(folder, info)
        except UserError:
            raise
        except (OSError, ValueError) as error:
            raise damage(folder, f"not a readable tokenised corpus ({error})") from error

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raise UserError naming the document and the id when a token id is not below `vocab_size`."""
        if self.info.max_token_id >= vocab_size:
            raise UserError(
                f"{printable(self.info.max_token_document)}: token id {self.info.max_token_id} is beyond the model's "
                f"vocabulary of {vocab_size}; use the model's own tokenizer, or set model.vocab_size to at least "
                f"{self.info.max_token_id + 1}"
            )


def verify_corpus(folder: Path) -> int:
    """Read and check every file of a corpus; the bytes read. Raises UserError naming what is damaged."""
    corpus = TokenCorpus.open(folder)
    others = sum((folder / name).stat().st_size for name in (META, SUMS, DOCUMENTS) if (folder / name).is_file())
    return corpus.tokens.verify() + others


def damage(path: Path, why: str) -> UserError:
    """The UserError for a file of a corpus, or for its folder."""
    folder = path if path.is_dir() else path.parent
    return UserError(
        f"{path}: damaged: {why}; restore the file, or delete the folder {folder} and resume, which makes the "
        "tokenised corpus again from its source"
    )


def read_info(folder: Path) -> CorpusInfo:
    """What meta.json says, its checksum and types checked. Raises UserError naming it."""
    path = folder / META
    try:
        values, sealed = unseal(parse_object(read_regular(path, most_bytes=_MOST_META_BYTES)))
        info = _info(values)
        if info.sums_crc32c and not sealed:
            raise ValueError("its own checksum is missing")
        return info
    except OSError as error:
        raise damage(path, f"it cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise damage(path, f"not the description of a tokenised corpus ({error})") from error


def _info(values: dict[str, Any]) -> CorpusInfo:
    """ValueError for a missing field or one of a wrong type, and for numbers that no corpus has."""
    info = typed(values, CorpusInfo)
    if not 0 <= info.eos_id <= info.max_token_id <= np.iinfo(info.dtype).max:
        raise ValueError(f"token ids up to {info.max_token_id}, of which {info.eos_id} ends a text")
    if not (0 < info.num_tokens < _MOST_BYTES and 0 < info.num_documents <= info.num_tokens):
        raise ValueError(f"{info.num_documents} documents of {info.num_tokens} tokens")
    if bool(info.sums_crc32c) != bool(info.documents_crc32c):
        raise ValueError("one of two checksums is missing")
    return info


def _read_starts(folder: Path, info: CorpusInfo) -> NDArray[np.int64]:
    path = folder / DOCUMENTS
    content = read_regular(path, most_bytes=8 * info.num_documents + (1 << 16))
    if info.documents_crc32c and (crc := hex_crc(content)) != info.documents_crc32c:
        raise damage(path, f"it has CRC-32C {crc}, and {info.documents_crc32c} was written")
    starts = _array(content, info.num_documents + 1)
    if starts is None:
        raise damage(path, f"it is no array of {info.num_documents + 1:,} offsets")
    if starts[0] != 0 or starts[-1] != info.num_tokens or (starts[1:] < starts[:-1]).any():
        raise damage(path, f"its offsets do not rise from 0 to {info.num_tokens:,}")
    return starts


def _array(content: bytes, length: int) -> NDArray[np.int64] | None:
    """The int64 array [length] of a .npy file; None where it is anything else."""
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    except Exception:  # numpy parses a header as Python, and raises whatever that does
        return None
    wanted = (version, shape, dtype) == ((1, 0), (length,), np.dtype("<i8"))
    rest = memoryview(content)[stream.tell() :]
    return np.frombuffer(rest, dtype="<i8") if wanted and len(rest) == 8 * length else None


def _read_sums(folder: Path, info: CorpusInfo) -> NDArray[np.uint32]:
    path, length = folder / SUMS, -(-_token_bytes(info) // BLOCK_BYTES)
    content = read_regular(path, most_bytes=4 * length)
    if (crc := hex_crc(content)) != info.sums_crc32c or len(content) != 4 * length:
        raise damage(path, f"it has CRC-32C {crc}, and {info.sums_crc32c} was written")
    return np.frombuffer(content, dtype="<u4")


def _take_over(folder: Path, info: CorpusInfo) -> tuple[CorpusInfo, NDArray[np.uint32]]:
    """Give a corpus without checksums its own, once its tokens are known to be those that were written.

    Where the folder cannot be written this is done again each time that it is opened.
    """
    path, digest, sums = folder / TOKENS, hashlib.sha256(), _BlockSums()
    with open(open_regular(path), "rb") as stream:
        while data := stream.read(_COPY_BYTES):
            digest.update(data)
            sums.add(data)
    if digest.hexdigest() != info.content:
        raise damage(path, f"it has SHA-256 {digest.hexdigest()[:12]}..., and {info.content[:12]}... was written")
    content, documents = sums.finish(), read_regular(folder / DOCUMENTS, most_bytes=_MOST_BYTES)
    found = replace(info, sums_crc32c=hex_crc(content), documents_crc32c=hex_crc(documents))
    with contextlib.suppress(UserError):
        atomic_write(folder / SUMS, content)
        atomic_write(folder / META, _meta_text(found))
    return found, np.frombuffer(content, dtype="<u4")


def _token_bytes(info: CorpusInfo) -> int:
    return info.num_tokens * np.dtype(info.dtype).itemsize


def _meta_text(info: CorpusInfo) -> str:
    return json.dumps(seal(asdict(info)), indent=2) + "\n"


class _BlockSums:
    """CRC-32C of each BLOCK_BYTES of what it is given; the last block may be shorter."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._rest = b""

    def add(self, data: bytes) -> None:
        whole = memoryview(self._rest + data)
        end = len(whole) - len(whole) % BLOCK_BYTES
        self._sums += [checksum(whole[at : at + BLOCK_BYTES], 0) for at in range(0, end, BLOCK_BYTES)]
        self._rest = bytes(whole[end:])

    def finish(self) -> bytes:
        """The content of tokens.crc32c."""
        last = [checksum(memoryview(self._rest), 0)] if self._rest else []
        return np.asarray([*self._sums, *last], dtype="<u4").tobytes()


class CorpusWriter:
    """Makes the files of a corpus in `folder`: appends documents to tokens.bin and remembers their offsets."""

    def __init__(self, folder: Path, dtype: Literal["uint16", "uint32"]) -> None:
        self._folder = folder
        self._dtype: Literal["uint16", "uint32"] = dtype
        self._stream = (folder / TOKENS).open("wb")
        self._digest, self._sums = hashlib.sha256(), _BlockSums()
        self._starts = [0]
        self._total = 0
        self._max = (-1, "")

    def append(self, document: str, ids: NDArray[Any], last: bool) -> None:
        """Add `ids` to the present document, which ends with them where they are its `last`."""
        if len(ids) and int(ids.max()) > self._max[0]:
            self._max = (int(ids.max()), document)
        assert not len(ids) or int(ids.max()) <= np.iinfo(self._dtype).max
        data = ids.astype(np.dtype(self._dtype).newbyteorder("<")).tobytes()
        self._digest.update(data)
        self._sums.add(data)
        self._stream.write(data)
        self._total += len(ids)
        if last:
            self._starts.append(self._total)

    def finish(self, fingerprint: str, eos_id: int) -> None:
        """Make it a corpus, durably."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        documents = io.BytesIO()
        np.save(documents, np.asarray(self._starts, dtype="<i8"))
        sums = self._sums.finish()
        atomic_write(self._folder / DOCUMENTS, documents.getvalue())
        atomic_write(self._folder / SUMS, sums)
        info = CorpusInfo(
            fingerprint=fingerprint,
            content=self._digest.hexdigest(),
            dtype=self._dtype,
            num_tokens=self._total,
            num_documents=len(self._starts) - 1,
            max_token_id=self._max[0],
            max_token_document=printable(self._max[1]),
            eos_id=eos_id,
            sums_crc32c=hex_crc(sums),
            documents_crc32c=hex_crc(documents.getvalue()),
        )
        atomic_write(self._folder / META, _meta_text(info))
