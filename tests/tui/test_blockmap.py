"""Where blocks are: followed op by op, and drawn for any number of blocks at any size."""

import itertools
from typing import Any

import pytest
from seen import widths

from penstock.app.rows import ASCII, UNICODE, plain
from penstock.tui.data.blocks import BlockPlaces
from penstock.tui.render.blockmap import block_map


def plan(layers: int, weights: str = "ram", state: str = "nvme", gradient: str = "ram") -> dict[str, Any]:
    names = ["embed", *(f"layers.{i}" for i in range(layers)), "head"]
    blocks = [{"name": name, "weights": weights, "state": state, "gradient": gradient} for name in names]
    return {"blocks": blocks, "weight_slots": {"layer": 2, "embedding and head": 0}}


def ended(op: str, block: str, end_s: float = 1.0) -> dict[str, Any]:
    return {"lane": "compute", "op": op, "block": block, "chunk": 0, "start_s": 0.0, "end_s": end_s, "step": 1}


def places(found: BlockPlaces, kind: str, **more: Any) -> dict[str, str]:
    return {block.name: block.place[kind] for block in found.snapshot(**more)}


def test_weights_lose_their_slot_to_later_ones() -> None:
    found = BlockPlaces(plan(3))
    found.add([ended("load_weights", name) for name in ("layers.0", "layers.1", "layers.2")])
    assert list(places(found, "weights").items()) == [
        ("embed", "ram"), ("layers.0", "ram"), ("layers.1", "gpu"), ("layers.2", "gpu"), ("head", "ram")
    ]  # fmt: skip
    for pool in ("embedding and head", "edge"):  # with slots of their own, whatever older runs called the pool
        found = BlockPlaces(plan(3) | {"weight_slots": {"layer": 2, pool: 1}})
        found.add([ended("load_weights", name) for name in ("embed", "layers.0", "layers.1", "head")])
        on_gpu = [name for name, place in places(found, "weights").items() if place == "gpu"]
        assert on_gpu == ["layers.0", "layers.1", "head"]


def test_gradients_and_state_go_where_ops_bring_them() -> None:
    found = BlockPlaces(plan(1))
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
    found = BlockPlaces({"blocks": blocks, "weight_slots": {"layer": 1, "frozen layer": 2}})
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
    now = {"h2d": [{"op": "load_weights", "block": "layers.1.frozen"}]}
    assert {block.name: block.moving for block in found.snapshot(now)}["layers.1"] == {"weights": "in"}


def test_ops_under_way_are_in_flight_and_what_ended_just_now_still_counts() -> None:
    found = BlockPlaces(plan(2))
    now = {"h2d": [{"op": "load_weights", "block": "layers.1"}], "compute": [{"op": "layer_forward", "block": "embed"}]}
    by_name = {block.name: block for block in found.snapshot(now)}
    assert (by_name["layers.1"].moving, by_name["embed"].doing) == ({"weights": "in"}, "forward")
    assert all(not block.moving and not block.doing for block in found.snapshot(now, live=False))
    found.add([ended("write_state", "layers.0", 10.0), ended("read_state", "layers.1", 10.9)])
    by_name = {block.name: block for block in found.snapshot(None, 11.0)}
    assert (by_name["layers.1"].moving, by_name["layers.0"].moving) == ({"state": "in"}, {})


def test_foreign_plans_and_spans_are_ignored() -> None:
    for odd in ({}, {"blocks": 3}, {"blocks": [1, {"name": 4}, {"name": "x"}], "weight_slots": []}):
        found = BlockPlaces(odd)
        found.add([{"op": 3}, {"op": "update", "block": ["x"]}, {"op": "update", "block": "nobody", "end_s": "late"}])
        found.snapshot({"compute": "no list", "h2d": [3, {"op": None}]}, 3.0)
    assert BlockPlaces({"blocks": [{"name": "x"}]}).snapshot()[0].place["weights"] == ""


def test_drawn_as_text() -> None:
    found = BlockPlaces(plan(3))
    found.add([ended("load_weights", "layers.0"), ended("layer_backward", "layers.1"), ended("read_state", "head")])
    now = {
        "nvme_read": [{"op": "read_state", "block": "embed"}],
        "d2h": [{"op": "store_gradient", "block": "layers.2"}],
        "optimizer": [{"op": "update", "block": "head"}],
    }
    rows = block_map(found.snapshot(now), 34, 6, UNICODE)
    assert [line.rstrip() for line in plain(rows).splitlines()] == [
        "        e   0       2   h",
        "weights rrr GGG rrr rrr rrr",
        "state   ▲▲▲ nnn nnn nnn rrr",
        "grad    ··· ··· GGG ▼▼▼ ···",
        "now     ··· ··· ··· ··· uuu",
        "g gpu  r ram  n nvme  ▲▼ in flight",
    ]


@pytest.mark.parametrize("layers", [0, 2, 28, 62, 128])
def test_any_number_of_blocks_at_any_size(layers: int) -> None:
    blocks = BlockPlaces(plan(layers)).snapshot()
    for width, height in itertools.product((1, 5, 20, 24, 40, 77, 190), (1, 2, 3, 4, 5, 6, 11, 30)):
        for glyphs in (UNICODE, ASCII):
            rows = block_map(blocks, width, height, glyphs)
            assert len(rows) <= height
            assert widths(rows) == {width}
            assert glyphs is UNICODE or plain(rows).isascii()


def test_all_blocks_of_a_deep_model_are_there_and_the_busiest_of_a_shared_cell_speaks() -> None:
    found = BlockPlaces(plan(128))
    rows = plain(block_map(found.snapshot(), 80, 12, UNICODE)).splitlines()
    assert sum(line[8:].count("r") for line in rows if line.startswith("weights")) == 130
    now = {"nvme_read": [{"op": "read_state", "block": "layers.77"}]}
    assert plain(block_map(found.snapshot(now), 40, 5, UNICODE)).count("▲") == 1


def test_a_row_a_block_where_there_is_room() -> None:
    blocks = [*plan(1)["blocks"][:2], {"name": "head", "weights": "gpu", "bytes": 2048}]
    found = BlockPlaces(plan(1) | {"blocks": blocks}).snapshot({"h2d": [{"op": "load_weights", "block": "embed"}]})
    assert [line.rstrip() for line in plain(block_map(found, 60, 14, UNICODE)).splitlines()[7:]] == [
        "block    weights   state     grad           size  now",
        "embed    ▲         nvme      -               n/a",
        "layers.0 ram       nvme      -               n/a",
        "head     gpu       -         -           2.0 KiB",
    ]
    # Of many blocks those that are not at rest.
    now = {"h2d": [{"op": "load_weights", "block": "layers.7"}], "compute": [{"op": "head", "block": "head"}]}
    lines = plain(block_map(BlockPlaces(plan(60)).snapshot(now), 90, 20, UNICODE)).splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["layers.7", "head"]
    assert lines[-1].rstrip().endswith("backward")
    assert plain(block_map([], 20, 5, UNICODE)).strip() == "no plan yet"
