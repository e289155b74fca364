"""Several ranks train one run together: the same bits on any number of them, on all tiers, whatever the delays; and a
run goes on with another number."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import comparisons
import pytest
import tiny
import torch
from cluster_ranks import train_on_ranks
from plain_training import document_losses, plain_model, trained_on
from ranked import ranked, started
from samples import cases, samples

from penstock.app.recipes.recipe import to_dict
from penstock.engine import reference_logps
from penstock.engine.hf.config import model_config
from penstock.engine.model.tokens import MicroBatch
from penstock.engine.ranks.ranks import Ranks
from penstock.engine.session import Session
from penstock.storage.files.errors import UserError
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.manifest import Manifest

TIERS = tiny.TIERS[1:]
"""What is trained is not on the GPU."""


def training(**changes: Any) -> tiny.TrainConfig:
    return tiny.training(**{"global_batch_size": 6, "replicas": 6, "steps": 8, "chunk_tokens": 48} | changes)


def trained(ranks: Ranks, folder: Path, steps: int, seed: str, settings: dict[str, Any]) -> list[tuple[float, float]]:
    """Loss and gradient norm of so many steps, the last of which is committed; ops are delayed at random."""
    with tiny.session(folder, ranks=ranks, **settings) as session:
        tiny.delay(session, random.Random(f"{seed} {ranks.rank}"))
        assert bool(session.plan.spread) == (settings.get("spread", False) and ranks.count > 1)
        metrics = tiny.steps(session, steps)
        ranks.meet()  # nobody leaves while others need it
        return [(m.loss, m.grad_norm) for m in metrics]


def run(folder: Path, count: int, steps: int = 3, **settings: Any) -> tuple[str, list[tuple[float, float]]]:
    """The digest of the generation behind so many steps on `count` ranks, and what they report, all the same."""
    first, *others = ranked(count, trained, folder, steps, f"{count} {steps}", settings)
    assert all(each == first for each in others), "every rank knows loss and norm of the whole step"
    store = NvmeStore.open(folder / "state", read_only=True)
    try:
        return tiny.digest(store), first
    finally:
        store.close()


@pytest.mark.parametrize("tiers", TIERS, ids=str)
def test_any_number_of_ranks_gives_the_same_bits(tmp_path: Path, tiers: tuple[Any, Any]) -> None:
    gpu, ram = tiers
    found = {run(tmp_path / str(n), n, t=training(), gpu=gpu, ram=ram)[0] for n in (1, 2, 3, 6)}
    assert len(found) == 1


@pytest.mark.parametrize("tiers", TIERS, ids=str)
def test_whatever_goes_forward_together_the_bits_are_the_same(tmp_path: Path, tiers: tuple[Any, Any]) -> None:
    """Of a model whose head and embedding are one, two replicas and then the others, three, and all."""
    gpu, ram = tiers
    tied: dict[str, Any] = {"m": tiny.model(overrides={"tie_word_embeddings": True}), "t": training()}
    tied |= {"gpu": gpu, "ram": ram}
    found = {run(tmp_path / f"{n} {group}", n, group=group, **tied)[0] for n, group in ((1, 2), (1, 3), (2, 1), (3, 0))}
    assert len(found) == 1


SHARED: dict[str, Any] = {"parallel": "context", "global_batch_size": 2, "chunk_tokens": 2}
"""Six shards of every sequence, each of four chunks."""


@pytest.mark.parametrize("tiers", [("1GiB", "1GiB"), *tiny.TIERS[1:3], (1_400_000, 1_300_000)], ids=str)
def test_sequences_that_ranks_share_give_the_same_bits(tmp_path: Path, tiers: tuple[Any, Any]) -> None:
    gpu, ram = tiers
    found = {run(tmp_path / str(n), n, t=training(**SHARED), gpu=gpu, ram=ram)[0] for n in (1, 2, 3, 6)}
    assert len(found) == 1


SHARING: dict[str, dict[str, Any]] = {
    "recomputed": {"t": training(**SHARED, activation_checkpointing="full"), "ram": tiny.FLOOR},
    "experts": {
        "t": training(**SHARED, **tiny.GROUPS),
        "m": tiny.model(model_type="qwen3_moe", overrides=tiny.EXPERTS),
    },
    "balanced routers": {
        "t": training(**SHARED, router_aux_loss=0.5),
        "m": tiny.model(model_type="qwen3_moe", overrides=tiny.EXPERTS),
    },
    "states": {"t": training(**SHARED), "m": tiny.model(model_type="qwen3_next", overrides=tiny.HYBRID)},
    "an adapter on nf4": {
        "t": training(**SHARED),
        "m": tiny.model(frozen_format="nf4"),
        "adapter": tiny.AdapterConfig(method="lora", rank=2),
        "ram": tiny.FLOOR,
    },
    "padded": {"t": training(**SHARED), "d": tiny.data(packing="none")},
    "validated": {
        "t": training(**SHARED, validate_every=1, validation_sequences=2),
        "d": tiny.data(validation_documents=3),
    },
    "bfloat16, compiled": {"t": training(**SHARED, compute_dtype="bfloat16", compile="on")},
}


@pytest.mark.parametrize("case", SHARING)
def test_whatever_shares_them(tmp_path: Path, case: str) -> None:
    found = {run(tmp_path / str(n), n, 2, **SHARING[case])[0] for n in (1, 3)}
    assert len(found) == 1


SPREAD: dict[str, dict[str, Any]] = {
    "on all tiers": {},
    "bfloat16, compiled": {"compute_dtype": "bfloat16", "compile": "on"},
    "balanced routers, padded": {"router_aux_loss": 0.5},
    "context": SHARED,
    "context, states": SHARED,
    "adapter": {},
}
"""Experts that ranks compute for each other, and what of a run may matter to that."""


@pytest.mark.parametrize("case", SPREAD)
def test_spread_experts_give_the_same_bits(tmp_path: Path, case: str) -> None:
    """On two and three ranks, each with some groups of experts, as on one that has all, and on two that both do."""
    kind, overrides = ("qwen3_next", tiny.HYBRID) if "states" in case else ("qwen3_moe", tiny.EXPERTS)
    settings: dict[str, Any] = {"m": tiny.model(model_type=kind, overrides=overrides)}
    settings["t"] = training(**tiny.GROUPS | {"expert_groups": 4}, **SPREAD[case])
    settings |= {"d": tiny.data(packing="none")} if "padded" in case else {}
    if case == "adapter":
        settings["adapter"] = tiny.AdapterConfig(method="lora", rank=2)
    for number, (gpu, ram) in enumerate(TIERS if case == "on all tiers" else TIERS[1:2]):
        ways = [(1, True), (2, False), (2, True), (3, True)]
        found = {
            run(tmp_path / f"{number} {count} {spread}", count, spread=spread, gpu=gpu, ram=ram, **settings)[0]
            for count, spread in ways
        }
        assert len(found) == 1


def test_more_ranks_than_groups_of_experts_are_one_message() -> None:
    recipe = tiny.recipe(
        model=tiny.model(model_type="qwen3_moe", overrides=tiny.EXPERTS),
        train=training(**tiny.GROUPS, spread_experts=True),
    )
    spec = tiny.spec_of(model_config(recipe, recipe.model.vocab_size), split_layers="experts", expert_groups=2)
    assert tiny.plan_of(spec, recipe, "1GiB", "1GiB", ranks=2, spread=True).spread
    with pytest.raises(UserError) as e:
        tiny.plan_of(spec, recipe, "1GiB", "1GiB", ranks=3)
    assert str(e.value) == (
        "train.spread_experts: 3 GPUs need as many groups of experts at least, and there are 2; set "
        "train.expert_groups, or leave train.spread_experts out"
    )


def preferred(ranks: Ranks, folder: Path, settings: dict[str, Any]) -> tuple[str, list[Any]]:
    """The digest behind two steps on pairs of answers, and what these report."""
    os.environ["XDG_CACHE_HOME"] = f"{folder}-cache"  # nothing is taken from another run
    with tiny.session(folder, ranks=ranks, **settings) as session:
        assert reference_logps.complete(session, tiny.Silent())
        metrics = tiny.steps(session, 2)
        ranks.meet()
        return tiny.digest(session.store), [(m.loss, m.grad_norm, m.measured, m.tokens) for m in metrics]


@pytest.mark.parametrize("objective", ["dpo", "orpo", "reward", "sequence_mean", "kto", "dpo, experts spread"])
def test_preferences_are_those_of_one(tmp_path: Path, objective: str) -> None:
    """With the reference's log-probabilities from passes that the ranks take in turns."""
    objective, _, spread = objective.partition(", ")
    rows = comparisons.verdicts(24) if objective == "kto" else comparisons.pairs(24)
    path = comparisons.write(tmp_path / "rows.jsonl", rows)
    settings: dict[str, Any] = {"t": training(objective=objective), "m": tiny.model(vocab_size=None)}
    settings["d"] = comparisons.data(path, sequence_length=256)
    if objective == "sequence_mean":
        settings = {"t": training(objective=objective)}
    if spread:
        settings["m"] = tiny.model(vocab_size=None, model_type="qwen3_moe", overrides=tiny.EXPERTS)
        settings |= {"t": training(objective=objective, **tiny.GROUPS | {"expert_groups": 4}), "spread": True}
    found = {count: ranked(count, preferred, tmp_path / str(count), settings) for count in (1, 2, 3)}
    assert all(each == found[1][0] for of_count in found.values() for each in of_count)


@pytest.mark.parametrize("shared", [{}, SHARED], ids=["data", "context"])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, shared: dict[str, Any]) -> None:
    straight, _ = run(tmp_path / "straight", 1, 8, t=training(**shared))
    for count in (1, 2, 3, 1):
        digest, _ = run(tmp_path / "run", count, 2, t=training(**shared))
    assert digest == straight


def committed_step(folder: Path) -> int:
    return int(Manifest.read(folder / "state").meta["step"])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_an_op(session: Session, chance: random.Random) -> None:
    """Die before some op of the next three steps."""
    left = chance.randrange(1500)

    def count(op: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            die()

    tiny.before_ops(session, count)


def at_a_commit(session: Session, chance: random.Random) -> None:
    """Die in one of the next three commits: before this rank has synced its files, behind that, or once one manifest is
    there and others have not heard of it."""
    store, left, moment = session.store, chance.randrange(3), chance.choice(["_sync", "_agree", "_adopt"])
    original: Callable[..., Any] = getattr(store, moment)

    def dying(*given: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            die()
        return original(*given)

    setattr(store, moment, dying)


def trained_killed(ranks: Ranks, folder: Path, seed: str, victim: int, settings: dict[str, Any]) -> None:
    with tiny.session(folder, ranks=ranks, **settings) as session:
        chance = random.Random(f"{seed} {ranks.rank}")
        if ranks.rank == victim:
            chance.choice([at_an_op, at_a_commit])(session, chance)
        tiny.steps(session)
        ranks.meet()


@pytest.mark.sampled
@pytest.mark.parametrize("number", cases(range(len(TIERS) + 2), 1))
def test_kill_9_of_any_rank_loses_nothing(tmp_path: Path, number: int) -> None:
    """At any moment, also between the sync of one rank and that of another, and between sync and rename: a run goes on,
    on as many ranks or others, to the bits of one that was never killed. The last cases share sequences, and spread
    experts."""
    (gpu, ram), shared = [*TIERS, TIERS[1], TIERS[1]][number], set(os.listdir("/dev/shm"))
    how = training(**SHARED) if number == len(TIERS) else training()
    settings: dict[str, Any] = {"t": how, "gpu": gpu, "ram": ram, "s": tiny.storage(checkpoint_every=1)}
    if number > len(TIERS):
        settings["m"] = tiny.model(model_type="qwen3_moe", overrides=tiny.EXPERTS)
        settings |= {"t": training(**tiny.GROUPS | {"expert_groups": 4}), "spread": True}
    straight, _ = run(tmp_path / "straight", 1, 8, **settings)
    deaths = finished = seed = 0
    while deaths < samples(4, 50) or not finished:
        chance = random.Random(f"{number} {seed}")
        count, folder = chance.choice([2, 3]), tmp_path / f"run{finished}"
        before = committed_step(folder) if (folder / "state" / "manifest.json").exists() else 0
        victim = chance.randrange(count) if deaths < samples(4, 50) else count
        found = started(count, trained_killed, folder, str(seed), victim, settings)
        seed += 1
        if all(there for there, _ in found.values()):
            store = NvmeStore.open(folder / "state", read_only=True)
            assert tiny.digest(store) == straight
            store.close()
            finished += 1
            continue
        assert found[victim] == (False, -signal.SIGKILL), found
        deaths += 1
        assert not (folder / "state" / "manifest.json").exists() or committed_step(folder) >= before
    assert set(os.listdir("/dev/shm")) <= shared, "nothing is left behind"


def beside() -> tiny.TrainConfig:
    return tiny.training(global_batch_size=2, replicas=2, steps=20, lr=3e-3)


FEW = tiny.data(max_documents=3)
"""Documents that are learnt by heart."""


class Summed(torch.nn.Module):
    """A model whose output is the loss of micro-batches, summed over their targets."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, micro_batches: list[MicroBatch]) -> torch.Tensor:
        return torch.stack([loss for m in micro_batches for loss in document_losses(self.model, m)]).sum()


def plainly(ranks: Ranks, folder: Path, steps: int) -> list[float]:
    """The losses of DistributedDataParallel around transformers' own model, on the same sequences."""
    store = torch.distributed.FileStore(str(folder) + ".store", ranks.count)
    torch.distributed.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.count)
    with tiny.session(folder / str(ranks.rank), t=beside(), d=FEW) as session:
        model = torch.nn.parallel.DistributedDataParallel(Summed(plain_model(session)))

        def losses() -> Iterator[torch.Tensor]:
            whole = session.loader.next_step()
            targets = sum(m.num_targets for m in whole)
            # It takes the mean over ranks of what each finds.
            yield ranks.count * model(whole[ranks.rank :: ranks.count]) / targets

        found, _, _ = trained_on(model.module.model, session.recipe.train, (losses() for _ in range(steps)))
    torch.distributed.destroy_process_group()
    return found


def test_losses_are_those_of_ddp_and_of_fsdp2(tmp_path: Path) -> None:
    """On two ranks each, over 20 steps in float32; and so are those of ranks that share each sequence."""
    _, ours = run(tmp_path / "ours", 2, 20, t=beside(), d=FEW)
    _, shared = run(tmp_path / "shared", 2, 20, t=replace(beside(), parallel="context", chunk_tokens=5), d=FEW)
    by_rank = ranked(2, plainly, tmp_path / "ddp", 20)
    ddp = [sum(of_ranks) / 2 for of_ranks in zip(*by_rank, strict=True)]
    train = replace(beside(), replicas=None, chunk_tokens=None, activation_checkpointing="auto")
    sharded = tiny.recipe(train=train, data=FEW)
    fsdp2 = train_on_ranks(tmp_path, {"fsdp2": (to_dict(sharded), 1)})["fsdp2"]["losses"]
    losses = [loss for loss, _ in ours]
    assert losses[-1] < losses[0] - 0.5, "or nothing is trained"
    assert losses == pytest.approx(ddp, rel=1e-4)
    assert losses == pytest.approx(fsdp2, rel=1e-4)
    assert [loss for loss, _ in shared] == pytest.approx(ddp, rel=1e-4)
