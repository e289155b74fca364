"""`penstock plan`: what a recipe is told before anything is launched."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from bad_model_files import CONFIG
from cli_process import refusal
from recipe_texts import recipe_text
from samples import cases

from penstock.app.cli import main
from penstock.app.recipe import load_recipe
from penstock.engine.schedule.actions import LANES

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.py"))
OURS = [path for path in RECIPES if load_recipe(path).machine]
FEW = [path for path in OURS if path.stem == "qwen_1_5b_4gib"]
CHOSEN = {"activation_checkpointing": "auto", "kv_window": "auto"}
"""By the planner."""
SMALL = recipe_text(
    model={"num_layers": 4, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 1000},
    data={"source": "random", "sequence_length": 256},
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


def words(settings: tuple[str, ...]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.mark.parametrize("path", cases(OURS, *FEW), ids=lambda path: path.stem)
def test_a_recipe_fits_the_machine_it_is_written_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.app.plan import plan_recipe

    monkeypatch.chdir(path.parent)
    found = plan_recipe(load_recipe(path), advice=False)
    assert found["fits"], found["refusal"]["message"]
    assert found["machine"]["name"] == load_recipe(path).machine
    for tier in found["tiers"].values():
        assert tier["peak_bytes"] <= tier["budget_bytes"]
        assert sum(tier["parts"].values()) == tier["peak_bytes"]
    assert found["step_s"] > 0
    assert max(found["lanes"], key=lambda lane: found["lanes"][lane]["busy_s"]) == found["bound_by"]
    assert found["tokens_per_s"] == pytest.approx(found["tokens_per_step"] / found["step_s"])
    assert 0 < found["mfu"] <= found["hfu"] < 1


def test_json_has_everything(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(capsys, str(small))
    assert code == 0
    assert found["fits"] is True
    assert found["tokens_per_step"] == 512
    assert set(found["tiers"]) == {"gpu", "ram", "nvme"}
    assert set(found["lanes"]) == set(LANES)
    assert [block["name"] for block in found["blocks"]] == ["embed", *(f"layers.{i}" for i in range(4)), "head"]
    layer = found["blocks"][1]
    assert sum(layer["activation_checkpointing"].values()) == found["group_chunks"]
    assert found["run"]["seconds"] >= 100 * found["step_s"]
    assert found["run"]["drives"][0]["bytes_written"] > 0
    assert {"best_change", "compute_bound_tokens", "reasons", "mfu", "hfu", "model"} <= found.keys()


def test_a_cluster_beside_the_machine(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(capsys, str(small), "--cluster", "1x2")
    assert code == 0
    there = found["cluster"]
    assert (there["nodes"], there["gpus_per_node"], there["micro_batches_per_gpu"]) == (1, 2, 1)
    assert there["fits"]
    assert there["run_s"] == pytest.approx(100 * there["step_s"])
    assert "cluster" not in planned(capsys, str(small))[1]
    assert main(["plan", str(small), "--cluster", "1x2xh200"]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert "planned from data sheets, not measured" in screen
    assert re.search(r"to finish: \S+ here, \S+ there \([\d.]+ times as fast\)", screen)
    assert re.search(r"memory of a GPU [\d.]+ of 138 GiB: CUDA, NCCL, allocator", screen)
    assert re.search(r"bound by \w+: compute takes [\d.]+ m?s a step \(eager layers\)", screen)
    assert main(["plan", str(small), "--cluster", "1x2", *words(("budgets.ram=1MiB", "budgets.nvme=1MiB"))]) == 1
    assert "to finish: does not fit here, " in " ".join(capsys.readouterr().out.split())


def test_a_cluster_that_cannot_be(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for cluster in ("0x8", "foo", "1x4", "1x2xfoo"):
        assert refusal(capsys, "plan", str(small), "--cluster", cluster).startswith(f"error: --cluster {cluster}")


def test_validations_count(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*settings: str) -> dict[str, Any]:
        return dict(planned(capsys, str(small), *words((*GIVEN, *settings)))[1]["run"])

    without, held = run(), "data.validation_documents=3"
    assert without["validations"] == without["validation_s"] == 0
    some = run(held, "train.validate_every=30")
    more = run(held, "train.validate_every=30", "train.validation_sequences=6")  # a step has two
    assert some["validations"] == more["validations"] == 4, "after steps 30, 60, 90 and 100"
    assert 0 < some["validation_s"] < without["seconds"] / 100
    assert more["validation_s"] == pytest.approx(3 * some["validation_s"])
    assert some["seconds"] == pytest.approx(without["seconds"] + 4 * some["validation_s"])
    assert main(["plan", str(small), *words((*GIVEN, held, "train.validate_every=30"))]) == 0
    assert "4 validations of" in capsys.readouterr().out


def test_samples_count(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan without a tokenizer takes them for as many tokens as they can be; the memory they need is set aside."""

    def found(*settings: str) -> dict[str, Any]:
        return dict(planned(capsys, str(small), *words((*GIVEN, *settings)))[1])

    asked = ("samples.every=30", 'samples.prompts=["one", "and two"]', "samples.tokens=8")
    without, some, more = found(), found(*asked), found(*asked[:2], "samples.tokens=16")
    assert without["run"]["samples"] is None
    told = some["run"]["samples"]
    assert told | {"seconds": 0} == {"every": 30, "prompts": 2, "tokens": 8, "times": 4, "seconds": 0}
    assert some["run"]["seconds"] == pytest.approx(without["run"]["seconds"] + 4 * told["seconds"])
    assert 1.5 * told["seconds"] < more["run"]["samples"]["seconds"] < 2.5 * told["seconds"]
    for tier in ("gpu", "ram"):
        assert without["tiers"][tier]["parts"].get("samples", 0) == 0
        assert 0 < some["tiers"][tier]["parts"]["samples"] <= more["tiers"][tier]["parts"]["samples"]
    assert main(["plan", str(small), *words((*GIVEN, *asked))]) == 0
    assert re.search(r"samples: 2 x 8 tokens every 30 steps, about [\d.]+ m?s each", capsys.readouterr().out)


def test_the_screen_and_the_trace(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert main(["plan", str(small), "--trace", str(trace)]) == 0
    screen = capsys.readouterr().out
    assert "fits on this machine: tiny" in screen
    assert len(screen.splitlines()) <= 46
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {"compute", "optimizer"} <= {event["cat"] for event in events}


def test_what_does_not_fit_is_told_what_would(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = planned(capsys, str(small), "--set", "budgets.ram=3MiB", "--set", "train.chunk_tokens=256")
    assert code == 1
    assert found["fits"] is False
    assert found["refusal"]["tier"] == "ram"
    assert found["refusal"]["short_bytes"] > 0
    changes = [change["set"] for change in found["refusal"]["changes"] if change["set"]]
    assert changes
    for change in changes:
        settings = ("budgets.ram=3MiB", "train.chunk_tokens=256", *change)
        again, accepted = planned(capsys, str(small), *words(settings))
        assert again == 0, (change, accepted)


def test_a_missing_model_folder_is_planned_from_the_shape(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = planned(capsys, str(small), *words(("model.path=nowhere", "name=x")), "--context", "128")
    assert code == 0
    assert "nowhere" in found["note"]
    assert found["tokens_per_step"] == 256, "the context of a recipe is changed"


def test_a_model_is_planned_without_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "Qwen3-tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 2048}))
    code, found = planned(capsys, str(folder), "--context", "1024", "--set", "train.global_batch_size=2")
    assert (code, found["recipe"]) == (0, "Qwen3-tiny")
    assert found["tokens_per_step"] == 2048
    assert found["model"]["layers"] == CONFIG["num_hidden_layers"]
    assert "2048" in refusal(capsys, "plan", str(folder / "config.json"), "--context", "4096")
    assert "config.json" in refusal(capsys, "plan", str(tmp_path))
