"""DOC"""

import itertools
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import tensorstore as ts
import torch
from nvme_state import SPECS, advance, assert_holds, assert_whole, content, make, read_all, write_all
from system_calls import refuse_direct

from penstock.storage import chunk
from penstock.storage.arena import empty_aligned
from penstock.storage.drives import Traffic
from penstock.storage.errors import BudgetError, UserError
from penstock.storage.nvme import NvmeStore
from penstock.storage.readers import DirectReader, Readers

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


def test_generations_survive_reopening(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (store.generation, store.meta) == (0, {})
    write_all(store, 1)
    files = 3 * 20480 + 3 * 12288 + 12288  # with padding and checksums
    assert (store.bytes_written, store.bytes_read) == (files, 0)
    assert_holds(store, 1)
    assert (store.bytes_written, store.bytes_read) == (files, files)
    assert store.traffic() == {store.root: Traffic(files, files)}
    assert files < store.disk_bytes() < 3 * files
    for step in (1, 2, 3):
        write_all(store, step)
        assert_holds(store, step)
        assert store.commit({"step": step, "rng": [1, 2]}) == step
        assert_holds(store, step)
        leftover = store.root / ".manifest.json.12345.tmp"
        leftover.write_text('{"gen')
        store = reopen(store)
        assert not leftover.exists()
        assert (store.generation, store.meta) == (step, {"step": step, "rng": [1, 2]})
        assert set(store.arrays()) == set(SPECS)
        assert_holds(store, step)
    store.verify()
    monkeypatch.setattr("nvme_state.content", lambda spec, step: content(spec, step).zero_())
    advance(store, 4)
    store = reopen(store)
    assert not read_all(store, MASTER).any(), "zeros are stored too"
    store.verify()
    store.close()


def test_other_zarr_readers_see_the_arrays(store: NvmeStore) -> None:
    advance(store, 1)
    for spec in SPECS:
        path = f"{store.root}/{spec.buffer}/{spec.kind}/0/"
        array = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}).result()
        assert array.dtype.name == spec.dtype
        assert array.shape[0] == len(spec.parts())
        flat = torch.from_numpy(array.read().result().astype("float32").reshape(-1))
        assert torch.equal(flat[: spec.numel], content(spec, 1).float())
        assert not flat[spec.numel :].any()
        codecs = json.loads((Path(path) / "zarr.json").read_text())["codecs"]
        assert [codec["name"] for codec in codecs] == ["bytes", "crc32c"]


def test_reads_what_tensorstore_writes(store: NvmeStore) -> None:
    advance(store, 1)
    path = f"{store.root}/layers.0/master/0/"
    array = ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": path}}).result()
    array.write(torch.arange(3 * 4096, dtype=torch.float32).reshape(3, 4096).numpy()).result()
    out = torch.empty(4096)
    form = chunk.ChunkFormat(4 * 4096)
    chunk.read_chunk(Path(path) / "c.1.0", out.view(torch.uint8).numpy(), form, direct=False)
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
    store.spill("k", aligned).result()
    store.unspill("k", aligned.zero_()).result()
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


def test_where_no_store_is_or_can_be(tmp_path: Path, store: NvmeStore) -> None:
    for root in (tmp_path / "nowhere", store.root):
        with pytest.raises(UserError, match="no generation was committed here"):
            NvmeStore.open(root)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: not a writable folder"):
        NvmeStore.create(tmp_path / "file", SPECS, budget_bytes=None)


def test_budget_is_checked_before_the_first_byte(tmp_path: Path) -> None:
    # Files of 20,480 (3), 12,288 (3) and 12,288 (1) bytes, twice, plus 5 %.
    need = int(2 * (3 * 20480 + 3 * 12288 + 12288) * 1.05)
    with pytest.raises(BudgetError, match=rf"budgets\.nvme: .*needs {need:,} bytes.*budget is {need - 1:,}"):
        NvmeStore.create(tmp_path / "s", SPECS, budget_bytes=need - 1)
    assert list((tmp_path / "s").iterdir()) == []
    store = NvmeStore.create(tmp_path / "s", SPECS, budget_bytes=need)
    with pytest.raises(BudgetError, match="scratch space"):
        store.add_scratch([replace(EMBED, kind="gradient")])
    store.close()


def test_wrong_tensors_are_our_bug(store: NvmeStore) -> None:
    """And commits of arrays that are not whole, of which the first needs every one."""
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


def test_reading_a_part_while_it_is_written_is_our_bug(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    array = store._arrays["embed", "master"]
    store._writing[array.next(0)[1]] = array
    array.written[0] = 0
    with pytest.raises(AssertionError, match="read while it is written"):
        store.read("embed", "master", 0, torch.empty(1000))
    with pytest.raises(AssertionError, match="written twice at once"):
        store.write("embed", "master", 0, torch.empty(1000))
    store._writing.clear()


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
