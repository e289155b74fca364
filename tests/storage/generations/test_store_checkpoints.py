"""Checkpoints: kept bit for bit whatever the run does later, made of links where there are any, whole or not at all.
Arrays that are written once: one slot, shared by every generation and checkpoint, wherever the run goes."""

import errno
import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from nvme_state import SPECS, advance, assert_holds, assert_whole, content, make, moved_bytes, read_all
from reader_checks import DAMAGE
from system_calls import failing

from penstock.storage.files.errors import BudgetError, UserError
from penstock.storage.generations.checkpoints import delete_checkpoint, list_checkpoints
from penstock.storage.generations.copying import copy_state
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.manifest import ArraySpec, Manifest

IN_MEMORY = True
GENERATION = 1
"""Of the store."""
GENERATION_BYTES = 3 * 20480 + 3 * 12288 + 12288


def chunks_of(store: NvmeStore, name: str) -> list[Path]:
    return sorted(path for drive in store.drives for path in drive.glob(f"checkpoints/{name}/*/*/[01]/c.*.0"))


def assert_checkpoint(store: NvmeStore, name: str, step: int) -> None:
    assert_whole(store.root / "checkpoints" / name, step)


def test_links_are_shared_and_survive_later_generations(store: NvmeStore) -> None:
    (store.root / "constants.safetensors").write_bytes(b"constants")
    before = store.disk_bytes()
    store.checkpoint("first")
    assert len(chunks_of(store, "first")) == 7
    assert all(path.stat().st_nlink == 2 for path in chunks_of(store, "first"))
    assert store.disk_bytes() - before < 100_000  # folders and manifests
    advance(store, 2)
    store.checkpoint("second")
    store.checkpoint("second-again")
    advance(store, 3, 4, 5)
    assert all(path.stat().st_nlink == 1 for path in chunks_of(store, "first"))
    assert_holds(store, 5)
    for name, step in (("first", 1), ("second", 2), ("second-again", 2)):
        assert_checkpoint(store, name, step)
    assert list(list_checkpoints(store.root)) == ["first", "second", "second-again"]
    first = list_checkpoints(store.root)["first"]
    assert (first.generation, first.meta) == (1, {"step": 1})
    assert (store.root / "checkpoints/first/constants.safetensors").read_bytes() == b"constants"
    store.verify()


@pytest.mark.parametrize("code", [errno.EPERM, errno.EXDEV, errno.EMLINK])
def test_copies_where_links_fail(store: NvmeStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    failing(monkeypatch, ["link"], code)
    written = moved_bytes(store)[1]
    store.checkpoint("copied")
    assert all(path.stat().st_nlink == 1 for path in chunks_of(store, "copied"))
    assert 0 < moved_bytes(store)[1] - written - GENERATION_BYTES < 10_000  # zarr.json files
    advance(store, 2, 3)
    assert_checkpoint(store, "copied", 1)
    store.restore("copied")
    assert_holds(store, 1)
    assert store.verify()


def test_restore_then_go_on(store: NvmeStore) -> None:
    store.checkpoint("one")
    advance(store, 2, 3)
    store.write("embed", "master", 0, content(SPECS[2], 9)).result()  # dropped
    assert store.restore("one") == 4
    assert store.meta == {"step": 1}
    assert_holds(store, 1)
    advance(store, 7)
    assert_holds(store, 7)
    assert_checkpoint(store, "one", 1)
    store.restore("one")
    store.close()
    with closing(NvmeStore.open(store.root)) as again:
        assert (again.generation, again.meta) == (6, {"step": 1})
        assert_holds(again, 1)
        advance(again, 8, 9)
        assert_checkpoint(again, "one", 1)
        assert_holds(again, 9)


def test_arrays_that_rest_are_shared_and_what_is_not_committed_is_in_no_checkpoint(store: NvmeStore) -> None:
    store.add_scratch([replace(SPECS[2], kind="gradient")])
    store.write("embed", "gradient", 0, torch.ones(1000)).result()
    store.write("embed", "master", 0, content(SPECS[2], 2)).result()
    store.checkpoint("one")
    assert len(chunks_of(store, "one")) == 7
    assert not list(store.root.glob("checkpoints/*/scratch"))
    assert torch.equal(read_all(store, SPECS[2]), content(SPECS[2], 2))
    store.commit({"step": 2})
    assert_checkpoint(store, "one", 1)
    store.checkpoint("two")
    shared = [path for path in chunks_of(store, "two") if "layers.0" in str(path)]
    assert len(shared) == 6
    assert all(path.stat().st_nlink == 3 for path in shared)
    delete_checkpoint(store.root, "one")
    with closing(NvmeStore.open(store.root / "checkpoints/two")) as kept:
        assert torch.equal(read_all(kept, SPECS[0]), content(SPECS[0], 1))
        assert torch.equal(read_all(kept, SPECS[2]), content(SPECS[2], 2))


def test_delete(store: NvmeStore) -> None:
    for name in ("one", "two", "damaged"):
        store.checkpoint(name)
    with closing(NvmeStore.open(store.root / "checkpoints/one")), pytest.raises(UserError, match="in use"):
        delete_checkpoint(store.root, "one")
    path = store.root / "checkpoints/damaged/manifest.json"
    path.write_text(path.read_text().replace('"generation": 1', '"generation": 3'))
    for read, folder in ((list_checkpoints, store.root), (NvmeStore.open, path.parent)):
        with pytest.raises(UserError, match=r"checkpoints/damaged/manifest\.json: not a readable manifest"):
            read(folder)
    for name in ("damaged", "one"):
        delete_checkpoint(store.root, name)  # while this process has the store open
        assert not chunks_of(store, name)
    assert_checkpoint(store, "two", 1)
    store.close()
    delete_checkpoint(store.root, "two")  # and while nobody has
    assert list_checkpoints(store.root) == {}
    for name in ("two", "never"):
        with pytest.raises(UserError, match=f"has no checkpoint '{name}'; it has none"):
            delete_checkpoint(store.root, name)
    NvmeStore.open(store.root).close()


def test_taken_and_unknown_names_and_other_arrays_are_refused(store: NvmeStore, tmp_path: Path) -> None:
    for name in ("", ".", "..", ".hidden", "a/b", "a b", "ü", "a\n"):
        for call in (store.checkpoint, store.restore, lambda name: delete_checkpoint(store.root, name)):
            with pytest.raises(UserError, match="checkpoint name"):
                call(name)
    store.checkpoint("v1.0_a-b")
    with pytest.raises(UserError, match=r"there is a checkpoint 'v1\.0_a-b' already"):
        store.checkpoint("v1.0_a-b")
    with pytest.raises(UserError, match=r"has no checkpoint 'x'; it has v1\.0_a-b"):
        store.restore("x")
    with closing(NvmeStore.create(tmp_path / "other", SPECS[:2], budget_bytes=None)) as other:
        advance(other, 1)
        shutil.copytree(store.root / "checkpoints", other.root / "checkpoints")
        with pytest.raises(UserError, match="array embed/master differs"):
            other.restore("v1.0_a-b")
        assert_holds(other, 1)


def test_no_room(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    advance(store, 2)
    need = int(GENERATION_BYTES * 1.05)
    usage = shutil.disk_usage(store.root)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=need - 1))
        with pytest.raises(UserError, match=rf"checkpoint 'one'.* needs {need:,} bytes of disk"):
            store.checkpoint("one")
    assert not (store.root / "checkpoints").exists()
    store.close()
    with closing(NvmeStore.open(store.root, budget_bytes=4 * GENERATION_BYTES - 1)) as again:
        again.checkpoint("one")
        with pytest.raises(BudgetError, match=r"budgets\.nvme: checkpoint 'two'"):
            again.checkpoint("two")
        assert_holds(again, 2)


def test_incomplete_checkpoints_are_swept(store: NvmeStore) -> None:
    store.checkpoint("whole")
    store.checkpoint("torn")
    (store.root / "checkpoints/torn/manifest.json").unlink()
    for base in {store.root, *store.drives}:  # so a crash leaves it
        (base / "checkpoints/torn/.unfinished").touch()
    store.close()
    with closing(NvmeStore.open(store.root)) as again:
        assert not chunks_of(again, "torn")
        assert not (again.root / "checkpoints/torn").exists()
        assert_checkpoint(again, "whole", 1)
        again.checkpoint("torn")
        assert_checkpoint(again, "torn", 1)


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damage_of_a_checkpoint(store: NvmeStore, damage: str) -> None:
    store.checkpoint("one")
    advance(store, 2, 3)
    path = chunks_of(store, "one")[2]
    if damage == "missing":
        path.unlink()
    else:
        DAMAGE["one block short" if damage == "truncated" else "first byte"][0](path)
    kept = NvmeStore.open(store.root / "checkpoints/one")
    with closing(kept), pytest.raises(UserError, match=rf"{path} \(generation 1\)"):
        kept.verify()
    if damage == "flipped":
        assert store.restore("one") == 4  # found by the first read
        with pytest.raises(UserError, match=r"\(generation 4\): checksum mismatch"):
            store.verify()
    else:
        with pytest.raises(UserError, match=rf"{path} \(checkpoint 'one', generation 1\): the file"):
            store.restore("one")
        assert_holds(store, 3)


def test_a_checkpoint_stays_on_a_drive_that_the_run_left(tmp_path: Path) -> None:
    a, b, root = tmp_path / "a", tmp_path / "b", tmp_path / "state"
    with closing(make(root, 1, drives=[a])) as store:
        store.checkpoint("one")
    with closing(NvmeStore.open(root, drives=[b])) as store:
        advance(store, 2, 3)
        assert not list(a.glob("*/*/[01]/c.*.0"))
        assert_checkpoint(store, "one", 1)
        store.restore("one")  # by copies: drive a is no drive of this run any more
        assert_holds(store, 1)
        advance(store, 4)
    a.rename(tmp_path / "gone")
    with closing(NvmeStore.open(root)) as store:
        assert_holds(store, 4)
        with pytest.raises(UserError, match=rf"{a}/checkpoints/one: this drive holds part of checkpoint 'one'"):
            store.restore("one")
        with pytest.raises(UserError, match="is it mounted"):
            NvmeStore.open(root / "checkpoints/one")
    for place in (tmp_path / "gone", tmp_path / "gone/checkpoints/one"):
        assert_whole(root / "checkpoints/one", 1, drives=[place])
    delete_checkpoint(root, "one")
    assert_whole(root, 4, drives=[tmp_path / "gone"])  # the drive is back: swept
    assert not list((tmp_path / "gone/checkpoints").glob("*"))


TRAINED = ArraySpec("layers.0", "master", 5000, "float32", 2048)
FROZEN = ArraySpec("layers.0.frozen", "weights", 9000, "bfloat16", 4096, fixed=True)


def fixed_values(spec: ArraySpec, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0 if spec.fixed else step)
    return torch.rand(spec.numel, generator=generator).to(getattr(torch, spec.dtype))


def write_fixed(store: NvmeStore, spec: ArraySpec, step: int) -> None:
    for part, (start, stop) in enumerate(spec.parts()):
        store.write(spec.buffer, spec.kind, part, fixed_values(spec, step)[start:stop]).result()


def advance_trained(store: NvmeStore, *steps: int) -> None:
    for step in steps:
        write_fixed(store, TRAINED, step)
        store.commit({"step": step})


def assert_both(store: NvmeStore, step: int) -> None:
    assert store.meta["step"] == step
    for spec in (TRAINED, FROZEN):
        assert torch.equal(read_all(store, spec), fixed_values(spec, step)), (spec, step)


def fixed_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("layers.0.frozen/weights/*/c.*.0"))


def make_fixed(root: Path, drives: list[Path] | None = None, budget_bytes: int | None = None) -> NvmeStore:
    store = NvmeStore.create(root, [TRAINED, FROZEN], budget_bytes=budget_bytes, drives=drives)
    write_fixed(store, FROZEN, 0)
    advance_trained(store, 1)
    return store


def test_generations_and_checkpoints_share_the_one_slot(tmp_path: Path) -> None:
    store = make_fixed(tmp_path / "state")
    files = fixed_files(store.root)
    inodes = [os.stat(file).st_ino for file in files]
    assert len(files) == 3
    store.checkpoint("one")
    advance_trained(store, 2, 3)
    store.checkpoint("three")
    assert fixed_files(store.root) == files
    assert [os.stat(file).st_ino for file in files] == inodes
    assert [os.stat(file).st_nlink for file in files] == [3, 3, 3]
    assert not list(store.root.glob("layers.0.frozen/weights/1/*"))
    store.restore("one")
    assert_both(store, 1)
    assert store.verify() == sum(file.stat().st_size for file in files) + 3 * 12288
    with closing(NvmeStore.open(store.root / "checkpoints" / "three", read_only=True)) as kept:
        assert_both(kept, 3)
    assert list(Manifest.read(store.root).arrays) == [TRAINED, FROZEN]
    assert "false" not in (store.root / "manifest.json").read_text().partition('"arrays"')[2]
    folder = store.root / "checkpoints" / "one"
    kept_one = Manifest.read(folder)
    stored = kept_one.arrays[FROZEN]
    other = type(stored)(stored.slot, stored.drives, (*stored.crcs[:-1], 7))
    arrays = {**kept_one.arrays, FROZEN: other}
    changed = Manifest(kept_one.store, kept_one.generation, arrays, kept_one.drives, kept_one.meta, "one")
    (folder / "manifest.json").write_bytes(changed.encode())
    with pytest.raises(UserError, match=r"layers\.0\.frozen/weights, which is written only once"):
        store.restore("one")
    assert_both(store, 1)
    store.close()


def test_it_counts_once_in_the_budget_and_not_with_checkpoints(tmp_path: Path) -> None:
    fixed, generation = 3 * 12288, 3 * 12288
    need = int((fixed + 2 * generation) * 1.05)
    with pytest.raises(UserError, match=r"budgets\.nvme"):
        make_fixed(tmp_path / "less", budget_bytes=need - 1)
    store = make_fixed(tmp_path / "enough", budget_bytes=need + generation)
    store.checkpoint("one")
    with pytest.raises(UserError, match=r"budgets\.nvme"):
        store.checkpoint("another")
    store.close()


def test_it_moves_with_the_run_to_other_drives(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    root = tmp_path / "state"
    make_fixed(root, drives=[a, b]).close()
    with closing(NvmeStore.open(root, drives=[b, c])) as store:
        assert fixed_files(a)  # until a commit says that it is elsewhere
    with closing(NvmeStore.open(root, drives=[b, c])) as store:
        advance_trained(store, 2, 3)
        assert_both(store, 3)
        assert len(fixed_files(b) + fixed_files(c)) == 3
    assert not fixed_files(a)
    with closing(NvmeStore.open(root)) as store:
        assert_both(store, 3)
        before = moved_bytes(store)[1]
        advance_trained(store, 4)
        assert moved_bytes(store)[1] - before == 3 * 12288
        store.verify()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a second file system")
def test_a_copy_of_the_state_on_another_device_has_it_once(tmp_path_factory: Any, workspace: Path) -> None:
    disk, drive = tmp_path_factory.mktemp("disk"), workspace / "drive"
    if workspace.stat().st_dev == disk.stat().st_dev:
        pytest.skip("both on one file system")
    with closing(make_fixed(disk / "state", drives=[drive])) as store:
        store.checkpoint("one")
        advance_trained(store, 2)
        store.checkpoint("two")
    copied, mine = shutil.copytree(disk / "state", disk / "copy/state"), disk / "drive"
    copy_state(copied, [mine])
    assert {os.stat(file).st_nlink for file in fixed_files(mine)} == {3}
    with closing(NvmeStore.open(copied, drives=[mine])) as store:
        assert_both(store, 2)
        store.restore("one")
        assert_both(store, 1)
