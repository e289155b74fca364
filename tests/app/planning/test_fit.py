"""`penstock fit`: every cell is what `penstock plan` says, shapes are the published ones, and nothing is guessed."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.app.cli.main import main
from penstock.app.planning import catalogue, fit
from penstock.app.planning.catalogue import NAMES, known_model
from penstock.app.planning.fit_view import print_fit
from penstock.app.planning.plan import plan_stages
from penstock.app.recipes.recipe import apply_overrides, from_dict, load_recipe
from penstock.engine.machine.presets import PRESETS, machine_here
from penstock.storage.files.errors import UserError

BILLIONS = {
    "Llama-3.2-1B": 1.236, "Qwen3-4B": 4.022, "Qwen2.5-7B": 7.616, "Llama-3.1-8B": 8.030, "Qwen2.5-14B": 14.770,
    "Qwen3-30B-A3B": 30.532, "Qwen2.5-32B": 32.764, "Llama-3.3-70B": 70.554, "gpt-oss-120b": 116.829,
    "Mistral-Large-2": 122.610,
}  # fmt: skip
"""Parameters, as the models' publishers count them."""
CELL: dict[str, Any] = {
    **{"model": "Mistral-Large-2", "context": 1_048_576, "gradient_dtype": "bfloat16", "stretched": True, "fits": True},
    **{"tokens_per_s": 12_345.6, "hours": 4321.0, "bound_by": "nvme_write", "kwh_at_most": 1234.5, "step_s": 1000.0},
    **{"written_bytes": 121 * 10**12, "endurance_share": 0.254, "mfu": 0.4},
    "peak_bytes": {"gpu": 2**36, "ram": 2**38, "nvme": 2**42},
}


def question(machine: str = "rtx4090-128", **options: Any) -> fit.Question:
    return fit.ask(machine=machine, **options)


def test_shapes_are_the_published_ones() -> None:
    assert tuple(BILLIONS) == NAMES
    for name, billions in BILLIONS.items():
        model = known_model(name)
        assert model.spec.num_params / 1e9 == pytest.approx(billions, abs=6e-4), name
        assert (model.spec.hidden_size, len(model.spec.attention)) == (model.shape.hidden_size, model.shape.num_layers)
        assert model.spec.vocab_size == model.shape.vocab_size
        assert sum(param.numel for param in model.spec.params) == model.spec.num_params


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_what_a_model_is_made_of_is_what_is_computed_at_any_context(name: str) -> None:
    """Where this fails, `python -m penstock.app.planning.catalogue` writes the file anew."""
    kept = known_model(name).spec
    for context in (8192, 1_048_576):
        computed = catalogue.computed_spec(name, context)
        assert kept == computed
        assert (kept.graph_bytes, kept.unread) == (computed.graph_bytes, computed.unread)
        assert list(kept.buffers) == list(computed.buffers)


def test_a_model_is_stretched_beyond_its_positions_and_not_before() -> None:
    for name in NAMES:
        model = known_model(name)
        reach = model.shape.max_position or 0
        assert model.reaching(reach) is model.shape
        rope = model.reaching(1_048_576).overrides["rope_parameters"]
        assert rope["factor"] * rope["original_max_position_embeddings"] == 1_048_576
    assert known_model("Qwen3-4B").reaching(65_536).overrides["rope_parameters"]["factor"] == 2


@pytest.mark.long
@pytest.mark.parametrize(("name", "shipped"), [("Llama-3.2-1B", None), ("Qwen2.5-14B", "14b_workstation")])
def test_a_cell_is_the_plan_of_its_recipe(name: str, shipped: str | None) -> None:
    """And of a shipped recipe with its batch: of that one's model, context and machine."""
    cell = fit.plan_cell(question("rtx4090-128"), name, 8192)
    ours = from_dict(cell["recipe"])
    recipe = ours
    if shipped is not None:
        batch = [f"train.global_batch_size={fit.STEP_TOKENS // 8192}", f"train.steps={cell['steps']}"]
        recipe = apply_overrides(load_recipe(shipped), batch)
    forecast = next(plan_stages(recipe))
    for field in ("step_s", "tokens_per_s", "bound_by", "mfu", "chunk_tokens", "steps"):
        assert cell[field] == forecast[field], field
    assert cell["peak_bytes"] == {tier: found["peak_bytes"] for tier, found in forecast["tiers"].items()}
    assert (ours.machine, ours.data.sequence_length, ours.train.steps) == ("rtx4090-128", 8192, cell["steps"])
    assert ours.train.global_batch_size == fit.STEP_TOKENS // 8192
    assert cell["hours"] == pytest.approx(1e7 / cell["tokens_per_s"] / 3600)
    assert cell["kwh_at_most"] == pytest.approx(0.45 * cell["hours"])  # 450 W
    written = sum(drive["bytes_written"] for drive in forecast["run"]["drives"])
    assert cell["written_bytes"] == written
    assert cell["endurance_share"] == pytest.approx(written / 2 / 2400e12)  # two drives


@pytest.mark.long
def test_the_first_context_that_does_not_fit_says_what_would() -> None:
    asked = question("rtx4090-64", contexts="512k,1M,2M")
    cell, beyond = (fit.plan_cell(asked, "Llama-3.3-70B", context) for context in asked.contexts[1:])
    assert (cell["fits"], cell["tier"], beyond["fits"]) == (False, "gpu", False)
    assert "changes" not in beyond
    alone = fit.plan_cell(replace(asked, contexts=(1 << 20,)), "Llama-3.3-70B", 1 << 20)
    recipe_change, machine_change = alone["changes"]
    assert recipe_change["set"] == ["data.sequence_length=524288"]
    assert fit.plan_cell(asked, "Llama-3.3-70B", 524_288)["fits"]
    assert cell["changes"] == [machine_change]
    assert machine_change["text"].endswith(" of GPU memory")


def test_what_completions_would_fit_is_tried_in_whole_groups() -> None:
    asked = question(contexts="8k,64k", objective="grpo", models="Llama-3.3-70B")
    cell = fit.plan_cell(asked, "Llama-3.3-70B", 65_536)
    assert (cell["fits"], cell["tier"]) == (False, "gpu")
    assert [change["text"].endswith(" of GPU memory") for change in cell["changes"]] == [True]


def test_this_machine_is_planned_by_its_real_sizes_until_it_is_probed(tmp_path: Path) -> None:
    machine = machine_here(tmp_path)
    assert machine.is_assumed
    assert machine.power_w is None
    assert 0 < machine.gpu_bytes < machine.ram_bytes
    assert machine.nvme_bytes > 0
    assert all(preset.power_w for preset in PRESETS.values())


def test_options_mean_what_people_write() -> None:
    asked = question(models="qwen2.5,*-2", contexts="1M,8k,3000", tokens="3.5B")
    assert asked.models == ("Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B", "Mistral-Large-2")
    assert asked.contexts == (3000, 8192, 1_048_576)
    assert asked.tokens == 3_500_000_000
    for options, message in (
        ({"models": "nothing-like-it"}, "--models nothing-like-it: matches none of Llama-3.2-1B, "),
        ({"contexts": "8k,many"}, "--contexts many: not a number from 1 to "),
        ({"contexts": "1"}, "--contexts 1: a context needs at least 2 tokens"),
        ({"tokens": "0"}, "--tokens 0: not a number"),
        ({"tokens": "1M", "data": Path("x")}, "--tokens and --data: "),
        ({"data": Path("no.jsonl")}, r"--data no.jsonl: cannot be read \(No such file or directory\)"),
    ):
        with pytest.raises(UserError, match=message):
            question(**options)


def test_a_files_tokens_are_estimated_from_its_text(tmp_path: Path) -> None:
    lines = tmp_path / "mine.jsonl"
    lines.write_text(3 * (json.dumps({"text": "a" * 4000, "other": "b" * 4000}) + "\n"))
    assert fit.count_tokens(lines)[0] == pytest.approx(3000, rel=1e-3)
    text = tmp_path / "mine.txt"
    text.write_text("word " * 800)
    assert fit.count_tokens(text) == (1000, "mine.txt, estimated at 4 bytes of its text a token")
    lines.write_text('{"text": "fine"}\n{"txt": 1}\n')
    with pytest.raises(UserError, match='line 2 is not a JSON object with a "text"'):
        fit.count_tokens(lines)


def test_the_command_streams_cells_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--machine", "rtx4090-64", "--models", "Llama-3.2-1B,gpt-oss", "--contexts", "8k", "--tokens", "20M"]
    assert main(["fit", *options, "--json"]) == 0
    head, small, large = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (head["tokens"], head["models"]) == (20_000_000, ["Llama-3.2-1B", "gpt-oss-120b"])
    assert (small["fits"], large["fits"], large["tier"]) == (True, False, "gpu")
    assert main(["fit", *options[:2], "--models", "gpt-oss", "--contexts", "8k"]) == 1
    text = capsys.readouterr().out
    assert "gpt-oss-120b        8,192   does not fit: gpu tier too small by " in text
    assert "would fit: a machine with " in text


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_keeps_to_its_width_and_says_what_is_not_known(width: int) -> None:
    out = io.StringIO()
    asked = question("rtx4090-128").to_json() | {"power_w": None}
    refused = {"fits": False, "tier": "gpu", "short_bytes": 2**34, "changes": []}
    unknown = CELL | {"endurance_share": None, "kwh_at_most": None, "mfu": None}
    cells = [CELL, unknown, {key: CELL[key] for key in ("model", "context", "gradient_dtype", "stretched")} | refused]
    print_fit(asked, cells, Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "12,346  4,321 h  nvme_write" in next(line for line in lines if "Mistral" in line)
    for part in ("no single change was found that makes it fit", "kWh: n/a"):
        assert part in out.getvalue()
    assert ("4.00 TiB" in out.getvalue()) == (width == 160)
