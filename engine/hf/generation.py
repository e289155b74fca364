"""generation_config.json: which tokens end a text, read and written."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from penstock.engine.data.text.tokenizer import TextTokenizer
from penstock.storage.files.disk import atomic_write
from penstock.storage.files.errors import UserError
from penstock.storage.files.model_folder import has_model_file, read_model_file
from penstock.storage.files.untrusted import is_whole, parse_object

NAME = "generation_config.json"
_MOST_BYTES = 1 << 20


def stop_ids(where: Path | None, config: PretrainedConfig, tokenizer: TextTokenizer | None) -> frozenset[int]:
    """Tokens that end a text: those of a model folder's generation_config.json or the config, and the tokenizer's.

    Without a folder the tokenizer's alone: a config that was made from a shape names tokens of some other vocabulary.
    """
    if where is None and tokenizer is not None:
        return frozenset([tokenizer.eos_id])
    result: list[Any] = [*_config_ends(config), _read(where).get("eos_token_id")]
    if tokenizer is not None:
        result.append(tokenizer.eos_id)
    return frozenset(_ids(result))


def with_stops(where: Path | None, config: PretrainedConfig, stops: Collection[int]) -> bytes | None:
    """The generation_config.json of a folder, byte for byte where `stops` are among the tokens that end a text, else
    with them; of a folder that has none what transformers makes of the config, and None where that has them all."""
    has_file = where is not None and has_model_file(where, NAME)
    values = _read(where)
    known = _ids([values.get("eos_token_id")] if has_file else _config_ends(config))
    if set(stops) <= set(known):
        return read_model_file(where, NAME, _MOST_BYTES) if where is not None and has_file else None
    if not has_file:
        made: Any = GenerationConfig.from_model_config(config)
        values = made.to_diff_dict()
    ids = [*known, *sorted(set(stops) - set(known))]
    values["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    values.pop("_from_model_config", None)  # it is no longer what transformers makes of the config
    return (json.dumps(values, indent=2) + "\n").encode()


def write_generation_config(
    out_dir: Path, where: Path | None, config: PretrainedConfig, stops: Collection[int]
) -> None:
    """Write what `with_stops` gives into an export, durably; nothing where that is None."""
    content = with_stops(where, config, stops)
    if content is not None:
        atomic_write(out_dir / NAME, content)


def _config_ends(config: PretrainedConfig) -> list[Any]:
    return [getattr(one, "eos_token_id", None) for one in (config, config.get_text_config(decoder=True))]


def _read(where: Path | None) -> dict[str, Any]:
    if where is None or not has_model_file(where, NAME):
        return {}
    try:
        return parse_object(read_model_file(where, NAME, _MOST_BYTES))
    except ValueError as error:
        raise UserError(f"{where / NAME}: not JSON ({error}); correct or remove it") from None


def _ids(result: list[Any]) -> list[int]:
    """Token ids, each once, in their order."""
    ids = [id for some in result for id in (some if isinstance(some, list) else [some])]
    return list(dict.fromkeys(id for id in ids if is_whole(id)))
