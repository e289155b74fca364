"""What browsers send to `penstock serve`: bounds of sizes and texts, and everything that is no message."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.tui.web.messages import MOST_TYPED, PIECE_BYTES, MalformedError, asked_size, read_message


def sent(*envelope: Any) -> list[tuple[str, bytes]]:
    """Kind and payload of the packets that come of a message."""
    found = []
    for packet in read_message(json.dumps(envelope)).packets:
        assert int.from_bytes(packet[1:5], "big") == len(packet) - 5
        found.append((packet[:1].decode(), packet[5:]))
    return found


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        (100, 30, (100, 30)),
        (100.7, 30.2, (100, 30)),
        (1e8, 1e8, (1000, 500)),
        (10**400, 1e300, (1000, 500)),
        (float("inf"), float("-inf"), (1000, 5)),
        (0, -5, (20, 5)),
    ],
)
def test_a_terminals_size_is_brought_into_bounds(width: float, height: float, expected: tuple[int, int]) -> None:
    ((kind, payload),) = sent("resize", {"width": width, "height": height})
    assert kind == "M"
    assert json.loads(payload) == {"type": "resize", "width": expected[0], "height": expected[1]}


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [
        ("100", "30", (100, 30)),
        ("1e8", "99999999999", (1000, 500)),
        ("inf", "-1", (1000, 5)),
        ("nan", "30", (80, 24)),
        ("", "", (80, 24)),
        ("x", "30", (80, 24)),
        ("9" * 5000, "1", (1000, 5)),
    ],
)
def test_so_is_the_one_in_the_address(width: str, height: str, expected: tuple[int, int]) -> None:
    assert asked_size(width, height) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "[1]",
        '["stdin"]',
        '["stdin", 1]',
        '["stdin", "a", "b"]',
        '["stdin", "\\ud800"]',
        '["nosuch", 1]',
        '["ping", {}]',
        json.dumps(["ping", "1" * 1000]),
        json.dumps(["stdin", "a" * (MOST_TYPED + 1)]),
        '["resize", []]',
        '["resize", {}]',
        '["resize", {"width": "100", "height": "30"}]',
        '["resize", {"width": true, "height": 30}]',
        '["resize", {"width": NaN, "height": 30}]',
        "[" * 3_000_000,
        '["stdin", ' * 1000 + '""' + "]" * 1000,
        '["stdin", "a"' + " " * (5 << 20) + "]",
    ],
)
def test_what_is_no_message_says_why_in_a_line(text: str) -> None:
    with pytest.raises(MalformedError) as caught:
        read_message(text)
    assert 0 < len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_an_unknown_types_control_characters_reach_no_log() -> None:
    with pytest.raises(MalformedError) as caught:
        read_message(json.dumps(["\x1b]0;x\x07" + "a" * 9999]))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


def test_what_is_typed_goes_on_in_pieces_and_whole() -> None:
    text = "ü" * PIECE_BYTES + "q"
    packets = sent("stdin", text)
    assert {kind for kind, _ in packets} == {"D"}
    assert max(len(payload) for _, payload in packets) == PIECE_BYTES
    assert b"".join(payload for _, payload in packets).decode() == text


def test_a_ping_is_answered_and_what_costs_much_takes_its_time() -> None:
    assert read_message('["ping", "17"]').answer == '["pong", "17"]'
    key = read_message('["stdin", "q"]')
    assert key.answer is None
    assert key.pause_s < 0.01  # nobody types faster
    for costly in ('["resize", {"width": 9, "height": 9}]', '["ping", ""]', json.dumps(["stdin", "a" * MOST_TYPED])):
        assert read_message(costly).pause_s >= 0.05
