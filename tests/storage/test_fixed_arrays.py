"""Arrays that are written once: one slot, shared by every generation and checkpoint, wherever the run goes."""

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from nvme_state import read_all

from penstock.storage.copying import copy_state
from penstock.storage.errors import UserError
from penstock.storage.manifest import ArraySpec, Manifest
from penstock.storage.nvme import NvmeStore

TRAINED = ArraySpec("layers.0", "master", 5000, "float32", 2048)
FROZEN = ArraySpec("layers.0.frozen", "weights", 9000, "bfloat16", 4096, fixed=True)


def values(spec: ArraySpec, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0 if spec.fixed else step)
    return torch.rand(spec.numel, generator=generator).to(getattr(torch, spec.dtype))


def write(store: NvmeStore, spec: ArraySpec, step: int) -> None:
    for part, (start, stop) in enumerate(spec.parts()):
        store.write(spec.buffer, spec.kind, part, values(spec, step)[start:stop]).result()


def advance(store: NvmeStore, *steps: int) -> None:
    for step in steps:
        write(store, TRAINED, step)
        store.commit({"step": step})


def assert_holds(store: NvmeStore, step: int) -> None:
    assert store.meta["step"] == step
    for spec in (TRAINED, FROZEN):
        assert torch.equal(read_all(store, spec), values(spec, step)), (spec, step)


def fixed_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("layers.0.frozen/weights/*/c.*.0"))


def make(root: Path, drives: list[Path] | None = None, budget_bytes: int | None = None) -> NvmeStore:
    store = NvmeStore.create(root, [TRAINED, FROZEN], budget_bytes=budget_bytes, drives=drives)
    write(store, FROZEN, 0)
    advance(store, 1)
    return store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[NvmeStore]:
    store = make(tmp_path / "state")
    yield store
    store.close()


def test_generations_and_checkpoints_share_the_one_slot(store: NvmeStore) -> None:
    files = fixed_files(store.root)
    inodes = [os.stat(file).st_ino for file in files]
    assert len(files) == 3
    store.checkpoint("one")
    advance(store, 2, 3)
    store.checkpoint("three")
    assert fixed_files(store.root) == files
    assert [os.stat(file).st_ino for file in files] == inodes
    assert [os.stat(file).st_nlink for file in files] == [3, 3, 3]
    assert not list(store.root.glob("layers.0.frozen/weights/1/*"))
    store.restore("one")
    assert_holds(store, 1)
    assert store.verify() == sum(file.stat().st_size for file in files) + 3 * 12288
    with closing(NvmeStore.open(store.root / "checkpoints" / "three", read_only=True)) as kept:
        assert_holds(kept, 3)
    assert list(Manifest.read(store.root).arrays) == [TRAINED, FROZEN]
    assert "false" not in (store.root / "manifest.json").read_text().partition('"arrays"')[2]


def test_it_counts_once_in_the_budget_and_not_with_checkpoints(tmp_path: Path) -> None:
    fixed, generation = 3 * 12288, 3 * 12288
    need = int((fixed + 2 * generation) * 1.05)
    with pytest.raises(UserError, match=r"budgets\.nvme"):
        make(tmp_path / "less", budget_bytes=need - 1)
    store = make(tmp_path / "enough", budget_bytes=need + generation)
    store.checkpoint("one")
    with pytest.raises(UserError, match=r"budgets\.nvme"):
        store.checkpoint("another")
    store.close()


def test_it_moves_with_the_run_to_other_drives(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    root = tmp_path / "state"
    make(root, drives=[a, b]).close()
    with closing(NvmeStore.open(root, drives=[b, c])) as store:
        assert fixed_files(a)  # until a commit says that it is elsewhere
    with closing(NvmeStore.open(root, drives=[b, c])) as store:
        advance(store, 2, 3)
        assert_holds(store, 3)
        assert len(fixed_files(b) + fixed_files(c)) == 3
    assert not fixed_files(a)
    with closing(NvmeStore.open(root)) as store:
        assert_holds(store, 3)
        before = store.bytes_written
        advance(store, 4)
        assert store.bytes_written - before == 3 * 12288
        store.verify()


def test_a_checkpoint_with_another_content_is_refused(store: NvmeStore, tmp_path: Path) -> None:
    store.checkpoint("one")
    folder = store.root / "checkpoints" / "one"
    kept = Manifest.read(folder)
    stored = kept.arrays[FROZEN]
    other = type(stored)(stored.slot, stored.drives, (*stored.crcs[:-1], 7))
    changed = Manifest(kept.store, kept.generation, {**kept.arrays, FROZEN: other}, kept.drives, kept.meta, "one")
    (folder / "manifest.json").write_bytes(changed.encode())
    with pytest.raises(UserError, match=r"layers\.0\.frozen/weights, which is written only once"):
        store.restore("one")
    assert_holds(store, 1)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a second file system")
def test_a_copy_of_the_state_on_another_device_has_it_once(tmp_path: Path, workspace: Path) -> None:
    if workspace.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("both on one file system")
    drive, root = workspace / "drive", tmp_path / "state"
    store = make(root, drives=[drive])
    store.checkpoint("one")
    advance(store, 2)
    store.checkpoint("two")
    store.close()
    copied, mine = shutil.copytree(root, tmp_path / "copy/state"), tmp_path / "drive"
    copy_state(copied, [mine])
    assert {os.stat(file).st_nlink for file in fixed_files(mine)} == {3}
    with closing(NvmeStore.open(copied, drives=[mine])) as store:
        assert_holds(store, 2)
        store.restore("one")
        assert_holds(store, 1)
