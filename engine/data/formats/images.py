"""Images of a row of messages: `images` beside them, or in the parts of their content.

Places for them are parts `{"type": "image"}`, as TRL has it, or `<image>` in a text, as LLaMA-Factory has it; without
any they come before the first user's text. An image is a path, from the folder of the file that names it, or an object
with `bytes` or `path`, as `datasets` stores it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.engine.data.formats.base import kind, unpacked
from penstock.engine.data.samples import RowError, in_parts, is_image
from penstock.storage.files.untrusted import one_line

FIELDS = ("images", "image")
_MARK = "<image>"


def with_images(
    messages: list[dict[str, Any]], fields: dict[str, Any], where: str
) -> tuple[list[dict[str, Any]], tuple[str | bytes, ...]]:
    """Messages of a row with a part for each image in its place, and the images: paths, or the content of files.

    Of a row without images the messages as they are. RowError naming what is no image, or has no place.
    """
    beside = _beside(fields, where)
    parts = [part for message in messages for part in _parts(message) if is_image(part)]
    if not beside and not parts:
        return messages, ()
    if beside and not parts:
        messages = [_marked(message) for message in messages]
        parts = [part for message in messages for part in _parts(message) if is_image(part)]
    messages = [in_parts(message) for message in messages]
    if not parts:
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise RowError(f"{where}: `images` has {len(beside)}, and no user's message to show them in")
        parts = [{"type": "image"} for _ in beside]
        messages[first] = messages[first] | {"content": [*parts, *messages[first].get("content", [])]}
    own = [{name: value for name, value in part.items() if name != "type" and value is not None} for part in parts]
    if (places := sum(not given for given in own)) != len(beside):
        raise RowError(
            f"{where}: {len(beside)} images and {places} places for them; each needs one: {_MARK} in a text, or a part "
            '{"type": "image"} of a content'
        )
    rest = iter(beside)
    images = tuple(_image(given, f"{where}: an image part") if given else next(rest) for given in own)
    return [_bare(message) for message in messages], images


def _beside(fields: dict[str, Any], where: str) -> list[str | bytes]:
    """The images of a row's column."""
    field = next((name for name in FIELDS if fields.get(name) is not None), FIELDS[0])
    value = unpacked(fields.get(field))
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    return [_image(value, f"{where}: {field}[{number}]") for number, value in enumerate(values)]


def _image(value: Any, where: str) -> str | bytes:
    if isinstance(value, dict):
        value = next((value[name] for name in ("bytes", "path", "image", "url") if value.get(name) is not None), value)
        if isinstance(value, dict) and value.keys() & {"bytes", "path"}:
            return _image(value, where)
    if isinstance(value, str) and value.partition("://")[0].lower() in ("http", "https", "ftp", "s3", "hf"):
        raise RowError(f"{where} is a URL, {one_line(value, 80)}; download it, and give the path of the file")
    if not isinstance(value, str | bytes) or not value:
        raise RowError(f"{where} is {kind(value)}; expected the path of an image, or an object with `bytes` or `path`")
    return value


def _parts(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose text has marks, with parts in their place."""
    content = message.get("content")
    if not isinstance(content, str) or _MARK not in content:
        return message
    return message | {"content": list(_split(content))}


def _split(text: str) -> Iterator[dict[str, str]]:
    for number, part in enumerate(text.split(_MARK)):
        if number:
            yield {"type": "image"}
        if part:
            yield {"type": "text", "text": part}


def _bare(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose parts of images say nothing else."""
    if "content" not in message:
        return message
    return message | {"content": [{"type": "image"} if is_image(part) else part for part in message["content"]]}
