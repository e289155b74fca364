"""The columns of a run's steps: what is missing, derived figures, time to the end, replayed steps."""

import math

import numpy as np
import pytest

from penstock.app.progress import Eta
from penstock.engine.events import StepMetrics
from penstock.tui.data.metrics import MetricsLog


def line(step: int, **more: object) -> dict[str, object]:
    return {"step": step, "loss": 3.0, "grad_norm": 1.0, "lr": 1e-4, "tokens": 100, "step_s": 2.0} | more


def filled(steps: int, **more: object) -> MetricsLog:
    log = MetricsLog()
    log.add(line(step, **more) for step in range(1, steps + 1))
    return log


def test_columns_and_totals() -> None:
    log = filled(1000)
    assert (log.rows, log.last_step) == (1000, 1000)
    assert (log.column("total_tokens")[-1], log.column("total_s")[9]) == (100_000, 20.0)
    np.testing.assert_allclose(log.column("ema"), 3.0)
    rows, column = log.rows, log.column("loss", log.rows)
    log.add(line(step, loss=5.0) for step in range(1001, 4000))
    assert (len(column), set(column)) == (rows, {3.0}), "a reader keeps whole rows while it grows"
    log.add([line(6, loss=9.0)])  # steps that are done again
    assert (log.rows, log.last("loss"), log.column("total_tokens")[-1]) == (6, 9.0, 600)
    log = filled(3, nvme_read_bytes={"/a": 10, "/b": 1}, nvme_written_bytes={"/a": 5}, tier_bytes={"gpu": 7})
    assert (log.read_bytes, log.written_bytes) == ({"/a": 30.0, "/b": 3.0}, {"/a": 15.0})
    assert (log.column("read_bytes").tolist(), log.tier_bytes) == ([11.0, 11.0, 11.0], {"gpu": 7.0})


def test_what_is_absent_or_foreign_is_nan() -> None:
    log = MetricsLog()
    odd = [{"step": 1}, {"step": 2, "loss": None, "tokens": "many"}, {"loss": 1}, {"step": True}, {"step": -1}]
    assert log.add([*odd, {"step": 3, "loss": 10**400, "tier_bytes": 3, "nvme_read_bytes": {"/a": "x"}}]) == 3
    assert np.isnan(log.column("loss")).all()
    assert (log.skipped, log.last("loss"), log.eta_s(10), log.z_score("loss")) == (3, None, None, None)
    # Absurd figures are none, too, and totals never fall.
    log = MetricsLog()
    steps = [line(1), line(2, tokens=-5, step_s=-1e9), line(3, loss=1e300, tokens=10**400), line(4)]
    log.add([*steps, {"step": 1e29}, {"step": 10**400}, {"step": float("nan")}])
    assert (log.rows, log.last_step, log.skipped) == (4, 4, 3)
    assert log.column("total_tokens").tolist() == [100.0, 100.0, 100.0, 200.0]
    assert log.column("total_s").tolist() == [2.0, 2.0, 4.0, 6.0]
    assert math.isnan(log.column("loss")[2])


def test_average_starts_as_a_mean_and_goes_on_over_a_gap() -> None:
    for losses, averages in (((4.0, None, 4.0), [4.0] * 3), ((2.0, 4.0), [2.0, pytest.approx(3.0)])):
        log = MetricsLog()
        log.add(line(step, loss=loss) for step, loss in enumerate(losses, 1))
        assert log.column("ema").tolist() == averages


def test_eta_is_that_of_the_command_line() -> None:
    log, eta = MetricsLog(), Eta(100)
    for step in range(1, 41):
        step_s = 10.0 if step <= 2 else 1.0 + step / 10
        log.add([line(step, step_s=step_s)])
        metrics = StepMetrics(step=step, loss=1, grad_norm=1, lr=1, tokens=1, step_s=step_s, tokens_per_s=1)
        expected = eta.update(metrics)
        assert log.eta_s(100) == (None if expected is None else pytest.approx(expected))


def test_eta_leaves_out_the_resumed_process_warm_up_and_counts_down() -> None:
    log = MetricsLog()
    log.add(line(step, time=1000.0 + step) for step in range(1, 31))
    log.add([line(31, step_s=50.0, time=5000.0), line(32, step_s=50.0, time=5050.0)])
    assert log.eta_s(40, started=4000.0) is None
    log.add([line(33, step_s=4.0, time=5054.0)])
    assert [log.eta_s(40, started=4000.0, now=now) for now in (None, 5055.0, 9999.0)] == [28.0, 27.0, 24.0]
    assert log.eta_s(33) == 0.0


def test_z_score_of_a_spike() -> None:
    log = MetricsLog()
    log.add(line(step, loss=3.0 + (step % 2) * 0.1) for step in range(1, 60))
    log.add([line(60, loss=9.0)])
    assert log.z_score("loss") > 50
    assert filled(60).z_score("loss") is None  # nothing varies


def test_validations() -> None:
    log = filled(10)
    assert log.add_validation([{"step": 4, "loss": 2.0}, {"step": 8, "loss": 1.5}, {"loss": 1}]) == 2
    assert log.add_validation([{"step": 8, "loss": 1.25}]) == 1
    assert [column.tolist() for column in log.validation] == [[4, 8], [2.0, 1.25]]
    assert log.validation_at("total_tokens").tolist() == [400.0, 800.0]
    assert math.isnan(MetricsLog().recent_mean("loss") or math.nan)
