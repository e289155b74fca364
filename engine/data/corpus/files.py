"""A tokenised corpus on disk: its files, their checksums, and reading them so that no damaged token is trained on.

`tokens.bin` holds the ids of all documents end to end, `documents.bin` where each begins (int64), `tokens.crc32c` the
CRC-32C (uint32) of every BLOCK_BYTES of tokens.bin. Where some token does not count 1 as a target there is
`weights.bin` too, float32 per token, with `weights.crc32c`; where there are images, their files (corpus/images.py).
Where documents are comparisons `sides.bin` says where the sides of each are, two int64 (`TokenCorpus.sides`); where
they are prompts there are their rows (corpus/rows.py).
`origins.bin` and `origins.json` say where each document comes from, `meta.json` what they are, with checksums of all
but tokens.bin, weights.bin, images.bin and rows.bin. All are little-endian.

The origin of a document is eight bytes: a name's number (of origins.json), whether rows are counted, and the number.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.engine.config.data import Comparison
from penstock.engine.data.corpus.images import COLUMNS, IMAGE_INDEX, IMAGES, ImageFiles, ImageWriter
from penstock.engine.data.corpus.rows import ROW_COLUMNS, ROW_INDEX, ROWS, RowFile, RowWriter
from penstock.engine.data.corpus.spans import BLOCK_BYTES as BLOCK_BYTES
from penstock.engine.data.corpus.spans import COPY_BYTES, SpanFile, SpanWriter, damage
from penstock.engine.data.samples import ImageFile
from penstock.storage.files.disk import atomic_write
from penstock.storage.files.errors import UserError, ensure
from penstock.storage.files.sealed import hex_crc, seal, unseal
from penstock.storage.files.untrusted import Size, one_line, parse_object, printable, read_regular, typed

META, TOKENS, SUMS, DOCUMENTS = "meta.json", "tokens.bin", "tokens.crc32c", "documents.bin"
WEIGHTS, WEIGHT_SUMS, SIDES = "weights.bin", "weights.crc32c", "sides.bin"
ORIGINS, ORIGIN_NAMES = "origins.bin", "origins.json"
CORPUS_FILES = (
    *(META, TOKENS, SUMS, DOCUMENTS, SIDES, WEIGHTS, WEIGHT_SUMS, ORIGINS, ORIGIN_NAMES),
    *(IMAGES, IMAGE_INDEX, ROWS, ROW_INDEX),
)

_MOST_NAMES = 1 << 17
"""Files whose names are stored; the origin of documents of further files is unknown."""
_ROW_BIT, _NAME_BIT = 1 << 40, 41
_UNKNOWN = -1
_PLACE = re.compile(r"(?s)(.*):(row )?([0-9]{1,12})")
_MOST_META_BYTES = 1 << 20
_MOST_BYTES = 1 << 50
_MOST_NAMES_BYTES = 1 << 30


class SourceFile(NamedTuple):
    """A file that a corpus was made from."""

    path: str
    num_bytes: Size
    mtime_ns: int
    sha256: str


@dataclass(frozen=True)
class Origin:
    """What a corpus was made from."""

    fingerprint: str
    """Of the source's files, by name, size and time."""
    settings: str
    """Of the fields of the recipe that say what is read."""
    encoder: str
    """Of what made tokens of it."""
    sources: list[SourceFile]
    """The files that it was made from; empty if they are very many."""


@dataclass(frozen=True)
class CorpusInfo(Origin):
    """What a tokenised corpus holds; the content of its meta.json."""

    content: str
    """SHA-256 of the token file, or where there are weights, images, sides or rows of its and their SHA-256: equal
    means the same tokens."""
    checksums: dict[str, str]
    """File -> CRC-32C."""
    dtype: Literal["uint16", "uint32"]
    num_tokens: Size
    num_documents: Size
    num_trained: Size
    """Tokens that are a target: those of weights above 0 that begin no document; of prompts none."""
    max_token_id: Size
    max_token_document: str
    """The first document that holds max_token_id."""
    eos_id: Size
    part_documents: list[Size]
    """Documents of each part of a mixture, which follow one another."""
    skipped_rows: Size
    """Rows of the source that could not be used and were left out."""
    unread: list[str]
    """What conversations have that their chat template does not read."""
    num_images: Size = 0
    comparison: Comparison = ""
    """Whether documents are pairs of answers, answers with a verdict, or prompts alone."""

    def words(self) -> str:
        """Of a sentence about the data."""
        what = self.comparison if self.comparison in ("pairs", "prompts") else "documents"
        said = f"{self.num_documents:,} {what}, {self.num_tokens:,} tokens"
        if WEIGHT_SUMS in self.checksums:
            said += f", {self.num_trained:,} of them trained"
        if self.num_images:
            said += f", {self.num_images:,} images"
        if len(self.part_documents) > 1:
            said += f", parts of {', '.join(f'{count:,}' for count in self.part_documents)} documents"
        return said + (f", {self.skipped_rows:,} unusable rows skipped" if self.skipped_rows else "")


class OriginsWriter:
    """Takes the `where` of samples, as `file:12` or `file:row 12`, in the order of the documents."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._packed: list[int] = []

    def add(self, where: str) -> None:
        match = _PLACE.fullmatch(where)
        name, row, at = (match[1], match[2], int(match[3])) if match else (where, None, -1)
        if len(self._names) < _MOST_NAMES:
            self._names.setdefault(name, len(self._names))
        number = self._names.get(name)
        known = number is not None and at + 1 < _ROW_BIT
        self._packed.append(((number or 0) << _NAME_BIT) | (_ROW_BIT if row else 0) | (at + 1) if known else _UNKNOWN)

    def finish(self) -> tuple[bytes, bytes]:
        """The content of the two files."""
        names = json.dumps({"names": [printable(name) for name in self._names]})
        return np.asarray(self._packed, dtype="<i8").tobytes(), names.encode()


class Origins:
    """Reads them."""

    def __init__(self, packed: NDArray[np.int64], names: bytes) -> None:
        """`names`: the content of origins.json. ValueError where it holds none."""
        self._packed, self._names = packed, typed(parse_object(names).get("names"), list[str])

    def where(self, document: int) -> str | None:
        """`file:12`, `file:row 12` or the file alone; None where that is unknown."""
        value = int(self._packed[document])
        name = value >> _NAME_BIT
        if value < 0 or name >= len(self._names):
            return None
        at = (value & (_ROW_BIT - 1)) - 1
        return self._names[name] + ("" if at < 0 else f":{'row ' if value & _ROW_BIT else ''}{at}")


class TokenCorpus:
    """A tokenised corpus: `tokens`, and `starts` [num_documents + 1] int64, the offset of each document in them.

    `weights` is None where every token counts 1 as a target, `images` where there are none. `notes`: what there is to
    say of how it came to be.

    `comparison`: "pairs" where each document is a prompt with the chosen answer, and then the prompt again with the
    rejected one; "unpaired" where each is a prompt with an answer and a verdict; "prompts" where each is a prompt; else
    "". `sides`, int64 [num_documents, 2], None where no answers are compared: the number of tokens before the first
    trained one, of a pair on its chosen side; and of a pair the number of tokens of the chosen side, else 1 for an
    answer that is wanted and 0 for one that is not.
    """

    def __init__(self, folder: Path) -> None:
        """Open a folder made by `prepare_corpus` or `random_corpus`; all but tokens and weights is checked.

        Raises UserError naming the file when it is none, or damaged.
        """
        self.folder, self.info = folder, read_info(folder)
        self.notes: list[str] = []
        if self.info.unread:
            names = ", ".join(f"`{one_line(name, 40)}`" for name in self.info.unread)
            self.notes.append(f"the chat template does not read {names} of the conversations, which is left out")
        self.starts = self._array(DOCUMENTS, self.info.num_documents + 1)
        if self.starts[0] != 0 or self.starts[-1] != self.info.num_tokens or (np.diff(self.starts) < 0).any():
            raise damage(folder / DOCUMENTS, f"its offsets do not rise from 0 to {self.info.num_tokens:,}")
        self.tokens = self._spans(TOKENS, self.info.dtype, SUMS, self._wrong_ids)
        has_weights = WEIGHT_SUMS in self.info.checksums
        self.weights = self._spans(WEIGHTS, "float32", WEIGHT_SUMS, _wrong_weights) if has_weights else None
        self.comparison = self.info.comparison
        self.sides = self._sides()
        self._rows: RowFile | None = None
        if self.comparison == "prompts":
            index = self._array(ROW_INDEX, self.info.num_documents * ROW_COLUMNS).reshape(-1, ROW_COLUMNS)
            self._rows = RowFile(folder / ROWS, index)
        self.images: ImageFiles | None = None
        if self.info.num_images:
            index = self._array(IMAGE_INDEX, self.info.num_images * COLUMNS).reshape(-1, COLUMNS)
            self.images = ImageFiles(folder / IMAGES, index)

    def _sides(self) -> NDArray[np.int64] | None:
        if SIDES not in self.info.checksums:
            return None
        sides = self._array(SIDES, 2 * self.info.num_documents).reshape(-1, 2)
        before, second = sides.T
        lengths = np.diff(self.starts)
        is_pairs = self.comparison == "pairs"
        wrong = (before < 0) | (before >= (second if is_pairs else lengths))
        wrong |= (second >= lengths) if is_pairs else (second != 0) & (second != 1)
        if wrong.any():
            raise damage(self.folder / SIDES, f"document {int(wrong.argmax()):,} has no such sides")
        return sides

    def _read(self, name: str, most_bytes: int) -> bytes:
        path = self.folder / name
        try:
            content = read_regular(path, most_bytes=most_bytes)
        except (OSError, ValueError) as error:
            raise damage(path, f"it cannot be read ({error})") from error
        if (crc := hex_crc(content)) != (wanted := self.info.checksums[name]):
            raise damage(path, f"it has CRC-32C {crc} instead of {wanted} as written")
        return content

    def _array(self, name: str, length: int, dtype: str = "<i8", what: str = "numbers") -> NDArray[Any]:
        num_bytes = length * np.dtype(dtype).itemsize
        content = self._read(name, num_bytes)
        if len(content) != num_bytes:
            raise damage(self.folder / name, f"it is not an array of {length:,} {what}")
        return np.frombuffer(content, dtype)

    def _spans(self, name: str, dtype: str, sums: str, wrong: Callable[[NDArray[Any]], str | None]) -> SpanFile:
        blocks = -(-self.info.num_tokens * np.dtype(dtype).itemsize // BLOCK_BYTES)
        of_blocks = self._array(sums, blocks, "<u4", "checksums")
        try:
            return SpanFile(self.folder / name, dtype, self.info.num_tokens, of_blocks, wrong)
        except OSError as error:
            raise damage(self.folder / name, f"it cannot be read ({error})") from error

    def _wrong_ids(self, values: NDArray[Any]) -> str | None:
        # An id beyond what meta.json promises would index memory that is not the embedding's.
        most = self.info.max_token_id
        return f"a token id above {most:,}, the largest of {META}" if int(values.max()) > most else None

    def document_at(self, token: int) -> int:
        """Number of the document that a token belongs to, from 0."""
        return int(np.searchsorted(self.starts, token, side="right")) - 1

    def row(self, document: int) -> dict[str, Any]:
        """The row of a prompt: each column by its name; `prompt` is a text, or messages. UserError where it is damaged.

        A number may be NaN or infinite, where the source has such.
        """
        assert self._rows is not None, "documents are no prompts"
        return self._rows.row(document)

    @cached_property
    def origins(self) -> Origins:
        """Where its documents come from. UserError where that is damaged."""
        packed = self._array(ORIGINS, self.info.num_documents)
        names = self._read(ORIGIN_NAMES, _MOST_NAMES_BYTES)
        try:
            return Origins(packed, names)
        except ValueError as error:
            raise damage(self.folder / ORIGIN_NAMES, f"it does not name files ({error})") from error

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raise UserError naming the document and the id when a token id is not below `vocab_size`."""
        if self.info.max_token_id >= vocab_size:
            raise UserError(
                f"{printable(self.info.max_token_document)}: token id {self.info.max_token_id} is beyond the model's "
                f"vocabulary of {vocab_size}; use the model's own tokenizer, set model.vocab_size to at least "
                f"{self.info.max_token_id + 1} for a model from scratch, or name the tokens that it lacks in "
                "model.added_tokens, for which the embedding grows"
            )


def _wrong_weights(values: NDArray[Any]) -> str | None:
    return None if bool((np.isfinite(values) & (values >= 0)).all()) else "an invalid weight"


def verify_corpus(folder: Path) -> int:
    """Read and check every file of a corpus; the bytes read. Raises UserError naming what is damaged."""
    corpus = TokenCorpus(folder)
    _ = corpus.origins
    size = sum((folder / name).stat().st_size for name in (META, *corpus.info.checksums))
    held = (corpus.tokens, corpus.weights, corpus.images, corpus._rows)
    return size + sum(files.verify() for files in held if files is not None)


def read_info(folder: Path) -> CorpusInfo:
    """What meta.json says, its checksum and types checked. Raises UserError naming it."""
    path = folder / META
    try:
        values, sealed = unseal(parse_object(read_regular(path, most_bytes=_MOST_META_BYTES)))
        if not sealed:
            raise ValueError("its own checksum is missing")
        return _info(values)
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
    if info.checksums.keys() - {WEIGHT_SUMS, IMAGE_INDEX, SIDES, ROW_INDEX} != {SUMS, DOCUMENTS, ORIGINS, ORIGIN_NAMES}:
        raise ValueError(f"checksums of {', '.join(info.checksums)}")
    if bool(info.num_images) != (IMAGE_INDEX in info.checksums):
        raise ValueError(f"{info.num_images} images")
    has_sides, has_rows = info.comparison in ("pairs", "unpaired"), info.comparison == "prompts"
    if (has_sides, has_rows) != (SIDES in info.checksums, ROW_INDEX in info.checksums):
        raise ValueError(f"comparison '{info.comparison}'")
    if info.part_documents and sum(info.part_documents) != info.num_documents:
        raise ValueError(f"parts of {sum(info.part_documents)} documents, but {info.num_documents} documents in all")
    return info


def write_info(folder: Path, info: CorpusInfo) -> None:
    """Write meta.json. Durable."""
    atomic_write(folder / META, json.dumps(seal(asdict(info)), indent=2) + "\n")


class CorpusWriter:
    """Makes the files of a corpus in `folder`: appends documents to tokens.bin and remembers their offsets."""

    def __init__(self, folder: Path, vocab_size: int, comparison: Comparison = "") -> None:
        self._folder, self._comparison = folder, comparison
        self._sides: list[tuple[int, int]] = []
        self._rows = RowWriter(folder) if comparison == "prompts" else None
        self._dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 2**16 else "uint32"
        self._tokens = SpanWriter(folder / TOKENS)
        self._weights: SpanWriter | None = None
        self._images: ImageWriter | None = None
        self._num_images = 0
        self._starts = [0]
        self._total = self._trained = 0
        self._max = (-1, "")
        self._parts: list[int] = []
        self._origins = OriginsWriter()

    @property
    def num_documents(self) -> int:
        """Those that have ended."""
        return len(self._starts) - 1

    def append(
        self,
        document: str,
        ids: NDArray[Any],
        last: bool,
        weights: NDArray[np.float32] | None = None,
        images: Sequence[ImageFile] = (),
        sides: tuple[int, int] | None = None,
        row: str | None = None,
    ) -> None:
        """Add `ids` to the present document, which ends with its `last` ones; its origin is then `document`.

        `weights`, one per id: how much each counts as a target; None: 1. `images`: those of the whole document.
        `sides`: those of a comparison, which is one call, as `TokenCorpus.sides` has them. `row`: that of a prompt,
        likewise, as JSON.
        """
        is_prompt = self._rows is not None
        is_compared = bool(self._comparison) and not is_prompt
        ensure((sides is not None) == is_compared, f"sides {sides} of comparison '{self._comparison}'")
        ensure((row is not None) == is_prompt, f"a row of comparison '{self._comparison}'")
        if self._rows is not None and row is not None:
            self._rows.add_row(row)
        if sides is not None:
            self._sides.append(sides)
        if images:
            self._images = self._images or ImageWriter(self._folder)
            self._images.add_images(self.num_documents, images)
            self._num_images += len(images)
        if len(ids) and int(ids.max()) > self._max[0]:
            self._max = (int(ids.max()), document)
        ensure(not len(ids) or int(ids.max()) <= np.iinfo(self._dtype).max, f"an id is beyond {self._dtype}")
        self._tokens.add(ids.astype(np.dtype(self._dtype).newbyteorder("<")).tobytes())
        self._append_weights(len(ids), weights)
        first = int(self._total == self._starts[-1])  # a document's first token is no target
        if not is_prompt:
            self._trained += int((weights[first:] > 0).sum()) if weights is not None else max(0, len(ids) - first)
        self._total += len(ids)
        if last:
            self._starts.append(self._total)
            self._origins.add(document)

    def _append_weights(self, count: int, weights: NDArray[np.float32] | None) -> None:
        if weights is None and self._weights is None:
            return
        result = np.ones(count, dtype="<f4") if weights is None else weights.astype("<f4")
        ensure(len(result) == count, f"{len(result)} weights of {count} tokens")
        ensure((np.isfinite(result) & (result >= 0)).all(), "a weight is not finite, or negative")
        if self._weights is None:
            if (result == 1).all():
                return
            self._weights = SpanWriter(self._folder / WEIGHTS)
            for start in range(0, self._total, COPY_BYTES // 4):
                self._weights.add(np.ones(min(COPY_BYTES // 4, self._total - start), dtype="<f4").tobytes())
        self._weights.add(result.tobytes())

    def end_part(self) -> None:
        """What comes now belongs to the next part of a mixture."""
        self._parts.append(self.num_documents - sum(self._parts))

    def finish(self, origin: Origin, eos_id: int, *, skipped_rows: int = 0, unread: Sequence[str] = ()) -> None:
        """Make it a corpus, durably."""
        content, sums = self._tokens.finish()
        packed, names = self._origins.finish()
        starts = np.asarray(self._starts, dtype="<i8").tobytes()
        files = {SUMS: sums, DOCUMENTS: starts, ORIGINS: packed, ORIGIN_NAMES: names}
        if self._weights is not None:
            weight_content, files[WEIGHT_SUMS] = self._weights.finish()
            content = hashlib.sha256(f"{content} {weight_content}".encode()).hexdigest()
        if self._images is not None:
            image_content, files[IMAGE_INDEX] = self._images.finish(), self._images.index
            content = hashlib.sha256(f"{content} {image_content}".encode()).hexdigest()
        if self._rows is not None:
            row_content, files[ROW_INDEX] = self._rows.finish(), self._rows.index
            content = hashlib.sha256(f"{content} {row_content}".encode()).hexdigest()
        elif self._comparison:
            files[SIDES] = np.asarray(self._sides, dtype="<i8").tobytes()
            content = hashlib.sha256(content.encode() + files[SIDES]).hexdigest()
        for name, data in files.items():
            atomic_write(self._folder / name, data)
        info = CorpusInfo(
            **vars(origin),
            content=content,
            checksums={name: hex_crc(data) for name, data in files.items()},
            dtype=self._dtype,
            num_tokens=self._total,
            num_documents=self.num_documents,
            num_trained=self._trained,
            max_token_id=self._max[0],
            max_token_document=printable(self._max[1]),
            eos_id=eos_id,
            part_documents=self._parts,
            skipped_rows=skipped_rows,
            unread=list(unread),
            num_images=self._num_images,
            comparison=self._comparison,
        )
        write_info(self._folder, info)
