"""Models and data sets of the hub, through the real huggingface_hub, from a server on this machine."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import huggingface_hub
import pytest
from cli_process import refusal
from fake_hub import FakeHub, commit_of, fake_hub
from huggingface_hub import constants
from transformers import LlamaConfig

from penstock.app.cli.main import main
from penstock.app.hub.fetch import dataset_folder, fetched, for_plan, model_folder
from penstock.app.hub.names import HubName, normal, on_hub, parse_hub
from penstock.app.recipes.recipe import resolve_paths
from penstock.engine.config import DataConfig, ModelConfig, Recipe
from penstock.storage.files.errors import UserError

MODEL = {
    "config.json": b'{"model_type": "llama"}', "generation_config.json": b"{}", "tokenizer.json": b"x" * 3000,
    "tokenizer_config.json": b"{}", "chat_template.jinja": b"{{ messages }}", "onnx/config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 64, "README.md": b"# a model", "pytorch_model.bin": b"pickle" * 1000,
    "consolidated.safetensors": b"the same again" * 1000, "modeling_own.py": b"raise SystemExit",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}", "other/more.jinja": b"",
}  # fmt: skip
DATA = {
    "README.md": b"# a data set", "dataset_infos.json": b"{}", "data/train-00000-of-00001.parquet": b"PAR1" * 300,
    "more.jsonl.gz": b"gz",
}  # fmt: skip
NAME = "hf://small/llama"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with a model and a data set; huggingface_hub asks it, and keeps what it gets below tmp_path."""
    monkeypatch.chdir(tmp_path)
    with fake_hub() as running:
        for name in ("HF_HUB_OFFLINE", "PENSTOCK_OFFLINE_BY_DEFAULT", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        for name, folder in {"HF_HOME": "", "XDG_CACHE_HOME": "cache", "XDG_CONFIG_HOME": "config"}.items():
            monkeypatch.setenv(name, str(tmp_path / folder))
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        files = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        own = {"ENDPOINT": running.url, "HUGGINGFACE_CO_URL_TEMPLATE": files, "HF_HUB_CACHE": str(tmp_path / "hub")}
        for name, value in (own | {"HF_TOKEN_PATH": str(tmp_path / "token"), "HF_HUB_DISABLE_XET": True}).items():
            monkeypatch.setattr(constants, name, value)
        v2 = MODEL | {"config.json": b'{"model_type": "qwen3"}'}
        running.add("models/small/llama", dict(MODEL), revisions={"v2": v2})
        running.add("datasets/some/chats", dict(DATA))
        yield running


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_names_and_that_a_bare_one_is_the_hubs_where_no_such_path_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, revision in (("hf://a/b", None), ("hf:/a/b@v1.0", "v1.0"), ("hf://datasets/a/b@refs/c/d", "refs/c/d")):
        assert parse_hub(text) == HubName("a/b", revision)
        assert normal(text).startswith("hf://")
    for text in ("hf://", "hf://a", "hf://a/b/c", "hf://a/../b", "hf://a/b@", "hf://a/b@x y", "hf://-a/b"):
        with pytest.raises(UserError, match="write hf://OWNER/NAME"):
            parse_hub(text)
    with pytest.raises(UserError, match="write hf://OWNER/NAME"):
        resolve_paths(Recipe(name="x", model=ModelConfig(path="hf://a")), Path("/"))
    monkeypatch.chdir(tmp_path)
    assert on_hub("owner/name") == HubName("owner/name", None)
    assert on_hub("recipes/mine.py") is None
    (tmp_path / "owner").mkdir()
    assert on_hub("owner/name") is on_hub("./owner/name") is None
    assert model_folder("owner/name") == Path("owner/name")
    recipe = Recipe(name="x", model=ModelConfig(path="hf:/a/b"), data=DataConfig(source="jsonl", path="hf://c/d@e"))
    resolved = resolve_paths(recipe, tmp_path)  # which keeps its names until it is run
    assert (resolved.model.path, resolved.data.path) == ("hf://a/b", "hf://c/d@e")


def test_what_a_model_needs_is_fetched_and_nothing_twice(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folder(NAME)
    unneeded = {
        "README.md",
        "pytorch_model.bin",
        "onnx/config.json",
        "consolidated.safetensors",
        "other/more.jinja",
    }
    assert names(folder) == set(MODEL) - unneeded
    assert all((folder / name).read_bytes() == MODEL[name] for name in names(folder))
    assert folder.name == commit_of(MODEL)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" ")[0] for line in said] == ["fetching", "fetched"]
    assert "8 files" in said[0]
    hub.requests.clear()
    assert model_folder("small/llama") == folder
    assert not [request for request in hub.requests if request.startswith("GET /cdn") or "HEAD" in request]
    assert capsys.readouterr().err == ""
    assert b"qwen3" in (model_folder(f"{NAME}@v2") / "config.json").read_bytes(), "a revision is another folder"
    assert model_folder(f"{NAME}@{commit_of(MODEL)}").name == commit_of(MODEL)


def test_of_a_data_set_its_data_files_are_fetched(hub: FakeHub) -> None:
    assert names(dataset_folder("hf://some/chats")) == {"data/train-00000-of-00001.parquet", "more.jsonl.gz"}
    hub.add("datasets/some/script", {"chats.py": b"import os", "README.md": b""})
    with pytest.raises(UserError, match=r"only a loading script.*refs/convert/parquet"):
        dataset_folder("hf://some/script")
    hub.add("datasets/some/images", {"README.md": b"", "image.png": b""})
    with pytest.raises(UserError, match="contains no data file"):
        dataset_folder("hf://some/images")


def test_a_plan_fetches_the_config_alone_and_a_run_folders_for_everything_from_scratch_no_weights(hub: FakeHub) -> None:
    data = DataConfig(source="jsonl", path="hf://some/chats", tokenizer=NAME)
    recipe = Recipe(name="x", model=ModelConfig(path=NAME), data=data)
    with pytest.raises(UserError, match=r"not in the cache yet; `penstock plan hf://small/llama`"):
        for_plan(recipe, fetch=False)
    planned = for_plan(recipe)
    assert names(Path(str(planned.model.path))) == {"config.json"}
    assert (planned.data.path, planned.data.tokenizer) == (None, None)
    assert for_plan(recipe, fetch=False) == planned
    assert not any("chats" in request for request in hub.requests)
    ready = fetched(Recipe(name="x", model=recipe.model), weights=False)
    assert names(Path(str(ready.model.path))) >= {"config.json", "tokenizer.json"}
    assert not any("model.safetensors" in request for request in hub.requests)
    mixture = [{"path": "hf://some/chats", "weight": 2}, {"path": "/x"}]
    data = DataConfig(source="messages", tokenizer=NAME, mixture=mixture)
    ready = fetched(Recipe(name="x", model=recipe.model, data=data))
    assert (Path(str(ready.model.path)) / "model.safetensors").is_file()
    assert ready.data.tokenizer == ready.model.path
    assert [Path(entry["path"]).exists() for entry in ready.data.mixture] == [True, False]
    assert ready.data.mixture[0]["weight"] == 2


def test_a_connection_that_breaks_is_taken_up_where_it_broke(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # written as it comes
    hub.cut["model.safetensors"] = 5000
    assert (model_folder(NAME) / "model.safetensors").read_bytes() == MODEL["model.safetensors"]
    assert hub.ranges == ["bytes=5000-"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_wrong_bytes_are_removed_and_fetched_again(hub: FakeHub, name: str) -> None:
    hub.wrong.add(name)
    with pytest.raises(UserError, match=rf"{name} came with digest .* removed: run the same command again"):
        model_folder(NAME)
    hub.wrong.clear()
    assert (model_folder(NAME) / name).read_bytes() == MODEL[name]


def test_too_small_a_disk_is_said_before_anything_is_fetched_and_a_full_one_then(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.claimed["model.safetensors"] = 10**15
    with pytest.raises(UserError, match=r"needs 909 TiB and .* free; free some, or set HF_HOME"):
        model_folder(NAME)
    assert not any("resolve" in request for request in hub.requests)
    assert not (tmp_path / "hub").exists()
    hub.claimed.clear()
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(UserError, match=r"No space left on device .* set HF_HOME"):
        model_folder(NAME)


REFUSED = {
    "no such model": ("hf://small/none", r"no such model is on the hub, or it is private"),
    "no revision": (f"{NAME}@v9", r"has no revision 'v9'"), "no model": ("hf://small/nothing", r"has no config\.json"),
    "private": ("hf://small/private", r"or it is private; .* `hf auth login`"),
    "gated": ("hf://small/gated", r"is gated; accept its terms at http.*/small/gated, then log in"),
    "only pickles": ("hf://small/pickles", r"has only \*\.bin weights"),
    "an adapter": ("hf://small/adapter", r"has no weights of a model"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_be_had(hub: FakeHub, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, message = REFUSED[case]
    hub.add("models/small/private", dict(MODEL), private=True)
    hub.add("models/small/gated", dict(MODEL), gated=True)
    hub.add("models/small/pickles", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    hub.add("models/small/adapter", {"config.json": b"{}", "adapter_model.safetensors": b"x"})
    hub.add("models/small/nothing", {"README.md": b""})
    with pytest.raises(UserError, match=message) as found:
        model_folder(name)
    assert "\n" not in str(found.value)
    assert not list((tmp_path / "hub").rglob("*.incomplete"))
    monkeypatch.setenv("HF_TOKEN", hub.token)
    if case in ("private", "gated"):
        assert (model_folder(name) / "model.safetensors").is_file(), "a token opens it"


def test_offline_takes_what_is_in_the_cache(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"is set .* run `hf download small/llama` and copy .*models--small--llama"):
        model_folder(NAME)
    with pytest.raises(UserError, match=r"`hf download some/chats --repo-type dataset`"):
        dataset_folder("hf://some/chats")
    assert not hub.requests
    monkeypatch.delenv("HF_HUB_OFFLINE")
    folder, data = model_folder(NAME), dataset_folder("hf://some/chats")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.requests.clear()
    assert (model_folder(NAME), dataset_folder("hf://some/chats")) == (folder, data)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        model_folder(NAME)
    assert not hub.requests


def test_without_a_network_the_cache_serves_and_else_one_line_says_what_to_do(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder(NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    capsys.readouterr()
    assert model_folder(NAME) == folder
    assert "cannot be reached; using the cached copy" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"http://127\.0\.0\.1:9 cannot be reached .* `hf download other/llama`"):
        model_folder("hf://other/llama")


def test_an_interrupted_download_goes_on_from_complete_files(hub: FakeHub, tmp_path: Path) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        huggingface_hub.hf_hub_download("small/llama", "config.json", cache_dir=tmp_path / "hub")
        raise KeyboardInterrupt

    patched = patch.object(huggingface_hub, "snapshot_download", interrupted)
    with patched, pytest.raises(UserError, match="interrupted; complete files stay"):
        model_folder(NAME)
    hub.requests.clear()
    model_folder(NAME)
    assert not any(request.startswith("GET") and "config.json" in request.split("/")[-1:] for request in hub.requests)


@pytest.mark.long
def test_the_command_line_plans_and_checks_a_model_of_the_hub(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=300, max_position_embeddings=256)
    hub.add("models/tiny/one", {"config.json": config.to_json_string().encode()})
    assert main(["plan", "tiny/one", "--machine", "rtx4090-64", "--context", "256", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == "one"
    assert main(["check", "hf://tiny/one"]) == 0
    assert [request for request in hub.requests if "resolve" in request and "config.json" not in request] == []


@pytest.mark.usefixtures("hub")
def test_a_command_that_cannot_fetch_ends_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "no such model" in refusal(capsys, "check", "hf://small/none")
    assert "no such model" in refusal(capsys, "plan", "small/none")
    (tmp_path / "x.json").write_text('{"name": "x", "model": {"path": "hf://small/none"}}')
    assert "no such model" in refusal(capsys, "train", "x.json")
    assert not (tmp_path / "runs").exists()
