"""Which links of a model's folder are followed: the user's own ways, not a stranger's."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from samples import sampled

from penstock.storage.files.errors import UserError
from penstock.storage.files.links import VARIABLE, require_no_entry
from penstock.storage.files.model_folder import linked_files, more_templates, open_model_file, read_model_file
from penstock.storage.files.safetensors import CheckpointReader

CONFIG = json.dumps({"model_type": "llama"})
SECRET = json.dumps({"auths": {"registry": {"auth": "c2VjcmV0"}}})


def folder_of(place: Path) -> Path:
    """A small model's folder."""
    place.mkdir(parents=True)
    (place / "config.json").write_text(CONFIG)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (place / name).write_text(json.dumps({"file": name}))
    (place / "chat_template.jinja").write_text("{{ messages }}")
    save_file({"a": torch.ones(2)}, place / "model.safetensors")
    return place


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {name: read_model_file(folder, name, 1 << 20) for name in names(folder)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return folder_of(tmp_path / "store" / "models" / "own")


def cached(model: Path, place: Path, blob: Callable[[int, bytes], str]) -> Path:
    """The model as the cache of the hub has it."""
    snapshot = place / "hub" / "models--owner--name" / "snapshots" / "abc"
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(model.iterdir())):
        name = blob(number, file.read_bytes())
        shutil.copyfile(file, blobs / name)
        (snapshot / file.name).symlink_to(f"../../blobs/{name}")
    return snapshot


@pytest.mark.parametrize("blob", [lambda number, _: f"b{number}", lambda number, _: f"{number:064x}"])
def test_a_snapshot_of_the_cache_is_read_whatever_its_blobs_are_called(
    tmp_path: Path, model: Path, blob: Callable[[int, bytes], str]
) -> None:
    snapshot = cached(model, tmp_path, blob)
    (tmp_path / "mine").symlink_to(snapshot)
    for place in (snapshot, tmp_path / "mine"):
        assert contents(place) == contents(model)
        assert CheckpointReader(place).read("a").tolist() == [1, 1]
        assert linked_files(place) == {}, "which lead nowhere else"
    below = snapshot / "additional_chat_templates"
    below.mkdir()
    (below / "tool_use.jinja").symlink_to("../../../blobs/" + os.path.basename(os.readlink(snapshot / "config.json")))
    assert read_model_file(below, "tool_use.jinja", 100) == CONFIG.encode()


def test_links_that_a_user_makes_into_another_model_s_folder_are_followed(tmp_path: Path, model: Path) -> None:
    """One by one, all of them as `cp -as` does, through a linked folder, and to a file of the cache."""
    farm, shards, relative = tmp_path / "farm", tmp_path / "shards", tmp_path / "relative"
    for place in (farm, shards, relative):
        place.mkdir()
    (tmp_path / "way").symlink_to(model.parent)
    snapshot = cached(model, tmp_path, lambda number, _: f"b{number}")
    for name in names(model):
        (farm / name).symlink_to(model / name)
        (relative / name).symlink_to(f"../way/own/{name}")
        (shards / name).symlink_to(snapshot / name)
    for place in (farm, shards, relative):
        assert contents(place) == contents(model)
        assert CheckpointReader(place).read("a").tolist() == [1, 1]
        assert sorted(linked_files(place)) == names(model)
    twice = tmp_path / "twice"
    twice.mkdir()
    (twice / "config.json").symlink_to(farm / "config.json")
    assert read_model_file(twice, "config.json", 100) == CONFIG.encode()
    alone = tmp_path / "weights.safetensors"
    shutil.copyfile(model / "model.safetensors", alone)
    (twice / "model.safetensors").symlink_to(alone)
    assert CheckpointReader(twice).read("a").tolist() == [1, 1]
    (twice / "tokenizer.json").write_text("{}")
    (twice / "vocab.json").symlink_to("tokenizer.json")
    assert read_model_file(twice, "vocab.json", 100) == b"{}", "within the folder"


def test_links_into_blobs_of_the_cache_and_a_linked_folder_of_templates_are_followed(
    tmp_path: Path, model: Path
) -> None:
    """As `hf download --local-dir` has made them, and as `ln -s model/* .` does."""
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    snapshot = cached(without_folders(model, tmp_path / "files"), tmp_path, lambda number, _: f"{number:064x}")
    local, farm = tmp_path / "local", tmp_path / "farm"
    for place in (local, farm):
        place.mkdir()
    for path in snapshot.iterdir():
        (local / path.name).symlink_to(path.resolve())
    for path in model.iterdir():
        (farm / path.name).symlink_to(path)
    assert contents(local) == contents(snapshot)
    assert sorted(linked_files(local)) == names(local)
    (template,) = more_templates(farm)
    assert read_model_file(template.parent, template.name, 100) == b"{{ tools }}"
    assert sorted(linked_files(farm)) == names(farm)
    secret = private(tmp_path)["a private file"]
    for target in (secret.parent, secret, secret.with_name("nowhere")):
        (farm / "additional_chat_templates").unlink()
        (farm / "additional_chat_templates").symlink_to(target)
        for read in (more_templates, linked_files):
            with pytest.raises(UserError, match="additional_chat_templates: it is a symbolic link to"):
                read(farm)


def without_folders(model: Path, place: Path) -> Path:
    return Path(shutil.copytree(model, place, ignore=lambda *_: ["additional_chat_templates"]))


def test_an_entry_of_the_cache_names_its_snapshot(tmp_path: Path, model: Path) -> None:
    snapshot = cached(model, tmp_path, lambda number, _: f"{number:064x}")
    other = snapshot.with_name("0")
    other.mkdir()
    for place in (snapshot.parent, snapshot.parents[1]):
        with pytest.raises(UserError, match=f"{place}: is an entry of the Hugging Face cache; .* as {other}$"):
            require_no_entry(place)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    with pytest.raises(UserError, match=f"name a snapshot of it, as {snapshot}$"):
        require_no_entry(snapshot.parents[1])
    for place in (snapshot, model, tmp_path / "models--mine"):
        require_no_entry(place)


def private(tmp_path: Path) -> dict[str, Path]:
    """Files that no stranger may have, by what is wrong with a link to them."""
    place = tmp_path / "home" / ".docker"
    place.mkdir(parents=True)
    (place / "config.json").write_text(SECRET)
    (tmp_path / "home" / "id_rsa").write_text("PRIVATE KEY")
    (tmp_path / "home" / "tokenizer.json").write_text(SECRET)
    (tmp_path / "home" / "notes.json").write_text(SECRET)
    return {
        "a private file": tmp_path / "home" / "id_rsa",
        "JSON of a model's name, in no model's folder": place / "config.json",
        "another, beside nothing": tmp_path / "home" / "tokenizer.json",
    }


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"]
)
def test_a_stranger_s_link_to_a_private_file_is_refused_with_the_way_to_allow_it(
    tmp_path: Path, model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The links belong to the user, who has unpacked them."""
    (model / name).unlink()
    for file in private(tmp_path).values():
        (model / name).symlink_to(file)
        words = re.escape(f"{model / name}: it is a symbolic link to {file}, which is outside of the folder")
        for read in (lambda: open_model_file(model, name), lambda: linked_files(model)):
            with pytest.raises(UserError, match=words + rf".*copy the file itself.*{VARIABLE}={file.parent}"):
                read()
        monkeypatch.setenv(VARIABLE, f"/nowhere:{file.parent}")
        assert read_model_file(model, name, 1 << 20) == file.read_bytes()
        monkeypatch.delenv(VARIABLE)
        (model / name).unlink()


def test_no_detour_leads_out(tmp_path: Path, model: Path) -> None:
    """Chains, blobs that are links, folders that say they are models, an entry's neighbour, what is no file."""
    secret = private(tmp_path)["a private file"]
    snapshot = cached(model, tmp_path, lambda number, _: f"b{number}")
    blobs = snapshot.parents[1] / "blobs"
    evil = folder_of(tmp_path / "unpacked" / "evil")  # beside the model, in the same archive
    (evil / "tokenizer.json").unlink()
    (evil / "tokenizer.json").symlink_to(secret)
    (blobs / "out").symlink_to(secret)
    (model / "aside").symlink_to(secret)
    neighbour = tmp_path / "hub" / "models--other--name" / "blobs" / "b0"
    neighbour.parent.mkdir(parents=True)
    neighbour.write_text(SECRET)
    cases = {
        (snapshot, "../../blobs/out"): "which is outside of the folder",
        (snapshot, "../../../models--other--name/blobs/b0"): "which is outside of the folder",
        (snapshot, "../../blobs/none"): "which does not exist",
        (model, str(evil / "tokenizer.json")): "which is outside of the folder",
        (model, "aside"): "which is outside of the folder",
        (model, "/dev/zero"): "which is outside of the folder",
        (model, "tokenizer.json"): "which cannot be followed",
        (model, "/etc/hostname"): "which is outside of the folder",
    }
    for (place, target), why in cases.items():
        (place / "tokenizer.json").unlink(missing_ok=True)
        (place / "tokenizer.json").symlink_to(target)
        with pytest.raises(UserError, match=rf"tokenizer\.json: it is a symbolic link to .*{why}"):
            read_model_file(place, "tokenizer.json", 100)
    os.mkfifo(model / "pipe")
    (model / "vocab.json").symlink_to("pipe")
    with pytest.raises(UserError, match="no regular file"):
        read_model_file(model, "vocab.json", 100)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make another user's link")
def test_a_link_that_another_user_has_made_is_not_followed(tmp_path: Path, model: Path) -> None:
    place = tmp_path / "shared"
    place.mkdir()
    (place / "config.json").symlink_to(model / "config.json")
    os.lchown(place / "config.json", 12345, 12345)
    with pytest.raises(UserError, match="which another user has made"):
        read_model_file(place, "config.json", 100)


@sampled(40, 1000)
@given(st.data())
def test_no_archive_of_links_yields_a_secret(data: st.DataObject) -> None:
    """Whatever folders, files and links a stranger packs, in whatever order: of the user's files only those of models
    are read. What is read without an archive's help is read with it as well."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        own = folder_of(root / "home" / "models" / "own")
        secrets = [root / "home" / part for part in ("id_rsa", "tokenizer.json", ".docker/config.json", "config.json")]
        for number, file in enumerate(secrets):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"secret": number}))
        parts = ("evil", "models--a--b/snapshots/abc", "models--a--b/blobs", "additional_chat_templates", "more")
        folders = [root / "archive" / part for part in parts]
        targets = [*secrets, *own.iterdir(), root / "home", root / "home" / ".docker", own]
        names = ("config.json", "tokenizer.json", "tokenizer_config.json", "a.safetensors", "x.jinja", "blobs", "b0")
        for folder in folders:
            folder.mkdir(parents=True)
        for _ in range(data.draw(st.integers(1, 12))):
            place = data.draw(st.sampled_from(folders)) / data.draw(st.sampled_from(names))
            inside = [folder / file for folder in folders for file in names] + folders
            target = data.draw(st.sampled_from([*targets, *inside]))
            if os.path.lexists(place):
                continue
            if data.draw(st.booleans()):
                place.symlink_to(data.draw(st.sampled_from([str(target), os.path.relpath(target, place.parent)])))
            else:
                place.write_text(CONFIG)
        for folder in folders:
            for file in (*names, "model.safetensors", "chat_template.jinja"):
                try:
                    content = read_model_file(folder, file, 1 << 20)
                except UserError:
                    continue
                assert b"secret" not in content, (folder, file)
        assert contents(own)["config.json"] == CONFIG.encode()
