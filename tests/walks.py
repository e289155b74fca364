"""What docs/EXTENDING.md adds, section by section: it is trained, planned and shown."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import real_runs
import tiny
import torch
from recipe_texts import tiny_recipe
from torch import Tensor
from transformers import Qwen3Config

import penstock
from penstock.app.console.rows import plain
from penstock.app.recipes.recipe import apply_overrides
from penstock.engine.attention.select import attention_report, forget
from penstock.engine.config import DataConfig
from penstock.engine.data.formats.detect import detect
from penstock.engine.data.formats.reading import read_samples
from penstock.engine.forecast.costs import Costs
from penstock.engine.forecast.problem import LOGITS_BYTES
from penstock.engine.forecast.report import predict
from penstock.engine.machine.presets import GENERIC
from penstock.engine.model.reference import forward_backward, in_buffers
from penstock.engine.model.runner import ModelRunner
from penstock.engine.objectives.base import OBJECTIVES
from penstock.engine.optim.lr import learning_rate
from penstock.engine.schedule.actions import ACTIONS, LARGEST
from penstock.engine.schedule.builder import ScheduleBuilder
from penstock.engine.schedule.passes import training
from penstock.engine.self_check import check_model
from penstock.engine.session import Session
from penstock.engine.train import train_step
from penstock.storage.files.errors import UserError
from penstock.tui.app import PenstockApp
from penstock.tui.screens.run import RunScreen

# ---------------------------------------------------------------------- attention kernel


def test_it_is_chosen_and_its_gradients_are_transformers() -> None:
    forget()
    for pieces in (False, True):
        result = check_model(
            Qwen3Config(sliding_window=16, use_sliding_window=True, max_window_layers=1), pieces=pieces
        )
        assert result.ok, result.reason
    report = [entry for entry in attention_report() if entry["dtype"] == "float32"]
    assert {entry["direction"] for entry in report} == {"forward", "backward"}
    assert {entry["window"] for entry in report} == {False, True}
    assert all(entry["chosen"].startswith("plain,") for entry in report)


# ---------------------------------------------------------------------- data format


def test_questions_are_samples_that_are_trained_on(tmp_path: Path) -> None:
    file = tmp_path / "questions.blocks"
    file.write_text("".join(f"question: what is {i} squared\nanswer: it is {i * i}\n\n" for i in range(200)))
    data = DataConfig(source="questions", path=str(file), tokenizer_vocab_size=300, sequence_length=48)
    assert len(list(read_samples(data))) == 200
    found = detect(file)
    assert found.source == "questions"
    with tiny.session(tmp_path / "run", d=data) as session:
        losses = [train_step(session).loss for _ in range(2)]
    assert losses[1] < losses[0]


def test_a_malformed_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "questions.blocks"
    file.write_text("question: what\nanswer\n")
    with pytest.raises(UserError, match=r"questions\.blocks:2: no `name: value`"):
        list(read_samples(DataConfig(source="questions", path=str(file))))


def test_the_command_line_takes_its_name() -> None:
    recipe = apply_overrides(tiny.recipe(), ["data.source=questions", "data.path=text"])
    assert recipe.data.source == "questions"


# ---------------------------------------------------------------------- objective


def test_the_engine_gives_the_references_loss(tmp_path: Path) -> None:
    t = tiny.training(objective="hardest", steps=2)
    with tiny.session(tmp_path, t=t) as session:
        runner = ModelRunner(session.spec, device="cpu", dtype=torch.float32)
        weights = in_buffers(session.spec, tiny.parameters(session.store, session.spec))
        gradients = in_buffers(session.spec, {name: torch.zeros_like(weight) for name, weight in weights.items()})
        batch, chunk = session.loader.next_step(), session.plan.max_chunk_tokens
        expected = forward_backward(
            runner, weights, gradients, batch, chunk, LOGITS_BYTES["cpu"], objective=OBJECTIVES["hardest"]
        )
    with tiny.session(tmp_path / "again", t=t) as session:
        assert train_step(session).loss == expected


# ---------------------------------------------------------------------- block


def test_a_layers_mlp_is_a_block_that_trains_as_before(tmp_path: Path) -> None:
    assert check_model(Qwen3Config(), split_layers="mlp").ok
    losses: dict[str | None, list[float]] = {}
    for split in (None, "mlp"):
        with tiny.session(tmp_path / str(split), t=tiny.training(split_layers=split)) as session:
            if split is not None:
                assert "layers.0.mlp" in session.plan.buffers
            losses[split] = [train_step(session).loss for _ in range(3)]
    assert losses["mlp"] == pytest.approx(losses[None], rel=1e-5)


# ---------------------------------------------------------------------- tracker


def test_a_run_is_sent_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = {"source": "random", "path": None, "tokenizer_vocab_size": 300}
    recipe = replace(tiny_recipe(train={"steps": 3}, model={"vocab_size": 300}, data=data), trackers=["csv"])
    run = penstock.train(recipe, run_dir="run")
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [float(line.split(",")[1]) for line in (run / "losses.csv").read_text().splitlines()] == losses


# ---------------------------------------------------------------------- optimizer


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


# ---------------------------------------------------------------------- pane


async def test_it_is_shown_and_its_key_goes_there(tmp_path: Path) -> None:
    root = real_runs.make_root(tmp_path)
    real_runs.train(root, "first")
    run = root / "runs" / "first"
    best = min(json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines())
    app = PenstockApp(root, run=run)
    async with app.run_test(size=(120, 50)) as pilot:
        await real_runs.until(lambda: isinstance(app.screen, RunScreen), pilot.pause)
        screen = cast("RunScreen", app.screen)
        await real_runs.until(lambda: screen.data.metrics.rows == 12, pilot.pause)
        await pilot.pause(0.3)
        pane = screen.pane("best")
        assert plain(pane.rows(40, 1)).strip() == f"best loss {best:.4f}"
        assert pane.region.height > 0
        await pilot.press("8")
        assert screen.focused is pane


# ---------------------------------------------------------------------- schedule action


def test_it_is_emitted_priced_simulated_and_carried_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ACTIONS["largest"] is LARGEST
    with tiny.session(tmp_path) as session:
        plan = session.plan
        ops = [op for op in ScheduleBuilder(plan).ops(training(plan, 1)) if op.action is LARGEST]
        assert sorted(op.block for op in ops) == sorted(plan.buffers)
        costs = Costs(plan, GENERIC, None, [[0]] * len({chunk.micro_batch for chunk in plan.chunks}))
        assert all(costs.seconds(op) > 0 for op in ops)
        simulated = predict(plan, GENERIC, None, [[0]] * len({chunk.micro_batch for chunk in plan.chunks}))
        assert {span.op for span in simulated.spans} >= {"largest", "norm"}
        train_step(session)
    printed = capsys.readouterr().out
    assert all(f"largest gradient {name} " in printed for name in plan.buffers)
