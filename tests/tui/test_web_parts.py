"""The parts of `penstock serve`: whom it lets in, what browsers send to it, and its page's script."""

import json
import shutil
import socket
import subprocess
from typing import Any

import pytest

from penstock.tui.web.access import SECURITY_HEADERS, Access, is_remote
from penstock.tui.web.messages import MOST_TYPED, PIECE_BYTES, MalformedError, read_message, requested_size
from penstock.tui.web.server import STATIC

LOCAL = Access("localhost", ("127.0.0.1", "::1"), 8000)
ONE = Access("192.0.2.7", ("192.0.2.7",), 8000)
NAMED = Access("trainer.example", ("192.0.2.7",), 80)
ALL = Access("0.0.0.0", ("0.0.0.0",), 8000)


def test_its_own_names_are_answered_others_and_other_sites_refused_and_tokens_not_to_be_guessed() -> None:
    for access, hosts in (
        (LOCAL, ["localhost:8000", "LocalHost:8000", "127.0.0.1:8000", "[::1]:8000"]),
        (ONE, ["192.0.2.7:8000"]),
        (NAMED, ["trainer.example", "trainer.example:80", "192.0.2.7"]),
        (ALL, ["192.0.2.99:8000", "[2001:db8::1]:8000", "localhost:8000", f"{socket.gethostname()}:8000"]),
    ):
        for host in hosts:
            assert access.host_trouble([host]) is None, host
            assert access.origin_trouble([f"http://{host}"], host, needed=True) is None, host
    for access, hosts in (
        (LOCAL, ["rebound.example:8000", "localhost.rebound.example:8000", "127.0.0.1.rebound.example:8000"]),
        (LOCAL, ["192.0.2.7:8000", "localhost:8001", "localhost", "localhost:8000@rebound.example"]),
        (LOCAL, ["", "[::1:8000", "localhost:80000000000"]),
        (ONE, ["localhost:8000", "192.0.2.8:8000"]),
        (NAMED, ["other.example"]),
        (ALL, ["rebound.example:8000"]),
    ):
        for several in ([], [access.host] * 2, *([host] for host in hosts)):
            assert access.host_trouble(several) is not None, several
    others = ["null", "http://evil.example", "http://localhost:8001", "https://localhost:8000"]
    others += ["http://127.0.0.1:8000", "http://localhost:8000.evil.example"]
    for origins in ([], ["http://localhost:8000"] * 2, *([origin] for origin in others)):
        assert LOCAL.origin_trouble(origins, "localhost:8000", needed=True) is not None, origins
    # A page that is opened by hand has no origin.
    assert LOCAL.origin_trouble([], "localhost:8000", needed=False) is None
    assert LOCAL.origin_trouble(["http://evil.example"], "localhost:8000", needed=False) is not None
    assert not is_remote(["127.0.0.1", "::1", "127.3.2.1"])
    for address in ("0.0.0.0", "::", "192.0.2.7", "fe80::1%eth0"):
        assert is_remote(["127.0.0.1", address])
    policy = SECURITY_HEADERS["Content-Security-Policy"]
    assert {"default-src 'none'", "frame-ancestors 'none'", "script-src 'self'"} <= set(policy.split("; "))
    assert "http" not in policy
    first, second = Access("localhost", ("::1",), 1), Access("localhost", ("::1",), 1)
    assert first.token != second.token
    assert len(first.token) >= 43  # 256 bits
    assert first.is_token(first.token)
    for wrong in ("", "\ud800", "é", first.token[:-1], first.token + "a", second.token):
        assert not first.is_token(wrong)
    assert first.token not in repr(first)


def sent(*envelope: Any) -> list[tuple[str, bytes]]:
    """Kind and payload of the packets that come of a message."""
    found = []
    for packet in read_message(json.dumps(envelope)).packets:
        assert int.from_bytes(packet[1:5], "big") == len(packet) - 5
        found.append((packet[:1].decode(), packet[5:]))
    return found


INF = float("inf")


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


def test_sizes_are_bounded_what_is_typed_goes_on_in_pieces_and_what_costs_much_takes_its_time() -> None:
    text = "ü" * PIECE_BYTES + "q"
    packets = sent("stdin", text)
    assert {kind for kind, _ in packets} == {"D"}
    assert max(len(payload) for _, payload in packets) == PIECE_BYTES
    assert b"".join(payload for _, payload in packets).decode() == text
    assert read_message('["ping", "17"]').answer == '["pong", "17"]'
    key = read_message('["stdin", "q"]')
    assert key.answer is None
    assert key.pause_s < 0.01  # nobody types faster
    for costly in ('["resize", {"width": 9, "height": 9}]', '["ping", ""]', json.dumps(["stdin", "a" * MOST_TYPED])):
        assert read_message(costly).pause_s >= 0.05
    bounds = {(100, 30): (100, 30), (100.7, 30.2): (100, 30), (1e8, 1e8): (1000, 500), (0, -5): (20, 5)}
    for asked, (width, height) in (bounds | {(10**400, 1e300): (1000, 500), (INF, -INF): (1000, 5)}).items():
        ((kind, payload),) = sent("resize", {"width": asked[0], "height": asked[1]})
        assert (kind, json.loads(payload)) == ("M", {"type": "resize", "width": width, "height": height}), asked
    in_address = {("100", "30"): (100, 30), ("1e8", "99999999999"): (1000, 500), ("inf", "-1"): (1000, 5)}
    in_address |= {("nan", "30"): (80, 24), ("", ""): (80, 24), ("x", "30"): (80, 24), ("9" * 5000, "1"): (1000, 5)}
    assert {texts: requested_size(*texts) for texts in in_address} == in_address


PAGE = """
const fs = require("fs");
const focused = [], classes = new Set();
const element = (name) => ({ dataset: {}, focus() { focused.push(name); }, addEventListener() {}, textContent: "" });
const elements = Object.fromEntries(["why", "again", "terminal", ".xterm-helper-textarea"].map((n) => [n, element(n)]));
class Events {
  constructor() { this.heard = {}; }
  addEventListener(name, then) { (this.heard[name] ??= []).push(then); }
  fire(name, event = {}) { (this.heard[name] ?? []).forEach((then) => then(event)); }
}
globalThis.window = Object.assign(new Events(), {
  location: { search: "?fontsize=20", href: "http://localhost:8000/?fontsize=20" }, WebSocket: Events });
globalThis.document = Object.assign(new Events(), {
  body: { classList: { add: (c) => classes.add(c), contains: (c) => classes.has(c) } },
  getElementById: (id) => elements[id], querySelector: (q) => elements[q] });
eval(fs.readFileSync(process.argv[1], "utf8"));
const seen = {}, now = (what) => { seen[what] = focused.splice(0); };
document.fire("DOMContentLoaded"); window.fire("focus"); now("before the emulator");
const socket = new window.WebSocket("ws://localhost:8000/ws");
window.fire("focus"); now("connecting");
socket.fire("open"); now("open");
window.fire("focus"); now("back in the window");
socket.fire("close", { reason: "the server is shutting down" }); now("closed");
window.fire("focus"); now("back when closed");
console.log(JSON.stringify({ ...seen, why: elements.why.textContent, classes: [...classes],
  url: elements.terminal.dataset.sessionWebsocketUrl }));
"""
"""A page that is made up, around penstock.js."""


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_the_terminal_has_the_keyboard_while_it_is_open_and_the_button_afterwards() -> None:
    command = ["node", "-e", PAGE, str(STATIC["penstock.js"][0])]
    seen = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    keys = [".xterm-helper-textarea"]
    # While it is connecting the emulator tells of its focus over the websocket.
    wanted = {"before the emulator": [], "connecting": [], "open": keys, "back in the window": keys}
    wanted |= {"closed": ["again"], "back when closed": [], "why": "the server is shutting down"}
    assert seen == wanted | {"classes": ["-closed"], "url": "ws://localhost:8000/ws"}
