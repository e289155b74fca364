"""Damaged files: found by reads and by the scrub, told by name and generation, and nothing else is lost with them."""

import itertools
import os
import random
import shutil
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
from nvme_state import advance, assert_holds, assert_sound, committed_files, content, make

from penstock.storage.errors import UserError
from penstock.storage.manifest import ArraySpec
from penstock.storage.nvme import NvmeStore

IN_MEMORY = True


def places(raw: bytes, payload: int, rng: random.Random) -> dict[str, int]:
    """One position for every kind of place in a chunk file."""
    found = {
        "first byte": 0,
        "payload": rng.randrange(payload),
        "last byte": payload - 1,
        "checksum": len(raw) - rng.randint(1, 4),
    }
    if payload < len(raw) - 4:
        found["padding"] = rng.randrange(payload, len(raw) - 4)
    return found


def test_a_flipped_bit_anywhere(store: NvmeStore) -> None:
    """Every chunk file, every kind of place. A read may pass over a flipped bit of the padding: it is no state."""
    rng, tried = random.Random(0), 0
    for array in store._committable():
        for part, (start, stop) in enumerate(array.parts):
            path = array.committed(part)[1]
            raw = path.read_bytes()
            payload = (stop - start) * array.spec.item_bytes
            for place, position in places(raw, payload, rng).items():
                damaged = bytearray(raw)
                damaged[position] ^= 1 << rng.randrange(8)
                path.write_bytes(damaged)
                message = rf"{path} \(generation 3\): checksum mismatch"
                with pytest.raises(UserError, match=message):
                    store.verify()
                out = torch.empty(stop - start, dtype=getattr(torch, array.spec.dtype))
                future = store.read(array.spec.buffer, array.spec.kind, part, out)
                if place == "padding":
                    with suppress(UserError):
                        future.result()
                        assert torch.equal(out, content(array.spec, 3)[start:stop])
                else:
                    with pytest.raises(UserError, match=message):
                        future.result()
                tried += 1
            path.write_bytes(raw)
    assert tried >= 34
    store.close()
    assert_sound(store.root, 3)


def test_a_damaged_file(store: NvmeStore) -> None:
    for path, damage in itertools.product(
        committed_files(store), ["missing", "truncated", "longer", "empty", "folder"]
    ):
        raw = path.read_bytes()
        match damage:
            case "missing" | "folder":
                path.unlink()
                if damage == "folder":
                    path.mkdir()
            case "truncated":
                os.truncate(path, len(raw) - 4096)
            case "longer":
                path.write_bytes(raw + bytes(4096))
            case "empty":
                path.write_bytes(b"")
        with pytest.raises(UserError, match=rf"^{path}.*generation 3"):
            store.verify()
        with pytest.raises(UserError, match=rf"^{path}.*generation 3"):
            assert_holds(store, 3)
        if damage == "folder":
            path.rmdir()
        path.write_bytes(raw)
    store.close()
    assert_sound(store.root, 3)


def test_a_stale_file(store: NvmeStore) -> None:
    """Whole and self-consistent, but of generation 3 when 5 is the committed one in the same slot."""
    old = {path: path.read_bytes() for path in committed_files(store)}
    advance(store, 4, 5)
    assert committed_files(store) == list(old)
    for path, raw in old.items():
        good = path.read_bytes()
        path.write_bytes(raw)
        for found in (store.verify, lambda: assert_holds(store, 5)):
            with pytest.raises(
                UserError, match=rf"{path} \(generation 5\): stale: intact, but from another generation"
            ):
                found()
        path.write_bytes(good)
    store.close()
    assert_sound(store.root, 5)


def test_a_drive_from_the_past(tmp_path: Path) -> None:
    """One of two drives comes back from a snapshot of two generations ago: its identity is right, its state is not."""
    a, b = tmp_path / "a", tmp_path / "b"
    with closing(make(tmp_path / "state", 1, 2, 3, drives=[a, b])) as store:
        shutil.copytree(b, tmp_path / "snapshot")
        advance(store, 4, 5)
    b.rename(tmp_path / "now")
    (tmp_path / "snapshot").rename(b)
    with closing(NvmeStore.open(tmp_path / "state")) as store:
        with pytest.raises(UserError, match=rf"3 chunk files of generation 5 are damaged:\n{b}/.*stale"):
            store.verify()
        with pytest.raises(UserError, match=rf"{b}/.* \(generation 5\): stale"):
            assert_holds(store, 5)
    shutil.rmtree(b)
    (tmp_path / "now").rename(b)
    assert_sound(tmp_path / "state", 5)


def test_damaged_files_are_listed_and_a_long_list_is_cut(tmp_path: Path) -> None:
    for num_parts, num_listed in ((7, 7), (30, 20)):
        spec = ArraySpec("embed", "master", 2048 * num_parts, "float32", 2048)
        drives = [tmp_path / f"a{num_parts}", tmp_path / f"b{num_parts}"]
        with closing(NvmeStore.create(tmp_path / f"{num_parts}", [spec], budget_bytes=None, drives=drives)) as store:
            for part in range(num_parts):
                store.write("embed", "master", part, torch.ones(2048)).result()
            store.commit({})
            files = committed_files(store)
            for path in files:
                os.truncate(path, 4096)
            with pytest.raises(UserError, match=f"{num_parts} chunk files of generation 1 are damaged:") as caught:
                store.verify()
        lines = str(caught.value).splitlines()[1:]
        assert sum(str(path) in str(caught.value) for path in files) == num_listed
        assert lines[num_listed:] == (["... and 10 more"] if num_parts == 30 else [])


# ---------------------------------------------------------------- the manifest


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
                with pytest.raises(
                    UserError, match=r"c\.\d\.0 \(generation 3\): stale: intact, but from another generation"
                ):
                    found()
        backup.write_bytes(good_backup)
    path.write_bytes(good)
    assert_sound(store.root, 5)


def test_a_half_written_manifest(store: NvmeStore) -> None:
    store.close()
    path = store.root / "manifest.json"
    good = path.read_bytes()
    for size in [*range(0, len(good), 97), len(good) - 1]:
        path.write_bytes(good[:size])
        with pytest.raises(UserError, match=rf"{path}: not a readable manifest .*backup\.json holds generation 3"):
            NvmeStore.open(store.root)
    shutil.copy(store.root / "manifest.backup.json", path)  # what the message says
    assert_sound(store.root, 3)


def test_a_missing_manifest_is_no_new_start(store: NvmeStore) -> None:
    store.close()
    path = store.root / "manifest.json"
    good = path.read_bytes()
    path.unlink()
    for start in (NvmeStore.open, make):
        with pytest.raises(UserError, match=rf"{path}: the file is missing; .*backup\.json holds generation 3"):
            start(store.root)
    path.write_bytes(good)
    assert_sound(store.root, 3)
