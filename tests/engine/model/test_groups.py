"""Experts in groups, each a block of its own: what they compute, what they are stored as, how many there are."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.engine.branches.experts import run_group
from penstock.engine.config import BudgetConfig, Recipe
from penstock.engine.export import export
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.hf.config import model_config
from penstock.engine.machine.budgets import Budgets
from penstock.engine.machine.presets import GENERIC
from penstock.engine.model.anatomy import take_apart
from penstock.engine.model.groups import cut, uncut
from penstock.engine.model.types import default_config
from penstock.engine.opening import open_session
from penstock.engine.run_files import with_saved_inputs
from penstock.engine.self_check import TOLERANCE, check_model
from penstock.storage.files.errors import UserError

MOE = tiny.model(model_type="qwen3_moe", num_layers=2, overrides=tiny.EXPERTS)


@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v3", "qwen3_moe", "qwen3_next", "granitemoe"])
def test_gradients_are_those_of_transformers(model_type: str) -> None:
    """Of eight experts in four groups, some with biases, some beside experts that all tokens use."""
    result = check_model(default_config(model_type), split_layers="experts", expert_groups=4)
    assert result.ok, result.reason
    assert result.max_rel_error is not None
    assert result.max_rel_error < TOLERANCE


def test_a_cut_model_is_the_whole_one_again() -> None:
    whole = take_apart(model_config(MOE_RECIPE, None), ["*.layers.1.*"], split_layers="experts")
    for number in (1, 2, 4):
        spec = cut(whole, number)
        assert uncut(spec) == whole
        assert sum(param.numel for param in spec.params) == sum(param.numel for param in whole.params)
        assert len(spec.blocks) == len(whole.blocks) + 2 * (number - 1)
    names = [block.name for block in cut(whole, 2).blocks]
    assert names == ["embed", "layers.0", "layers.0.experts.0", "layers.0.experts.1", "layers.1",
                     "layers.1.experts.0", "layers.1.experts.1", "head"]  # fmt: skip
    assert "layers.1.experts.1.frozen" in cut(whole, 2).buffers
    with pytest.raises(UserError, match="the 4 experts of a layer do not divide into 3 groups; use one of 1, 2, 4"):
        cut(whole, 3)


def test_a_group_computes_its_own_share() -> None:
    """The sum over groups is what the module makes of all; a group that nobody chose makes nothing."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        small = replace(MOE, overrides=tiny.EXPERTS | {"num_experts": 6})
        config = model_config(replace(MOE_RECIPE, model=small), None)
        layer = AutoModelForCausalLM.from_config(config).model.layers[0].mlp.experts
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        hidden, shares = torch.randn(40, config.hidden_size), torch.rand(40, 3)
        chosen = torch.stack([torch.randperm(4)[:3] for _ in range(40)])  # never the last two
    total, empty = torch.zeros_like(hidden), 0
    for first in range(0, 6, 2):
        part = type(layer)(config)
        part.num_experts = 2
        for name, parameter in layer.named_parameters():
            setattr(part, name, torch.nn.Parameter(parameter[first : first + 2].detach()))
        made = run_group(part, (first, first + 2), hidden, chosen, shares)
        empty += made is None
        total += 0 if made is None else made
    assert empty == 1
    torch.testing.assert_close(total, layer(hidden, chosen, shares))


MOE_RECIPE = tiny.recipe(
    model=MOE,
    data=tiny.data(),
    train=tiny.training(steps=2, split_layers="experts", lr_groups={"*": 0.0}, calibrate=False, chunk_tokens=16),
    storage=tiny.storage(),
    budgets=BudgetConfig(gpu="64MiB", ram="256MiB"),
)


def test_an_export_has_the_imported_experts(tmp_path: Path) -> None:
    """Of a run in two groups, whose learning rates are zero; its number is known when it goes on."""
    model = AutoModelForCausalLM.from_config(model_config(MOE_RECIPE, None))
    model.save_pretrained(tmp_path / "model")
    run = replace(MOE_RECIPE, model=replace(MOE, path=str(tmp_path / "model")))
    run = replace(run, train=replace(run.train, expert_groups=2))
    with closing(open_session(run, run_dir=tmp_path, observer=tiny.Silent(), resume=False)) as session:
        assert len(session.spec.blocks) == 8
        tiny.steps(session)
    unsaid = replace(run, train=replace(run.train, expert_groups=None))
    assert with_saved_inputs(unsaid, tmp_path).train.expert_groups == 2
    with closing(open_session(unsaid, run_dir=tmp_path, observer=tiny.Silent(), resume=True)) as session:
        assert session.step == 2
    export(tmp_path, unsaid, out_dir=tmp_path / "export")
    trained, first = (load_file(tmp_path / name / "model.safetensors") for name in ("export", "model"))
    assert trained.keys() == first.keys()
    assert all(torch.equal(trained[name], first[name]) for name in first)


def test_the_plan_takes_as_many_groups_as_fit_and_are_soonest() -> None:
    """With a budget in which no layer's experts fit at once, more than one; where there is room, one."""
    shape = {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    model = tiny.model(model_type="qwen3_moe", num_layers=2, hidden_size=256, overrides=shape)
    recipe = replace(MOE_RECIPE, model=model, train=replace(MOE_RECIPE.train, lr_groups={}))
    spec = take_apart(model_config(recipe, None), split_layers="experts")

    def groups(gpu: int) -> tuple[int, Recipe]:
        budgets = Budgets(gpu, 1 << 32, None, {})
        task = PlanRequest(spec=spec, recipe=recipe, budgets=budgets, device_type="cuda").grouped(GENERIC)
        assert task.spec == cut(spec, task.recipe.train.expert_groups or 0)
        task.search(GENERIC)
        return len(task.spec.blocks), task.recipe

    of_a_layer = max(buffer.numel for buffer in spec.buffers.values())
    roomy, scarce = groups(1 << 32), groups(of_a_layer * 6)
    assert roomy[1].train.expert_groups == 1
    assert (scarce[1].train.expert_groups or 0) > 1
    with pytest.raises(UserError, match=r"budgets\.gpu: 1\.0 MiB"):
        groups(1 << 20)
