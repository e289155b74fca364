"""Learning rates by parameter: factors by pattern and by layer, in every range that a buffer can be cut into."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from plain import plain_training
from torch import Tensor

from penstock.engine.config import TrainConfig
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.hf.config import model_config
from penstock.engine.machine.budgets import Budgets
from penstock.engine.model.spec import depths
from penstock.engine.optim.adamw import AdamW
from penstock.engine.optim.base import UpdateRange
from penstock.engine.optim.groups import lr_factors, runs, with_factors
from penstock.storage.errors import UserError
from penstock.storage.layout import ALIGN_NUMEL, FlatLayout, ParamSpec

CPU = torch.device("cpu")
LAYOUT = FlatLayout.build(
    [
        ParamSpec("a.weight", (50, 100), True),
        ParamSpec("a.bias", (100,), False),
        ParamSpec("b.weight", (40, 60), True),
        ParamSpec("b.norm", (60,), False),
        ParamSpec("c.weight", (3000,), True),
    ]
)
FACTORS = {"a.weight": 0.5, "a.bias": 0.25, "b.weight": 0.5, "b.norm": 1.0, "c.weight": 0.0}


def names(num_layers: int = 3, *, tied: bool = False) -> dict[str, int]:
    recipe = tiny.recipe(model=tiny.model(num_layers=num_layers, tie_embeddings=tied))
    return depths(tiny.spec_of(model_config(recipe, recipe.model.vocab_size)))


def test_factors_by_layer() -> None:
    factors = lr_factors(TrainConfig(layer_lr_decay=0.5), names())
    assert factors["lm_head.weight"] == factors["model.norm.weight"] == 1
    assert [factors[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(3)] == [0.125, 0.25, 0.5]
    assert factors["model.layers.1.input_layernorm.weight"] == 0.25
    assert factors["model.embed_tokens.weight"] == 0.0625
    tied = lr_factors(TrainConfig(layer_lr_decay=0.5), names(tied=True))
    assert "lm_head.weight" not in tied
    assert tied["model.embed_tokens.weight"] == 0.0625
    assert lr_factors(TrainConfig(), names()) == {}


def test_the_first_pattern_counts_and_multiplies_the_layers_factor() -> None:
    groups = {"*layers.2.*_proj.*": 4.0, "*proj*": 2.0, "*norm*": 0.0}
    factors = lr_factors(TrainConfig(lr_groups=groups, layer_lr_decay=0.5), names())
    assert factors["model.layers.2.mlp.up_proj.weight"] == 2
    assert factors["model.layers.1.mlp.up_proj.weight"] == 0.5
    assert factors["model.layers.1.self_attn.q_norm.weight"] == factors["model.norm.weight"] == 0
    assert factors["lm_head.weight"] == 1


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"*emb_tokens*": 0.1}, r"'\*emb_tokens\*' matches no parameter; the nearest are model\.embed_tokens\.weight"),
        (
            {"model.layers.7.mlp.up_proj.weight": 0.1},
            r"'model\.layers\.7\.mlp\.up_proj\.weight' matches no parameter; the nearest are model\.layers\.\*\.mlp",
        ),
        ({"%": 0.1}, r"'%' matches no parameter; the nearest are model\.embed_tokens\.weight, "),
        ({"*": 1.0, "*norm*": 0.0}, r"'\*norm\*' applies to no parameter, as earlier patterns match them all"),
    ],
    ids=str,
)
def test_a_pattern_that_counts_for_nothing_is_refused_before_anything_is_made(
    tmp_path: Path, groups: dict[str, float], said: str
) -> None:
    with pytest.raises(UserError, match=rf"train\.lr_groups: {said}"):
        tiny.train_run(tmp_path / "run", tiny.Silent(), train=tiny.training(lr_groups=groups))
    assert not (tmp_path / "run" / "state").exists()


def test_a_plan_refuses_it_too() -> None:
    recipe = tiny.recipe(train=tiny.training(lr_groups={"*emb_tokens*": 0.1}))
    spec = tiny.spec_of(model_config(recipe, recipe.model.vocab_size))
    with pytest.raises(UserError, match="matches no parameter"):
        PlanRequest(spec=spec, recipe=recipe, budgets=Budgets(1, 1, None, {}), device_type="cpu")


def test_runs_cover_a_range_and_join_what_is_alike() -> None:
    assert list(runs(UpdateRange(LAYOUT, 0, LAYOUT.numel), {})) == [(0, LAYOUT.numel, 1.0)]
    whole = list(runs(UpdateRange(LAYOUT, 0, LAYOUT.numel), FACTORS))
    assert [factor for _, _, factor in whole] == [0.5, 0.0, 0.25, 1.0], "a.weight and b.weight are one run"
    assert [start for start, _, _ in whole] == [0, *(end for _, end, _ in whole[:-1])]
    assert whole[-1][1] == LAYOUT.numel
    middle = UpdateRange(LAYOUT, ALIGN_NUMEL, LAYOUT.offset("c.weight") + ALIGN_NUMEL)
    assert list(runs(middle, FACTORS)) == [
        (ALIGN_NUMEL, LAYOUT.offset("c.weight"), 0.5),
        (LAYOUT.offset("c.weight"), middle.end, 0.0),
    ]


def test_two_steps_equal_torchs_param_groups_wherever_ranges_are_cut() -> None:
    """Cuts fall into parameters as the parts of NVMe do, and anywhere else besides."""
    t = tiny.training(weight_decay=0.3, eps=1e-6)
    chance = random.Random(0)
    for cuts in ([], range(0, LAYOUT.numel, ALIGN_NUMEL), *(chance.sample(range(LAYOUT.numel), 5) for _ in range(5))):
        bounds = sorted({0, *cuts, LAYOUT.numel})
        state = {kind: torch.zeros(LAYOUT.numel) for kind in ("master", "exp_avg", "exp_avg_sq")}
        weights = torch.zeros(LAYOUT.numel)
        start = {param.name: torch.randn(param.shape) for param in LAYOUT.params}
        for name, master in LAYOUT.views(state["master"]).items():
            master.copy_(start[name])
        expected = {name: value.clone().requires_grad_() for name, value in start.items()}
        theirs = torch.optim.AdamW(
            [
                {"params": [expected[p.name]], "lr": 1e-2 * FACTORS[p.name], "weight_decay": 0.3 if p.decay else 0.0}
                for p in LAYOUT.params
            ],
            betas=(t.beta1, t.beta2),
            eps=t.eps,
        )
        ours = with_factors(AdamW("fused"), FACTORS)
        for step in (1, 2):
            gradient = torch.zeros(LAYOUT.numel)
            for name, view in LAYOUT.views(gradient).items():
                view.copy_(torch.randn(view.shape))
                expected[name].grad = view * 0.5
            theirs.step()
            scalars = ours.scalars(t, 1e-2, step, 0.5, CPU)
            for first, last in itertools.pairwise(bounds):
                part = {kind: tensor[first:last] for kind, tensor in state.items()}
                where = UpdateRange(LAYOUT, first, last)
                ours.step(part, gradient[first:last], weights[first:last], where, scalars)
        for name, weight in LAYOUT.views(weights).items():
            torch.testing.assert_close(weight, expected[name].detach(), rtol=1e-6, atol=1e-6, msg=name)
        assert torch.equal(LAYOUT.views(weights)["c.weight"], start["c.weight"]), "a factor of 0"
        assert torch.equal(weights, state["master"])


GROUPS: dict[str, Any] = {"lr_groups": {"*self_attn*": 0.25, "*layernorm*": 0.0, "*embed*": 2.0}, "layer_lr_decay": 0.7}


def by_hand(name: str) -> float:
    layer = 0.7 ** (3 - int(name.split(".")[2])) if ".layers." in name else 0.7**4 if "embed" in name else 1.0
    return layer * (0.25 if "self_attn" in name else 0 if "layernorm" in name else 2 if "embed" in name else 1)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.long)], ids=["tied", "untied"])
def test_a_run_over_all_tiers_equals_plain_pytorch(tmp_path: Path, tied: bool) -> None:
    settings: dict[str, Any] = {
        "m": tiny.model(tie_embeddings=tied),
        "t": tiny.training(steps=2, warmup_steps=2, clip_norm=0.5, lr=3e-3, **GROUPS),
    }
    with tiny.session(tmp_path / "plain", **settings) as session:
        start = tiny.parameters(session.store, session.spec)
        losses, expected, _ = plain_training(session, 2, by_hand)
    digests = set()
    for i, (gpu, ram) in enumerate(tiny.TIERS[2:] if tied else tiny.TIERS):
        with tiny.session(tmp_path / str(i), **settings, gpu=gpu, ram=ram) as session:
            if (gpu, ram) == (tiny.FLOOR, tiny.FLOOR):
                assert max(buffer.num_parts for buffer in session.plan.buffers.values()) > 1
            metrics = tiny.steps(session)
            weights = tiny.parameters(session.store, session.spec)
            digests.add(tiny.digest(session.store))
    assert len(digests) == 1
    assert [m.loss for m in metrics] == pytest.approx(losses, rel=1e-5)
    assert [m.lr for m in metrics] == [1.5e-3, 3e-3], "that of a factor of 1"
    for name, weight in weights.items():
        assert _off(weight, expected[name]) <= 1e-5, name
        assert torch.equal(weight, start[name]) == (by_hand(name) == 0), name


def _off(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())
