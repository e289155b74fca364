"""State at a place off the machine: an S3 server behind a proxy that cuts, refuses, shortens, delays; and a folder."""

import itertools
import random
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorstore as ts
import torch
from nvme_state import SPECS, advance, assert_holds, content, make
from s3_server import BUCKET, FAULTS, KEYS, S3, serving
from samples import cases, samples
from system_calls import said_by

from penstock.storage.files.errors import UserError
from penstock.storage.generations.checkpoints import delete_checkpoint, read_checkpoint
from penstock.storage.generations.store import NvmeStore
from penstock.storage.offsite import mover
from penstock.storage.offsite.fetch import fetch_files, fetch_state, find
from penstock.storage.offsite.index import Claim, encode_files, read_files, read_index, require_usable, write_tokens
from penstock.storage.offsite.link import Link, LocationChangedError, OffsiteError
from penstock.storage.offsite.location import Location, may_be_named, mover_bytes, parse_location
from penstock.storage.offsite.send import Sent, send_checkpoint
from penstock.storage.tier.manifest import ArraySpec

QUICK = {"most_pause_s": 0.05, "patience_s": 120.0}


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with serving() as found:
        yield found


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.proxy.faults.clear()
    server.proxy.always = None
    server.proxy.met.clear()
    return server


_numbers = itertools.count()


@pytest.fixture(params=cases(["s3", "file"], "file"))
def place(request: pytest.FixtureRequest, s3: S3, tmp_path: Path) -> str:
    """A place where nothing is yet."""
    (tmp_path / "other disk").mkdir()
    return new_place() if request.param == "s3" else str(tmp_path / "other disk" / "runs")


TOP = f"s3://{BUCKET}/"


def new_place() -> str:
    return f"{TOP}runs/{next(_numbers)}"


def link_to(place: str | Location) -> Link:
    found = parse_location(place, "--to") if isinstance(place, str) else place
    return Link(found, **QUICK)


def send(store: NvmeStore, place: str | Link, name: str, *, automatic: bool = False, **options: object) -> Sent:
    """Upload the committed generation as `name`."""
    local = f"for-{name}"
    if not (store.root / "checkpoints" / local).exists():
        store.checkpoint(local)
    with nullcontext(place) if isinstance(place, Link) else link_to(place) as link:
        claim = Claim(link, store.root, store.id, "tiny")
        files = {"recipe.json": store.root / "recipe.json", "data/notes.bin": store.root / "notes.bin"}
        more: dict[str, Any] = {"name": name, "automatic": automatic, **options}
        return send_checkpoint(claim, store.root, store.drives, local, files, **more)


def fetched_step(place: str, root: Path, name: str | None = None, drives: list[Path] | None = None) -> int:
    """Fetch the newest generation, or that of `name`, to `root`, and check all of it; its step."""
    link, found = find(link_to, parse_location(place, "RUN"), name)
    with link:
        fetch_state(link, found, root, drives or [root], lambda moved: None)
        fetch_files(link, found, {"data/notes.bin": root / "notes.bin"}, root, lambda moved: None)
    with closing(NvmeStore.open(root, drives=drives)) as store:
        store.verify()
        step: int = store.meta["step"]
        assert_holds(store, step)
    return step


TWO_PIECES = 9_000_000


def new_store(folder: Path, *steps: int, notes_bytes: int = 9000) -> NvmeStore:
    store = make(folder / "state", *steps)
    (store.root / "recipe.json").write_text('{"name": "tiny"}')
    (store.root / "notes.bin").write_bytes(random.Random(1).randbytes(notes_bytes))
    return store


def test_what_goes_there_comes_back(place: str, tmp_path: Path) -> None:
    with closing(new_store(tmp_path / "a", 1, 2, notes_bytes=TWO_PIECES)) as store:
        sent = send(store, place, "first")
        assert read_checkpoint(store.root, "for-first").checkpoint == "for-first"
        assert_holds(store, 2)
        assert (sent.entry.step, sent.moved_bytes) == (2, 3 * 20480 + 3 * 12288 + 12288 + TWO_PIECES + 16)
        spec = parse_location(place, "--to").spec()
        for array in SPECS:  # any zarr3 reader opens what is there
            path = f"{spec['path']}{sent.entry.folder}/{array.buffer}/{array.kind}/"
            opened = ts.open({"driver": "zarr3", "kvstore": spec | {"path": path}}, open=True, read=True).result()
            values = torch.from_numpy(opened.read().result().astype("float32"))
            expected = content(array, 2).float()
            for part, (start, stop) in enumerate(array.parts()):
                assert torch.equal(values[part, : stop - start], expected[start:stop])
        advance(store, 3)
        later = send(store, place, "second")
        assert later.moved_bytes == sent.moved_bytes - TWO_PIECES - 16, "files that are there are not sent again"
        assert send(store, place, "second").moved_bytes == 0
        advance(store, 4)
        delete_checkpoint(store.root, "for-first")
        with pytest.raises(UserError, match="has a checkpoint 'first' of step 2 already; choose another name"):
            send(store, place, "first")
        drives = [tmp_path / f"d{number}" for number in range(3)]
        for drive in drives:
            drive.mkdir()
        assert fetched_step(place, tmp_path / "b", drives=drives) == 3
        assert fetched_step(place, tmp_path / "c", "first") == 2
        assert fetched_step(f"{place}/first", tmp_path / "d") == 2
        assert (tmp_path / "d" / "notes.bin").read_bytes() == (store.root / "notes.bin").read_bytes()
        assert all(any(drive.glob("*/*/0/c.*.0")) for drive in drives)
        with pytest.raises(UserError, match="has no generation 'third'; it has first, second"):
            find(link_to, parse_location(place, "RUN"), "third")
    with pytest.raises(UserError, match=r"holds no state: neither penstock\.json nor a generation was found"):
        find(link_to, parse_location(f"{place}-other", "RUN"), None)


def test_fixed_arrays_go_there_once(s3: S3, tmp_path: Path) -> None:
    place, fixed = new_place(), ArraySpec("layers.0.frozen", "weights", 4096, "bfloat16", 2048, True)
    with closing(NvmeStore.create(tmp_path / "a", [SPECS[2], fixed], budget_bytes=None)) as store:
        values = torch.rand(4096).to(torch.bfloat16)
        for step in (1, 2):
            store.write("embed", "master", 0, content(SPECS[2], step)).result()
            for part in (0, 1) if step == 1 else ():
                store.write("layers.0.frozen", "weights", part, values[2048 * part : 2048 * (part + 1)]).result()
            store.commit({"step": step})
            (store.root / "recipe.json").write_text("{}")
            (store.root / "notes.bin").write_bytes(b"")
            send(store, place, f"at-{step}")
    assert len([key for key in s3.keys("runs/") if "/frozen/" in key or "frozen/weights/c." in key]) == 2
    link, found = find(link_to, parse_location(place, "RUN"), None)
    with link:
        fetch_state(link, found, tmp_path / "b", [tmp_path / "b"], lambda moved: None)
    with closing(NvmeStore.open(tmp_path / "b")) as store:
        out = torch.empty(2048, dtype=torch.bfloat16)
        store.read("layers.0.frozen", "weights", 1, out).result()
        assert torch.equal(out, values[2048:])


def test_as_many_as_wanted_stay(place: str, tmp_path: Path) -> None:
    with closing(new_store(tmp_path / "a", 1, notes_bytes=TWO_PIECES)) as store, link_to(place) as link:
        send(store, link, "mine")
        for step in range(2, 7):
            advance(store, step)
            (store.root / "recipe.json").write_text(f'{{"step": {step}}}')
            send(store, link, f"step-{step:06}", automatic=True, keep=2)
        index = read_index(link).index
        assert index is not None
        assert [entry.name for entry in index.entries] == ["mine", "step-000005", "step-000006"]
        tops = {key.split("/")[0] for key in link.keys("")}
        assert tops == {"penstock.json", "shared", *(entry.folder for entry in index.entries)}
        assert len([key for key in link.keys("shared/files/")]) == 5, "two pieces of notes.bin, three recipes"


@pytest.mark.sampled
def test_twenty_faults_lose_nothing(s3: S3, tmp_path: Path) -> None:
    """Whatever a request meets, at any object of an upload: the newest listed generation is whole, and is this one."""
    num_faults = samples(3, 20)
    every = FAULTS if num_faults == 20 else ("cut after", "403", "flipped")
    place, keys = new_place(), ("c.0.0", "manifest.json", "penstock.json", "run.json", "zarr.json", "c.1.0")
    chance = random.Random(0)
    with closing(new_store(tmp_path / "a", 1)) as store:
        send(store, place, "step-000001", automatic=True, keep=2)
        for number in range(num_faults):
            step = number + 2
            advance(store, step)
            fault = every[number % len(every)]
            s3.proxy.faults.clear()
            s3.proxy.faults.append(("PUT", keys[number % len(keys)], fault))
            more = [chance.choice(("503", "cut before", "cut after")) for _ in range(number % 3)]
            s3.proxy.faults.extend(("*", "", one) for one in more)
            refused = said_by(lambda step=step: send(store, place, f"step-{step:06}", automatic=True, keep=2))
            assert (refused is not None) == (fault == "403"), (refused, fault)
            assert "\n" not in (refused or "")
            assert s3.proxy.met[-1][2]
            s3.proxy.faults.clear()
            newest = fetched_step(place, tmp_path / f"back-{number}")
            assert newest == (step if refused is None else step - 1), (fault, keys[number % len(keys)])
            if refused is not None:
                send(store, place, f"step-{step:06}", automatic=True, keep=2)
    assert len([met for met in s3.proxy.met if met[2] in FAULTS]) >= num_faults


@pytest.mark.parametrize("fault", cases(["503", "cut before", "short"], "503"))
def test_what_never_ends_is_given_up_and_the_old_state_stays(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    place = new_place()
    with closing(new_store(tmp_path / "a", 1)) as store:
        send(store, place, "step-000001", automatic=True)
        advance(store, 2)
        s3.proxy.always = ("PUT", "c.1.0", fault)
        with monkeypatch.context() as patch:
            patch.setitem(QUICK, "patience_s", 1.0)
            with pytest.raises(OffsiteError, match="then try again") as caught:
                send(store, place, "step-000002", automatic=True)
        assert not caught.value.permanent
        s3.proxy.always = None
        assert fetched_step(place, tmp_path / "b") == 1
        send(store, place, "step-000002", automatic=True, keep=1)
        assert fetched_step(place, tmp_path / "c") == 2
    folders = {key.split("/")[2] for key in s3.keys(place.removeprefix(TOP) + "/")}
    assert len(folders) == 3, "what was given up is gone: index, shared, one generation"


NO_KEYS = "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
            NO_KEYS,
        ),
        ({"AWS_PROFILE": "nobody", "AWS_ACCESS_KEY_ID": ""}, "no credentials were found"),
        ({"place": "s3://no-such-bucket-here/run"}, "the bucket does not exist; create it, or correct its name"),
        ({"fault": "403"}, "the credentials were refused; set AWS_ACCESS_KEY_ID or AWS_PROFILE to an account that may"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    place = changes.pop("place", None) or new_place()
    if fault := changes.pop("fault", None):
        s3.proxy.always = ("*", "", fault)
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with link_to(place) as link, pytest.raises(OffsiteError) as caught:
        require_usable(link, tmp_path, None)
    said = str(caught.value)
    assert message in said
    assert said.startswith(f"storage.offsite: {place}: ")
    assert "\n" not in said
    assert not any(KEYS[name] in said for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    assert caught.value.permanent


def test_two_machines_that_go_on_with_one_run(place: str, tmp_path: Path) -> None:
    """Both fetch it: the one that writes first has the place, the other is told, and nothing is written over."""
    with closing(new_store(tmp_path / "a", 1)) as first:
        send(first, place, "step-000001", automatic=True)
        assert fetched_step(place, tmp_path / "b" / "state") == 1
        assert fetched_step(place, tmp_path / "c" / "state") == 1
        for name in ("b", "c"):
            (tmp_path / name / "state" / "recipe.json").write_text("{}")
        with closing(NvmeStore.open(tmp_path / "b" / "state")) as second:
            advance(second, 2)
            send(second, place, "step-000002", automatic=True)
            for root, steps in ((tmp_path / "c" / "state", (12,)), (None, (22,))):
                with closing(first if root is None else NvmeStore.open(root)) as other:
                    advance(other, *steps)
                    with pytest.raises(LocationChangedError, match=r"has continued this run 'tiny'.*nothing there was"):
                        send(other, place, f"step-{steps[0]:06}", automatic=True)
    assert fetched_step(place, tmp_path / "d") == 2


@pytest.mark.long
def test_who_loses_while_uploading_leaves_nothing(s3: S3, tmp_path: Path) -> None:
    place = new_place()
    with closing(new_store(tmp_path / "a", 1)) as store:
        send(store, place, "first")
        advance(store, 2)
        store.checkpoint("late")
        with link_to(place) as link:
            claim = Claim(link, store.root, store.id, "tiny")

            def other_machine(total: int) -> None:
                with link_to(place) as another:
                    write_tokens(tmp_path, place, [claim.index.token])
                    rival = Claim(another, tmp_path, store.id, "tiny")
                    rival.take()

            with pytest.raises(LocationChangedError, match="has continued this run"):
                send_checkpoint(claim, store.root, store.drives, "late", {}, name="late", begins=other_machine)
    assert not any("/late." in key for key in s3.keys("runs/"))
    assert fetched_step(place, tmp_path / "b") == 1


def test_damage_at_the_place_is_found(s3: S3, tmp_path: Path) -> None:
    place = new_place()
    with closing(new_store(tmp_path / "a", 1)) as store:
        folder = send(store, place, "first").entry.folder
    key = f"{place.removeprefix(TOP)}/{folder}/layers.0/master/c.1.0"
    whole = s3.get(key)
    for number, (broken, message) in enumerate(
        ((whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], "damaged"), (whole[:-4096], "is shorter than its"))
    ):
        s3.put(key, broken)
        with pytest.raises(OffsiteError, match=message):
            fetched_step(place, tmp_path / f"b{number}")
        assert not (tmp_path / f"b{number}" / "manifest.json").exists()
    s3.client.delete_object(Bucket=BUCKET, Key=key)
    with pytest.raises(OffsiteError, match=r"c\.1\.0 is missing"):
        fetched_step(place, tmp_path / "b2")
    s3.put(key, whole)
    assert fetched_step(place, tmp_path / "b2") == 1, "a second try goes on"
    manifest = f"{place.removeprefix(TOP)}/{folder}/manifest.json"
    s3.put(manifest, s3.get(manifest).replace(b'"step": 1', b'"step": 7'))
    with pytest.raises(UserError, match=r"cannot be read .*choose another with --checkpoint NAME"):
        fetched_step(place, tmp_path / "b3")
    s3.put(f"{place.removeprefix(TOP)}/penstock.json", b'{"format": "penstock-offsite"')
    with pytest.raises(OffsiteError, match="is not a Penstock index, or is damaged"):
        fetched_step(place, tmp_path / "b4")


def test_the_mover_takes_no_more_memory_than_is_counted(place: str, tmp_path: Path, monkeypatch: Any) -> None:
    spec = ArraySpec("b", "master", 6 << 22, "float32", 1 << 22)
    with closing(NvmeStore.create(tmp_path / "a", [spec], budget_bytes=None)) as store:
        values = torch.rand(1 << 22)
        for part in range(6):
            store.write("b", "master", part, values).result()
        store.commit({"step": 1})
        store.checkpoint("x")
        with link_to(place) as link:
            claim = Claim(link, store.root, store.id, "tiny")
            send_checkpoint(claim, store.root, store.drives, "x", {}, name="x")
            status = Path(f"/proc/{link.pid}/status").read_text()
    peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) * 1024
    assert peak <= mover_bytes((4 << 22) + 4096)
    slept: list[float] = []
    limit = mover.Limit(1e6)  # of its bandwidth
    limit._free_at = 99.0  # as after a pause: what was not used is not saved up
    clock = SimpleNamespace(monotonic=lambda: 100.0 + sum(slept), sleep=slept.append)
    monkeypatch.setattr(mover, "time", clock)
    for _ in range(4):
        limit.take(500_000)
    assert slept == pytest.approx([0.0, 0.5, 0.5, 0.5])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3://bucket/", "has a bucket but no prefix"),
        ("s3://Bucket/x", "is not a valid bucket name"),
        ("s3://key:secret@bucket/x", "put credentials and endpoints in the environment"),
        ("s3://bucket/x?token=abc", "put credentials and endpoints in the environment"),
        ("s3://bucket/a/../b", "the prefix of"),
        ("s3://bucket/a//b", "the prefix of"),
        ("http://bucket/a", "is not a supported location"),
        ("file://host/a", "names another machine"),
        ("/", "is the root of this machine"),
        ("", "the name is empty"),
        ("s3://bucket/a\x1b[31m", "contains control characters"),
    ],
)
def test_what_is_no_place_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match="--to: ") as caught:
        parse_location(text, "--to")
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


def test_endpoint_region_and_credentials_come_from_the_environment() -> None:
    place = parse_location("s3://bucket/run", "--to")
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    spec = {"driver": "s3", "bucket": "bucket", "path": "run/", "endpoint": "http://x:1", "aws_region": "eu-west-3"}
    given = {"AWS_ENDPOINT_URL": "http://x:1/", "AWS_REGION": "eu-west-3"}
    assert place.spec(keys | given) == spec | {"aws_credentials": {"type": "environment"}}
    both = {"AWS_ENDPOINT_URL": "http://x", "AWS_ENDPOINT_URL_S3": "http://y"}
    assert place.spec(keys | both)["endpoint"] == "http://y"
    files = {"AWS_SHARED_CREDENTIALS_FILE": "/nowhere", "AWS_CONFIG_FILE": "/nowhere"}
    assert place.spec(files)["aws_credentials"] == {"type": "imds"}
    assert place.spec(files | {"AWS_PROFILE": "me"})["aws_credentials"] == {"type": "profile", "profile": "me"}
    # No server of Google's runs here: that tensorstore takes the spec is all that is shown.
    place = parse_location("gs://bucket.of-mine/a/b/", "--to")
    assert str(place) == "gs://bucket.of-mine/a/b"
    assert place.spec({}) == {"driver": "gcs", "bucket": "bucket.of-mine", "path": "a/b/"}
    assert ts.KvStore.Spec(place.spec({})).to_json()["driver"] == "gcs"
    with pytest.raises(UserError, match="does not exist: is the disk mounted"):
        link_to("/nowhere/mnt/run")


def test_names_that_lead_elsewhere_are_refused(s3: S3) -> None:
    place = new_place()
    with link_to(place) as link:
        for path in ("../x", "/etc/passwd", "data/../../x", "data//x", ".ssh/key", "a\nb", "data/./x", "x" * 300, ""):
            assert not may_be_named(path)
            s3.put(f"{place.removeprefix(TOP)}/x.1/run.json", encode_files({path: []}))
            with pytest.raises(UserError, match="which is not a file of a run"):
                read_files(link, "x.1")
    s3.proxy.always = ("*", "", "delayed")  # and a server that does not answer is given up
    link = Link(parse_location(place, "--to"), most_pause_s=0.01, patience_s=0.2)
    with link, pytest.raises(OffsiteError, match="it did not answer in time"):
        link.read("penstock.json", 1000)
