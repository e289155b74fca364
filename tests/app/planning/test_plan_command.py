"""`penstock plan`: what a recipe is told before anything is launched; and what a model is made of, kept between plans:
the same forecasts sooner, and never from a file that is not right."""

import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tiny
from bad_model_files import CONFIG
from cli_process import REPOSITORY, done, refusal, started
from recipe_texts import recipe_text
from samples import cases
from transformers import Qwen3Config

from penstock.app.cli.main import main
from penstock.app.planning import model_cache
from penstock.app.planning.inputs import from_scratch
from penstock.app.planning.model_cache import cached_spec
from penstock.app.planning.plan import plan_stages
from penstock.app.recipes.recipe import load_recipe
from penstock.engine.config import Recipe
from penstock.engine.model.spec import ModelSpec
from penstock.engine.schedule.action import WORKING
from penstock.storage.files.errors import UserError
from penstock.storage.files.sealed import seal, unseal

RECIPES = sorted((REPOSITORY / "recipes").glob("*.py"))
OURS = [path for path in RECIPES if load_recipe(path).machine]
FEW = [path for path in OURS if path.stem == "qwen_1_5b_4gib"]
CHOSEN = {"activation_checkpointing": "auto", "kv_window": "auto"}
"""By the planner."""
SMALL = recipe_text(
    model={"num_layers": 4, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 1000},
    data={"source": "random", "path": None, "tokenizer_vocab_size": 4096, "sequence_length": 256},
    train={"steps": 100, "global_batch_size": 2, "chunk_tokens": None} | CHOSEN,
    budgets={"gpu": "256MiB", "ram": "256MiB", "nvme": "4GiB"},
    storage={"part_bytes": "32MiB"},
)

GIVEN = ("train.activation_checkpointing=selective", "train.kv_window=whole", "train.chunk_tokens=256")
"""What a plan could choose: that spares a search."""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.py"
    path.write_text(SMALL)
    return path


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def words(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.parametrize("path", cases(OURS, *FEW), ids=lambda path: path.stem)
def test_a_recipe_fits_the_machine_it_is_written_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    found = next(plan_stages(load_recipe(path)))
    assert found["fits"], found["refusal"]["message"]
    assert found["machine"]["name"] == load_recipe(path).machine
    for tier in found["tiers"].values():
        assert sum(tier["parts"].values()) == tier["peak_bytes"] <= tier["budget_bytes"]
    assert found["step_s"] > 0
    assert max(found["lanes"], key=lambda lane: found["lanes"][lane]["busy_s"]) == found["bound_by"]
    assert found["tokens_per_s"] == pytest.approx(found["tokens_per_step"] / found["step_s"])
    assert 0 < found["mfu"] <= found["hfu"] < 1


def test_json_has_everything_and_the_screen_fits(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = planned(capsys, str(small))
    assert (code, found["fits"], found["tokens_per_step"]) == (0, True, 512)
    assert "cluster" not in found
    assert set(found["tiers"]) == {"gpu", "ram", "nvme"}
    assert set(found["lanes"]) == set(WORKING)
    assert [block["name"] for block in found["blocks"]] == ["embed", *(f"layers.{i}" for i in range(4)), "head"]
    layer = found["blocks"][1]
    assert sum(layer["activation_checkpointing"].values()) == found["group_chunks"]
    assert found["run"]["seconds"] >= 100 * found["step_s"]
    assert found["run"]["drives"][0]["bytes_written"] > 0
    assert {"best_change", "compute_bound_tokens", "reasons", "mfu", "hfu", "model"} <= found.keys()
    trace = tmp_path / "trace.json"
    assert main(["plan", str(small), "--trace", str(trace)]) == 0
    screen = capsys.readouterr().out
    assert "fits on this machine: tiny" in screen
    assert len(screen.splitlines()) <= 46
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {"compute", "optimizer"} <= {event["cat"] for event in events}


def test_a_cluster_beside_the_machine(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(capsys, str(small), "--cluster", "1x2")
    assert code == 0
    there = found["cluster"]
    assert (there["nodes"], there["gpus_per_node"], there["micro_batches_per_gpu"]) == (1, 2, 1)
    assert there["fits"]
    assert there["run_s"] == pytest.approx(100 * there["step_s"])
    assert main(["plan", str(small), "--cluster", "1x2xh200"]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert "planned from data sheets, not measured" in screen
    assert re.search(r"to finish: \S+ here, \S+ there \([\d.]+ times as fast\)", screen)
    assert re.search(r"memory of a GPU [\d.]+ of 138 GiB: CUDA, NCCL, allocator", screen)
    assert re.search(r"bound by \w+: compute takes [\d.]+ m?s a step \(eager layers\)", screen)
    assert main(["plan", str(small), "--cluster", "1x2", *words("budgets.ram=1MiB", "budgets.nvme=1MiB")]) == 1
    assert "to finish: does not fit here, " in " ".join(capsys.readouterr().out.split())
    for cluster in ("0x8", "foo", "1x4", "1x2xfoo"):
        assert refusal(capsys, "plan", str(small), "--cluster", cluster).startswith(f"error: --cluster {cluster}")


def test_validations_and_samples_count(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan without a tokenizer takes samples for as many tokens as they can be; the memory they need is set aside."""

    def found(*settings: str) -> dict[str, Any]:
        return planned(capsys, str(small), *words(*GIVEN, *settings))[1]

    def run(*settings: str) -> dict[str, Any]:
        return dict(found(*settings)["run"])

    bare, held = found(), "data.validation_documents=3"
    without = bare["run"]
    assert without["validations"] == without["validation_s"] == 0
    some = run(held, "train.validate_every=30")
    more = run(held, "train.validate_every=30", "train.validation_sequences=6")  # a step has two
    assert some["validations"] == more["validations"] == 4, "after steps 30, 60, 90 and 100"
    assert 0 < some["validation_s"] < without["seconds"] / 100
    assert more["validation_s"] == pytest.approx(3 * some["validation_s"])
    assert some["seconds"] == pytest.approx(without["seconds"] + 4 * some["validation_s"])
    asked = ("samples.every=30", 'samples.prompts=["one", "and two"]', "samples.tokens=8")
    some, more = found(*asked), found(*asked[:2], "samples.tokens=16")
    assert without["samples"] is None
    told = some["run"]["samples"]
    assert told | {"seconds": 0} == {"every": 30, "prompts": 2, "tokens": 8, "times": 4, "seconds": 0}
    assert some["run"]["seconds"] == pytest.approx(without["seconds"] + 4 * told["seconds"])
    assert 1.5 * told["seconds"] < more["run"]["samples"]["seconds"] < 2.5 * told["seconds"]
    taken = [plan["tiers"]["gpu"]["parts"].get("samples", 0) for plan in (bare, some, more)]
    assert 0 == taken[0] < taken[1] <= taken[2]
    assert main(["plan", str(small), *words(*GIVEN, held, "train.validate_every=30", *asked)]) == 0
    screen = capsys.readouterr().out
    assert "4 validations of" in screen
    assert re.search(r"samples: 2 x 8 tokens every 30 steps, about [\d.]+ m?s each", screen)


def test_rewards_are_planned_in_whole_groups(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What else is tried, to say where computing takes longest or what would fit, has all completions of a prompt."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n' * 9)
    asked = (
        *("data.source=prompts", f"data.path={tmp_path / 'prompts.jsonl'}", "train.objective=grpo"),
        *('grpo.reward=["rewards.py:right"]', "grpo.num_generations=4", "grpo.max_completion_length=64"),
        *("train.global_batch_size=32", "data.validation_documents=4", "train.validate_every=30"),
    )
    code, found = planned(capsys, str(small), *words(*GIVEN, *asked))
    assert (code, found["bound_by"], found["compute_bound_tokens"]) == (0, "compute", 4 * 256)
    run = found["run"]
    assert (run["validations"], run["generations"]["prompts"]) == (4, 8)
    _, other = planned(capsys, str(small), *words(*GIVEN, *asked, "grpo.num_generations_eval=1"))
    assert 0 < other["run"]["validation_s"] < run["validation_s"] < run["generations"]["sampling_s"]
    code, found = planned(capsys, str(small), *words(*GIVEN, *asked, "budgets.ram=3MiB"))
    assert (code, found["fits"]) == (1, False)
    assert refusal(capsys, "plan", str(small), *words(*asked, "grpo.max_completion_length=255")).startswith(
        "error: data.sequence_length: 256 leaves no room for a prompt before grpo.max_completion_length=255"
    )


def test_what_does_not_fit_is_told_what_would(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tight = ("budgets.ram=3MiB", "train.chunk_tokens=256")
    code, found = planned(capsys, str(small), *words(*tight))
    assert (code, found["fits"], found["refusal"]["tier"]) == (1, False, "ram")
    assert found["refusal"]["short_bytes"] > 0
    changes = [change["set"] for change in found["refusal"]["changes"] if change["set"]]
    assert changes
    for change in changes:
        again, accepted = planned(capsys, str(small), *words(*tight, *change))
        assert again == 0, (change, accepted)


def test_a_missing_model_folder_is_planned_from_the_shape_and_a_model_without_a_recipe(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = planned(capsys, str(small), *words("model.path=nowhere", "name=x"), "--context", "128")
    assert code == 0
    assert "nowhere" in found["note"]
    assert found["tokens_per_step"] == 256, "the context of a recipe is changed"
    folder = tmp_path / "Qwen3-tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 2048}))
    code, found = planned(capsys, str(folder), "--context", "1024", "--set", "train.global_batch_size=2")
    assert (code, found["recipe"], found["tokens_per_step"]) == (0, "Qwen3-tiny", 2048)
    assert found["model"]["layers"] == CONFIG["num_hidden_layers"]
    assert "2048" in refusal(capsys, "plan", str(folder / "config.json"), "--context", "4096")
    assert "config.json" in refusal(capsys, "plan", str(tmp_path))


SPEC = tiny.spec_of(Qwen3Config(**CONFIG))
KEPT = replace(SPEC, config=None)


class Maker:
    """Takes the model apart, and counts how often."""

    calls = 0

    def __call__(self) -> ModelSpec:
        self.calls += 1
        return SPEC


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "penstock" / "models"


@pytest.fixture
def recipe(folder: Path) -> Recipe:
    return from_scratch(load_recipe(REPOSITORY / "recipes" / "8b_8k.py"))


def test_it_is_taken_apart_once_and_a_refusal_is_not_kept(folder: Path, recipe: Recipe) -> None:
    long = replace(recipe, data=replace(recipe.data, sequence_length=1 << 20))
    for _ in range(2):
        with pytest.raises(UserError, match="positions of model type"):
            next(plan_stages(long))
    assert not folder.exists()
    make = Maker()
    for _ in range(3):
        found = cached_spec(recipe, make)
        assert (found, found.graph_bytes) == (KEPT, SPEC.graph_bytes)
    assert make.calls == 1
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("model", {"num_layers": 2}), ("model", {"overrides": {"rope_theta": 1e6}}), ("data", {"sequence_length": 4096}),
    ("data", {"tokenizer_vocab_size": 5000}), ("train", {"freeze": ["*.mlp.*"]}),
    ("train", {"compute_dtype": "float32"}),
]  # fmt: skip


def test_another_model_config_or_version_is_another_file(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, version = Maker(), importlib.metadata.version
    cached_spec(recipe, make)
    for calls, (section, changes) in enumerate(CHANGES, start=2):
        part: Any = {section: replace(getattr(recipe, section), **changes)}
        cached_spec(replace(recipe, **part), make)
        cached_spec(replace(recipe, train=replace(recipe.train, steps=recipe.train.steps + 1)), make)
        assert make.calls == calls, changes
    make.calls = 0
    config = tmp_path / "model" / "config.json"
    config.parent.mkdir()
    recipe = replace(recipe, model=replace(recipe.model, path=str(config.parent)))
    for content in ("{}", '{"a": 1}', "{}"):
        config.write_text(content)
        cached_spec(recipe, make)
    assert make.calls == 2
    for name in ("penstock", "torch", "transformers"):
        monkeypatch.setattr(importlib.metadata, "version", lambda n, name=name: version(n) + "x" * (n == name))
        cached_spec(recipe, make)
    assert make.calls == 5


def _edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """A change of the file's content under a checksum that is right."""

    def edit(file: Path) -> None:
        content = unseal(json.loads(file.read_text())).content
        change(content)
        file.write_text(json.dumps(seal(content)))

    return edit


def _to_link(file: Path) -> None:
    file.rename(file.with_suffix(".moved"))
    file.symlink_to(file.with_suffix(".moved"))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "empty": lambda file: file.write_bytes(b""),
    "torn": lambda file: file.write_bytes(file.read_bytes()[:-40]),
    "no JSON": lambda file: file.write_bytes(b"\xff\x00" * 500),
    "flipped": lambda file: file.write_text(file.read_text().replace(str(SPEC.num_params), "385")),
    "no checksum": lambda file: file.write_text(json.dumps(unseal(json.loads(file.read_text())).content)),
    "no spec": _edit(lambda content: content.pop("spec")),
    "another's": _edit(lambda content: content.update(digest="0" * 64)),
    "of other types": _edit(lambda content: content["spec"].update(num_params="many")),
    "a list": _edit(lambda content: content.update(spec=[1])),
    "too long": lambda file: file.write_bytes(file.read_bytes() + b" " * (1 << 22)),
    "a link": _to_link,
    "others may write it": lambda file: file.chmod(0o622),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_what_is_not_right_is_made_again(folder: Path, recipe: Recipe, damage: Callable[[Path], Any]) -> None:
    make = Maker()
    cached_spec(recipe, make)
    (file,) = folder.iterdir()
    damage(file)
    for _ in range(2):
        assert (cached_spec(recipe, make), make.calls) == (KEPT, 2)


def test_nothing_is_read_of_another_user_and_a_folder_that_cannot_be_used_is_done_without(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, me = Maker(), os.geteuid()
    cached_spec(recipe, make)
    with patch.object(os, "geteuid", lambda: me + 1):
        cached_spec(recipe, make)
    assert make.calls == 2
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert cached_spec(recipe, make) == KEPT


def test_the_newest_are_kept(folder: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "_MOST_FILES", 2)
    make = Maker()
    for age in (1, 2, 3):
        one = replace(recipe, model=replace(recipe.model, num_layers=age))
        cached_spec(one, make)
        newest = max(folder.iterdir(), key=lambda file: file.stat().st_mtime)
        os.utime(newest, (1000 + age, 1000 + age))
    assert len(list(folder.iterdir())) == 2
    cached_spec(one, make)
    assert make.calls == 3


@pytest.mark.parametrize("name", cases(["tiny", "8b_8k", "120b_moe", "7b_512k_24gb"], "tiny"))
@pytest.mark.usefixtures("folder")
def test_plans_are_the_same(name: str, tmp_path: Path) -> None:
    """Taken apart here, then in a process of its own that finds it kept and loads neither PyTorch nor transformers."""
    path, machine = REPOSITORY / "recipes" / f"{name}.py", list[str]()
    if name == "tiny":
        path, machine = tmp_path / "tiny.py", ["--machine", "rtx4090-64"]
        budgets, data = dict.fromkeys(("gpu", "ram", "nvme")), {"source": "random", "path": None}
        data["tokenizer_vocab_size"] = 4096
        path.write_text(recipe_text(model={"vocab_size": 300}, data=data, budgets=budgets))
    *_, forecast = plan_stages(from_scratch(load_recipe(path)), *machine[1:])
    code = (
        "import sys\nfrom penstock.app.cli.main import main\n"
        f"code = main(['plan', {str(path)!r}, '--from-scratch', '--json', *{machine}])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'loaded'\nsys.exit(code)"
    )
    again = json.loads(done(started(REPOSITORY, sys.executable, "-c", code)).stdout)
    for found in (forecast, again):
        del found["search_s"]
    assert again == json.loads(json.dumps(forecast))
