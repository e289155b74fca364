"""What browsers send to `penstock serve`: bounds of sizes and texts, and everything that is no message."""

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


def test_a_terminals_size_is_brought_into_bounds() -> None:
    for asked, width, height in (
        ((100, 30), 100, 30),
        ((100.7, 30.2), 100, 30),
        ((1e8, 1e8), 1000, 500),
        ((10**400, 1e300), 1000, 500),
        ((float("inf"), float("-inf")), 1000, 5),
        ((0, -5), 20, 5),
    ):
        ((kind, payload),) = sent("resize", {"width": asked[0], "height": asked[1]})
        assert (kind, json.loads(payload)) == ("M", {"type": "resize", "width": width, "height": height}), asked
    for texts, size in (
        (("100", "30"), (100, 30)),
        (("1e8", "99999999999"), (1000, 500)),
        (("inf", "-1"), (1000, 5)),
        (("nan", "30"), (80, 24)),
        (("", ""), (80, 24)),
        (("x", "30"), (80, 24)),
        (("9" * 5000, "1"), (1000, 5)),
    ):  # the one in the address
        assert asked_size(*texts) == size


NO_MESSAGES = ["", "[]", "null", "[1]", '["stdin"]', '["stdin", 1]', '["stdin", "a", "b"]', '["stdin", "\\ud800"]']
NO_MESSAGES += ['["nosuch", 1]', '["ping", {}]', '["resize", []]', '["resize", {}]']
NO_MESSAGES += [f'["resize", {{"width": {width}, "height": 30}}]' for width in ('"100"', "true", "NaN")]
NO_MESSAGES += [json.dumps(["ping", "1" * 1000]), json.dumps(["stdin", "a" * (MOST_TYPED + 1)]), "[" * 3_000_000]
NO_MESSAGES += ['["stdin", ' * 1000 + '""' + "]" * 1000, '["stdin", "a"' + " " * (5 << 20) + "]"]


@pytest.mark.parametrize("text", [*NO_MESSAGES, json.dumps(["\x1b]0;x\x07" + "a" * 9999])])
def test_what_is_no_message_says_why_in_a_line(text: str) -> None:
    with pytest.raises(MalformedError) as caught:
        read_message(text)
    assert 0 < len(str(caught.value)) < 200
    assert str(caught.value).isprintable(), "control characters reach the log"


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
