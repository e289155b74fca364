"""Training end to end on tiny models: gradients of plain PyTorch, the same bits under any delay, and what is refused. A
run goes on with other budgets, drives or tiers than it was saved with, and back from its checkpoints.
The bits wherever state lives and whatever is saved, kept or computed again: model/test_check.py."""

import random
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from plain_training import plain_training
from samples import cases, sampled, samples

from penstock.engine.forecast.costs import Conditions
from penstock.engine.forecast.extrapolate import estimate
from penstock.engine.machine import budgets
from penstock.engine.machine.presets import GENERIC
from penstock.engine.record import require_record
from penstock.engine.train import train_step
from penstock.storage.files.errors import UserError
from penstock.storage.generations.checkpoints import AUTOMATIC
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.manifest import Manifest

DELAYED: list[Any] = [
    ({"chunk_tokens": 20}, *tiny.TIERS[-1]),
    ({"activation_checkpointing": "none", "chunk_tokens": 9}, "1GiB", tiny.FLOOR),
    ({"kv_window": "streamed", "chunk_tokens": 9, "activation_checkpointing": "full"}, tiny.FLOOR, tiny.FLOOR),
    *(({"chunk_tokens": 20}, *budgets) for budgets in tiny.TIERS[:-1]),
]
NO_KERNELS: dict[str, Any] = {"environment": {}, "rankings": {}, "products": {}}
NO_SENSE: list[dict[str, Any]] = [
    *({"step": step} for step in (None, -1, True, 2.0, 10**30)),
    *({"tokens": tokens} for tokens in (None, [1])),
    *({"recipe": 7}, {"cursor": []}, {"plan": {"chunk_tokens": "16"}}),
    *({"graph_bytes": sizes} for sizes in ([], {"layers.0": 0}, {"layers.0": "1"})),
    *({"kernels": kernels} for kernels in (7, {}, NO_KERNELS | {"environment": {"torch": 2}})),
    *({"kernels": NO_KERNELS | {"rankings": rankings}} for rankings in ([], {"a": "b"}, {"a": [1]})),
    {"kernels": NO_KERNELS | {"products": {"a": 1}}},
    *({"plan": {"chunk_tokens": 16, name: value}}
      for name, value in [("of_a_later_version", 1), ("stages", True), ("gpu_first", 3), ("compiled", "no")]),
]  # fmt: skip


def training(**changes: Any) -> tiny.TrainConfig:
    return tiny.training(**{"steps": 3, "global_batch_size": 1, "chunk_tokens": 48} | changes)


QUICK, SIX = training(steps=5), training(steps=6)


def test_placement_changes_no_bit_of_what_bfloat16_gradients_do(tmp_path: Path) -> None:
    """In RAM and on NVMe: buffers on the GPU keep float32 gradients."""
    digests, t = set(), tiny.training(gradient_dtype="bfloat16", chunk_tokens=24)
    for gpu, ram in tiny.TIERS[1:3]:
        with tiny.session(tmp_path / ram, t=t, gpu=gpu, ram=ram) as session:
            tiny.steps(session, 2)
            digests.add(tiny.digest(session.store))
    assert len(digests) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("number", cases(range(len(DELAYED)), 0, 1))
def test_random_delays_change_no_bit(tmp_path: Path, number: int) -> None:
    """Runs of two steps with the ops of every lane delayed at random; of a step where the policy is another."""
    policy, gpu, ram = DELAYED[number]
    digests, tiers_only = set(), len(policy) == 1
    for seed in range(samples(2, 20) if tiers_only else samples(2, 8)):
        with tiny.session(tmp_path, t=tiny.training(global_batch_size=1, **policy), gpu=gpu, ram=ram) as session:
            tiny.delay(session, random.Random(f"{policy} {gpu} {ram} {seed}"))
            for _ in range(2 if tiers_only else 1):
                train_step(session)
            tiny.settle(session)
            digests.add(tiny.live_digest(session))
    assert len(digests) == 1


def test_train_runs_and_keeps_the_generations_that_the_recipe_says(tmp_path: Path) -> None:
    observer, train = tiny.Silent(), tiny.training(steps=6, chunk_tokens=48)
    kept = tiny.storage(checkpoint_every=1, keep_last=2, keep_every=3, keep_good=None)
    result = tiny.train_run(tmp_path, observer, train=train, storage=kept)
    assert (result.steps, result.stopped) == (6, False)
    assert [m.step for m in observer.metrics] == [1, 2, 3, 4, 5, 6]
    assert result.tokens == sum(m.tokens for m in observer.metrics) == 6 * 2 * 47
    assert result.first_loss == observer.metrics[0].loss
    for tier in ("gpu", "ram", "nvme"):
        assert 0 < result.tiers[tier]["peak_bytes"] <= result.tiers[tier]["budget_bytes"]
    assert tiny.kept(tmp_path) == [AUTOMATIC.name(step) for step in (3, 5, 6)]
    with closing(NvmeStore.open(tmp_path / "state" / "checkpoints" / AUTOMATIC.name(3))) as store:
        assert store.meta["step"] == 3
        store.verify()


@pytest.mark.parametrize(("changes", "message"), [
    ({"budgets": tiny.BudgetConfig(gpu="1KiB", ram="1GiB")}, r"budgets\.gpu: .* give at least \d+[KMG]iB"),
    ({"budgets": tiny.BudgetConfig(gpu="1GiB", ram="1GiB", nvme="1KiB")}, r"budgets\.nvme: .*1,024"),
    ({"model": tiny.model(model_type="qwen33")}, "unknown architecture 'qwen33'"),
    ({"model": tiny.model(num_kv_heads=None)}, r"model\.num_kv_heads: 4 query heads cannot share 32"),
    ({"data": tiny.data(validation_documents=500, max_documents=None)},
     r"data\.validation_documents: 500, but the corpus has 64 documents"),
])  # fmt: skip
def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny.train_run(tmp_path, tiny.Silent(), **changes)
    assert not (tmp_path / "state").exists()


def test_a_slow_commit_lags_behind_the_steps(tmp_path: Path) -> None:
    """With all state in memory nothing but the next commit waits for the last one."""
    with tiny.session(tmp_path, t=QUICK, s=tiny.storage(checkpoint_every=2)) as session:
        commit, steps_at = session.store.commit, []

        def slow(meta: dict[str, Any]) -> int:
            until = time.monotonic() + 300
            while meta["step"] == 2 and session.step < 5 and time.monotonic() < until:
                time.sleep(0.005)
            steps_at.append((meta["step"], session.step))
            return commit(meta)

        session.store.commit = slow  # type: ignore[method-assign]
        tiny.steps(session)
        assert [step for step, _ in steps_at] == [2, 4, 5]
        assert steps_at[0][1] == 5, "the steps went on"
        assert session.store.meta["step"] == 5


def test_the_plan_and_each_step_tell_what_is_moved(tmp_path: Path) -> None:
    with tiny.session(tmp_path, gpu=tiny.FLOOR, ram=tiny.FLOOR) as session:
        planned = estimate(session.plan, Conditions(GENERIC), full=True).bytes
        session.executor.take_spans()
        metrics = [train_step(session) for _ in range(3)]
        tiny.settle(session)
        spans = session.executor.take_spans()
        root, traffic = str(session.store.root), session.store.traffic()[session.store.root].bytes_written
    state = 12 * sum(buffer.numel for buffer in session.plan.buffers.values())
    assert planned["nvme_write"] > state
    for lane in ("nvme_read", "nvme_write"):
        measured = sum(s.bytes for s in spans if s.lane == lane) / 3
        assert measured == pytest.approx(planned[lane], rel=0.1), lane
    assert sum(m.nvme_written_bytes[root] for m in metrics) <= traffic
    # Twelve bytes of state, four of float32 weights, four of gradient; files round up to pages.
    assert metrics[1].nvme_written_bytes[root] >= 20 / 12 * state * 0.9
    assert metrics[1].nvme_read_bytes[root] > 0


POLICIES = {
    "activation_checkpointing": st.sampled_from(["auto", "full", "selective", "none"]),
    "kv_window": st.sampled_from(["whole", "streamed", "auto"]),
    "chunk_tokens": st.integers(5, 70),
}
SLIDING = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
PLACEMENTS = {
    "gpu": st.sampled_from([tiny.FLOOR, 1_400_000, "1GiB"]),
    "ram": st.sampled_from([tiny.FLOOR, 850_000, "1GiB"]),
    "gpu_first": st.sampled_from(["blocks", "weights"]),
}
LEAVING = {"group": st.sampled_from([0, 1]), "offloaded_graphs": st.sampled_from(["none", "half", "all"])}


@sampled(6, 25)
@given(
    m=st.builds(tiny.model, num_layers=st.just(2), overrides=st.sampled_from([{}, SLIDING])),
    d=st.builds(tiny.data, sequence_length=st.just(64), max_documents=st.integers(1, 40), seed=st.integers(0, 3)),
    policy=st.fixed_dictionaries(POLICIES),
    sequences=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    placed=st.fixed_dictionaries(PLACEMENTS),
    leaving=st.fixed_dictionaries(LEAVING),
)
def test_gradients_are_those_of_plain_pytorch(
    tmp_path_factory: Any, policy: Any, sequences: Any, placed: Any, leaving: Any, **model_and_data: Any
) -> None:
    sizes = dict(zip(("global_batch_size", "micro_batch_size"), sequences, strict=True))
    options = {"t": tiny.training(steps=1, clip_norm=None, **sizes, **policy), **placed, **model_and_data}
    if policy["activation_checkpointing"] == "none":
        options |= {"gpu": "1GiB", "ram": "1GiB"}
    folder = tmp_path_factory.mktemp("any")
    with tiny.session(folder / "plain", **options) as reference:
        losses, _, moments = plain_training(reference, 1)
    with tiny.session(folder / "run", **options, **leaving) as session:
        (metrics,) = tiny.steps(session)
        used, parts = session.gpu.arena.used_bytes, session.plan.tiers["gpu"].parts
        assert used + parts["workspace"] + session.runtime.layer_ops.graphs_peak_bytes <= sum(parts.values())
        assert not session.runtime.layer_ops.outgrown
        assert session.ram.arena.used_bytes == session.plan.tiers["ram"].peak_bytes - session.plan.problem.reader_bytes
        found = tiny.first_moments(session.store, session.spec)
    assert metrics.loss == pytest.approx(losses[0], rel=1e-5)
    for name, moment in moments.items():
        assert (found[name] - moment).norm() <= 2e-5 * moment.norm(), name


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> str:
    with tiny.session(tmp_path_factory.mktemp("straight"), t=SIX) as session:
        tiny.steps(session, 4)
        return tiny.digest(session.store)


@pytest.mark.parametrize("start", range(len(tiny.TIERS)))
@pytest.mark.parametrize("away", [1, *(pytest.param(number, marks=pytest.mark.long) for number in (0, 2, 3))])
def test_other_budgets(tmp_path: Path, straight: str, start: int, away: int) -> None:
    """From every tier to the next, and to all others."""
    for step, place in ((0, start), (2, start + away)):
        gpu, ram = tiny.TIERS[place % len(tiny.TIERS)]
        with tiny.session(tmp_path, t=SIX, gpu=gpu, ram=ram) as session:
            assert session.step == step
            tiny.steps(session, 2)
            found = tiny.digest(session.store)
    assert found == straight


def test_other_drives(tmp_path: Path, straight: str) -> None:
    """One drive, then two others, then one of these; a step on each."""
    drives = [[tmp_path / "a"], [tmp_path / "b", tmp_path / "c"], [tmp_path / "c"], [tmp_path / "c", tmp_path / "a"]]
    for folders in drives:
        with tiny.session(tmp_path, t=SIX, gpu=tiny.FLOOR, ram=tiny.FLOOR, drives=folders) as session:
            tiny.steps(session, 1)
            moved = session.store.traffic()
            assert all(moved[folder].bytes_written > 0 for folder in folders)
            result = tiny.digest(session.store)
    assert result == straight
    left = [path for path in (tmp_path / "b").rglob("*") if path.is_file() and path.name.startswith("c.")]
    assert left == []


def test_back_to_a_checkpoint_and_on_ends_in_the_same_bits(tmp_path: Path) -> None:
    """And one that cannot be made stops nothing."""
    observer = tiny.Silent(asks={2: "before-{step}", 4: "bad/name"})
    rarely: dict[str, Any] = {"train": SIX, "storage": tiny.storage(checkpoint_every=100)}
    tiny.train_run(tmp_path, observer, **rarely)
    assert observer.checkpoints[0] == ("before-{step}", 2, None)
    ((name, step, error),) = observer.checkpoints[1:]
    assert (name, step) == ("bad/name", 4)
    assert "bad/name" in error
    expected = tiny.digest_of(tmp_path)
    again = tiny.Silent()
    tiny.train_run(tmp_path, again, resume=True, checkpoint="before-2", **rarely)
    assert [m.step for m in again.metrics] == [3, 4, 5, 6]
    assert [m.loss for m in again.metrics] == [m.loss for m in observer.metrics[2:]]
    assert tiny.digest_of(tmp_path) == expected


def test_what_a_resumed_run_cannot_change_is_named(stopped: Path) -> None:
    for changes, said in (
        ({"storage": tiny.storage(part_bytes="8KiB")}, r"storage\.part_bytes: .*16KiB"),
        ({"model": tiny.model(num_layers=4)}, "another model"),
        ({"data": tiny.data(validation_documents=8)},
         r"data\.validation_documents: 8, but the run so far used 0; set it back"),
        ({"checkpoint": "x"}, r"has no checkpoint 'x'; it has good-00000\d"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            tiny.train_run(stopped, tiny.Silent(), resume=True, **{"train": SIX} | changes)


def test_an_open_nvme_budget_is_what_the_drives_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a new run what is free, of a resumed one what it holds there as well: never what it holds alone."""
    free = 7 * 2**30
    monkeypatch.setattr(budgets, "free_disk", lambda place: free)
    new = tiny.train_run(tmp_path, tiny.Silent(stop_after=1), train=SIX).tiers["nvme"]
    assert new["budget_bytes"] == free
    resumed = tiny.train_run(tmp_path, tiny.Silent(stop_after=0), resume=True, train=SIX).tiers["nvme"]
    assert free + new["peak_bytes"] / 2 < resumed["budget_bytes"] < free + 2 * new["peak_bytes"]


def test_the_manifest_says_where_a_generation_comes_from_and_another_recipe_is_said(stopped: Path) -> None:
    manifest, lr = Manifest.read(stopped / "state"), tiny.training().lr
    meta = manifest.meta
    assert (meta["step"], len(meta["recipe"])) == (2, 64)
    assert meta["rng"] == {"train.seed": 0, "data.seed": 0}
    assert set(meta["versions"]) == {"torch", "transformers", "python"}
    assert meta["cursor"]
    for changes, said in (
        ({"budgets": tiny.BudgetConfig(gpu="500MiB", ram="500MiB")}, []),
        ({"train": training(lr=1e-3)}, [f"train.lr was {lr} and is 0.001"]),
        ({"train": training(steps=9)}, ["train.steps was 3 and is 9"]),
    ):
        observer = tiny.Silent(stop_after=0)
        tiny.train_run(stopped, observer, resume=True, **THREE_STEPS | changes)
        begins = f"since generation {manifest.generation} the recipe has changed: "
        told = [text.removeprefix(begins) for text in observer.messages if "recipe has changed" in text]
        assert told == [f"{change}; going on with the present one" for change in said]


THREE_STEPS: dict[str, Any] = {"train": training(), "storage": tiny.storage()}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    tiny.train_run(folder, tiny.Silent(stop_after=2), **THREE_STEPS)
    return folder


@contextmanager
def recorded(run: Path, change: dict[str, Any]) -> Iterator[Path]:
    """The state of a run whose last generation's record is another meanwhile."""
    root = run / "state"
    current = Manifest.read(root)
    meta = {name: value for name, value in (current.meta | change).items() if value is not None}
    replace(current, meta=meta).write(root)
    try:
        yield root
    finally:
        current.write(root)


def test_no_run_goes_on_from_a_record_that_makes_no_sense(stopped: Path) -> None:
    """Its checksum is right: somebody made it, or a later version did. But from the record as it was one does."""
    for change in NO_SENSE:
        refused = pytest.raises(UserError, match=r"does not record .*another version")
        with recorded(stopped, change) as root, closing(NvmeStore.open(root)) as store, refused:
            require_record(store)
    for change in ({"step": 10**30}, {"cursor": {"piece": -1}}):
        with recorded(stopped, change) as root:
            before = Manifest.read(root).meta
            with pytest.raises(UserError, match=r"does not record the run.s position|record of the generation"):
                tiny.train_run(stopped, tiny.Silent(), resume=True, **THREE_STEPS)
            assert Manifest.read(root).meta == before
    observer = tiny.Silent()
    tiny.train_run(stopped, observer, resume=True, **THREE_STEPS)
    assert [metrics.step for metrics in observer.metrics] == [3]
