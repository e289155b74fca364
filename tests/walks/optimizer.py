"""Optimizers, by element and by whole parameters: over three tiers, resumed, beside plain PyTorch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor

from penstock.engine.forecast.problem import LOGITS_BYTES
from penstock.engine.model.reference import forward_backward, in_buffers
from penstock.engine.model.runner import ModelRunner
from penstock.engine.optim.lr import learning_rate
from penstock.engine.session import Session
from penstock.engine.train import train_step

Tensors = dict[str, Tensor]
STEPS = 4
BUDGETS = {"sgd": (900_000, 1_450_000), "normalised": (900_000, 1_200_000)}
TIERS = {"sgd": {"gpu", "ram", "nvme"}, "normalised": {"gpu", "nvme"}}
"""Of the state, within these budgets."""


def session(folder: Path, optimizer: str) -> Session:
    gpu, ram = BUDGETS[optimizer]
    t = tiny.training(optimizer=optimizer, steps=STEPS, clip_norm=None, beta1=0.9, weight_decay=0.1)
    return tiny.session(folder, t=t, gpu=gpu, ram=ram)


def train(folder: Path, optimizer: str, *parts: int) -> Tensors:
    """The weights after sessions of so many steps, one after the other."""
    for steps in parts:
        with session(folder, optimizer) as opened:
            assert {buffer.state for buffer in opened.plan.buffers.values()} == TIERS[optimizer]
            for _ in range(steps):
                train_step(opened)
            opened.finish()
            weights = tiny.parameters(opened.store, opened.spec)
    return weights


def plainly(folder: Path, optimizer: str, update: Callable[[Tensors, Tensors, float], None]) -> Tensors:
    """The weights after as many plain steps, in which `update` is given weights, gradients and learning rate."""
    with session(folder, optimizer) as opened:
        recipe, chunk = opened.recipe.train, opened.plan.max_chunk_tokens
        runner = ModelRunner(opened.spec, device="cpu", dtype=torch.float32)
        weights = in_buffers(opened.spec, tiny.parameters(opened.store, opened.spec))
        for step in range(1, STEPS + 1):
            gradients = in_buffers(opened.spec, {name: torch.zeros_like(weight) for name, weight in weights.items()})
            batch = opened.loader.next_step()
            forward_backward(runner, weights, gradients, batch, chunk, LOGITS_BYTES["cpu"])
            update(weights, gradients, learning_rate(recipe, step))
    return weights


def same(computed: Tensors, expected: Tensors) -> None:
    assert computed.keys() == expected.keys()
    for name, weight in computed.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-6, msg=name)


def test_sgd_is_torchs_over_three_tiers_and_resumes(tmp_path: Path) -> None:
    made: list[torch.optim.SGD] = []

    def update(weights: Tensors, gradients: Tensors, lr: float) -> None:
        if not made:
            decayed = [weight for weight in weights.values() if weight.dim() > 1]
            others = [weight for weight in weights.values() if weight.dim() == 1]
            groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
            made.append(torch.optim.SGD(groups, lr=lr, momentum=0.9))
        for name, weight in weights.items():
            weight.grad = gradients[name]
        for group in made[0].param_groups:
            group["lr"] = lr
        made[0].step()

    whole = train(tmp_path / "whole", "sgd", STEPS)
    same(whole, plainly(tmp_path / "plain", "sgd", update))
    resumed = train(tmp_path / "resumed", "sgd", 2, STEPS - 2)
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


def test_an_optimizer_sees_parameters_whole(tmp_path: Path) -> None:
    def update(weights: Tensors, gradients: Tensors, lr: float) -> None:
        for name, weight in weights.items():
            weight -= gradients[name] / (gradients[name].norm() + 1e-8) * lr

    with session(tmp_path / "whole", "normalised") as opened:
        assert all(buffer.num_parts == 1 for buffer in opened.plan.buffers.values())
    same(train(tmp_path / "whole", "normalised", STEPS), plainly(tmp_path / "plain", "normalised", update))


@pytest.mark.parametrize("optimizer", ["sgd", "normalised"])
def test_a_run_from_a_recipe_takes_it(tmp_path: Path, optimizer: str) -> None:
    observer = tiny.Silent()
    tiny.train_run(tmp_path, observer, train=tiny.training(optimizer=optimizer, steps=2, calibrate=True))
    assert len(observer.metrics) == 2
