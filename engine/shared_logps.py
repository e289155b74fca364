"""Reference log-probabilities that this user's runs share: a file for each model and set of answers below
XDG_CACHE_HOME/penstock/reference, beside the cached corpora (engine/data/corpus/cache.py).

A file is named by a digest of all that decides its values to the bit, so that a run which takes them trains as if it
had made the passes. It begins with a line of JSON, sealed; the values, float64 [documents, 2], are behind it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engine.kernels import kernel_record
from penstock.engine.optim.base import MASTER
from penstock.engine.runtime.sources import WEIGHTS
from penstock.engine.session import Session
from penstock.storage.files.sealed import hex_crc, seal, unseal
from penstock.storage.files.untrusted import parse_object
from penstock.storage.files.user_cache import code_digest, read_cached_file, write_cached_file

KIND = "reference"
MOST_BYTES = 1 << 28
"""Of one file: 16 million documents. What is larger is not shared."""
MOST_FILES = 32
"""The newest, by when they were made."""
_MOST_LINE_BYTES = 1 << 12
_CODE = ("attention", "branches", "model")
"""Rooms of the engine that compute."""
_INCIDENTAL = ("_name_or_path", "transformers_version")


def digest_of(session: Session, documents: Sequence[NDArray[np.int64]]) -> str:
    """Of all that decides the log-probabilities of a run before its first step: weights, answers, and how they are
    computed. `documents`: those that are read one behind the other, of each part of the data."""
    assert session.step == 0, "the weights have changed"
    spec, plan, recipe = session.spec, session.plan, session.recipe
    kernels = kernel_record(session.device)
    what: dict[str, Any] = {
        "weights": {
            f"{array.buffer}/{array.kind}": [array.dtype, array.numel, array.part_numel, *sums]
            for array, sums in session.store.checksums().items()
            if array.kind in (MASTER, WEIGHTS)
        },
        "constants": session.store.meta.get("constants"),
        "config": json.loads(spec.config.to_json_string(use_diff=False), object_hook=_without_incidental),
        "adapter": None if spec.adapter is None else asdict(replace(spec.adapter, start=None)),
        "formats": {name: buffer.format for name, buffer in spec.buffers.items()},
        "corpus": session.loader.corpus.info.content,
        "compares": [session.objective.compares, session.objective.mismatched],
        "documents": [hashlib.sha256(some.astype("<i8").tobytes()).hexdigest() for some in documents],
        "rows": [recipe.data.packing, plan.problem.rows, plan.problem.row_tokens, plan.problem.chunk_tokens],
        "computed": [recipe.train.compute_dtype, recipe.train.deterministic, session.runtime.runner.compiled],
        "attention": [plan.streamed, {what: names[:1] for what, names in kernels["rankings"].items()}],
        "environment": [kernels["environment"], *map(importlib.metadata.version, ("penstock", "transformers"))],
        "code": code_digest(Path(__file__).parent / room for room in _CODE),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _without_incidental(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in _INCIDENTAL}


def take(digest: str, count: int) -> NDArray[np.float64] | None:
    """Those of `count` documents that a run has shared, float64 [count, 2]; None: there are none, or not whole."""
    data = read_cached_file(KIND, _name(digest), MOST_BYTES + _MOST_LINE_BYTES)
    line, _, content = (data or b"").partition(b"\n")
    try:
        header, sealed = unseal(parse_object(line, most_bytes=_MOST_LINE_BYTES))
    except ValueError:
        return None
    if not sealed or header != _header(digest, content) or len(content) != 16 * count:
        return None
    return np.frombuffer(content, dtype="<f8").reshape(count, 2)


def keep(digest: str, values: NDArray[np.float64]) -> None:
    """Share them with the runs to come, unless they are too many, or the cache cannot be written."""
    content = values.astype("<f8").tobytes()
    if len(content) <= MOST_BYTES:
        line = json.dumps(seal(_header(digest, content))).encode() + b"\n"
        write_cached_file(KIND, _name(digest), line + content, MOST_FILES)


def _name(digest: str) -> str:
    return f"{digest}.logps"


def _header(digest: str, content: bytes) -> dict[str, Any]:
    return {"digest": digest, "crc": hex_crc(content)}
