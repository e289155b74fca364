import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import tensorstore as ts
import torch
from nvme_state import SPECS, advance, assert_holds, assert_whole, content, read_all, write_all
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
