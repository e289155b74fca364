"""Training on completions that the model samples: the same bits after a kill in any phase, rewards that fail, and what
advantages are."""

import json
import math
import multiprocessing
import random
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import comparisons
import pytest
import tiny
import torch
from killed import die_at_call
from ranked import ranked
from samples import samples
from transformers import AutoModelForCausalLM

from penstock.engine import passes, rollouts, session
from penstock.engine.attention.spans import prefixes_of
from penstock.engine.config import AdapterConfig, BudgetConfig, GrpoConfig
from penstock.engine.data.completions import CompletionLoader, Generation
from penstock.engine.data.corpus.files import TokenCorpus
from penstock.engine.export import export
from penstock.engine.hf.config import model_config
from penstock.engine.model.spec import ModelSpec
from penstock.engine.opening import first_values
from penstock.engine.plan import planner
from penstock.engine.ranks.ranks import ALONE, Ranks
from penstock.engine.rewards.rewards import Rewards
from penstock.storage.files.errors import UserError
from penstock.storage.generations.checkpoints import read_checkpoint, resolve_checkpoint
from penstock.storage.generations.store import NvmeStore

REWARD = """
def letters(completions, wanted, **_):
    return [float(text.count(letter)) for text, letter in zip(completions, wanted)]
"""
FALLS = """
calls = []

def letters(completions, **_):
    calls.append(len(completions))
    return [-float(len(calls))] * len(completions)
"""
FAILS_LATER = """
calls = []

def letters(completions, wanted, **_):
    calls.append(1)
    return [float(text.count(letter)) / (len(calls) < 2) for text, letter in zip(completions, wanted)]
"""
STEPS = 5


def run(
    folder: Path,
    observer: tiny.Silent,
    *,
    resume: bool = False,
    reward: str = REWARD,
    ranks: Ranks = ALONE,
    **changes: Any,
) -> None:
    """Steps on completions of twelve tokens at most, two steps for each generation, on a budget in which weights and
    state are on NVMe."""

    def prepared() -> dict[str, Any]:
        if not resume:
            (folder.with_suffix(".py")).write_text(reward)
        return sections(folder, **changes)

    tiny.train_run(folder, observer, resume=resume, ranks=ranks, **ranks.of_first(prepared))


def sections(folder: Path, **changes: Any) -> dict[str, Any]:
    """Of the recipe."""
    rows = [{"prompt": row["prompt"], "wanted": "e"} for row in comparisons.pairs(9)]
    grpo: dict[str, Any] = {"num_generations": 4, "max_completion_length": 6, "num_iterations": 2}
    train: dict[str, Any] = {"objective": "grpo", "steps": STEPS, "global_batch_size": 8, "micro_batch_size": 4}
    data: dict[str, Any] = {"sequence_length": 40} | changes.pop("data", {})
    given: dict[str, Any] = {
        "model": tiny.model(vocab_size=None),
        "data": comparisons.data(comparisons.write(folder.with_suffix(".jsonl"), rows), **data),
        "train": tiny.training(**train | changes.pop("train", {})),
        "storage": tiny.storage(checkpoint_every=1, **changes.pop("storage", {})),
        "budgets": changes.pop("budgets", BudgetConfig(gpu="least", ram="least")),
        "adapter": changes.pop("adapter", AdapterConfig()),
    }
    reward = [f"{folder.with_suffix('.py')}:letters"]
    return given | {"grpo": GrpoConfig(reward=reward, **grpo | changes)}


def outcome(folder: Path, observer: tiny.Silent) -> tuple[Any, ...]:
    """What a run comes to, but for how long it took."""
    return *reported(observer), tiny.digest_of(folder)


def reported(observer: tiny.Silent) -> tuple[Any, ...]:
    last = {name: value for name, value in observer.metrics[-1].measured.items() if not name.endswith("_s")}
    validated = observer.validations[-1].measured if observer.validations else {}
    return last, validated, observer.metrics[-1].loss


def run_ranked(ranks: Ranks, folder: Path, changes: dict[str, Any]) -> tuple[Any, ...]:
    observer = tiny.Silent()
    run_validated(folder, observer, ranks=ranks, **changes)
    return reported(observer)


REPLICAS: dict[str, Any] = {"micro_batch_size": 2, "replicas": 4}
"""More than there are prompts of a generation."""


@pytest.mark.parametrize("objective", ["grpo", "rloo"])
def test_ranks_sample_and_score_in_turns(tmp_path: Path, objective: str) -> None:
    """Steps, validations and state are those of one; a rank without a prompt does no harm."""
    train = VALIDATED | REPLICAS | {"objective": objective}
    changes: dict[str, Any] = {"train": train, "beta": 0.2, "budgets": BudgetConfig(gpu="64MiB", ram="64MiB")}
    found = []
    for count in (1, 2, 4):
        first, *others = ranked(count, run_ranked, tmp_path / str(count), changes)
        assert all(each == first for each in others)
        found.append((*first, tiny.digest_of(tmp_path / str(count))))
    assert found[0] == found[1] == found[2]


def run_validated(folder: Path, observer: tiny.Silent, *, resume: bool = False, **changes: Any) -> None:
    """With rewards of two held-out prompts out of three."""
    changes = {"train": VALIDATED} | changes | {"data": {"validation_documents": 3}, "num_generations_eval": 2}
    run(folder, observer, resume=resume, **changes)


MOMENTS: list[tuple[Any, str, int]] = [
    *((passes.Forward, "__call__", moment) for moment in (1, 4, 9)),
    *((Generation, "save", moment) for moment in range(1, 6)),
    *((rollouts, "_log_probabilities", moment) for moment in (1, 2, 4)),
    *((Rewards, "scores", moment) for moment in (1, 2, 3)),
    *((session.Session, "begin_step", moment) for moment in range(1, STEPS + 1)),
    *((session.Session, "_commit", moment) for moment in (1, 3)),
    *((rollouts, "validate", moment) for moment in (1, 2)),
    *((session.Session, "take_validation", moment) for moment in (1, 2)),
]
VALIDATED: dict[str, Any] = {"validate_every": 2, "validate_first": True, "validation_sequences": 4}
"""Two completions of each of two prompts."""


def dying(folder: Path, place: int) -> None:
    """Train, and die by SIGKILL at that call."""
    die_at_call(*MOMENTS[place])
    run_validated(folder, tiny.Silent(), beta=0.2)


@pytest.mark.sampled
def test_kill_9_in_any_phase_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight = tiny.Silent()
    run_validated(tmp_path / "straight", straight, beta=0.2)
    expected = outcome(tmp_path / "straight", straight)
    processes = multiprocessing.get_context("forkserver")
    for place in random.Random(0).sample(range(len(MOMENTS)), samples(3, len(MOMENTS))):
        folder, observer = tmp_path / str(place), tiny.Silent()
        child = processes.Process(target=dying, args=(folder, place))
        child.start()
        child.join(600)
        assert child.exitcode == -signal.SIGKILL, MOMENTS[place]
        run_validated(folder, observer, resume=(folder / "state" / "manifest.json").exists(), beta=0.2)
        assert outcome(folder, observer) == expected, MOMENTS[place]


def test_what_was_sampled_and_rewarded_is_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward function fails in the second generation; mended, the run goes on with the completions that there are."""
    folder = tmp_path / "run"
    with pytest.raises(UserError, match=r"ZeroDivisionError.*Generation \d+ \(step 2\) is intact: fix the cause, then"):
        run(folder, tiny.Silent(), reward=FAILS_LATER)
    found = Generation.read(folder / "data" / "generations", 2)
    assert found is not None
    assert found.completions
    assert not found.advantages
    times: list[int] = []
    sampled = rollouts._sampled
    monkeypatch.setattr(rollouts, "_sampled", lambda *args: (times.append(1), sampled(*args))[1])
    (folder.with_suffix(".py")).write_text(REWARD)
    observer, straight = tiny.Silent(), tiny.Silent()
    run(folder, observer, resume=True)
    assert len(times) == 1, "the second generation is there; the third is sampled"
    run(tmp_path / "straight", straight)
    assert [m.loss for m in observer.metrics] == [m.loss for m in straight.metrics[2:]]


FAILING = {
    "raises": ("def letters(completions, **_):\n    return [int(text) for text in completions]", "ValueError"),
    "NaN": (
        "def letters(completions, **_):\n    return [float('nan')] * len(completions)",
        "completion 0 is nan, of the row",
    ),
    "too few": ("def letters(completions, **_):\n    return [1.0]", "it returned 1 rewards for 8 completions"),
    "hangs": ("import time\ndef letters(**_):\n    time.sleep(60)", "took longer than 0.5 s and was ended"),
    "dies": ("import os\ndef letters(**_):\n    os._exit(3)", "its process ended with exit code 3"),
    "missing": ("def other(**_):\n    return []", "grpo.reward"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_reward_function_that_fails_is_named(tmp_path: Path, name: str) -> None:
    reward, message = FAILING[name]
    with pytest.raises(UserError, match=f"(?s)run.py:letters.*{message}|{message}.*run.py"):
        run(tmp_path / "run", tiny.Silent(), reward=reward, reward_timeout_s=0.5)


def test_completions_are_the_same_wherever_their_prompts_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt at a time with keys and values in RAM, all prompts on the compute device, and in RAM; each completion by
    itself. And training on them comes to the same, though prompts are computed once, and for each."""
    spaces, made, losses, shared = list[Any](), list[list[list[int]]](), list[list[float]](), list[int]()
    in_ram: list[bool] = []
    roomy, other = (BudgetConfig(gpu=size, ram="64MiB") for size in ("64MiB", "65MiB"))
    for number, (shares, budgets) in enumerate([(True, None), (True, roomy), (False, roomy), (True, other)]):
        with monkeypatch.context() as patch:
            patch.setattr(ModelSpec, "takes_prefixes", shares)
            if number == 3:
                patch.setattr(planner, "COMPLETIONS_SHARE", 10**9)  # they are in RAM
            observer, batches = tiny.Silent(), CompletionLoader.batches
            count: list[int] = []

            def counted(*args: Any, batches: Any = batches, count: list[int] = count) -> Any:
                result = batches(*args)
                count.append(sum(len(prefixes_of(stream.documents)) for stream in result))
                return result

            patch.setattr(CompletionLoader, "batches", counted)
            run(tmp_path / f"{number}", observer, **({} if budgets is None else {"budgets": budgets}))
        losses.append([loss for m in observer.metrics for loss in (m.loss, m.grad_norm)])
        shared.append(min(count))
        found = Generation.read(tmp_path / f"{number}" / "data" / "generations", 0)
        assert found is not None
        made.append(found.completions)
        spaces.append(observer.plan["run"]["generations"]["at_once"])
        in_ram.append(observer.plan["tiers"]["ram"]["parts"]["samples"] > 0)
    assert made[0] == made[1] == made[2] == made[3]
    assert len({tuple(ids) for ids in made[0]}) > 4
    assert spaces == [1, 2, 2, 2]
    assert in_ram == [True, False, False, True]
    assert shared == [6, 6, 0, 6], "three of four completions of two prompts"
    assert losses[0] == pytest.approx(losses[2], rel=1e-5, abs=1e-7)
    assert losses[1] == pytest.approx(losses[2], rel=1e-5, abs=1e-7)


def test_prompts_may_be_read_in_several_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 of them, of which a pass has room for some: what the others wrote to RAM stays."""
    made = []
    for size, share in (("64MiB", 2), ("65MiB", 10**9)):
        monkeypatch.setattr(planner, "COMPLETIONS_SHARE", share)
        observer = tiny.Silent(stop_after=1)
        budgets = BudgetConfig(gpu=size, ram="64MiB")
        run(tmp_path / size, observer, budgets=budgets, steps_per_generation=64, num_iterations=1)
        assert observer.plan["run"]["generations"]["at_once"] == 128
        assert (observer.plan["tiers"]["ram"]["parts"]["samples"] > 0) == (share > 2)
        found = Generation.read(tmp_path / size / "data" / "generations", 0)
        assert found is not None
        made.append(found.completions)
    assert made[0] == made[1]


ADAPTERS = {
    "every parameter": AdapterConfig(),
    "lora": AdapterConfig(method="lora", rank=2),
    "dora": AdapterConfig(method="dora", rank=2),
}
TIERS = {
    "nvme": BudgetConfig(gpu="least", ram="least"),
    "ram": BudgetConfig(gpu="least", ram="64MiB"),
    "gpu": BudgetConfig(gpu="64MiB", ram="64MiB"),
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("trained", ADAPTERS)
def test_the_reference_is_the_model_as_it_was_before_the_first_step(tmp_path: Path, trained: str, tier: str) -> None:
    """Log-probabilities of completions by the reference are those of the first weights, whatever was trained since, and
    wherever a plan keeps them."""
    folder, observer, adapter = tmp_path / "run", tiny.Silent(), ADAPTERS[trained]
    run(folder, observer, adapter=adapter, budgets=TIERS[tier], beta=0.3, num_iterations=1)
    held = observer.plan["reference"]
    assert held
    assert ("nvme" in held) == (tier == "nvme")
    assert observer.metrics[0].measured["kl"] == 0
    assert observer.metrics[-1].measured["kl"] > 1e-6
    made = Generation.read(folder / "data" / "generations", STEPS - 1)
    assert made is not None
    corpus = TokenCorpus(folder / "data" / "corpus")
    recipe = tiny.recipe(model=tiny.model(vocab_size=None), train=tiny.training(), adapter=AdapterConfig())
    spec = tiny.spec_of(model_config(recipe, 300))
    _, buffers = first_values(spec, recipe, None, None)
    first = {name: tensor for _, tensors in buffers for name, tensor in tensors.items()}
    model: Any = AutoModelForCausalLM.from_config(spec.config, dtype=torch.float32).eval()
    model.load_state_dict(first)
    for document, ids, expected in zip(made.documents, made.completions, made.base, strict=True):
        prompt = corpus.tokens[corpus.starts[document] : corpus.starts[document + 1]].tolist()
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        logps = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert logps.tolist() == pytest.approx(expected, abs=1e-5)


def test_what_is_exported_is_not_the_reference(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, tiny.Silent(), beta=0.3)
    export(folder, tiny.recipe(**sections(folder, beta=0.3)), out_dir=tmp_path / "out")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with closing(NvmeStore.open(folder / "state", read_only=True)) as store:
        trained = tiny.parameters(store, tiny.spec_of(model_config(tiny.recipe(**sections(folder)), 300)))
    assert all(torch.equal(model.state_dict()[name], values) for name, values in trained.items())


def test_a_run_without_a_reference_cannot_be_given_one(tmp_path: Path) -> None:
    for number, (before, after) in enumerate([(0.0, 0.3), (0.3, 0.0)]):
        folder = tmp_path / str(number)
        run(folder, tiny.Silent(stop_after=1), beta=before)
        with pytest.raises(UserError, match=rf"grpo.beta: {after} in the recipe, {before} in the run"):
            run(folder, tiny.Silent(), resume=True, beta=after)


def test_samples_show_completions_with_their_rewards(tmp_path: Path) -> None:
    observer = tiny.Silent()
    run(tmp_path / "run", observer)
    assert [made.step for made in observer.samples] == [0, 2, 4]
    assert not any("running mean" in message for message in observer.messages)  # the losses are around 0
    for made in observer.samples:
        assert all(one.reward == one.text.count("e") for one in made.samples)
    assert all({"reward", "reward_std", "completions/mean_length"} <= m.measured.keys() for m in observer.metrics)


def test_validations_reward_prompts_that_are_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ones each time, by the same draws, and the run computes what it computes without them."""
    seen: list[tuple[int, list[int], float]] = []
    reward = rollouts._reward

    def keep(session: session.Session, generation: Generation) -> Any:
        prompts, texts = reward(session, generation)
        seen.append((session.step, generation.documents, sum(text.count("e") for text in texts) / len(texts)))
        return prompts, texts

    monkeypatch.setattr(rollouts, "_reward", keep)
    observer, without = tiny.Silent(), tiny.Silent()
    run_validated(tmp_path / "run", observer)
    held_out = [each for each in seen if each[1] == [6, 6, 7, 7]]
    assert [step for step, _, _ in held_out] == [made.step for made in observer.validations] == [0, 2, 4, 5]
    assert [mean for _, _, mean in held_out] == [made.measured["reward"] for made in observer.validations]
    assert all(made.loss is None and made.value == made.measured["reward"] for made in observer.validations)
    trained = {document for each in seen if each not in held_out for document in each[1]}
    assert trained == set(range(6))
    run(tmp_path / "without", without, data={"validation_documents": 3})
    assert tiny.digest_of(tmp_path / "run") == tiny.digest_of(tmp_path / "without")
    assert observer.plan["run"]["validations"] == 3
    assert 0 < observer.plan["run"]["validation_s"] < observer.plan["run"]["generations"]["sampling_s"]


def test_validations_draw_alike_and_the_best_one_is_kept(tmp_path: Path) -> None:
    """The reward falls in every call: the first validation is the best one, and two without a gain end the run."""
    observer = tiny.Silent()
    run(
        tmp_path / "run",
        observer,
        reward=FALLS,
        data={"validation_documents": 3},
        train=VALIDATED | {"early_stopping_patience": 2, "lr": 1e-30, "validate_first": False, "steps": 20},
        storage={"keep_best": True},
        num_generations_eval=2,
    )
    values = [made.value for made in observer.validations]
    assert values == sorted(values, reverse=True)
    assert len({made.tokens for made in observer.validations}) == 1, "the same model draws the same completions"
    assert [made.step for made in observer.validations] == [2, 4, 6]
    assert any(f"ended early after step 6: no gain in 2 validations; best {values[0]:.4g} at step 2" in message
               for message in observer.messages)  # fmt: skip
    state = tmp_path / "run" / "state"
    assert read_checkpoint(state, resolve_checkpoint(state, "best")).step == 2


def test_validations_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"grpo.num_generations_eval: 5"):
        GrpoConfig(num_generations=4, num_generations_eval=5)
    words = r"each of the 3 held-out prompts has more tokens than the 3 that data.sequence_length leaves"
    data = {"validation_documents": 3, "long_documents": "drop", "sequence_length": 40}
    with pytest.raises(UserError, match=words):
        run(tmp_path / "run", tiny.Silent(), data=data, train=VALIDATED, max_completion_length=37)


def test_old_log_probabilities_are_the_first_steps_own(tmp_path: Path) -> None:
    """No ratio differs from one in the first step of a generation: the sampler's numbers are the trainer's."""
    observer = tiny.Silent()
    run(tmp_path / "run", observer, loss_type="grpo")
    for m in observer.metrics[::2]:
        assert m.loss == pytest.approx(0, abs=1e-15)
        assert m.measured["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize("objective", ["grpo", "rloo"])
def test_advantages(objective: str) -> None:
    config = GrpoConfig(reward=["a.py:a", "a.py:b"], reward_weights=[1.0, 0.5], num_generations=3)
    made = Generation(step=0, made_by="", documents=[0] * 6, completions=[[1]] * 6, ended=[True] * 6)
    made.rewards = [[1.0, 0.0, 2.0, 1.0, None, 4.0], [0.0, 2.0, None, 0.0, None, 0.0]]
    totals, found = rollouts.advantages(made, config, objective)
    assert totals[:4] == [1.0, 1.0, 2.0, 1.0]
    assert math.isnan(totals[4])
    if objective == "rloo":
        assert found == pytest.approx([1 - 1.5, 1 - 1.5, 2 - 1, 1 - 4, 0, 4 - 1])
        return
    for group, each in ((torch.tensor([1.0, 1.0, 2.0]), found[:3]), (torch.tensor([1.0, 4.0]), [found[3], found[5]])):
        assert each == pytest.approx(((group - group.mean()) / (group.std() + 1e-4)).tolist(), rel=1e-6)
    assert found[4] == 0


def test_prompts_that_leave_no_room_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"leaves no room for a prompt before grpo.max_completion_length=39"):
        run(tmp_path / "run", tiny.Silent(), max_completion_length=39)
    with pytest.raises(UserError, match=r"leaves 4 tokens for a prompt .* the longest has"):
        run(tmp_path / "run", tiny.Silent(), max_completion_length=36)


def test_a_generation_that_is_damaged_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, tiny.Silent(stop_after=1))
    file = next((folder / "data" / "generations").glob("step-*.json"))
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"advantages": [0.0] * 8}))
    with pytest.raises(UserError, match=r"step-000000\.json: damaged"):
        run(folder, tiny.Silent(), resume=True)
    file.unlink()
    with pytest.raises(UserError, match="completions of step 0 that the run is training on are gone"):
        run(folder, tiny.Silent(), resume=True)
