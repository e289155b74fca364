"""Generations of a store: what was committed comes back, to any reader, within the budget. Spilled activations: any
size comes back bit for bit, once, and leaves nothing."""

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import nvme_state
import pytest
import tensorstore as ts
import torch
from msgspec.structs import replace
from nvme_state import SPECS, advance, assert_holds, assert_whole, content, make, moved_bytes, read_all, write_all
from system_calls import refuse_direct

from penstock.storage.files.errors import BudgetError, UserError
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier import chunk
from penstock.storage.tier.arena import empty_aligned
from penstock.storage.tier.drives import Traffic
from penstock.storage.tier.manifest import ArraySpec
from penstock.storage.tier.readers import DirectReader, Readers

IN_MEMORY = True
MASTER, WEIGHTS, EMBED = SPECS


@pytest.fixture
def store(tmp_path: Path) -> Iterator[NvmeStore]:
    store = NvmeStore.create(tmp_path / "state", SPECS, budget_bytes=None)
    yield store
    store.close()


def reopen(store: NvmeStore) -> NvmeStore:
    store.close()
    return NvmeStore.open(store.root)


def test_generations_survive_reopening(store: NvmeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (store.generation, store.meta) == (0, {})
    for root in (tmp_path / "nowhere", store.root):
        with pytest.raises(UserError, match="no generation was committed here"):
            NvmeStore.open(root)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: not a writable folder"):
        NvmeStore.create(tmp_path / "file", SPECS, budget_bytes=None)
    write_all(store, 1)
    files = 3 * 20480 + 3 * 12288 + 12288  # with padding and checksums
    assert moved_bytes(store) == (0, files)
    assert_holds(store, 1)
    assert moved_bytes(store) == (files, files)
    assert store.traffic() == {store.root: Traffic(files, files)}
    assert files < store.disk_bytes() < 3 * files
    odd = {10: 1, 9: [float("inf"), 1e-320, 0.1, -0.0], "ü": ("a", None), "n": 2**70}
    as_json_has_it = {"10": 1, "9": [float("inf"), 1e-320, 0.1, -0.0], "ü": ["a", None], "n": 2**70}
    for step in (1, 2, 3):
        write_all(store, step)
        assert_holds(store, step)
        assert store.commit({"step": step, **odd} if step == 1 else {"step": step}) == step  # type: ignore[dict-item]
        assert_holds(store, step)
        leftover = store.root / ".manifest.json.12345.tmp"
        leftover.write_text('{"gen')
        store = reopen(store)
        assert not leftover.exists()
        assert (store.generation, store.meta) == (step, {"step": step} | (as_json_has_it if step == 1 else {}))
        assert set(store.arrays()) == set(SPECS)
        assert_holds(store, step)
    store.verify()
    monkeypatch.setattr("nvme_state.content", lambda spec, step: content(spec, step).zero_())
    advance(store, 4)
    store = reopen(store)
    assert not read_all(store, MASTER).any(), "zeros are stored too"
    store.verify()
    store.close()


def test_other_zarr_readers_see_the_arrays_and_what_they_write_is_read(store: NvmeStore) -> None:
    advance(store, 1)

    def opened(spec: ArraySpec) -> Any:
        path = f"{store.root}/{spec.buffer}/{spec.kind}/0/"
        return ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}).result()

    for spec in SPECS:
        array = opened(spec)
        assert array.dtype.name == spec.dtype
        assert array.shape[0] == len(spec.parts())
        flat = torch.from_numpy(array.read().result().astype("float32").reshape(-1))
        assert torch.equal(flat[: spec.numel], content(spec, 1).float())
        assert not flat[spec.numel :].any()
        codecs = json.loads((store.root / spec.buffer / spec.kind / "0/zarr.json").read_text())["codecs"]
        assert [codec["name"] for codec in codecs] == ["bytes", "crc32c"]
    opened(MASTER).write(torch.arange(3 * 4096, dtype=torch.float32).reshape(3, 4096).numpy()).result()
    out = torch.empty(4096)
    path, form = store.root / "layers.0/master/0/c.1.0", chunk.ChunkFormat(4 * 4096)
    chunk.read_chunk(path, out.view(torch.uint8).numpy(), form, direct=False)
    assert torch.equal(out, torch.arange(4096, 8192, dtype=torch.float32))
    with pytest.raises(UserError, match=r"c\.1\.0 \(generation 1\): stale"):  # but nobody committed it
        store.read("layers.0", "master", 1, out).result()


def test_scratch_is_wiped_and_in_no_generation(store: NvmeStore) -> None:
    scratch = replace(EMBED, kind="gradient")
    store.add_scratch([scratch])
    advance(store, 1)
    store.write("embed", "gradient", 0, torch.ones(1000)).result()
    store.commit({"step": 2})
    out = torch.zeros(1000)
    store.read("embed", "gradient", 0, out).result()
    assert out.all()
    assert scratch not in store.arrays()
    store = reopen(store)
    assert not (store.root / "scratch").exists()
    store.add_scratch([scratch])
    with pytest.raises(AssertionError, match="before it was ever written"):
        store.read("embed", "gradient", 0, out)
    store.close()


def test_reads_go_through_the_given_reader(tmp_path: Path) -> None:
    """It is told what the manifest says of every chunk, and serves only memory of the host where there is no other."""

    class Noting(DirectReader):
        def read(self, path: Path, out: torch.Tensor, form: chunk.ChunkFormat, expected: int | None) -> None:
            told.append((path.name, out.numel(), expected))
            super().read(path, out, form, expected)

    told: list[tuple[str, int, int | None]] = []
    store = NvmeStore.create(tmp_path / "s", SPECS, budget_bytes=None, readers=Readers(Noting(), None))
    advance(store, 1)
    read_all(store, MASTER)
    crcs = store._arrays["layers.0", "master"].crcs
    assert told == [("c.0.0", 16384, crcs[0]), ("c.1.0", 16384, crcs[1]), ("c.2.0", 8192, crcs[2])]
    with pytest.raises(AssertionError, match="no reader for memory of meta"):
        store.read("embed", "master", 0, torch.empty(1000, device="meta"))
    store.close()


def test_without_direct_io(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that refuses direct I/O: everything passes through the page cache, and a warning says so."""
    refuse_direct(monkeypatch)
    store = NvmeStore.create(tmp_path_factory.mktemp("disk") / "s", SPECS, budget_bytes=None)
    assert any("direct I/O" in warning for warning in store.warnings)
    aligned = empty_aligned(16384, torch.uint8)
    advance(store, 1)
    store.read("layers.0", "master", 0, aligned.view(torch.float32)).result()
    assert torch.equal(aligned.view(torch.float32), content(MASTER, 1)[:4096])
    store.spilled.write("k", aligned).result()
    store.spilled.read("k", aligned.zero_()).result()
    assert torch.equal(aligned.view(torch.float32), content(MASTER, 1)[:4096])
    store.verify()
    store.checkpoint("one")
    store.close()
    assert_whole(store.root, 1)


def test_reads_go_on_during_commits(store: NvmeStore) -> None:
    """One thread reads arrays that rest while another writes and commits a third one."""
    advance(store, 1)
    stop = threading.Event()

    def read_on() -> int:
        count = 0
        while not stop.is_set():
            assert torch.equal(read_all(store, MASTER), content(MASTER, 1))
            assert torch.equal(read_all(store, WEIGHTS), content(WEIGHTS, 1))
            assert store.disk_bytes() > 0
            count += 1
        return count

    with ThreadPoolExecutor(2) as threads:
        readers = [threads.submit(read_on) for _ in range(2)]
        for step in range(2, 40):
            store.write("embed", "master", 0, content(EMBED, step)).result()
            assert store.commit({"step": step}) == step
        stop.set()
        assert all(reader.result(30) > 0 for reader in readers)
    assert torch.equal(read_all(reopen(store), EMBED), content(EMBED, 39))


def test_budget_is_checked_before_the_first_byte(tmp_path: Path) -> None:
    # Files of 20,480 (3), 12,288 (3) and 12,288 (1) bytes, twice, plus 5 %.
    state = 2 * (3 * 20480 + 3 * 12288 + 12288)
    need = int(state * 1.05)
    with pytest.raises(BudgetError, match=rf"budgets\.nvme: .*needs {need:,} bytes.*budget is {need - 1:,}"):
        NvmeStore.create(tmp_path / "s", SPECS, budget_bytes=need - 1)
    assert list((tmp_path / "s").iterdir()) == []
    for budget_bytes, spill_bytes in ((need, 0), (state + 130_000, 100_000)):
        with closing(NvmeStore.create(tmp_path / "s", SPECS, budget_bytes=budget_bytes)) as store:
            store.reserve_spill(spill_bytes)
            if spill_bytes:
                message = rf"budgets\.nvme: .*on top of {state + spill_bytes:,} already allocated"
                with pytest.raises(BudgetError, match=message):
                    store.reserve_spill(spill_bytes)
            with pytest.raises(BudgetError, match="scratch space"):
                store.add_scratch([replace(MASTER if spill_bytes else EMBED, kind="gradient")])
    no_room = pytest.raises(UserError, match=r"room for spilled activations needs [\d,]+ bytes of disk")
    with closing(make(tmp_path / "s")) as store, no_room:
        store.reserve_spill(10**18)


def test_wrong_tensors_are_our_bug(store: NvmeStore) -> None:
    """And commits of arrays that are not whole, of which the first needs every one; and parts in use."""
    store.write("embed", "master", 0, content(EMBED, 1)).result()
    with pytest.raises(AssertionError, match=r"layers\.0/\w+ lacks parts"):
        store.commit({})
    advance(store, 1)
    store.write("layers.0", "master", 1, content(MASTER, 2)[4096:8192]).result()
    with pytest.raises(AssertionError, match=r"layers\.0/master lacks parts \[0, 2\]"):
        store.commit({})
    for bad in (torch.zeros(4096, dtype=torch.bfloat16), torch.zeros(4095), torch.zeros(8192)[::2]):
        with pytest.raises(AssertionError):
            store.write("layers.0", "master", 0, bad)
    array = store._arrays["embed", "master"]
    store._writing[array.next(0)[1]] = array
    array.written[0] = 0
    with pytest.raises(AssertionError, match="read while it is written"):
        store.read("embed", "master", 0, torch.empty(1000))
    with pytest.raises(AssertionError, match="written twice at once"):
        store.write("embed", "master", 0, torch.empty(1000))
    store._writing.clear()
    store.spilled.write("k", noise(10)).result()
    with pytest.raises(AssertionError, match="spilled twice"):
        store.spilled.write("k", noise(10))
    with pytest.raises(AssertionError):
        store.spilled.read("k", noise(11))
    with pytest.raises(KeyError):
        store.spilled.read("nothing", noise(1))
    with pytest.raises(AssertionError):
        store.spilled.write("../k", noise(1))


UNCHECKED = """
import sys
from pathlib import Path
from nvme_state import SPECS, advance, content, make
from penstock.storage.generations.store import NvmeStore

def refused(act, *given):
    try:
        act(*given)
    except AssertionError as error:
        return print(error)
    print("nothing was said")

assert False, "Python runs without -O"
root = Path(sys.argv[1])
fresh = make(root / "fresh")
fresh.write("embed", "master", 0, content(SPECS[2], 1)).result()
refused(fresh.commit, {})
store = make(root / "s", 1)
store.write("layers.0", "master", 1, content(SPECS[0], 2)[4096:8192]).result()
refused(store.commit, {"step": 2})
refused(store.write, "embed", "master", 0, content(SPECS[2], 2)[:-1])
refused(store.write, "embed", "master", 0, content(SPECS[2], 2).half())
print(store.generation)
"""


def test_what_a_generation_rests_on_is_checked_without_asserts(tmp_path: Path) -> None:
    """Python's -O leaves them out."""
    command = [sys.executable, "-O", "-c", UNCHECKED, str(tmp_path)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(nvme_state.__file__).parent)
    lines = found.stdout.splitlines()
    assert [" lacks parts [0, 1, 2]" in lines[0], " lacks parts [0, 2]" in lines[1]] == [True, True]
    assert lines[2:] == ["('embed/master', 0, (999,), 1000)", "('embed/master', torch.float16, 'float32')", "1"]
    assert not (tmp_path / "fresh/manifest.json").exists()
    assert_whole(tmp_path / "s", 1, generation=1)


UGLY = [0, 1, 511, 4095, 4096, 4097, 8191, 12288, 100_001, (4 << 20) + 3]


@pytest.fixture
def striped(tmp_path_factory: pytest.TempPathFactory, workspace: Path) -> Iterator[NvmeStore]:
    """On a disk, and in memory where there is some."""
    disk = tmp_path_factory.mktemp("disk")
    store = make(disk / "root", drives=[disk / "a", workspace / "b"])
    shared = disk.stat().st_dev == workspace.stat().st_dev
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
def test_round_trip(striped: NvmeStore, direct: bool) -> None:
    for drive in striped._drives:
        drive.direct = drive.direct and direct
    moved = 0
    for size, write_aligned, read_aligned in itertools.product(UGLY, (False, True), (False, True)):
        data = noise(size, size, aligned=write_aligned)
        striped.spilled.write("x.layers.0.0", data).result()
        (path,) = spilled(striped)
        assert path.name == "x.layers.0.0"
        raw = path.read_bytes()
        assert len(raw) == chunk.ChunkFormat(size).file_bytes
        assert raw[:size] == data.numpy().tobytes()
        assert not raw[size:-4].strip(b"\0")
        out = noise(size, aligned=read_aligned).zero_()
        striped.spilled.read("x.layers.0.0", out).result()
        assert torch.equal(out, data)
        assert not spilled(striped)
        moved += len(raw)
        assert moved_bytes(striped) == (moved, moved)


def test_keys_go_to_the_drives_in_turn_and_come_back_in_any_order(striped: NvmeStore, monkeypatch: Any) -> None:
    """And nothing is synced, and neighbours are left alone: a slot ends in a page of its own, but a slice does not."""
    monkeypatch.setattr(os, "fsync", lambda fd: pytest.fail("synced"))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda i: striped.spilled.write(f"k{i}", noise(8192, i)).result(), range(20)))
    counts = [len(list(drive.glob("scratch/spill/*"))) for drive in striped.drives]
    assert counts == [10, 10]
    assert len({traffic.bytes_written for traffic in striped.traffic().values()}) == 1
    for i in reversed(range(20)):
        out = torch.empty(8192, dtype=torch.uint8)
        striped.spilled.read(f"k{i}", out).result()
        assert torch.equal(out, noise(8192, i))
    assert not spilled(striped)
    striped.spilled.write("k0", noise(5000)).result()  # a key is free again once it was read
    slot = empty_aligned(1 << 14, torch.uint8).fill_(7)
    striped.spilled.read("k0", slot[:5000]).result()
    assert torch.equal(slot[:5000], noise(5000))
    assert (slot[5000:] == 7).all()


@pytest.mark.parametrize("damage", ["flip", "flip tail", "truncate", "empty", "remove"])
def test_damage_is_found(striped: NvmeStore, damage: str) -> None:
    for aligned in (False, True):
        striped.spilled.write(f"kv.{aligned}", noise(9000)).result()
        path = next(path for path in spilled(striped) if path.name == f"kv.{aligned}")
        raw = bytearray(path.read_bytes())
        if damage.startswith("flip"):
            raw[8999 if damage == "flip tail" else 17] ^= 8
            path.write_bytes(raw)
        elif damage == "remove":
            path.unlink()
        else:
            os.truncate(path, 0 if damage == "empty" else 4096)
        message = f"{path}: reading 9,000 bytes of activations.*{'checksum' if 'flip' in damage else 'the file'}"
        with pytest.raises(UserError, match=message):
            striped.spilled.read(f"kv.{aligned}", noise(9000, aligned=aligned)).result()


def test_swept_on_open_and_on_close(striped: NvmeStore) -> None:
    advance(striped, 1)
    for name in "abc":
        striped.spilled.write(name, noise(100)).result()
    saved = {path: path.read_bytes() for path in spilled(striped)}
    assert len(saved) == 3
    striped.close()
    assert not any((drive / "scratch").exists() for drive in striped.drives)
    for path, raw in saved.items():  # as a killed process leaves them
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    NvmeStore.open(striped.root).close()
    assert not any((drive / "scratch").exists() for drive in striped.drives)
