"""A tokenised corpus on disk: its files, their checksums, and reading them so that no damaged token is trained on.

`tokens.bin` holds the ids of all documents end to end, `documents.npy` where each begins, `tokens.crc32c` the CRC-32C
(uint32, little-endian) of every BLOCK_BYTES of tokens.bin, and `meta.json` what they are, with the checksums of the
other two and one of its own. Where some token does not count 1 as a target there is `weights.bin` too, float32 per
token, with `weights.crc32c`. `origins.npy` and `origins.json` say where each document comes from (engine.data.origins).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from penstock.engine.data.origins import Origins, OriginsWriter
from penstock.engine.data.span_files import BLOCK_BYTES as BLOCK_BYTES
from penstock.engine.data.span_files import COPY_BYTES, BlockSums, SpanFile, SpanWriter, damage, read_sums
from penstock.storage.files.disk import atomic_write
from penstock.storage.files.errors import UserError, ensure
from penstock.storage.files.sealed import hex_crc, seal, unseal
from penstock.storage.files.untrusted import Size, one_line, open_regular, parse_object, printable, read_regular, typed

META, TOKENS, SUMS, DOCUMENTS = "meta.json", "tokens.bin", "tokens.crc32c", "documents.npy"
WEIGHTS, WEIGHT_SUMS = "weights.bin", "weights.crc32c"
ORIGINS, ORIGIN_NAMES = "origins.npy", "origins.json"
CORPUS_FILES = (META, TOKENS, SUMS, DOCUMENTS, WEIGHTS, WEIGHT_SUMS, ORIGINS, ORIGIN_NAMES)

_MOST_META_BYTES = 1 << 20
_MOST_BYTES = 1 << 50
_MOST_NAMES_BYTES = 1 << 30


class SourceFile(NamedTuple):
    """A file that a corpus was made from."""

    path: str
    num_bytes: Size
    mtime_ns: int
    sha256: str


class Origin(TypedDict):
    """What a corpus was made from: fields of its CorpusInfo."""

    fingerprint: str
    settings: str
    encoder: str
    sources: list[SourceFile]


@dataclass(frozen=True)
class CorpusInfo:
    """What a tokenised corpus holds; the content of its meta.json."""

    fingerprint: str
    """Of the source and tokenizer that it was made from: equal means that it need not be made again."""
    content: str
    """SHA-256 of the token file, or where there are weights of its and their SHA-256: equal means the same tokens."""
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
    weights_crc32c: str = ""
    """Of weights.crc32c; empty where every token counts 1."""
    origins_crc32c: list[str] = field(default_factory=list)
    """Of origins.npy and origins.json; none where an earlier version made the corpus."""
    num_trained: Size | None = None
    """Tokens that are a target: those of weights above 0 that begin no document. None where it was not counted."""
    part_documents: list[Size] = field(default_factory=list)
    """Documents of each part of a mixture, which follow one another."""
    skipped_rows: Size = 0
    """Rows of the source that could not be used and were left out."""
    unread: list[str] = field(default_factory=list)
    """What conversations have that their chat template does not read."""
    settings: str = ""
    """Of the fields of the recipe that say what is read; empty where an earlier version made the corpus."""
    encoder: str = ""
    """Of what made tokens of it; likewise."""
    sources: list[SourceFile] = field(default_factory=list)
    """The files that it was made from; none where they are very many, or of an earlier version."""

    def words(self) -> str:
        """Of a sentence about the data."""
        said = f"{self.num_documents:,} documents, {self.num_tokens:,} tokens"
        if self.weights_crc32c and self.num_trained is not None:
            said += f", {self.num_trained:,} of them trained"
        if len(self.part_documents) > 1:
            said += f", parts of {', '.join(f'{count:,}' for count in self.part_documents)} documents"
        return said + (f", {self.skipped_rows:,} unusable rows skipped" if self.skipped_rows else "")


class Tokens(SpanFile):
    """The token ids, uint16 or uint32."""

    def __init__(self, folder: Path, info: CorpusInfo, sums: NDArray[np.uint32]) -> None:
        super().__init__(folder / TOKENS, info.dtype, info.num_tokens, sums)
        self._max = info.max_token_id

    def _wrong(self, values: NDArray[Any]) -> str | None:
        # An id beyond what meta.json promises would index memory that is not the embedding's.
        return f"a token id above {self._max:,}, the largest of {META}" if int(values.max()) > self._max else None


class Weights(SpanFile):
    """How much each token counts as a target, float32."""

    def __init__(self, folder: Path, info: CorpusInfo) -> None:
        sums = read_sums(folder / WEIGHT_SUMS, 4 * info.num_tokens, info.weights_crc32c)
        super().__init__(folder / WEIGHTS, "float32", info.num_tokens, sums)

    def _wrong(self, values: NDArray[Any]) -> str | None:
        fine = bool((np.isfinite(values) & (values >= 0)).all())
        return None if fine else "an invalid weight"


class TokenCorpus:
    """A tokenised corpus: `tokens`, and `starts` [num_documents + 1] int64, the offset of each document in them.

    `weights` is None where every token counts 1 as a target.

    What `prepare_corpus` makes ends every document with the end-of-text token.
    """

    def __init__(self, folder: Path, info: CorpusInfo) -> None:
        """OSError and ValueError where a file is none of a corpus', UserError where it is damaged."""
        self.folder = folder
        self.notes: list[str] = []
        """What there is to say of how it came to be."""
        if info.unread:
            names = ", ".join(f"`{one_line(name, 40)}`" for name in info.unread)
            self.notes.append(f"the chat template does not read {names} of the conversations, which is left out")
        self.starts = _read_starts(folder, info)
        if info.sums_crc32c:
            self.info, sums = info, read_sums(folder / SUMS, _token_bytes(info), info.sums_crc32c)
        else:
            self.info, sums = _take_over(folder, info)
        self.tokens = Tokens(folder, info, sums)
        self.weights = Weights(folder, info) if info.weights_crc32c else None

    def document_at(self, token: int) -> int:
        """Number of the document that a token belongs to, from 0."""
        return int(np.searchsorted(self.starts, token, side="right")) - 1

    @cached_property
    def origins(self) -> Origins | None:
        """Where its documents come from; None where an earlier version made it. UserError where that is damaged."""
        if not self.info.origins_crc32c:
            return None
        packed, names = (self._origin_file(number) for number in (0, 1))
        try:
            found = Origins.of(_array(packed, self.info.num_documents), names)
        except ValueError as error:
            raise damage(self.folder / ORIGINS, f"it does not say where documents come from ({error})") from error
        return found

    def _origin_file(self, number: int) -> bytes:
        path, wanted = self.folder / (ORIGINS, ORIGIN_NAMES)[number], self.info.origins_crc32c[number]
        try:
            content = read_regular(path, most_bytes=8 * self.info.num_documents + _MOST_NAMES_BYTES)
        except (OSError, ValueError) as error:
            raise damage(path, f"it cannot be read ({error})") from error
        if (crc := hex_crc(content)) != wanted:
            raise damage(path, f"it has CRC-32C {crc} instead of {wanted} as written")
        return content

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
                f"vocabulary of {vocab_size}; use the model's own tokenizer, set model.vocab_size to at least "
                f"{self.info.max_token_id + 1} for a model from scratch, or name the tokens that it lacks in "
                "model.added_tokens, for which the embedding grows"
            )


def verify_corpus(folder: Path) -> int:
    """Read and check every file of a corpus; the bytes read. Raises UserError naming what is damaged."""
    corpus = TokenCorpus.open(folder)
    _ = corpus.origins
    names = (META, SUMS, DOCUMENTS, WEIGHT_SUMS, ORIGINS, ORIGIN_NAMES)
    others = sum((folder / name).stat().st_size for name in names if (folder / name).is_file())
    weights = 0 if corpus.weights is None else corpus.weights.verify()
    return corpus.tokens.verify() + weights + others


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
    # The tokens need not have one as high as eos_id: chats may end by another, and ids that somebody else made by none.
    if (most := max(info.eos_id, info.max_token_id)) > np.iinfo(info.dtype).max:
        raise ValueError(f"token ids up to {most} in {info.dtype}")
    if not (0 < info.num_tokens < _MOST_BYTES and 0 < info.num_documents <= info.num_tokens):
        raise ValueError(f"{info.num_documents} documents of {info.num_tokens} tokens")
    if bool(info.sums_crc32c) != bool(info.documents_crc32c):
        raise ValueError("one of two checksums is missing")
    if info.weights_crc32c and not info.sums_crc32c:
        raise ValueError("weights without checksums")
    if len(info.origins_crc32c) not in (0, 2):
        raise ValueError("one of two checksums of where documents come from is missing")
    if info.part_documents and sum(info.part_documents) != info.num_documents:
        raise ValueError(f"parts of {sum(info.part_documents)} documents, but {info.num_documents} documents in all")
    return info


def _read_starts(folder: Path, info: CorpusInfo) -> NDArray[np.int64]:
    path = folder / DOCUMENTS
    content = read_regular(path, most_bytes=8 * info.num_documents + (1 << 16))
    if info.documents_crc32c and (crc := hex_crc(content)) != info.documents_crc32c:
        raise damage(path, f"it has CRC-32C {crc} instead of {info.documents_crc32c} as written")
    starts = _array(content, info.num_documents + 1)
    if starts is None:
        raise damage(path, f"it is not an array of {info.num_documents + 1:,} offsets")
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


def _take_over(folder: Path, info: CorpusInfo) -> tuple[CorpusInfo, NDArray[np.uint32]]:
    """Give a corpus without checksums its own, once its tokens are known to be those that were written.

    Where the folder cannot be written this is done again each time that it is opened.
    """
    path, digest, sums = folder / TOKENS, hashlib.sha256(), BlockSums()
    with open(open_regular(path), "rb") as stream:
        while data := stream.read(COPY_BYTES):
            digest.update(data)
            sums.add(data)
    if digest.hexdigest() != info.content:
        raise damage(path, f"it has SHA-256 {digest.hexdigest()[:12]}... instead of {info.content[:12]}... as written")
    content, documents = sums.finish(), read_regular(folder / DOCUMENTS, most_bytes=_MOST_BYTES)
    found = replace(info, sums_crc32c=hex_crc(content), documents_crc32c=hex_crc(documents))
    with contextlib.suppress(UserError):
        atomic_write(folder / SUMS, content)
        write_info(folder, found)
    return found, np.frombuffer(content, dtype="<u4")


def _token_bytes(info: CorpusInfo) -> int:
    return info.num_tokens * np.dtype(info.dtype).itemsize


def _meta_text(info: CorpusInfo) -> str:
    return json.dumps(seal(asdict(info)), indent=2) + "\n"


class CorpusWriter:
    """Makes the files of a corpus in `folder`: appends documents to tokens.bin and remembers their offsets."""

    def __init__(self, folder: Path, dtype: Literal["uint16", "uint32"]) -> None:
        self._folder = folder
        self._dtype: Literal["uint16", "uint32"] = dtype
        self._tokens = SpanWriter(folder / TOKENS)
        self._weights: SpanWriter | None = None
        self._starts = [0]
        self._total = self._trained = 0
        self._max = (-1, "")
        self._parts: list[int] = []
        self._origins = OriginsWriter()

    @property
    def num_documents(self) -> int:
        """Those that have ended."""
        return len(self._starts) - 1

    def append(self, document: str, ids: NDArray[Any], last: bool, weights: NDArray[np.float32] | None = None) -> None:
        """Add `ids` to the present document, which ends with them where they are its `last`; it comes from where the
        `document` that it ends with does.

        `weights`, one per id: how much each counts as a target; None: 1.
        """
        if len(ids) and int(ids.max()) > self._max[0]:
            self._max = (int(ids.max()), document)
        ensure(not len(ids) or int(ids.max()) <= np.iinfo(self._dtype).max, f"an id is beyond {self._dtype}")
        self._tokens.add(ids.astype(np.dtype(self._dtype).newbyteorder("<")).tobytes())
        self._append_weights(len(ids), weights)
        first = int(self._total == self._starts[-1])  # a document's first token is no target
        self._trained += int((weights[first:] > 0).sum()) if weights is not None else max(0, len(ids) - first)
        self._total += len(ids)
        if last:
            self._starts.append(self._total)
            self._origins.add(document)

    def _append_weights(self, count: int, weights: NDArray[np.float32] | None) -> None:
        if weights is None and self._weights is None:
            return
        found = np.ones(count, dtype="<f4") if weights is None else weights.astype("<f4")
        ensure(len(found) == count, f"{len(found)} weights of {count} tokens")
        ensure((np.isfinite(found) & (found >= 0)).all(), "a weight is not finite, or negative")
        if self._weights is None:
            if (found == 1).all():
                return
            self._weights = SpanWriter(self._folder / WEIGHTS)
            for start in range(0, self._total, COPY_BYTES // 4):
                self._weights.add(np.ones(min(COPY_BYTES // 4, self._total - start), dtype="<f4").tobytes())
        self._weights.add(found.tobytes())

    def end_part(self) -> None:
        """What comes now belongs to the next part of a mixture."""
        self._parts.append(self.num_documents - sum(self._parts))

    def finish(
        self,
        fingerprint: str,
        eos_id: int,
        *,
        skipped_rows: int = 0,
        unread: Sequence[str] = (),
        settings: str = "",
        encoder: str = "",
        sources: list[SourceFile] | None = None,
    ) -> None:
        """Make it a corpus, durably."""
        content, sums = self._tokens.finish()
        documents = io.BytesIO()
        np.save(documents, np.asarray(self._starts, dtype="<i8"))
        atomic_write(self._folder / DOCUMENTS, documents.getvalue())
        atomic_write(self._folder / SUMS, sums)
        origins = self._origins.finish()
        for name, of_name in zip((ORIGINS, ORIGIN_NAMES), origins, strict=True):
            atomic_write(self._folder / name, of_name)
        weight_sums = b""
        if self._weights is not None:
            weight_content, weight_sums = self._weights.finish()
            content = hashlib.sha256(f"{content} {weight_content}".encode()).hexdigest()
            atomic_write(self._folder / WEIGHT_SUMS, weight_sums)
        info = CorpusInfo(
            fingerprint=fingerprint,
            content=content,
            dtype=self._dtype,
            num_tokens=self._total,
            num_documents=self.num_documents,
            max_token_id=self._max[0],
            max_token_document=printable(self._max[1]),
            eos_id=eos_id,
            sums_crc32c=hex_crc(sums),
            documents_crc32c=hex_crc(documents.getvalue()),
            weights_crc32c=hex_crc(weight_sums) if weight_sums else "",
            origins_crc32c=[hex_crc(content) for content in origins],
            num_trained=self._trained,
            part_documents=self._parts,
            skipped_rows=skipped_rows,
            unread=list(unread),
            settings=settings,
            encoder=encoder,
            sources=sources or [],
        )
        write_info(self._folder, info)


def write_info(folder: Path, info: CorpusInfo) -> None:
    """Write meta.json. Durable."""
    atomic_write(folder / META, _meta_text(info))


def length_quantiles(corpus: TokenCorpus, shares: Sequence[float]) -> list[int]:
    """Tokens of the document that is longer than such a share of all, for each of `shares` from 0 to 1."""
    lengths = np.sort(np.diff(corpus.starts))
    return [int(lengths[min(len(lengths) - 1, int(share * len(lengths)))]) for share in shares]


def length_histogram(corpus: TokenCorpus, edges: Sequence[int]) -> list[int]:
    """Documents of fewer tokens than the first of the ascending `edges`, from there to below the next, ..., and of as
    many as the last or more: one more than there are edges."""
    places = np.searchsorted(np.asarray(edges), np.diff(corpus.starts), side="right")
    return [int(count) for count in np.bincount(places, minlength=len(edges) + 1)]
