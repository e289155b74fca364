"""Learning rates over the steps of a run, and by parameter: factors by pattern and by layer, in every range that a
buffer can be cut into."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from plain_training import plain_training
from transformers.optimization import get_scheduler

from penstock.engine.config import TrainConfig
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.hf.config import model_config
from penstock.engine.machine.budgets import Budgets
from penstock.engine.model.spec import depths
from penstock.engine.optim.base import UpdateRange
from penstock.engine.optim.groups import lr_factors, runs
from penstock.engine.optim.lr import learning_rate
from penstock.storage.files.errors import UserError
from penstock.storage.tier.layout import ALIGN_NUMEL, FlatLayout, ParamSpec

SHAPES: dict[str, tuple[int, ...]] = {"a.weight": (50, 100), "a.bias": (100,), "b.weight": (40, 60), "b.norm": (60,)}
SHAPES["c.weight"] = (30, 100)
LAYOUT = FlatLayout.build([ParamSpec(name, shape, name.endswith("weight")) for name, shape in SHAPES.items()])
FACTORS = {"a.weight": 0.5, "a.bias": 0.25, "b.weight": 0.5, "b.norm": 1.0, "c.weight": 0.0}
GROUPS: dict[str, Any] = {"lr_groups": {"*self_attn*": 0.25, "*layernorm*": 0.0, "*embed*": 2.0}, "layer_lr_decay": 0.7}


def rates(**changes: Any) -> list[float]:
    train = TrainConfig(lr=1.0, **changes)
    return [learning_rate(train, step) for step in range(1, train.steps + 1)]


def test_how_long_wsd_stays_at_the_peak() -> None:
    lengths = ({}, 91), ({"steps": 5}, 5), ({"warmup_steps": 100}, 0)
    for changes, peaks in (*lengths, ({"warmup_steps": 4, "decay_steps": 96}, 1)):
        found = rates(**{"lr_schedule": "wsd", "min_lr_ratio": 0.0, "steps": 100} | changes)
        assert found.count(1.0) == peaks
    settings = {"lr_schedule": "wsd", "warmup_steps": 2, "decay_steps": 4}
    assert rates(steps=20, **settings)[:5] == rates(steps=8, **settings)[:5], "a run that is made longer goes on"


THEIRS: dict[tuple[str, float], tuple[str, dict[str, Any]]] = {
    ("constant", 0.1): ("constant_with_warmup", {}),
    ("linear", 0.0): ("linear", {}),
    ("linear", 0.1): ("polynomial", {"lr_end": 0.1}),
    ("cosine", 0.0): ("cosine", {}),
    ("cosine", 0.1): ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine", 1.0): ("cosine_with_min_lr", {"min_lr_rate": 1.0}),
    ("wsd", 0.0): ("warmup_stable_decay", {"decay_type": "1-sqrt"}),
    ("wsd", 0.3): ("warmup_stable_decay", {"decay_type": "1-sqrt", "min_lr_ratio": 0.3}),
}
"""lr_schedule and min_lr_ratio -> what it is called in transformers, with what arguments."""


@pytest.mark.parametrize(("schedule", "least"), THEIRS, ids=str)
def test_rates_are_those_of_hugging_faces_trainer(schedule: str, least: float) -> None:
    """Which takes a step and then moves its schedule on."""
    name, arguments = THEIRS[schedule, least]
    lengths = [(steps, warmup) for steps in (1, 2, 3, 7, 30, 101) for warmup in {0, 1, 2, steps // 3, steps - 1, steps}]
    for steps, warmup in lengths:
        if warmup > steps or warmup == steps == 1:
            continue
        left = steps - warmup
        for decay in sorted({1, 2, left // 2, left} & set(range(1, left + 1))) if schedule == "wsd" else [None]:
            optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
            given = arguments | ({} if decay is None else {"num_decay_steps": decay})
            theirs = get_scheduler(name, optimizer, warmup, steps, given)
            expected = []
            for _ in range(steps):
                if expected:
                    optimizer.step()
                    theirs.step()
                expected.append(optimizer.param_groups[0]["lr"])
            settings = {"steps": steps, "warmup_steps": warmup, "decay_steps": decay, "min_lr_ratio": least}
            assert rates(lr_schedule=schedule, **settings) == pytest.approx(expected, abs=1e-12), settings


@pytest.mark.parametrize(("changes", "said"), [
    ({"steps": 1, "warmup_steps": 1}, r"train\.warmup_steps: 1 would leave the only step a learning rate of zero"),
    ({"decay_steps": 0, "lr_schedule": "wsd"}, r"train\.decay_steps: 0 must be at least 1"),
    ({"decay_steps": 96, "lr_schedule": "wsd", "warmup_steps": 5},
     r"train\.decay_steps: 96 exceeds the 95 steps that remain of train\.steps after"),
    ({"layer_lr_decay": 0.0}, r"train\.layer_lr_decay: 0\.0 must be above 0, at most 1"),
    ({"layer_lr_decay": 1.1}, r"train\.layer_lr_decay: 1\.1 must be above 0"),
    ({"lr_groups": {"*norm*": -1.0}}, r"train\.lr_groups: the factor of '\*norm\*' is -1\.0; give 0 or more"),
], ids=str)  # fmt: skip
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        TrainConfig(**changes)


def names(num_layers: int = 3, *, tied: bool = False) -> dict[str, int]:
    recipe = tiny.recipe(model=tiny.model(num_layers=num_layers, tie_embeddings=tied))
    return depths(tiny.spec_of(model_config(recipe, recipe.model.vocab_size)))


def test_factors_by_layer_and_pattern() -> None:
    factors = lr_factors(TrainConfig(layer_lr_decay=0.5), names())
    assert factors["lm_head.weight"] == factors["model.norm.weight"] == 1
    assert [factors[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(3)] == [0.125, 0.25, 0.5]
    assert factors["model.layers.1.input_layernorm.weight"] == 0.25
    assert factors["model.embed_tokens.weight"] == 0.0625
    tied = lr_factors(TrainConfig(layer_lr_decay=0.5), names(tied=True))
    assert "lm_head.weight" not in tied
    assert tied["model.embed_tokens.weight"] == 0.0625
    assert lr_factors(TrainConfig(), names()) == {}
    # The first pattern counts, and multiplies the layer's factor.
    groups = {"*layers.2.*_proj.*": 4.0, "*proj*": 2.0, "*norm*": 0.0}
    factors = lr_factors(TrainConfig(lr_groups=groups, layer_lr_decay=0.5), names())
    assert factors["model.layers.2.mlp.up_proj.weight"] == 2
    assert factors["model.layers.1.mlp.up_proj.weight"] == 0.5
    assert factors["model.layers.1.self_attn.q_norm.weight"] == factors["model.norm.weight"] == 0
    assert factors["lm_head.weight"] == 1


@pytest.mark.parametrize(("groups", "said"), [
    ({"*.mlp.*": 0.1}, r"'\*\.mlp\.\*' matches only frozen parameters, which have no learning rate; remove it"),
    ({"*emb_tokens*": 0.1}, r"'\*emb_tokens\*' matches no parameter; the nearest are model\.embed_tokens\.weight"),
    ({"model.layers.7.mlp.up_proj.weight": 0.1},
     r"'model\.layers\.7\.mlp\.up_proj\.weight' matches no parameter; the nearest are model\.layers\.\*\.mlp"),
    ({"%": 0.1}, r"'%' matches no parameter; the nearest are model\.embed_tokens\.weight, "),
    ({"*": 1.0, "*norm*": 0.0}, r"'\*norm\*' applies to no parameter, as earlier patterns match them all"),
], ids=str)  # fmt: skip
def test_a_pattern_for_nothing_is_refused_at_once(tmp_path: Path, groups: dict[str, float], said: str) -> None:
    train = tiny.training(lr_groups=groups, freeze=["*.mlp.*"] if "*.mlp.*" in groups else [])
    with pytest.raises(UserError, match=rf"train\.lr_groups: {said}"):
        tiny.train_run(tmp_path / "run", tiny.Silent(), train=train)
    assert not (tmp_path / "run" / "state").exists()
    recipe = tiny.recipe(train=train)
    spec = tiny.spec_of(model_config(recipe, recipe.model.vocab_size), train.freeze)
    with pytest.raises(UserError, match=rf"train\.lr_groups: {said}"):  # a plan refuses it too
        PlanRequest(spec=spec, recipe=recipe, budgets=Budgets(1, 1, None, {}), device_type="cpu")


def test_runs_cover_a_range_and_join_what_is_alike() -> None:
    assert list(runs(UpdateRange(LAYOUT, 0, LAYOUT.numel), {})) == [(0, LAYOUT.numel, 1.0)]
    whole = list(runs(UpdateRange(LAYOUT, 0, LAYOUT.numel), FACTORS))
    assert [factor for _, _, factor in whole] == [0.5, 0.0, 0.25, 1.0], "a.weight and b.weight are one run"
    assert [start for start, _, _ in whole] == [0, *(end for _, end, _ in whole[:-1])]
    assert whole[-1][1] == LAYOUT.numel
    middle = UpdateRange(LAYOUT, ALIGN_NUMEL, LAYOUT.offsets["c.weight"] + ALIGN_NUMEL)
    assert list(runs(middle, FACTORS)) == [
        (ALIGN_NUMEL, LAYOUT.offsets["c.weight"], 0.5),
        (LAYOUT.offsets["c.weight"], middle.end, 0.0),
    ]


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
    assert [m.lr for m in metrics] == [0.0, 1.5e-3], "that of a factor of 1"
    for name, weight in weights.items():
        assert (weight - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
        assert torch.equal(weight, start[name]) == (by_hand(name) == 0), name
