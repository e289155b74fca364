"""What browsers send: checked, bounded, and turned into what the application's process reads from its input."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

from penstock.storage.files.untrusted import parse_json, printable

MOST_WIDTH, MOST_HEIGHT = 1_000, 500
LEAST_WIDTH, LEAST_HEIGHT = 20, 5
USUAL_SIZE = (80, 24)

MOST_MESSAGE_BYTES = 4 << 20
"""The websocket closes at more."""
MOST_TYPED = 1 << 18
"""Characters that are typed or pasted at once."""
PIECE_BYTES = 1 << 14
"""Of what is typed, in one packet to the process."""
_MOST_PING = 64
_SHOWN = 60

_TYPED_BYTES_A_S = 1 << 18
_MESSAGES_A_S = 1_000
_RESIZES_A_S = 20


class MalformedError(ValueError):
    """A message that is none; the text says why in a few words."""


class Message(NamedTuple):
    """One message of a browser, as it is acted upon."""

    packets: list[bytes]
    answer: str | None
    pause_s: float
    """Time to take before the next one, so that nobody sends more than an application can take."""


def read_message(text: str) -> Message:
    """The message in a websocket's text frame. Raises MalformedError."""
    try:
        envelope = parse_json(text, most_bytes=MOST_MESSAGE_BYTES)
    except ValueError as error:
        raise MalformedError(f"no JSON: {error}") from None
    if not isinstance(envelope, list) or not 1 <= len(envelope) <= 2 or not isinstance(envelope[0], str):
        raise MalformedError("not a list of a type and a value")
    kind, value = envelope[0], envelope[1] if len(envelope) == 2 else None
    if kind == "stdin":
        if not isinstance(value, str) or len(value) > MOST_TYPED:
            raise MalformedError(f"'stdin' takes a text of at most {MOST_TYPED:,} characters")
        data = value.encode()
        packets = [packet(b"D", data[begin : begin + PIECE_BYTES]) for begin in range(0, len(data), PIECE_BYTES)]
        return Message(packets, None, 1 / _MESSAGES_A_S + len(data) / _TYPED_BYTES_A_S)
    if kind == "resize":
        if not isinstance(value, dict):
            raise MalformedError("'resize' takes a width and a height")
        width, height = clamped(value.get("width"), value.get("height"))
        return Message([meta({"type": "resize", "width": width, "height": height})], None, 1 / _RESIZES_A_S)
    if kind in ("focus", "blur"):
        return Message([meta({"type": kind})], None, 1 / _RESIZES_A_S)
    if kind == "ping":
        if not isinstance(value, str) or len(value) > _MOST_PING:
            raise MalformedError(f"'ping' takes a text of at most {_MOST_PING} characters")
        return Message([], json.dumps(["pong", value]), 1 / _RESIZES_A_S)
    raise MalformedError(f"unknown type '{printable(kind[:_SHOWN])}'")


def clamped(width: object, height: object) -> tuple[int, int]:
    """A terminal's size from two JSON numbers, brought into bounds. Raises MalformedError where one is no number."""
    return _side(width, LEAST_WIDTH, MOST_WIDTH), _side(height, LEAST_HEIGHT, MOST_HEIGHT)


def requested_size(width: str, height: str) -> tuple[int, int]:
    """The same from an address's query, where anything may stand."""
    try:
        return clamped(float(width), float(height))
    except ValueError:
        return USUAL_SIZE


def _side(value: object, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:  # NaN
        raise MalformedError("'resize' takes two numbers")
    return int(min(max(value, least), most))


def meta(value: dict[str, Any]) -> bytes:
    """A packet for the process that is not typed."""
    return packet(b"M", json.dumps(value).encode())


def packet(kind: Literal[b"D", b"M"], payload: bytes) -> bytes:
    """As Textual's web driver reads it."""
    return kind + len(payload).to_bytes(4, "big") + payload
