"""What an objective measures beside its loss, from the engine's observer to a run's files and whoever reads them."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_process import json_lines
from test_run_log import FIELDS

import penstock
from penstock.app.cli.main import main
from penstock.app.launch.run import summary_of
from penstock.app.runs.directory import RunDir
from penstock.app.runs.log import RunLog
from penstock.app.runs.measured import MOST_NAMES, by_weight, measured_of, measured_text
from penstock.engine.config import Recipe
from penstock.engine.events import StepMetrics, ValidationMetrics

MARGINS = [0.0, math.nan, 0.5]
"""Of each step."""


def write(run: Path, step: int = 0) -> None:
    """A run of three steps, each validated, resumed after `step`."""
    log = RunLog(run, total_steps=3, step=step)
    for number, margin in enumerate(MARGINS[step:], start=step + 1):
        fields = FIELDS | {"measured": {"logps/chosen": -9.0 - number, "kl": math.inf, "rewards/margins": margin}}
        log.step(StepMetrics(step=number, loss=0.7, **fields))
        rest = {"tokens": 5, "seconds": 0.5, "time": 9.0, "measured": {"rewards/margins": margin / 2}}
        log.validation(ValidationMetrics(step=number, loss=0.6, **rest))
    log.close("finished")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    RunDir.create(Recipe(name="pairs"), tmp_path / "runs" / "pairs").__exit__()
    write(tmp_path / "runs" / "pairs")
    return tmp_path / "runs" / "pairs"


def equal(found: list[dict[str, float]], expected: list[dict[str, float]]) -> bool:
    """NaN is NaN's equal."""
    return [{k: repr(v) for k, v in one.items()} for one in found] == [
        {k: repr(v) for k, v in one.items()} for one in expected
    ]


def test_lines_have_it_with_null_for_what_is_not_finite_and_a_reader_has_nan_again(run: Path) -> None:
    def null(value: float) -> float | None:
        return value if math.isfinite(value) else None

    for _ in range(2):  # and once more, its last step done again
        assert [line["measured"] for line in json_lines(run / "metrics.jsonl")] == [
            {"logps/chosen": -9.0 - step, "kl": None, "rewards/margins": null(margin)}
            for step, margin in enumerate(MARGINS, start=1)
        ]
        found = [line["measured"] for line in json_lines(run / "validation.jsonl")]
        assert found == [{"rewards/margins": null(margin / 2)} for margin in MARGINS]
        write(run, step=2)
    expected = [
        {"logps/chosen": -9.0 - step, "kl": math.nan, "rewards/margins": m} for step, m in enumerate(MARGINS, start=1)
    ]
    assert equal([step.measured for step in penstock.Run(run).metrics()], expected)
    validations = [{"rewards/margins": margin / 2} for margin in MARGINS]
    assert equal([one.measured for one in penstock.Run(run).validations()], validations)


def test_a_summary_has_the_first_and_the_last_that_were_finite(run: Path) -> None:
    rest: dict[str, Any] = dict.fromkeys(("tiers", "lanes", "drives", "gpu_memory", "attention", "early_end"))
    result: Any = SimpleNamespace(steps=3, **rest)
    summary, _, _ = summary_of(run, result)
    logps = {"first": -10.0, "last": -12.0}
    assert summary["measured"] == {"logps/chosen": logps, "rewards/margins": {"first": 0.0, "last": 0.5}}
    assert summary["validation_measured"] == {"rewards/margins": {"first": 0.0, "last": 0.25}}
    for name in ("metrics", "validation"):
        (run / f"{name}.jsonl").write_text('{"step": 1, "loss": 2.0, "measured": {}}\n')
    assert {"measured", "validation_measured"}.isdisjoint(summary_of(run, result)[0])


def test_a_list_of_runs_has_it_where_a_run_measures_something(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parent.parent)
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["runs"]) == 0
    listed = capsys.readouterr().out
    assert "measured" in listed
    assert "rewards/margins 0.500  kl n/a  logps/chosen -12.0" in listed
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert main(["runs"]) == 0
    assert "measured" not in capsys.readouterr().out


def test_what_says_most_comes_first_and_names_of_one_group_stand_together() -> None:
    names = [
        "logps/chosen",
        "rewards/chosen",
        "kl",
        "entropy",
        "logps/rejected",
        "rewards/margins",
        "a/b/mean",
        "a/b/c",
    ]
    assert by_weight(names) == [
        "rewards/margins", "rewards/chosen", "kl", "logps/chosen", "logps/rejected", "entropy", "a/b/mean", "a/b/c"
    ]  # fmt: skip
    values = dict.fromkeys(names, 0.25) | {"rewards/accuracies": 0.75}
    assert measured_text(values) == "rewards/margins 0.250  accuracies 0.750  kl 0.250"
    sampled = {"sampling_s": 0.5, "completions/mean_length": 4.0, "reward_std": 0.5, "reward": 0.25}
    assert measured_text(sampled) == "reward 0.250  reward_std 0.500  completions/mean_length 4.00"
    assert measured_text({"reward": math.nan, "reward_std": 1e-9}) == "reward n/a  reward_std 1e-9"
    assert measured_text({}) == ""


BAD = [None, 3, "kl", ["kl"], {"kl": "0.5"}, {"kl": [1]}, {"kl": True}, {"kl": 1e300}, {"kl": {}}, {"": 1.0}]
BAD += [{name: 1.0} for name in ("a\nb", "\x1b[2J", "x" * 101, "..", "a/../b", "/a", "a//b", " ", "\u202e", "\ud800")]


@pytest.mark.parametrize("measured", BAD, ids=range(len(BAD)))
def test_what_is_no_figure_or_has_no_name_to_show_is_left_out(run: Path, measured: Any) -> None:
    good = {"step": 1, **FIELDS, "loss": 2.0}
    lines = [good | {"measured": measured}, good | {"step": 2, "measured": {"kl": 0.5}}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = [] if isinstance(measured, dict) and "\ud800" in measured else [(1, {})]  # that line is no JSON
    assert [(step.step, step.measured) for step in penstock.Run(run).metrics()] == [*first, (2, {"kl": 0.5})]


def test_names_are_bounded() -> None:
    found = measured_of({"measured": {f"kl/{n}": 0.5 for n in range(10_000)}})
    assert list(found) == [f"kl/{n}" for n in range(MOST_NAMES)]
