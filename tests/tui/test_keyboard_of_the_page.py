"""penstock.js in a page that is made up: who has the keyboard, run by node where that is installed."""

import json
import shutil
import subprocess

import pytest

from penstock.tui.web.server import STATIC

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


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_the_terminal_has_the_keyboard_while_it_is_open_and_the_button_afterwards() -> None:
    command = ["node", "-e", PAGE, str(STATIC["penstock.js"][0])]
    seen = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    keys = [".xterm-helper-textarea"]
    assert seen == {
        "before the emulator": [],
        "connecting": [],  # the emulator tells of its focus over the websocket
        "open": keys,
        "back in the window": keys,
        "closed": ["again"],
        "back when closed": [],
        "why": "the server is shutting down",
        "classes": ["-closed"],
        "url": "ws://localhost:8000/ws",
    }
