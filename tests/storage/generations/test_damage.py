"""Damaged files: found by reads and by the scrub, told by name and generation, and nothing else is lost with them.

Links, pipes and folders of others in a state from somebody else: nothing follows them.
"""

import itertools
import json
import os
import random
import shutil
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
from nvme_state import advance, assert_holds, assert_sound, committed_files, content, make
from obstacles import plant

from penstock.storage.files.errors import UserError
from penstock.storage.generations.checkpoints import delete_checkpoint
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.manifest import ArraySpec

IN_MEMORY = True
STALE = "stale: intact, but from another generation"
BAD_FIELDS: list[dict[str, object]] = [{"version": 99}, {"generation": "x"}, {"arrays": [{}]}, {"meta": 3}]


def test_a_flipped_bit_anywhere(store: NvmeStore) -> None:
    """Every chunk file, every kind of place. A read may pass over a flipped bit of the padding: it is no state."""
    rng = random.Random(0)
    for array in store._committable():
        for part, (start, stop) in enumerate(array.parts):
            path = array.committed(part)[1]
            raw = path.read_bytes()
            payload = (stop - start) * array.spec.item_bytes
            padding = rng.randrange(payload, len(raw) - 4)
            for position in (0, rng.randrange(payload), payload - 1, padding, len(raw) - rng.randint(1, 4)):
                damaged = bytearray(raw)
                damaged[position] ^= 1 << rng.randrange(8)
                path.write_bytes(damaged)
                message = rf"{path} \(generation 3\): checksum mismatch"
                with pytest.raises(UserError, match=message):
                    store.verify()
                out = torch.empty(stop - start, dtype=getattr(torch, array.spec.dtype))
                future = store.read(array.spec.buffer, array.spec.kind, part, out)
                if position == padding:
                    with suppress(UserError):
                        future.result()
                        assert torch.equal(out, content(array.spec, 3)[start:stop])
                else:
                    with pytest.raises(UserError, match=message):
                        future.result()
            path.write_bytes(raw)
    store.close()
    assert_sound(store.root, 3)


def test_a_damaged_file(store: NvmeStore) -> None:
    for path, change in itertools.product(committed_files(store), (-4096, 4096, -(10**9), "missing", "folder")):
        raw = path.read_bytes()
        if isinstance(change, int):
            os.truncate(path, max(0, len(raw) + change))
        else:
            path.unlink()
        if change == "folder":
            path.mkdir()
        for found in (store.verify, lambda: assert_holds(store, 3)):
            with pytest.raises(UserError, match=rf"^{path}.*generation 3"):
                found()
        if change == "folder":
            path.rmdir()
        path.write_bytes(raw)
    store.close()
    assert_sound(store.root, 3)


def test_a_stale_file(store: NvmeStore) -> None:
    """Whole and self-consistent, but of generation 3 when 5 is the committed one in the same slot. Then a drive from a
    snapshot of two generations ago: its identity is right, its state is not."""
    drive = store.drives[-1]
    snapshot = shutil.copytree(drive, drive.with_name("snapshot"))
    old = {path: path.read_bytes() for path in committed_files(store)}
    advance(store, 4, 5)
    assert committed_files(store) == list(old)
    for path, raw in old.items():
        good = path.read_bytes()
        path.write_bytes(raw)
        for found in (store.verify, lambda: assert_holds(store, 5)):
            with pytest.raises(UserError, match=rf"{path} \(generation 5\): {STALE}"):
                found()
        path.write_bytes(good)
    store.close()
    if drive != store.root:
        now = drive.rename(drive.with_name("now"))
        snapshot.rename(drive)
        with closing(NvmeStore.open(store.root)) as opened:
            with pytest.raises(UserError, match=rf"3 chunk files of generation 5 are damaged:\n{drive}/.*stale"):
                opened.verify()
            with pytest.raises(UserError, match=rf"{drive}/.* \(generation 5\): stale"):
                assert_holds(opened, 5)
        shutil.rmtree(drive)
        now.rename(drive)
    assert_sound(store.root, 5)


def test_damaged_files_are_listed_and_a_long_list_is_cut(tmp_path: Path) -> None:
    spec = ArraySpec("embed", "master", 2048 * 30, "float32", 2048)
    drives = [tmp_path / "a", tmp_path / "b"]
    with closing(NvmeStore.create(tmp_path / "state", [spec], budget_bytes=None, drives=drives)) as store:
        for part in range(30):
            store.write("embed", "master", part, torch.ones(2048)).result()
        store.commit({})
        files = committed_files(store)
        for damaged, more in ((20, []), (30, ["... and 10 more"])):
            for path in files[:damaged]:
                os.truncate(path, 4096)
            with pytest.raises(UserError, match=f"{damaged} chunk files of generation 1 are damaged:") as caught:
                store.verify()
            assert sum(str(path) in str(caught.value) for path in files) == 20
            assert str(caught.value).splitlines()[21:] == more


def test_a_stale_manifest(store: NvmeStore) -> None:
    """An older manifest put back after two more commits: its slot was written over."""
    path, backup = store.root / "manifest.json", store.root / "manifest.backup.json"
    on_drives = [drive / "manifest.backup.json" for drive in store.drives if drive != store.root]
    old, old_backup = path.read_bytes(), backup.read_bytes()
    advance(store, 4, 5)
    store.close()
    good, good_backup = path.read_bytes(), backup.read_bytes()
    path.write_bytes(old)
    with pytest.raises(UserError, match=r"manifest\.json: holds generation 3, but generation 5 was committed.*backup"):
        NvmeStore.open(store.root)
    for other in (old_backup, None):  # even where nothing but the chunk files can tell
        backup.unlink()
        for copy in on_drives:
            copy.unlink()
        if other is not None:
            backup.write_bytes(other)
        with closing(NvmeStore.open(store.root)) as stale:
            for found in (stale.verify, lambda stale=stale: assert_holds(stale, 3)):
                with pytest.raises(UserError, match=rf"c\.\d\.0 \(generation 3\): {STALE}"):
                    found()
        backup.write_bytes(good_backup)
    path.write_bytes(good)
    assert_sound(store.root, 5)


def test_an_unreadable_manifest(store: NvmeStore) -> None:
    """Half written, of other content, missing: which is no new start."""
    store.close()
    path = store.root / "manifest.json"
    good = path.read_bytes()
    contents = [good[:size] for size in (*range(0, len(good), 97), len(good) - 1)]
    contents += [json.dumps(json.loads(good) | field).encode() for field in BAD_FIELDS]
    for damaged in (*contents, b"[]", b"{}", b'{"format": "other"}', b"\xff"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"{path}: not a readable manifest .*backup\.json holds generation 3"):
            NvmeStore.open(store.root)
    path.unlink()
    for start in (NvmeStore.open, make):
        with pytest.raises(UserError, match=rf"{path}: the file is missing; .*backup\.json holds generation 3"):
            start(store.root)
    shutil.copy(store.root / "manifest.backup.json", path)  # what the message says
    assert_sound(store.root, 3)


PLACES = "layers.0 layers.0/master layers.0/master/0 layers.0/master/0/c.0.0 layers.0/master/1/c.1.0 "
PLACES += "layers.0/weights/0/zarr.json checkpoints checkpoints/one checkpoints/one/layers.0/master scratch drive.json"


def files(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generation 2 of a state with a checkpoint; tests take a copy."""
    root = tmp_path_factory.mktemp("made") / "state"
    with closing(make(root, 1, 2)) as store:
        store.checkpoint("one")
    return root


@pytest.mark.parametrize("obstacle", ["link", "pipe"])
@pytest.mark.parametrize("place", PLACES.split())
def test_nothing_in_a_state_leads_elsewhere(tmp_path: Path, made: Path, place: str, obstacle: str) -> None:
    """To a folder of the user's, which looks like part of a state."""
    thesis = tmp_path / "thesis"
    for name in ("0", "1", "master/0", "one/layers.0/master/0", "spill"):
        (thesis / name).mkdir(parents=True)
        (thesis / name / "c.0.0").write_text("years of work")
        (thesis / name / "drive.json").write_text("{}")
    root = shutil.copytree(made, tmp_path / "state")
    path, away = root / place, tmp_path / "moved away"
    target = thesis / "0/c.0.0" if path.is_file() else thesis
    if path.exists():
        path.rename(away)
    plant(path, obstacle, away if place == "checkpoints/one" else target)
    before = files(thesis) | files(away)
    with pytest.raises(UserError, match=rf"{path}|{root}"):
        NvmeStore.open(root)
    if (place, obstacle) == ("checkpoints/one", "link"):  # deleting it would delete that of another run
        with pytest.raises(UserError, match="checkpoints/one: is a link, which a state never contains"):
            delete_checkpoint(root, "one")
    with suppress(UserError):  # it may go where nothing of it leads elsewhere
        delete_checkpoint(root, "one")
    with suppress(UserError), closing(NvmeStore.open(root, read_only=True)) as store:
        store.verify()
        assert_holds(store, 2)
    assert files(thesis) | files(away) == before
    path.unlink()
