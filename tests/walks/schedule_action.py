"""An action of the schedule: emitted, priced, simulated, carried out."""

from pathlib import Path

import pytest
import tiny

from penstock.engine.forecast.costs import Conditions, Costs
from penstock.engine.forecast.report import predict
from penstock.engine.machine.presets import GENERIC
from penstock.engine.schedule.actions import ACTIONS, LARGEST
from penstock.engine.schedule.builder import ScheduleBuilder
from penstock.engine.schedule.passes import training
from penstock.engine.train import train_step


def test_it_is_emitted_priced_simulated_and_carried_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ACTIONS["largest"] is LARGEST
    with tiny.session(tmp_path) as session:
        plan = session.plan
        ops = [op for op in ScheduleBuilder(plan).ops(training(plan, 1)) if op.action is LARGEST]
        assert sorted(op.block for op in ops) == sorted(plan.buffers)
        on = Conditions(GENERIC, documents=[[0]] * len({chunk.micro_batch for chunk in plan.chunks}))
        costs = Costs(plan, on)
        assert all(costs.seconds(op) > 0 for op in ops)
        simulated = predict(plan, on)
        assert {span.op for span in simulated.spans} >= {"largest", "norm"}
        train_step(session)
    printed = capsys.readouterr().out
    assert all(f"largest gradient {name} " in printed for name in plan.buffers)
