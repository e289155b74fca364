"""Spilled activations: any size comes back bit for bit, once, and leaves nothing."""

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nvme_state import SPECS, advance, make

from penstock.storage.arena import empty_aligned
from penstock.storage.errors import BudgetError, UserError
from penstock.storage.nvme import NvmeStore

UGLY = [0, 1, 511, 4095, 4096, 4097, 8191, 12288, 100_001, (4 << 20) + 3]


@pytest.fixture
def store(tmp_path: Path, workspace: Path) -> Iterator[NvmeStore]:
    store = make(tmp_path / "root", drives=[tmp_path / "a", workspace / "b"])
    shared = tmp_path.stat().st_dev == workspace.stat().st_dev
    assert any("on one device" in warning for warning in store.warnings) == shared
    yield store
    store.close()


def spilled(store: NvmeStore) -> list[Path]:
    return [path for drive in store.drives for path in sorted(drive.glob("scratch/spill/*"))]


def noise(num_bytes: int, seed: int = 0, *, aligned: bool = True) -> torch.Tensor:
    memory = empty_aligned(num_bytes + 1, torch.uint8)
    memory.random_(generator=torch.Generator().manual_seed(seed))
    return memory[:num_bytes] if aligned else memory[1:]


@pytest.mark.parametrize("direct", [False, True])
def test_round_trip(store: NvmeStore, direct: bool) -> None:
    for drive in store._drives:
        drive.direct = drive.direct and direct
    moved = 0
    for size, write_aligned, read_aligned in itertools.product(UGLY, (False, True), (False, True)):
        data = noise(size, size, aligned=write_aligned)
        store.spill("x.layers.0.0", data).result()
        (path,) = spilled(store)
        assert path.name == "x.layers.0.0"
        raw = path.read_bytes()
        assert len(raw) == -(-size // 4096) * 4096
        assert raw[:size] == data.numpy().tobytes()
        assert not raw[size:].strip(b"\0")
        out = noise(size, aligned=read_aligned).zero_()
        store.unspill("x.layers.0.0", out).result()
        assert torch.equal(out, data)
        assert not spilled(store)
        moved += len(raw)
        assert store.bytes_read == store.bytes_written == moved


def test_neighbours_are_left_alone_and_nothing_is_synced(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot ends in a page of its own, but a slice of a slot does not."""
    monkeypatch.setattr(os, "fsync", lambda fd: pytest.fail("synced"))
    slot = empty_aligned(1 << 14, torch.uint8).fill_(7)
    store.spill("k", noise(5000)).result()
    store.unspill("k", slot[:5000]).result()
    assert torch.equal(slot[:5000], noise(5000))
    assert (slot[5000:] == 7).all()


def test_keys_go_to_the_drives_in_turn_and_come_back_in_any_order(store: NvmeStore) -> None:
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda i: store.spill(f"k{i}", noise(8192, i)).result(), range(20)))
    counts = [len(list(drive.glob("scratch/spill/*"))) for drive in store.drives]
    assert counts == [10, 10]
    assert len({traffic.bytes_written for traffic in store.traffic().values()}) == 1
    for i in reversed(range(20)):
        out = torch.empty(8192, dtype=torch.uint8)
        store.unspill(f"k{i}", out).result()
        assert torch.equal(out, noise(8192, i))
    assert not spilled(store)
    store.spill("k0", noise(1)).result()  # a key is free again once it was read


@pytest.mark.parametrize("damage", ["flip", "flip tail", "truncate", "empty", "remove"])
def test_damage_is_found(store: NvmeStore, damage: str) -> None:
    for aligned in (False, True):
        store.spill(f"kv.{aligned}", noise(9000)).result()
        path = next(path for path in spilled(store) if path.name == f"kv.{aligned}")
        raw = bytearray(path.read_bytes())
        if damage.startswith("flip"):
            raw[8999 if damage == "flip tail" else 17] ^= 8
            path.write_bytes(raw)
        elif damage == "remove":
            path.unlink()
        else:
            os.truncate(path, 0 if damage == "empty" else 4096)
        message = f"{path}: reading 9,000 bytes of activations.*{'No such file' if damage == 'remove' else 'checksum'}"
        with pytest.raises(UserError, match=message):
            store.unspill(f"kv.{aligned}", noise(9000, aligned=aligned)).result()


def test_swept_on_open_and_on_close(store: NvmeStore) -> None:
    advance(store, 1)
    for name in "abc":
        store.spill(name, noise(100)).result()
    saved = {path: path.read_bytes() for path in spilled(store)}
    assert len(saved) == 3
    store.close()
    assert not any((drive / "scratch").exists() for drive in store.drives)
    for path, raw in saved.items():  # as a killed process leaves them
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    NvmeStore.open(store.root).close()
    assert not any((drive / "scratch").exists() for drive in store.drives)


def test_room_is_reserved(tmp_path: Path) -> None:
    state = 2 * (3 * 20480 + 3 * 12288 + 12288)
    store = make(tmp_path / "s")
    with pytest.raises(UserError, match=r"room for spilled activations needs [\d,]+ bytes of disk"):
        store.reserve_spill(10**18)
    store.close()
    store = NvmeStore.create(tmp_path / "s", SPECS, budget_bytes=state + 100_000 + 30_000)
    store.reserve_spill(0)
    store.reserve_spill(100_000)
    with pytest.raises(BudgetError, match=rf"budgets\.nvme: .*on top of {state + 100_000:,} already allocated"):
        store.reserve_spill(100_000)
    with pytest.raises(BudgetError):
        store.add_scratch([replace(SPECS[0], kind="gradient")])
    store.close()


def test_misuse_is_our_bug(store: NvmeStore) -> None:
    store.spill("k", noise(10)).result()
    with pytest.raises(AssertionError, match="spilled twice"):
        store.spill("k", noise(10))
    with pytest.raises(AssertionError):
        store.unspill("k", noise(11))
    with pytest.raises(KeyError):
        store.unspill("nothing", noise(1))
    with pytest.raises(AssertionError):
        store.spill("../k", noise(1))
