"""Several drives: striping, identity, changes between openings, missing drives."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nvme_state import SPECS, advance, assert_holds, assert_whole, content, make, read_all, write_all
from samples import sampled

from penstock.storage.files.errors import UserError
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier import chunk, manifest
from penstock.storage.tier.arena import empty_aligned
from penstock.storage.tier.manifest import ArraySpec, Manifest

IN_MEMORY = True


def folders(base: Path, names: str) -> list[Path]:
    return [base / name for name in names]


def chunk_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/[01]/c.*.0"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[NvmeStore]:
    """Generation 2 on drives a and b, its manifest in root."""
    store = make(tmp_path / "root", 1, 2, drives=folders(tmp_path, "ab"))
    yield store
    store.close()


def test_parts_are_striped(store: NvmeStore, tmp_path: Path) -> None:
    assert store.drives == folders(tmp_path, "ab")
    for number, spec in enumerate(SPECS):
        for part in range(len(spec.parts())):
            drive = tmp_path / "ab"[(number + part) % 2]
            assert (drive / spec.buffer / spec.kind / "1" / f"c.{part}.0").is_file()
    assert not chunk_files(store.root)
    assert_holds(store, 2)
    a, b = 2 * 20480 + 2 * 12288, 20480 + 2 * 12288
    assert [(moved.bytes_read, moved.bytes_written) for moved in store.traffic().values()] == [(a, 2 * a), (b, 2 * b)]
    assert store.verify() == a + b
    assert any("on one device" in warning for warning in store.warnings)
    content = json.loads((store.root / "manifest.json").read_text())
    array = content["arrays"][0]
    assert array["drives"] == [drive["id"] for drive in content["drives"]]
    raw = (tmp_path / "a/layers.0/master/1/c.0.0").read_bytes()
    assert int.from_bytes(raw[-4:], "little") == array["crcs"][0]


def test_every_thread_of_a_store_binds_itself_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a name that says what it does, and the system knows it by that."""
    bound: set[int] = set()
    seen: list[tuple[str, str, bool]] = []
    drives = folders(tmp_path, "ab")

    def watched(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thread = threading.current_thread()
        comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip()
        seen.append((thread.name.rpartition("_")[0], comm, thread.ident in bound))
        return real(*args, **kwargs)

    def bind() -> None:
        bound.add(threading.get_ident())

    for name in ("read_chunk", "write_chunk"):
        monkeypatch.setattr(chunk, name, partial(watched, getattr(chunk, name)))
    store = NvmeStore.create(tmp_path / "root", SPECS, budget_bytes=None, drives=drives, on_thread_start=bind)
    with closing(store):
        advance(store, 1)
        assert_holds(store, 1)
    bound.clear()  # a new thread may have the number of an old one
    with closing(NvmeStore.open(tmp_path / "root", on_thread_start=bind)) as store:
        assert_holds(store, 1)
    assert threading.get_ident() not in bound
    assert set(seen) == {(f"{work} {drive}", work, True) for work in ("nvme-read", "nvme-write") for drive in drives}


@pytest.mark.parametrize(("before", "after"), [("a", "b"), ("ab", "ba"), ("ab", "b"), ("a", "abc"), ("abc", "d")])
def test_a_run_changes_drives(tmp_path: Path, before: str, after: str) -> None:
    root = tmp_path / "root"
    make(root, 1, drives=folders(tmp_path, before)).close()
    with closing(NvmeStore.open(root, drives=folders(tmp_path, after))) as store:
        assert_holds(store, 1)  # from where it lies
        store.write("embed", "master", 0, content(SPECS[2], 2)).result()
        store.commit({})
        assert all((tmp_path / name / "drive.json").exists() for name in before)  # until its last array has moved
    with closing(NvmeStore.open(root)) as store:
        assert torch.equal(read_all(store, SPECS[2]), content(SPECS[2], 2))
        assert torch.equal(read_all(store, SPECS[0]), content(SPECS[0], 1))
        write_all(store, 2)
        assert_holds(store, 2)
        store.commit({})
        assert_holds(store, 2)
        assert store.drives == folders(tmp_path, after)
    for name in {*before, *after}:
        assert bool(chunk_files(tmp_path / name)) == (name in after), name
        assert (tmp_path / name / "drive.json").exists() == (name in after)
    for name in set(before) - set(after):
        shutil.rmtree(tmp_path / name)
    with closing(NvmeStore.open(root)) as store:
        assert_holds(store, 2)
        assert store.drives == folders(tmp_path, after)
        advance(store, 3)
        kept = sum(len(chunk_files(tmp_path / name)) for name in after)
        assert kept == 2 * sum(len(spec.parts()) for spec in SPECS)
        assert_holds(store, 3)
        assert store.verify()


@sampled(25, 60)
@given(data=st.data())
def test_any_order_of_operations_on_any_drives(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Writes of parts of ugly sizes, commits, crashes and changes of drives against a dictionary."""
    base = tmp_path_factory.mktemp("drives")
    sizes = st.sampled_from([1, 2, 2047, 2048, 2049, 4096, 6143, 6144, 10241])
    dtypes = st.sampled_from(["float32", "bfloat16"])
    shapes = data.draw(st.lists(st.tuples(sizes, dtypes, st.sampled_from([2048, 4096])), min_size=1, max_size=4))
    specs = [ArraySpec(f"b{i}", "master", n, dtype, part) for i, (n, dtype, part) in enumerate(shapes)]
    every = {(spec, part): stop - start for spec in specs for part, (start, stop) in enumerate(spec.parts())}
    some_drives = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True)
    names = recorded = data.draw(some_drives)
    store = NvmeStore.create(base / "root", specs, budget_bytes=None, drives=folders(base, "".join(names)))
    committed: dict[tuple[ArraySpec, int], int] = {}
    latest: dict[tuple[ArraySpec, int], int] = {}

    def memory(spec: ArraySpec, part: int) -> torch.Tensor:
        make_empty = empty_aligned if data.draw(st.booleans()) else torch.empty
        return make_empty(every[spec, part], dtype=getattr(torch, spec.dtype))

    for value in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["write", "write all", "commit", "crash", "change"]))
        if action.startswith("write"):
            for spec, part in every if action == "write all" else [data.draw(st.sampled_from(list(every)))]:
                store.write(spec.buffer, "master", part, memory(spec, part).fill_(value)).result()
                latest[spec, part] = value
        elif action == "commit":
            written = {key for key in latest if latest[key] != committed.get(key)}
            begun = {spec for spec, _ in written} if committed else set(specs)
            if all((spec, part) in written for spec, part in every if spec in begun):
                store.commit({"value": value})
                committed, recorded = dict(latest), names
        elif committed:
            store.close()
            names = data.draw(some_drives) if action == "change" else recorded
            store = NvmeStore.open(base / "root", drives=folders(base, "".join(names)) if action == "change" else None)
            latest = dict(committed)
        assert store.drives == folders(base, "".join(names))
        for (spec, part), expected in latest.items():
            out = memory(spec, part).fill_(-1)
            store.read(spec.buffer, "master", part, out).result()
            assert (out == expected).all(), (spec, part, expected)
    if committed:
        store.verify()
    store.close()


def test_a_drive_is_found_where_it_is_now_and_one_that_holds_nothing_yet_may_go(
    store: NvmeStore, tmp_path: Path
) -> None:
    store.close()
    with closing(NvmeStore.open(store.root, drives=folders(tmp_path, "c"))) as moved:
        moved.commit({"step": 2})  # no array was written: all state is still on a and b
    shutil.rmtree(tmp_path / "c")
    with closing(NvmeStore.open(store.root)) as again:
        assert again.drives == folders(tmp_path, "ab")
    assert_whole(store.root, 2)
    (tmp_path / "b").rename(tmp_path / "elsewhere")
    for listed in (None, folders(tmp_path, "a")):
        with pytest.raises(UserError, match=rf"{tmp_path}/b: this drive holds part of generation 3.*is it mounted\?"):
            NvmeStore.open(store.root, drives=listed)
    with closing(NvmeStore.open(store.root, drives=[tmp_path / "a", tmp_path / "elsewhere"])) as moved:
        assert_holds(moved, 2)
        advance(moved, 3)
    with closing(NvmeStore.open(store.root)) as moved:
        assert moved.drives == [tmp_path / "a", tmp_path / "elsewhere"]
        assert_holds(moved, 3)


def test_a_drive_that_is_left_out_is_given_up_by_a_commit_and_not_before(store: NvmeStore, tmp_path: Path) -> None:
    store.close()
    with closing(NvmeStore.open(store.root, drives=folders(tmp_path, "abc"))) as wider:
        wider.commit({"step": 2})  # no array was written: all state is still on a and b
    NvmeStore.open(store.root, drives=folders(tmp_path, "ab")).close()
    with closing(NvmeStore.open(store.root)) as again:
        assert again.drives == folders(tmp_path, "abc")
    with closing(NvmeStore.open(store.root, drives=folders(tmp_path, "ab"))) as narrower:
        narrower.commit({"step": 2})
        assert not (tmp_path / "c" / "drive.json").exists()
    with closing(NvmeStore.open(store.root)) as again:
        assert again.drives == folders(tmp_path, "ab")
        assert_holds(again, 2)


def test_drives_may_have_relative_paths_and_move_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, moved = tmp_path / "run" / "state", tmp_path / "moved" / "state"
    with closing(make(root, 1, drives=[root, root / "second"])) as store:
        store.checkpoint("one")
        advance(store, 2)
    assert [drive.path for drive in Manifest.read(root).drives] == [".", "second"]
    root.parent.rename(moved.parent)
    assert_whole(moved, 2)
    assert_whole(moved / "checkpoints/one", 1)
    with closing(NvmeStore.open(moved)) as store:
        store.restore("one")
        assert_holds(store, 1)
    monkeypatch.chdir(tmp_path)
    make(Path("root"), 1, drives=[Path("a"), Path("../" + tmp_path.name + "/b")]).close()
    monkeypatch.chdir("/")
    assert_whole(tmp_path / "root", 1)


def test_the_same_drive_twice(tmp_path: Path, store: NvmeStore) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for other in (tmp_path / "a", tmp_path / "link", tmp_path / "x" / ".." / "a"):
        with pytest.raises(UserError, match=r"storage\.nvme: .* is listed twice"):
            make(tmp_path / "new", drives=[tmp_path / "a", other])
    store.close()
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    with pytest.raises(UserError, match="copies of the same drive"):
        NvmeStore.open(store.root, drives=[*folders(tmp_path, "ab"), tmp_path / "copy"])


def test_an_aborted_start_is_no_obstacle(tmp_path: Path) -> None:
    """Nor one that was refused, as room is counted for each device."""
    huge = ArraySpec("embed", "master", 10**15, "float32", 2048 * 10**9)
    for names, which in (("ab", rf" \(with {tmp_path}/b\)"), ("c", "")):
        with pytest.raises(UserError, match=rf"two generations of the state{which} needs 8,\d+,\d+,\d+,"):
            NvmeStore.create(tmp_path / "root", [huge], budget_bytes=None, drives=folders(tmp_path, names))
    assert list((tmp_path / "c").iterdir()) == []
    for specs in (SPECS, SPECS[:1]):
        store = NvmeStore.create(tmp_path / "root", specs, budget_bytes=None, drives=folders(tmp_path, "ab"))
        with pytest.raises(AssertionError, match="before it was ever written"):
            read_all(store, SPECS[0])
        write_all(store, 1)
        store.close()
    assert not (tmp_path / "a" / "embed").exists()


def test_the_drive_of_another_run_is_refused(store: NvmeStore, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{tmp_path}/a: in use by another process"):
        make(tmp_path / "new", drives=folders(tmp_path, "a"))
    store.close()
    with pytest.raises(UserError, match="holds the state of another run"):
        make(store.root)
    message = rf"{tmp_path}/a: holds the state of another run \(its manifest was in {store.root}\)"
    with pytest.raises(UserError, match=message):
        make(tmp_path / "new", drives=folders(tmp_path, "a"))
    make(tmp_path / "new", 1, drives=folders(tmp_path, "c")).close()
    with pytest.raises(UserError, match=message):
        NvmeStore.open(tmp_path / "new", drives=folders(tmp_path, "ca"))
    assert_whole(store.root, 2)
    (tmp_path / "a/drive.json").write_text("{")
    with pytest.raises(UserError, match=r"a/drive\.json: not a readable drive identity"):
        NvmeStore.open(store.root)


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """A folder with arrays and folders of somebody else, before, during and after it is one of our drives."""
    theirs = tmp_path / "a" / "image" / "labels" / "0"
    theirs.mkdir(parents=True)
    (theirs / "zarr.json").write_text('{"dimension_names": ["y", "x"]}')
    (theirs / "c.0.0").write_text("theirs")
    a = folders(tmp_path, "a")
    for name in ("scratch", "checkpoints"):
        (a[0] / name).mkdir()
        with pytest.raises(UserError, match=rf"a/{name}: does not belong to Penstock"):
            make(tmp_path / "root", drives=a)
        (a[0] / name).rmdir()
    for steps in ((), (), (1,)):
        make(tmp_path / "root", *steps, drives=a).close()
    with closing(NvmeStore.open(tmp_path / "root", drives=folders(tmp_path, "b"))) as store:
        advance(store, 2)
    assert sorted(path.name for path in (tmp_path / "a").rglob("*")) == ["0", "c.0.0", "image", "labels", "zarr.json"]


def test_room_on_the_drives_that_state_moves_to(store: NvmeStore, tmp_path: Path, monkeypatch: Any) -> None:
    store.checkpoint("one")
    store.close()
    need = int(2 * (3 * 20480 + 3 * 12288 + 12288) * 1.05)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=need - 1))
    with pytest.raises(UserError, match=f"the state that moves there needs {need:,} bytes"):
        NvmeStore.open(store.root, drives=folders(tmp_path, "c"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    for drives in (None, folders(tmp_path, "ab")):  # where it lies there may be nothing to write, as for an export
        assert_whole(store.root, 2, drives=drives)


@sampled(15, 60)
@given(data=st.data())
def test_no_damage_of_the_manifest_goes_unseen(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("m")
    stored = manifest.Stored(1, ("d",), tuple(range(len(SPECS[0].parts()))))
    record = manifest.DriveRecord("d", ".", True)
    original = Manifest("s", 7, {SPECS[0]: stored}, (record,), {"step": 3, "lr": 0.125})
    raw = bytearray(original.encode())
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= 1 << data.draw(st.integers(0, 7))
    (root / "manifest.json").write_bytes(raw)
    try:
        found = Manifest.read(root)
    except UserError:
        return
    assert found == original  # only white space was hit
