"""Groups of experts that nothing is sent to are skipped, and nobody can tell from the state."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from machines import ROUND
from msgspec import structs
from samples import cases
from torch import Tensor

from penstock.engine.config import TrainConfig
from penstock.engine.export import export
from penstock.engine.forecast.costs import Conditions, Costs
from penstock.engine.forecast.simulate import simulate
from penstock.engine.runtime.past import KEY, StateReader
from penstock.engine.runtime.sources import RunSource
from penstock.engine.session import Session
from penstock.engine.train import train_step

MODEL = tiny.model(
    model_type="qwen3_moe",
    num_layers=2,
    overrides={"num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
)
CPU = structs.replace(ROUND, gpu=None)
FEW = tiny.data(sequence_length=4)
"""Four tokens a step, each sent to one of eight experts: about half of the four groups are idle."""


def settings(steps: int, **changes: Any) -> TrainConfig:
    """A frozen random router, so that no expert is left for good."""
    usual: dict[str, Any] = {"steps": steps, "split_layers": "experts", "expert_groups": 4, "global_batch_size": 1}
    usual |= {"freeze": ["*.mlp.gate.*"], "chunk_tokens": 3, "warmup_steps": 2}
    return tiny.training(**(usual | changes))


@contextmanager
def opened(folder: Path, steps: int, tier: Any = tiny.TIERS[2], every: int = 3, **changes: Any) -> Iterator[Session]:
    gpu, ram = tier
    planned = changes.pop("planned", {})
    train = settings(steps, **({"skip_idle_experts": True} | changes))
    storage = tiny.storage(checkpoint_every=every)
    with tiny.session(folder, m=MODEL, d=FEW, t=train, s=storage, gpu=gpu, ram=ram, **planned) as session:
        yield session


def state_of(session: Session) -> dict[tuple[str, str], Tensor]:
    """Master weights and moments of the committed generation, as of its step."""
    reader = StateReader(session.store, session.spec, session.recipe.train)
    result = {}
    for array in session.store.arrays():
        if not array.fixed:
            whole = torch.empty(array.numel)
            for part, (start, end) in enumerate(array.parts()):
                reader.read(array, part, whole[start:end])
            result[array.buffer, array.kind] = whole
    return result


def same(one: dict[tuple[str, str], Tensor], other: dict[tuple[str, str], Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@cache
def plain(folder: Path, steps: int, **changes: Any) -> dict[tuple[str, str], Tensor]:
    """What a run comes to that skips nothing."""
    with opened(folder, steps, tiny.TIERS[1], skip_idle_experts=False, **changes) as session:
        tiny.steps(session)
        return state_of(session)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.mark.long
def test_200_steps_are_those_of_plain_adamw(tmp_path: Path, folder: Path) -> None:
    """And they move what the plan expects of a router as likely to choose any expert."""
    with opened(tmp_path, 200, tiny.TIERS[3], every=1000) as session:
        lazy = len(session.plan.lazy)
        assert 0 < lazy < 8, "the states of some are on the GPU"
        tiny.steps(session)
        assert len(session.store.meta[KEY]["as_of"]) > lazy // 4
        assert same(state_of(session), plain(folder / "200", 200))
        moved: Counter[str] = Counter()
        for span in session.executor.take_spans():
            moved[span.lane] += span.bytes
        plan = session.plan
        whole = replace(plan, problem=replace(plan.problem, routing=None))
        planned, all_ = (simulate(Costs(each, Conditions(CPU))).bytes for each in (plan, whole))
        for lane in ("nvme_read", "h2d", "d2h", "nvme_write"):
            print(lane, moved[lane] / 200, planned[lane], all_[lane])
            assert moved[lane] / 200 == pytest.approx(planned[lane], rel=0.15), lane
            assert moved[lane] / 200 < 0.9 * all_[lane] or all_[lane] == 0


@pytest.mark.sampled
@pytest.mark.parametrize("tier", cases(tiny.TIERS, tiny.TIERS[2]), ids=str)
def test_state_is_that_of_plain_adamw_in_any_order(tmp_path: Path, folder: Path, tier: Any) -> None:
    with opened(tmp_path, 12, tier) as session:
        tiny.delay(session, random.Random(str(tier)))
        tiny.steps(session)
        assert same(state_of(session), plain(folder / "12", 12))


@pytest.mark.parametrize("tier", [tiny.TIERS[1], tiny.TIERS[2]], ids=str)
def test_micro_batches_one_by_one(tmp_path: Path, folder: Path, tier: Any) -> None:
    with opened(tmp_path, 8, tier, global_batch_size=3, planned={"group": 1}) as session:
        assert session.plan.group == 1
        tiny.steps(session)
        assert same(state_of(session), plain(folder / "groups", 8, global_batch_size=3))


RESUMED: dict[str, dict[str, Any]] = {
    "as it was": {},
    "with states on the GPU": {"tier": tiny.TIERS[0]},
    "skipping nothing": {"skip_idle_experts": False},
    "with other rates": {"lr": 2e-3, "beta1": 0.8, "weight_decay": 0.0},
    "with rates by group": {"lr_groups": {"*.experts.*": 0.5}},
}


NONE_BEHIND = ("with states on the GPU", "skipping nothing")


@pytest.mark.parametrize("how", RESUMED)
def test_a_run_goes_on(tmp_path: Path, how: str) -> None:
    """Broken off after five steps, of which three are committed, and resumed; then compared, checkpoint and all."""
    found = []
    for name in ("skips", "plain"):
        skips, changed = name == "skips", RESUMED[how]
        with opened(tmp_path / name, 9, skip_idle_experts=skips) as session:
            [train_step(session) for _ in range(5)]
        with opened(tmp_path / name, 9, **{"skip_idle_experts": skips} | changed) as session:
            assert session.step == 3
            tiny.steps(session, 4)
            if how != "as it was":
                assert (KEY in session.store.meta) == (
                    skips and how not in ("with states on the GPU", "skipping nothing")
                )
            found.append(state_of(session))
            tiny.steps(session)
            found.append(state_of(session))
    assert same(found[0], found[2])
    assert same(found[1], found[3])


def test_what_reads_a_run_sees_it_as_of_its_step(tmp_path: Path) -> None:
    """Exports, checkpoints, and models that are opened; validations and samples bring all experts up to date."""
    seen = []
    for skips in (True, False):
        run = tmp_path / str(skips)
        train = settings(7, skip_idle_experts=skips, validate_every=4)
        changes = {"model": MODEL, "data": replace(FEW, validation_documents=4), "train": train}
        changes |= {"budgets": tiny.BudgetConfig(gpu="1MB", ram="1GiB")}
        observer = tiny.Silent(asks={3: "third"})
        tiny.train_run(run, observer, **changes)
        recipe = tiny.recipe(**changes | {"storage": tiny.storage(checkpoint_every=1)})
        with closing(RunSource(run, recipe, "third")) as source:
            assert any(source._state.is_behind(name) for name in source.spec.buffers) == skips
            read = {name: torch.zeros(buffer.numel) for name, buffer in source.spec.buffers.items()}
            for name, out in read.items():
                source.read(name, "weights", 0, out).result()
        export(run, recipe, out_dir=run / "out", checkpoint="third")
        files = {file.name: file.read_bytes() for file in (run / "out").glob("*.safetensors")}
        seen.append((files, [m.loss for m in observer.validations], {n: t.tolist() for n, t in read.items()}))
    assert seen[0] == seen[1]


def test_idle_experts_move_nothing(tmp_path: Path) -> None:
    """Of a group that nothing is sent to, nothing is read, copied, updated or written."""
    with opened(tmp_path, 6, every=100) as session:
        for step in range(1, 6):
            train_step(session)
            session.executor.drain()
            spans = [span for span in session.executor.take_spans() if span.bytes and ".experts." in span.block]
            needed = {name for name, used in session.runtime.idle._used.items() if step in used}
            before = {name for name, used in session.runtime.idle._used.items() if step - 1 in used}
            assert 0 < len(needed) < 8
            assert {s.block for s in spans if "weights" in s.op and s.op != "write_weights"} == needed
            assert {s.block for s in spans if "gradient" in s.op} == needed
            assert {s.block for s in spans if "state" in s.op or s.op == "write_weights"} == (
                needed | before if step > 1 else set()
            )
