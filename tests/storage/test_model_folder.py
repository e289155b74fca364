"""Model folders that may come from anybody: what is opened in them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from penstock.storage.errors import UserError
from penstock.storage.model_folder import has_model_file, is_plain_name, read_model_file
from penstock.storage.safetensors_io import CheckpointReader

HEADER = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(range(8))
DIGEST = "0123456789abcdef" * 4


def hub_cache(root: Path) -> Path:
    """A model as huggingface_hub keeps it; its snapshot folder."""
    model = root / "hub" / "models--owner--name"
    snapshot = model / "snapshots" / ("ab" * 20)
    (model / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (model / "blobs" / DIGEST).write_bytes(WEIGHTS)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{DIGEST}")
    return snapshot


def test_the_hub_s_cache_is_read_through_its_links(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    (tmp_path / "mine").symlink_to(snapshot)  # a link of the user's, to the folder
    for folder in (snapshot, tmp_path / "mine"):
        assert CheckpointReader(folder).read("a").numel() == 2
        assert read_model_file(folder, "model.safetensors", 1 << 20) == WEIGHTS


@pytest.mark.parametrize(
    "target",
    [
        "/etc/hostname",
        "../../../models--other--name/blobs/" + DIGEST,
        "../../../../outside",
        "../../blobs/../../../outside",
        "../../blobs/name",
        "../../refs/main",
        "other.safetensors",
        "../../blobs/" + DIGEST[::-1],
    ],
)
def test_no_other_link_of_the_cache_is_followed(tmp_path: Path, target: str) -> None:
    snapshot = hub_cache(tmp_path)
    (tmp_path / "outside").write_bytes(WEIGHTS)
    (snapshot.parents[1] / "blobs" / DIGEST[::-1]).symlink_to(tmp_path / "outside")  # a blob that is a link
    (snapshot / "other.safetensors").write_bytes(WEIGHTS)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(target)
    with pytest.raises(UserError, match=r"model\.safetensors: it is a symbolic link, .*copy the file itself"):
        CheckpointReader(snapshot)


def test_links_elsewhere_are_not_followed_though_they_look_like_the_hub_s(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    (tmp_path / "a" / "blobs").mkdir()
    (tmp_path / "a" / "blobs" / DIGEST).write_bytes(WEIGHTS)
    (folder / "model.safetensors").symlink_to(f"../../blobs/{DIGEST}")
    with pytest.raises(UserError, match="a symbolic link, which is not followed"):
        CheckpointReader(folder)


def test_a_file_that_becomes_a_link_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    reader = CheckpointReader(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "moved")
    (tmp_path / "model.safetensors").symlink_to("moved")
    with pytest.raises(UserError, match="a symbolic link, which is not followed"):
        reader.read("a")


def test_pipes_and_folders_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        assert has_model_file(tmp_path, name)
        with pytest.raises(UserError, match="no regular file"):
            read_model_file(tmp_path, name, 10)
    (tmp_path / "long").write_bytes(bytes(11))
    with pytest.raises(UserError, match="larger than the limit of 10 bytes"):
        read_model_file(tmp_path, "long", 10)


def test_plain_names() -> None:
    assert is_plain_name("model-00001-of-00002.safetensors")
    for name in ("", ".", "..", "a/b", "/a", "../a", "a\0", "a" * 256, 5, None, ["a"]):
        assert not is_plain_name(name)
