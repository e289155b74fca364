"""What 1e-6 teaches: the rounding that is compared with, the figures by hand, and a small measurement."""

import json
from pathlib import Path

import pytest
import torch

from penstock.app.bench import precision


def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average() -> None:
    ulp = 2.0**-7  # of bfloat16 between 1 and 2
    values = torch.full((20_000,), 1 + 0.25 * ulp)
    generator = torch.Generator().manual_seed(0)
    for sign in (1, -1):
        found = precision.rounded_stochastically(sign * values, generator)
        assert found.dtype == torch.bfloat16
        up = (found.abs() == 1 + ulp).float().mean()
        assert (found.abs() == 1).float().mean() + up == 1
        assert (found.sign() == sign).all()
        assert up == pytest.approx(0.25, abs=0.02)
    exact = torch.randn(1000).bfloat16()
    assert torch.equal(precision.rounded_stochastically(exact.float(), generator), exact)


def test_what_is_learnt_is_a_share_of_what_float32_learns() -> None:
    def rows(last: float) -> list[dict[str, float]]:
        return [{"step": 0, "loss": 4.0, "changed": 0.0}, {"step": 9, "loss": last, "changed": 0.5}]

    found = precision.learnt({"float32": rows(3.0), "weights": rows(3.25), "in_place": rows(4.0)})
    assert found == {"float32": 1.0, "weights": 0.75, "in_place": 0.0}


@pytest.mark.long
def test_a_small_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a rate at which a few steps show it."""
    monkeypatch.chdir(tmp_path)
    report = precision.bench_precision(steps=10, before_steps=10, every=5, lr=1e-5, save=tmp_path / "found")
    cases = report["cases"]
    assert list(cases) == list(precision.CASES)
    assert all([row["step"] for row in rows] == [0, 5, 10] for rows in cases.values())
    assert len({rows[0]["loss"] for rows in cases.values()}) == 1, "all start at the same weights"
    assert cases["masters"][-1]["loss"] == pytest.approx(cases["float32"][-1]["loss"], rel=2e-3)
    assert report["learnt"]["masters"] == pytest.approx(1, abs=0.1)
    assert report["learnt"]["weights"] > 2 * report["learnt"]["in_place"]
    assert cases["float32"][-1]["changed"] > 0.95
    assert cases["weights"][-1]["changed"] > cases["in_place"][-1]["changed"]
    assert json.loads((tmp_path / "found.json").read_text()) == report
    assert "<svg" in (tmp_path / "found.svg").read_text()[:500]
    assert capsys.readouterr().out.startswith("10 steps at 1e-05, learnt of what float32 learns: float32 throughout")
