"""Where blocks are and what flows between the tiers, from real lines of spans.jsonl, drawn at every size."""

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from seen import append, span, widths

from benchmarks.parts.synthetic import Writer
from penstock.app.console.rows import ASCII, UNICODE, Glyphs, plain
from penstock.tui.data.blocks import BlockLocations
from penstock.tui.data.flow import DIRECT, LOAD, READ, STORE, WRITE, Flow, Link, Marks, Node, Tier, flow
from penstock.tui.data.run_data import RunData
from penstock.tui.render.blockmap import block_map
from penstock.tui.render.pipeline import pipeline_rows


def plan(layers: int) -> dict[str, Any]:
    names = ["embed", *(f"layers.{i}" for i in range(layers)), "head"]
    blocks = [{"name": name, "weights": "ram", "state": "nvme", "gradient": "ram"} for name in names]
    return {"blocks": blocks, "weight_slots": {"layer": 2, "embedding and head": 0}}


def ended(op: str, block: str) -> dict[str, Any]:
    return {"lane": "compute", "op": op, "block": block, "chunk": 0, "start_s": 0.0, "end_s": 1.0, "step": 1}


def places(found: BlockLocations, kind: str, **more: Any) -> dict[str, str]:
    return {block.name: block.location[kind] for block in found.snapshot(**more)}


def test_weights_gradients_and_state_go_where_ops_bring_them_and_are_in_flight_meanwhile() -> None:
    found = BlockLocations(plan(3))
    found.add([ended("load_weights", name) for name in ("layers.0", "layers.1", "layers.2")])
    assert list(places(found, "weights").items()) == [
        ("embed", "ram"), ("layers.0", "ram"), ("layers.1", "gpu"), ("layers.2", "gpu"), ("head", "ram")
    ]  # fmt: skip
    found = BlockLocations(plan(3) | {"weight_slots": {"layer": 2, "embedding and head": 1}})
    found.add([ended("load_weights", name) for name in ("embed", "layers.0", "layers.1", "head")])
    assert [name for name, place in places(found, "weights").items() if place == "gpu"] == [
        "layers.0",
        "layers.1",
        "head",
    ]
    found = BlockLocations(plan(1))
    assert (places(found, "gradient")["layers.0"], places(found, "state")["layers.0"]) == ("", "nvme")
    for kind, op, place in (
        ("gradient", "layer_backward", "gpu"),
        ("gradient", "store_gradient", "ram"),
        ("gradient", "update", ""),
        ("state", "read_state", "ram"),
        ("state", "write_state", "nvme"),
    ):
        found.add([ended(op, "layers.0")])
        assert places(found, kind)["layers.0"] == place, op
    found = BlockLocations(plan(2))
    now = [("load_weights", "layers.1"), ("layer_forward", "embed")]
    by_name = {block.name: block for block in found.snapshot(now)}
    assert (by_name["layers.1"].moving, by_name["embed"].doing) == ({"weights": "in"}, "forward")
    assert all(not block.moving and not block.doing for block in found.snapshot(live=False))
    # Foreign plans and spans are ignored.
    for odd in ({}, {"blocks": 3}, {"blocks": [1, {"name": 4}, {"name": "x"}], "weight_slots": []}):
        found = BlockLocations(odd)
        found.add([{"op": 3}, {"op": "update", "block": ["x"]}, {"op": "update", "block": "nobody", "end_s": "late"}])
        found.snapshot([("", ""), ("update", "nobody")])
    assert BlockLocations({"blocks": [{"name": "x"}]}).snapshot()[0].location["weights"] == ""


def test_a_frozen_block_has_weights_and_shares_no_slot_with_what_is_trained() -> None:
    """A column for each block: of one that is frozen in part the weights of its larger buffer, which is the frozen one
    here, and the state and gradient of the other."""
    blocks: list[dict[str, Any]] = []
    for name in ("embed", "layers.0", "layers.1", "layers.2"):
        frozen = {"name": f"{name}.frozen", "block": name, "frozen": True, "weights": "ram", "bytes": 900}
        blocks.append(frozen | {"state": None, "gradient": None})
        if name != "embed":
            trained = {"name": name, "block": name, "frozen": False, "weights": "gpu", "state": "nvme", "bytes": 100}
            blocks.append(trained | {"gradient": "ram"})
    found = BlockLocations({"blocks": blocks, "weight_slots": {"layer": 1, "frozen layer": 2}})
    assert [(block.name, block.num_bytes) for block in found.snapshot()] == [
        ("embed", 900), ("layers.0", 1000), ("layers.1", 1000), ("layers.2", 1000)
    ]  # fmt: skip
    found.add([ended("load_weights", f"layers.{i}.frozen") for i in range(3)])
    assert list(places(found, "weights").values()) == ["ram", "ram", "gpu", "gpu"]
    found.add([ended("load_weights", "layers.0"), ended("update", "layers.2"), ended("layer_backward", "layers.1")])
    assert list(places(found, "weights").values()) == ["ram", "ram", "gpu", "gpu"]
    assert places(found, "gradient") == {"embed": "", "layers.0": "", "layers.1": "gpu", "layers.2": ""}
    assert places(found, "state") == {"embed": "", "layers.0": "nvme", "layers.1": "nvme", "layers.2": "nvme"}
    found.add([ended("embed_backward", "embed")])
    assert places(found, "gradient")["embed"] == ""
    now = [("load_weights", "layers.1.frozen")]
    assert {block.name: block.moving for block in found.snapshot(now)}["layers.1"] == {"weights": "in"}


def test_the_map_as_text_with_a_row_a_block_where_there_is_room() -> None:
    found = BlockLocations(plan(3))
    found.add([ended("load_weights", "layers.0"), ended("layer_backward", "layers.1"), ended("read_state", "head")])
    now = [("read_state", "embed"), ("store_gradient", "layers.2"), ("update", "head")]
    shown = plain(block_map(found.snapshot(now), 34, 6, UNICODE)).splitlines()
    assert [line.rstrip() for line in shown] == [
        "        e   0       2   h",
        "weights rrr GGG rrr rrr rrr",
        "state   ▲▲▲ nnn nnn nnn rrr",
        "grad    ··· ··· GGG ▼▼▼ ···",
        "now     ··· ··· ··· ··· uuu",
        "g gpu  r ram  n nvme  ▲▼ in flight",
    ]
    deep = BlockLocations(plan(128))
    rows = plain(block_map(deep.snapshot(), 80, 12, UNICODE)).splitlines()
    assert sum(line[8:].count("r") for line in rows if line.startswith("weights")) == 130
    assert plain(block_map(deep.snapshot([("read_state", "layers.77")]), 40, 5, UNICODE)).count("▲") == 1
    blocks = [*plan(1)["blocks"][:2], {"name": "head", "weights": "gpu", "bytes": 2048}]
    found = BlockLocations(plan(1) | {"blocks": blocks}).snapshot([("load_weights", "embed")])
    assert [line.rstrip() for line in plain(block_map(found, 60, 14, UNICODE)).splitlines()[7:]] == [
        "block    weights   state     grad           size  now",
        "embed    ▲         nvme      -               n/a",
        "layers.0 ram       nvme      -               n/a",
        "head     gpu       -         -           2.0 KiB",
    ]
    # Of many blocks those that are not at rest.
    now = [("load_weights", "layers.7"), ("head", "head")]
    lines = plain(block_map(BlockLocations(plan(60)).snapshot(now), 90, 20, UNICODE)).splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["layers.7", "head"]
    assert lines[-1].rstrip().endswith("backward")
    assert plain(block_map([], 20, 5, UNICODE)).strip() == "no plan yet"


@pytest.mark.parametrize("layers", [0, 2, 28, 62, 128])
def test_any_number_of_blocks_at_any_size(layers: int) -> None:
    blocks = BlockLocations(plan(layers)).snapshot()
    for width, height in itertools.product((1, 5, 20, 24, 40, 77, 190), (1, 2, 3, 4, 5, 6, 11, 30)):
        for glyphs in (UNICODE, ASCII):
            rows = block_map(blocks, width, height, glyphs)
            assert len(rows) <= height
            assert widths(rows) == {width}
            assert glyphs is UNICODE or plain(rows).isascii()


GB = 10**9
NOW = time.time()
"""Of the runs and of who looks at them, however long that takes."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with what is read of a run; its process is this one."""
    folder = tmp_path / "runs" / "made"
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text("{}")
    blocks = [{"name": "layers.0", "weights": "nvme", "state": "nvme", "gradient": "ram"}]
    tiers = {name: {"budget_bytes": 100.0, "peak_bytes": 50.0} for name in ("gpu", "ram", "nvme")}
    (folder / "plan.json").write_text(json.dumps({"blocks": blocks, "tiers": tiers, "machine": {"gpu": None}}))
    return folder


def add(folder: Path, *ops: tuple[str, str, float, float, int], step: int = 1, **status: Any) -> None:
    """Ops as (lane, op, start, end, bytes), and a word of the run's process."""
    for lane, op, start, end, size in ops:
        append(folder / "spans.jsonl", span(lane, start, end, op=op, block="layers.0", bytes=size, step=step))
    found = {"state": "finished", "pid": 1, "host": "elsewhere", "heartbeat": NOW, "clock_s": 10.0} | status
    (folder / "status.json").write_text(json.dumps(found))


STEP = [
    ("nvme_read", "read_weights", 5.0, 6.0, 4 * GB),
    ("h2d", "load_weights_part", 6.0, 7.0, 4 * GB),
    ("h2d", "load_saved", 7.0, 7.5, 1 * GB),
    ("compute", "layer_backward", 7.0, 8.0, 0),
    ("d2h", "store_gradient", 8.0, 8.5, 2 * GB),
    ("nvme_read", "read_state", 8.5, 9.0, 3 * GB),
    ("optimizer", "update", 9.0, 9.5, 0),
    ("nvme_write", "write_state", 9.5, 9.9, 3 * GB),
    ("nvme_write", "commit", 9.9, 9.95, 0),
]


def polled(folder: Path) -> Flow:
    data = RunData(folder, lambda: NOW)
    data.poll()
    return flow(data)


def test_a_run_that_goes_on_tells_its_last_seconds_and_what_is_under_way(run: Path) -> None:
    now = {"compute": [{"op": "layer_forward", "block": "layers.7"}]}
    add(run, *STEP, state="running", now=now | {"h2d": [{"op": "load_weights", "block": "layers.8"}]})
    found = polled(run)
    assert (found.live, found.when) == (True, "last 5 s")
    rates = {route: found.links[route].bytes_per_s / GB for route in found.links}
    assert rates == pytest.approx({READ: 7 / 5, LOAD: 1.0, STORE: 0.4, WRITE: 0.6, DIRECT: 0.0}, rel=0.05)
    assert [name for name, _ in found.links[READ].cargo] == ["weights", "optimizer state"]
    assert [name for name, _ in found.links[LOAD].cargo] == ["weights", "activations"]
    assert found.links[LOAD].now == ("weights", "layers.8")
    assert found.links[WRITE].now == ("optimizer state", "layers.0")  # it has only just ended
    assert (found.nodes["gpu"].doing, found.nodes["gpu"].note) == ("forward layers.7", "in ordinary memory")
    assert found.nodes["nvme"].holds == ("weights", "optimizer state")
    (run / "spans.jsonl").unlink()  # a GPU that reads the drive itself has a way of its own
    add(run, ("nvme_read", "read_weights_whole", 6.0, 7.0, 4 * GB), state="running")
    found = polled(run)
    assert found.links[READ].bytes_per_s == 0 < found.links[DIRECT].bytes_per_s
    for size in ((80, 3), (118, 5), (198, 7)):
        assert "NVMe►GPU weights" in plain(pipeline_rows(*size, found, {}, UNICODE))


@pytest.mark.parametrize("state", ["finished", "stopped", "paused"])
def test_any_other_tells_its_last_whole_step(run: Path, state: str) -> None:
    add(run, ("optimizer", "clip", 1.0, 2.0, 0))
    add(run, ("h2d", "load_weights", 2.0, 4.0, 8 * GB), ("optimizer", "clip", 5.9, 6.0, 0), step=2)
    add(run, ("nvme_write", "write_state", 6.0, 9.0, 3 * GB), step=2, state=state)
    found = polled(run)
    assert (found.live, found.nodes["gpu"].doing) == (False, "")
    assert found.when.endswith("last step 2, 4.00 s")
    assert found.links[LOAD] == Link(2 * GB, (("weights", 2.0 * GB),))
    assert found.links[WRITE] == Link()


def test_marks_move_as_far_as_bytes_have_and_stand_otherwise(tmp_path: Path) -> None:
    """The fastest way's marks move four cells a second, others less, and none while nothing arrives."""
    writer = Writer(tmp_path / "run", num_spans=3000, num_steps=10)
    writer.begin(NOW)
    now_s, marks, moved = NOW, Marks(), []
    data = RunData(tmp_path / "run", lambda: now_s)
    for seconds in range(4):
        if seconds:
            now_s += 1.0
            writer.advance(1.0, now_s)
        data.poll()
        data.state = "running"
        before, now = marks.offsets, flow(data)
        marks.move(data.spans.view, now, behind=False)
        moved.append((marks.offsets[READ] - before.get(READ, 0)) % Marks.SPACING)
    assert moved[0] == 0
    assert all(3 <= cells <= 5 for cells in moved[1:])
    for late in (now, replace(now, live=False)):
        before = marks.offsets
        marks.move(data.spans.view, late, behind=False)
        assert marks.offsets == before


def scene(*, live: bool = True) -> Flow:
    tier = Tier("x", 100 * 2.0**30, 60 * 2.0**30, 42 * 2.0**30)
    links = {
        READ: Link(1.24 * GB, (("weights", 0.9 * GB), ("optimizer state", 0.34 * GB)), ("weights", "layers.4")),
        LOAD: Link(3.1 * GB, (("weights", 3.1 * GB),), ("weights", "layers.3")),
        STORE: Link(1.0 * GB, (("gradients", 0.8 * GB), ("activations", 0.2 * GB)), ("gradients", "layers.5")),
    }
    nodes = {
        "nvme": Node("NVMe", tier, ("weights", "optimizer state")),
        "ram": Node("RAM", tier, ("gradients",), "update layers.9"),
        "gpu": Node("GPU", tier, (), "backward layers.5"),
    }
    when = "last 5 s" if live else "last step 84, 1.91 s"
    return Flow(nodes, links | {WRITE: Link(), DIRECT: Link()}, when, live)


def test_the_whole_picture_as_text() -> None:
    """Marks have come two cells on."""
    assert plain(pipeline_rows(78, 3, scene(), dict.fromkeys(scene().links, 2), ASCII)).splitlines() == [
        " NVMe 42% = weights, ~ 1.2 GB/s => RAM  42% == weights 3.1 GB/s >==> GPU  42% ",
        "[###.|...]<------- nothing -------[###.|...]<= gradients~ 1.0 GB/s =[###.|...]",
        "GPU backward layers.5   to GPU weights of layers.3                    last 5 s",
    ]
    assert plain(pipeline_rows(50, 1, scene(), {}, UNICODE)) == "NVMe 1.2 GB/s► ◄0 B/s RAM 3.1 GB/s► ◄1.0 GB/s GPU "


@pytest.mark.parametrize(("glyphs", "live"), [(UNICODE, True), (ASCII, False)])
def test_every_size_is_filled_exactly(glyphs: Glyphs, live: bool) -> None:
    bare = Flow({name: Node(name, None) for name in ("nvme", "ram", "gpu")}, scene().links, "no step yet")
    for now, width, height in itertools.product((scene(live=live), bare), range(1, 230), (1, 2, 3, 5, 7)):
        rows = pipeline_rows(width, height, now, dict.fromkeys(now.links, 3), glyphs)
        assert 1 <= len(rows) <= height
        assert widths(rows) == {width}
        assert glyphs is UNICODE or plain(rows).isascii()
