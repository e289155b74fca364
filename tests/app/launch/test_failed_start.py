"""A run that fails before its first step has ended leaves nothing; what can be seen early is refused early; and where a
model comes from: a folder, a shape, both, or neither."""

import json
import os
import shutil
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bad_model_files
import fake_run
import pytest
from cli_process import FAKE, done, refusal, started, wait_until
from nvme_state import assert_whole, make
from recipe_texts import TINY
from transformers import PretrainedConfig

import penstock
from penstock.app.cli.main import main
from penstock.app.launch import launcher
from penstock.app.planning.inputs import from_scratch, require_inputs, require_weights
from penstock.app.recipes.recipe import from_json, to_json
from penstock.app.runs.directory import RunDir
from penstock.engine.config import DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig
from penstock.engine.data.text.made_tokenizer import train_tokenizer
from penstock.engine.hf.config import model_config, require_overrides
from penstock.engine.model.anatomy import take_apart
from penstock.storage.files.errors import UserError
from penstock.tui.data.alerts import alerts
from penstock.tui.data.run_data import RunData

Patch = pytest.MonkeyPatch
RANDOM = DataConfig(source="random")
RECIPE = Recipe(name="tiny", model=ModelConfig(vocab_size=300), data=RANDOM, train=TrainConfig(steps=4))


@pytest.fixture
def trains(monkeypatch: Patch, tmp_path: Path) -> Patch:
    """A stand-in for the engine trains in this process, in a folder with the recipe tiny.json."""
    monkeypatch.setitem(sys.modules, "penstock.engine.train", SimpleNamespace(train=fake_run.train))
    monkeypatch.setenv("FAKE_STEP_S", "0.001")
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(to_json(RECIPE))
    return monkeypatch


def test_nothing_is_left_of_a_failed_start(trains: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    """And a folder that was there stays as it was."""
    trains.setenv("FAKE_FAIL_AT", "1:user")
    for given in ([], ["--run-dir", "new/out"]):
        assert "loss is NaN" in refusal(capsys, "train", "tiny.json", *given)
        assert [path.name for path in Path().iterdir()] == ["tiny.json"]
    trains.setenv("FAKE_FAIL_AT", "1:bug")
    with pytest.raises(RuntimeError, match="a bug"):  # its traceback alone
        main(["train", "tiny.json"])
    assert [path.name for path in Path().iterdir()] == ["tiny.json"]
    trains.setenv("FAKE_FAIL_AT", "1:user")
    own = {"recipe.json": to_json(RECIPE), "output.log": "mine"}
    for recipe, folder, files in (("tiny.json", "empty", {}), ("own/recipe.json", "own", own)):
        Path(folder).mkdir()
        for name, text in files.items():
            Path(folder, name).write_text(text)
        refusal(capsys, "train", recipe, "--run-dir", folder)
        assert {path.name: path.read_text() for path in Path(folder).iterdir()} == files


def test_a_run_that_has_begun_or_is_resumed_stays(trains: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    trains.setenv("FAKE_FAIL_AT", "2:user")
    refusal(capsys, "train", "tiny.json", "--run-dir", "out")
    assert json.loads(Path("out/status.json").read_text())["state"] == "failed"
    refusal(capsys, "resume", "out")  # in its first step
    assert Path("out/metrics.jsonl").exists()
    Path("out/metrics.jsonl").unlink()
    refusal(capsys, "resume", "out")
    assert Path("out/recipe.json").exists()


def test_a_discarded_run_leaves_its_drives_as_well(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    recipe = Recipe(name="x", storage=StorageConfig(nvme=[str(drive) for drive in drives]))
    with RunDir.create(recipe, tmp_path / "out") as run:
        make(run.path / "state", 0, drives=[drive / "out" for drive in drives]).close()
        with closing(make(tmp_path / "other", 1, drives=[drives[0] / "other"])) as other:
            run.discard()
            assert other.verify() > 0
    assert not (tmp_path / "out").exists()
    assert [path.name for drive in drives for path in drive.iterdir()] == ["other"]


@pytest.mark.parametrize("how", ["renamed", "copied away"])
def test_a_discarded_run_leaves_the_state_of_one_that_was_there_before(tmp_path: Path, how: str) -> None:
    """The drives name the place of the new run as that of their owner, as its new path is known only once it is opened
    there."""
    drive = tmp_path / "nvme"
    recipe = Recipe(name="x", storage=StorageConfig(nvme=[str(drive)]))
    with RunDir.create(recipe, tmp_path / "out") as run:
        make(run.path / "state", 1, 2, drives=[drive / "out"]).close()
    if how == "renamed":
        run.path.rename(tmp_path / "away")
    else:
        shutil.copytree(run.path, tmp_path / "away")
        shutil.rmtree(run.path)
    with RunDir.create(recipe, tmp_path / "out") as again:
        with pytest.raises(UserError, match="holds the state of another run"):
            make(again.path / "state", drives=[drive / "out"])
        again.discard()
    assert_whole(tmp_path / "away/state", 2)


@pytest.mark.long
def test_a_start_from_the_terminal_application_leaves_its_words(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(launcher, "CLI", FAKE)
    monkeypatch.setenv("FAKE_FAIL_AT", "1:user")
    monkeypatch.setenv("FAKE_PREPARE_S", "0.5")
    path = launcher.start(RECIPE, tmp_path)
    data = RunData(path)
    wait_until(lambda: data.poll() is not None and data.state == "failed" and not data.exists)
    assert list((tmp_path / "runs").iterdir()) == []
    assert data.error == "loss is NaN in step 3, chunk 1"
    assert [alert.text for alert in alerts(data)] == [
        "loss is NaN in step 3, chunk 1",
        "the run failed before its first step finished and left nothing behind",
    ]
    assert launcher.last_words(tmp_path / "runs" / "never") is None


BAD_DATA: list[tuple[list[str], str]] = [
    (["data.source=jsonl", "data.path=none.jsonl"], "no `text` field; the row has content"),
    (["data.source=jsonl", "data.path=nowhere"], "nowhere does not exist"),
    (["data.source=text", "data.path=folder"], "the corpus is empty"),
    (["data.source=text", "data.path=latin.txt"], "not UTF-8 text"),
    (["data.source=python_stdlib", "data.tokenizer=nowhere"], "nowhere does not exist"),
    (["data.source=random"], "model.vocab_size: data.source=random needs it"),
]
TRAINS_WITHOUT_TORCH = """
import contextlib, io, json, sys
from penstock.app.cli.main import main
told = []
for settings in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as error:
        code = main(["train", "tiny.json", *(word for text in settings for word in ("--set", text))])
    told.append([code, error.getvalue(), "torch" in sys.modules])
print(json.dumps(told))
"""


def test_data_that_is_not_there_is_refused_before_pytorch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(to_json(Recipe(name="tiny")))
    (tmp_path / "none.jsonl").write_text('{"content": "x"}\n{"text": "x"}\n')
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9 " * 100)
    (tmp_path / "folder").mkdir()
    before = sorted(path.name for path in tmp_path.iterdir())
    given = json.dumps([settings for settings, _ in BAD_DATA])
    process = started(tmp_path, sys.executable, "-c", TRAINS_WITHOUT_TORCH, given)
    told: list[list[Any]] = json.loads(done(process).stdout)
    for (settings, words), (code, error, torch) in zip(BAD_DATA, told, strict=True):
        assert (code, words in error, torch) == (2, True, False), (settings, error)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "b.txt")  # root may read everything
    with pytest.raises(UserError, match=r"b\.txt cannot be read by this user"):
        require_inputs(Recipe(name="x", data=DataConfig(source="text", path=str(tmp_path))))


SHAPE = TINY["model"] | {"vocab_size": 300, "max_position": 128}
CONFIG = bad_model_files.CONFIG | {"rms_norm_eps": 1e-3, "rope_theta": 5e5, "rope_scaling": None}
del CONFIG["torch_dtype"]
DATA = DataConfig(source="random", sequence_length=32)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 5e5}


def config_of(model: ModelConfig) -> PretrainedConfig:
    return model_config(Recipe(name="x", model=model, data=DATA), None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a config.json and no weights."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def test_a_folder_and_its_shape_are_one_model_and_a_shape_that_is_not_the_folder_s_is_named(folder: Path) -> None:
    config = config_of(ModelConfig(path=str(folder), **SHAPE))
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-3, 5e5)
    assert config.to_dict() == config_of(ModelConfig(path=str(folder / "config.json"))).to_dict()
    others: dict[str, tuple[Any, str]] = {
        **{"num_layers": (3, "2"), "hidden_size": (64, "32"), "intermediate_size": (97, "64"), "num_heads": (8, "4")},
        **{"num_kv_heads": (4, "2"), "head_dim": (32, "8"), "vocab_size": (301, "300"), "max_position": (64, "128")},
        **{"model_type": ("mistral", "qwen3"), "tie_embeddings": (True, "False")},
    }
    for field, (value, found) in others.items():
        with pytest.raises(UserError, match=r"--set model\.path=") as caught:
            config_of(ModelConfig(path=str(folder), **(SHAPE | {field: value})))
        assert f"model.{field}: {value} in the recipe, but {found} in {folder}" in str(caught.value)


def test_overrides_go_on_top_of_folder_and_shape(folder: Path, tmp_path: Path) -> None:
    for former in (None, {"rope_type": "yarn", "factor": 2.0}):
        (folder / "config.json").write_text(json.dumps(CONFIG | {"rope_scaling": former}))
        for path in (folder, tmp_path / "none"):
            model = ModelConfig(path=str(path), **SHAPE, overrides={"rope_parameters": YARN})
            assert config_of(model).rope_parameters == YARN
            assert model.overrides == {"rope_parameters": YARN}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"rms_norm_epss": 1.0}, "rms_norm_epss has no effect, .* has no such field; did you mean rms_norm_eps"),
        ({"nothing_of_it": 1}, "nothing_of_it has no effect, .* has no such field; correct its name, or leave it out"),
        ({"rope_theta": 1.0}, 'rope_theta has no effect, as the config has rope_parameters; set all of them, here {"'),
        ({"sliding_window": 8}, "sliding_window has no effect, as transformers leaves it at null, by the config"),
        ({"attn_implementation": "eager"}, "attn_implementation has no effect, as Penstock chooses how"),
        ({"model_type": "llama"}, "model_type is llama, but qwen3 in .*, whose weights are of that type; leave it out"),
    ],
)  # fmt: skip
def test_an_override_without_effect_or_against_the_folder_is_refused(
    folder: Path, overrides: dict[str, Any], said: str
) -> None:
    config = {name: value for name, value in CONFIG.items() if not name.startswith("rope")}
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": YARN}))
    recipe = Recipe(name="x", model=ModelConfig(path=str(folder), overrides=overrides), data=DATA)
    with pytest.raises(UserError, match=f"^model.overrides: {said}"):
        require_overrides(recipe, None)
    with pytest.raises(UserError, match=f"^model.overrides: {said}"):
        penstock.plan(recipe)


def test_a_config_that_transformers_builds_and_does_not_run_is_one_line(folder: Path) -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": None}
    (folder / "config.json").write_text(json.dumps(CONFIG | kinds))
    with pytest.raises(UserError, match="transformers does not run the model: Could not find a `sliding_window`"):
        penstock.plan(Recipe(name="x", model=ModelConfig(path=str(folder)), data=DATA))


def test_overrides_with_effect_are_taken_and_those_against_the_recipe_s_shape_are_not(folder: Path) -> None:
    window = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
    for overrides in ({"rope_theta": 1.0}, {"rms_norm_eps": 0.1}, {"rope_scaling": YARN}, window, {"dtype": "float16"}):
        require_overrides(Recipe(name="x", model=ModelConfig(path=str(folder), overrides=overrides), data=DATA), None)
        require_overrides(Recipe(name="x", model=ModelConfig(**SHAPE, overrides=overrides), data=DATA), None)
    scratch = from_scratch(Recipe(name="x", model=ModelConfig(path=str(folder)), data=DATA))
    require_overrides(scratch, None)
    against = {"hidden_size": 64, "model_type": "llama", "vocab_size": 301}
    for name, value in against.items():
        recipe = Recipe(name="x", model=ModelConfig(**SHAPE, overrides={name: value}), data=DATA)
        with pytest.raises(UserError, match=f"{name} is {value}, but model.{name} is .*; set that, and leave this out"):
            require_overrides(recipe, None)


def test_from_scratch_takes_shape_and_tokenizer_from_where_they_are(folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(name="x", model=ModelConfig(path=str(tmp_path / "none"), **SHAPE))
    assert from_scratch(recipe) == Recipe(name="x", model=ModelConfig(**SHAPE))
    assert from_scratch(Recipe(name="x")) == Recipe(name="x")
    recipe = Recipe(name="x", model=ModelConfig(path=str(folder), overrides={"rope_parameters": YARN}), data=DATA)
    scratch = from_scratch(recipe)
    assert from_json(to_json(scratch)) == scratch
    assert (scratch.model.path, scratch.model.vocab_size) == (None, 300)
    ours, theirs = (config_of(r.model) for r in (scratch, recipe))
    assert ours.to_diff_dict() == theirs.to_diff_dict()
    assert take_apart(ours).buffers == take_apart(theirs).buffers
    recipe = Recipe(name="x", model=ModelConfig(path=str(folder), **SHAPE))
    assert from_scratch(recipe).data.tokenizer is None
    train_tokenizer(["some text"] * 10, 300, folder)
    assert from_scratch(recipe).data.tokenizer == str(folder)


def test_without_any_shape_it_is_refused(tmp_path: Path) -> None:
    model = ModelConfig(path=str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"model\.path: .*none does not exist, and the recipe gives no shape"):
        config_of(model)
    with pytest.raises(UserError, match=r"--from-scratch: the recipe gives no shape, and model\.path .*none does not"):
        from_scratch(Recipe(name="x", model=model))


def test_weights_are_looked_for_before_anything_else(folder: Path) -> None:
    def recipe(path: Path) -> Recipe:
        return Recipe(name="x", model=ModelConfig(path=str(path)))

    reasons = {"": r"contains no \*\.safetensors", "config.json": "is not a folder", "none": "does not exist"}
    for name, reason in reasons.items():
        with pytest.raises(UserError, match=f"{reason}; put the model's .* --set model.path=.* --from-scratch"):
            require_weights(recipe(folder / name))
    (folder / "model.safetensors").write_bytes(b"")
    require_weights(recipe(folder))
    require_weights(Recipe(name="x"))
