"""Which links of a data set's folder are followed: the user's own ways, not a stranger's."""

import json
import os
from pathlib import Path

import pytest

from penstock.engine.config import DataConfig, ModelConfig, Recipe
from penstock.engine.data.formats.detect import detect
from penstock.engine.data.formats.reading import read_samples, source_files
from penstock.engine.run_files import run_files
from penstock.storage.files.errors import UserError
from penstock.storage.files.links import VARIABLE


def texts(root: Path, source: str = "text") -> list[str]:
    return [sample.text for sample in read_samples(DataConfig(source=source, path=str(root)))]  # type: ignore[arg-type, union-attr]


def test_linked_files_and_folders_of_data_are_read(tmp_path: Path) -> None:
    """Nothing that lies below a linked folder is left out without a word; a folder met twice is read once."""
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    (elsewhere / "deep").mkdir(parents=True)
    (root / "own").mkdir(parents=True)
    for place, text in ((elsewhere / "a.jsonl", "one"), (elsewhere / "deep" / "b.jsonl", "two")):
        place.write_text(json.dumps({"text": text}) + "\n")
    (root / "own" / "c.jsonl").write_text('{"text": "three"}\n')
    (root / "d.jsonl").symlink_to(elsewhere / "a.jsonl")
    (root / "more").symlink_to(elsewhere / "deep")
    (root / "again").symlink_to("own")
    (root / ".#lock").symlink_to("user@host.1")
    (tmp_path / "mine").symlink_to(root)
    for place in (root, tmp_path / "mine"):
        assert texts(place, "jsonl") == ["one", "two", "three"]
        assert len(texts(place)) == 3
        assert detect(place).source == "jsonl"
    snapshot = tmp_path / "datasets--owner--name" / "snapshots" / "abc"
    (snapshot / "data").mkdir(parents=True)
    (snapshot.parents[1] / "blobs").mkdir()
    (snapshot.parents[1] / "blobs" / "b0").write_text('{"text": "four"}\n')
    (snapshot.parents[1] / "blobs" / "b0").chmod(0o600)
    (snapshot / "data" / "train-00000-of-00001.jsonl").symlink_to("../../../blobs/b0")
    assert texts(snapshot, "jsonl") == ["four"]
    farm = tmp_path / "farm" / "data"
    farm.mkdir(parents=True)
    (farm / "train.jsonl").symlink_to(snapshot / "data" / "train-00000-of-00001.jsonl")
    assert texts(farm, "jsonl") == ["four"]


def test_a_stranger_s_link_in_data_is_refused_with_the_way_to_allow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    root.mkdir()
    (root / "a.txt").write_text("a text")
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "config").write_text("Host x")
    (home / "closed").mkdir()
    (home / "closed" / "key.txt").write_text("PRIVATE KEY")
    (home / "closed" / "key.txt").chmod(0o600)
    cases = {
        home / "closed" / "key.txt": "which nobody else may read",
        home / ".ssh" / "config": "which is hidden, or in a hidden folder",
        home / ".ssh": "which is hidden, or in a hidden folder",
        home / "closed": "which nobody else may read",  # its file
        home / "nothing": "which does not exist",
        Path("/dev/zero"): "which is no file",
        tmp_path: "in which it is itself",
    }
    for target, why in cases.items():
        (root / "b.txt").symlink_to(target)
        for read in (lambda: source_files(DataConfig(source="text", path=str(root))), lambda: detect(root)):
            with pytest.raises(UserError, match=rf"b\.txt.*{why}"):
                read()
        if target.is_relative_to(home) and target.exists():
            monkeypatch.setenv(VARIABLE, str(home))
            assert len(texts(root)) == 2
            monkeypatch.delenv(VARIABLE)
        (root / "b.txt").unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make another user's link")
@pytest.mark.parametrize("name", ["below", "a.txt"])
def test_a_link_in_data_that_another_user_has_made_is_not_followed(tmp_path: Path, name: str) -> None:
    rows, root = tmp_path / "rows", tmp_path / "root"
    rows.mkdir()
    root.mkdir()
    (rows / "a.txt").write_text("a text")
    (root / name).symlink_to(rows if name == "below" else rows / name)
    assert texts(root) == ["a text"]
    os.lchown(root / name, 12345, 12345)
    with pytest.raises(UserError, match=rf"{name}: it is a symbolic link to .*, which another user has made"):
        source_files(DataConfig(source="text", path=str(root)))


def test_what_is_kept_and_uploaded_of_a_model_is_what_a_run_may_read(tmp_path: Path) -> None:
    model, other, secret = tmp_path / "model", tmp_path / "other", tmp_path / "secret"
    for place in (model, other):
        place.mkdir()
        (place / "config.json").write_text('{"model_type": "llama"}')
    (other / "tokenizer.json").write_text("{}")
    secret.write_text("{}")
    (model / "tokenizer.json").symlink_to(other / "tokenizer.json")
    (model / "processor_config.json").symlink_to(secret)
    found = run_files(tmp_path / "run", Recipe(name="x", model=ModelConfig(path=str(model))))
    assert {Path(name).name for name in found} == {"config.json", "tokenizer.json"}
