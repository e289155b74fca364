"""Text from streamed weights is what transformers' own generate gives, wherever weights, keys and values live; and what
lives where and how long it takes, of a model that fits nowhere: the figures of docs/sample.md."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import adapted
import pytest
import torch
from samples import cases
from tiny import HYBRID, Silent, model, recipe, storage, train_run, training
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from penstock.app.sampling.sample import opened
from penstock.engine.config import BudgetConfig, parse_bytes
from penstock.engine.export import export
from penstock.engine.forecast.query import Estimate, Query
from penstock.engine.generate.decode import Choose, Continuation, Decoding, Row, Target, choose, decode
from penstock.engine.machine.budgets import machine_budgets
from penstock.engine.machine.presets import find_machine
from penstock.engine.model.anatomy import take_apart
from penstock.engine.model.spec import ModelSpec
from penstock.engine.opened_model import OpenedModel
from penstock.engine.runtime.executor import Executor
from penstock.storage.files.errors import UserError
from penstock.storage.files.units import bytes_text, seconds_text

SHAPE: dict[str, Any] = adapted.SIZES | {"num_hidden_layers": 3, "vocab_size": 211, "pad_token_id": 0}
SHAPE |= {"bos_token_id": None, "eos_token_id": None}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 1e4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    # Windows shorter than the prompts, soft-caps.
    "gemma3_text": {"num_hidden_layers": 7, "sliding_window": 8, "attn_logit_softcapping": 20.0},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    # The rotary tables change at the 21st token.
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 20},
    "qwen3_next": HYBRID,
}
CONFIGS = {name: AutoConfig.for_model(name, **SHAPE | fields) for name, fields in FAMILIES.items()}
MIXTURE = model(model_type="qwen3_moe", overrides=FAMILIES["qwen3_moe"])
RUNS: dict[str, dict[str, Any]] = {
    "layers frozen": {"train": training(steps=3, freeze=["*layers.0.*", "*layers.2.mlp.*"])},
    "adapter": {"adapter": adapted.section("rslora"), "train": training(steps=4, lr=5e-2)},
    "expert blocks": {"model": MIXTURE, "train": training(steps=3, lr=5e-2, split_layers="experts")},
    "expert groups": {
        "model": MIXTURE,
        "train": training(steps=3, lr=5e-2, split_layers="experts", expert_groups=2),
    },
}
PAGE = Path(__file__).parents[2] / "docs" / "sample.md"
MACHINES = {"RTX 4090, 64 GB RAM": "rtx4090-64", "RTX 4090, 128 GB RAM": "rtx4090-128"}
LLAMA_70B = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
LLAMA_70B |= {"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072}
TOKENS = 64


def prompt_of(length: int) -> list[int]:
    found = torch.randint(1, 211, (length,), generator=torch.Generator().manual_seed(length))
    return [int(token) for token in found]


PROMPTS = [prompt_of(length) for length in (5, 23, 1, 17)]
ROOMY = {"gpu_bytes": 1 << 30, "ram_bytes": 1 << 30}


def save(config: PretrainedConfig, folder: Path) -> Any:
    """A model whose likeliest tokens are no close call, in `folder`."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config).eval()
        for parameter in made.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * 0.3 if parameter.dim() > 1 else parameter + noise * 0.1)
    made.save_pretrained(folder)
    return made


def by_transformers(made: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    found = []
    for prompt in prompts:
        ids = made.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False)
        found.append(ids[0, len(prompt) :].tolist())
    return found


def ids_of(found: list[Continuation]) -> list[list[int]]:
    return [continuation.ids for continuation in found]


def least_gpu(folder: Path, tokens: int) -> int:
    """What a refusal asks for, of a model that reads so many tokens."""
    with pytest.raises(UserError, match="give at least") as refusal:
        OpenedModel.open(folder, gpu_bytes=1 << 10, ram_bytes=1 << 12, device="cpu")
    with OpenedModel.open(folder, gpu_bytes=_asked(refusal.value), ram_bytes=1 << 12, device="cpu") as small:
        try:
            small.estimate(tokens - 1, 1, 1)
        except UserError as more:
            return _asked(more)
        return _asked(refusal.value)


def least_for_texts(folder: Path, least: int, pairs: list[tuple[list[int], list[int]]]) -> int:
    """Budget with which texts may be scored, if not `least`."""
    with OpenedModel.open(folder, gpu_bytes=least, ram_bytes=150_000, device="cpu", dtype="float32") as small:
        try:
            small.loglikelihoods(pairs, batch_tokens=30)
        except UserError as more:
            return _asked(more)
        return least


def _asked(refusal: UserError) -> int:
    found = re.search(r"give at least (\w+)", str(refusal))
    assert found
    return parse_bytes(found[1], "gpu")


@pytest.mark.parametrize("family", cases(CONFIGS, "phi3", "qwen3_next"))
def test_greedy_is_what_transformers_gives(family: str, tmp_path: Path) -> None:
    """Prompts of unequal length in one batch, all weights in memory; and each by itself, everything from disk."""
    made = save(CONFIGS[family], tmp_path)
    count = 4
    expected = by_transformers(made, PROMPTS, count)
    with OpenedModel.open(tmp_path, **ROOMY, device="cpu", dtype="float32") as ours:
        told: list[list[int]] = [[] for _ in PROMPTS]
        found = ours.generate(PROMPTS, Decoding(new_tokens=count), lambda i, token: told[i].append(token))
        assert ids_of(found) == told == expected
        assert not any(continuation.ended for continuation in found)
        assert ours.passes == count
    least = least_gpu(tmp_path, 26)
    with OpenedModel.open(tmp_path, gpu_bytes=least, ram_bytes=1 << 12, device="cpu", dtype="float32") as ours:
        assert ours.estimate(23, 1, 3).keys_values == "nowhere"
        assert ids_of(ours.generate(PROMPTS[1:2], Decoding(new_tokens=3))) == [expected[1][:3]]


@pytest.mark.parametrize("family", cases(["gemma3_text", "phi3", "qwen3_next"], "gemma3_text"))
def test_tiers_change_no_token(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, count = save(CONFIGS[family], tmp_path), 3
    expected = by_transformers(made, PROMPTS, count)
    monkeypatch.setattr("penstock.engine.forecast.query.CHUNKS", (3,))
    pairs = [(PROMPTS[1], PROMPTS[0]), (PROMPTS[2], PROMPTS[0]), (PROMPTS[0], PROMPTS[2])]
    least, seen = least_gpu(tmp_path, 64), set()
    more = max(least + 10_000, least_for_texts(tmp_path, least, pairs))
    # Everything in memory; weights in RAM, all or some of them; some on disk, keys and values in RAM.
    for gpu, ram in ((1 << 30, 1 << 30), (least, 1 << 30), (least, 1 << 17), (more, 150_000)):
        with OpenedModel.open(tmp_path, gpu_bytes=gpu, ram_bytes=ram, device="cpu", dtype="float32") as ours:
            assert ids_of(ours.generate(PROMPTS, Decoding(new_tokens=count))) == expected
            if gpu > least:  # which does for continuing texts
                for score, pair in zip(ours.loglikelihoods(pairs, batch_tokens=30), pairs, strict=True):
                    assert score == pytest.approx(log_likelihood(made, *pair), abs=1e-3)
            forecast = ours.estimate(max(map(len, PROMPTS)), len(PROMPTS), count)
            seen |= {tier for tier, size in forecast.weights.items() if size} | {f"kv {forecast.keys_values}"}
    assert seen == {"gpu", "ram", "disk"} | ({"kv nowhere"} if family == "qwen3_next" else {"kv gpu", "kv ram"})


def test_a_prompt_that_begins_as_before_is_not_read_again(tmp_path: Path) -> None:
    made = save(CONFIGS["qwen3"], tmp_path)
    read: list[int] = []
    with OpenedModel.open(tmp_path, **ROOMY, device="cpu") as ours:
        first = ours.generate([PROMPTS[1]], Decoding(new_tokens=5), reuse=True)[0].ids
        longer = [*PROMPTS[1], *first, 7, 8, 9]
        forward = ours._forward
        call = type(forward).__call__

        def counted(self: Any, rows: list[Row], choose: Choose) -> list[int]:
            read.append(sum(len(row.ids) for row in rows))
            return call(self, rows, choose)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(forward), "__call__", counted)
            again = ours.generate([longer], Decoding(new_tokens=3), reuse=True)[0].ids
    assert again == by_transformers(made, [longer], 3)[0]
    assert read == [4, 1, 1]  # the last token that was drawn, three new ones; then one by one


def test_a_pass_that_is_broken_off_changes_no_later_answer(tmp_path: Path) -> None:
    made, wait = save(CONFIGS["qwen3"], tmp_path), Executor.wait
    with OpenedModel.open(tmp_path, **ROOMY, device="cpu") as ours, pytest.MonkeyPatch.context() as patch:
        first = ours.generate([PROMPTS[1]], Decoding(new_tokens=2), reuse=True)[0].ids
        patch.setattr(Executor, "wait", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            ours.generate([[*PROMPTS[1], *first, 5, 6]], Decoding(new_tokens=3), reuse=True)
        patch.setattr(Executor, "wait", wait)
        longer = [*PROMPTS[1], *first, 7, 8]
        assert ids_of(ours.generate([longer], Decoding(new_tokens=3), reuse=True)) == by_transformers(made, [longer], 3)
        assert ours.passes == 2 + 3


@pytest.mark.long
@pytest.mark.parametrize("kind", RUNS)
def test_a_run_and_its_checkpoint_are_read_as_their_exports(kind: str, tmp_path: Path) -> None:
    run, sections = tmp_path / "run", RUNS[kind] | {"storage": storage(checkpoint_every=1)}
    train_run(run, Silent(asks={2: "second"}), **sections)
    pair = (PROMPTS[1], PROMPTS[0])
    values = []
    for checkpoint in (None, "second"):
        out = tmp_path / f"export {checkpoint}"
        export(run, recipe(**sections), out_dir=out, checkpoint=checkpoint)
        made = AutoModelForCausalLM.from_pretrained(out)
        with OpenedModel.open(run, recipe=recipe(**sections), checkpoint=checkpoint, **ROOMY, device="cpu") as ours:
            if kind != "adapter":  # which is exported merged: the same but for rounding
                assert ids_of(ours.generate(PROMPTS, Decoding(new_tokens=6))) == by_transformers(made, PROMPTS, 6)
            values.append(ours.loglikelihoods([pair])[0][0])
        assert values[-1] == pytest.approx(log_likelihood(made, *pair)[0], abs=1e-3)
    assert abs(values[0] - values[1]) > 2e-3, "the steps between changed something"
    with pytest.raises(UserError):
        OpenedModel.open(tmp_path / "none", recipe=recipe(**sections), device="cpu")


def log_likelihood(made: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    with torch.no_grad():
        scores = made(torch.tensor([[*context, *continuation]])).logits[0].double().log_softmax(-1)
    behind = scores[len(context) - 1 : -1]
    value = float(behind.gather(1, torch.tensor(continuation)[:, None]).sum())
    return value, behind.argmax(-1).tolist() == continuation


def test_sequences_end_at_stop_ids_and_at_the_end_of_the_context(tmp_path: Path) -> None:
    made = save(CONFIGS["llama"], tmp_path)
    long = prompt_of(124)
    expected = by_transformers(made, [long, PROMPTS[0]], 4)
    assert expected[1][2] not in expected[0] + expected[1][:2]
    with OpenedModel.open(tmp_path, **ROOMY, device="cpu") as ours:
        stop = frozenset({expected[1][2]})
        found = ours.generate([long, PROMPTS[0]], Decoding(new_tokens=9, stop_ids=stop))
        assert found[0] == Continuation(expected[0], True)
        assert found[1] == Continuation(expected[1][:2], True, end=expected[1][2])
        with pytest.raises(UserError, match="prompt 2: 128 tokens, and the model's context is 128"):
            ours.generate([[1], [1] * 128], Decoding())


def test_draws_depend_on_seed_sequence_and_position_alone() -> None:
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    settings = Decoding(new_tokens=30, temperature=1.0, seed=3)

    def forward(rows: Any, choose: Choose) -> list[int]:
        return choose(logits, 1)

    both = decode(forward, [[1], [2, 3]], settings)
    alone = decode(forward, [[2, 3]], settings, first=1)
    assert decode(lambda rows, choose: choose(logits[1:], 1), [[2, 3]], settings, first=1) == both[1:] != alone
    assert both != decode(forward, [[1], [2, 3]], Decoding(new_tokens=30, temperature=1.0, seed=4))
    # As often as probable, and never beyond what `top_p` leaves.
    few = torch.tensor([[0.2, 0.5, 0.0, 0.3, 0.0]]).log()
    places = [Target(0, 0, position) for position in range(4000)]
    drawn = choose(few, 10**5, targets=places, decoding=Decoding(temperature=1.0, top_p=0.79))
    assert set(drawn) == {1, 3}
    assert drawn.count(1) / 4000 == pytest.approx(0.5 / 0.8, abs=0.03)
    drawn = choose(few, 10**5, targets=places, decoding=Decoding(temperature=1.0))
    assert set(drawn) == {0, 1, 3}
    assert drawn.count(0) / 4000 == pytest.approx(0.2, abs=0.03)
    # Copies of a prompt are other draws by the logits of one.
    copies = decode(forward, [[1]], settings, copies=2)
    assert copies[0] == both[0] != copies[1]


@pytest.mark.parametrize("method", cases(["lora", "dora"], "lora"))
def test_an_adapter_folder_is_asked_with_its_base(method: str, tmp_path: Path) -> None:
    """As plain peft has it, the base streamed from disk or in memory."""
    shape = adapted.config("qwen3_moe" if method == "lora" else "llama")
    adapted.base(shape).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")  # by whose place peft calls it
    made = adapted.adapted(base, adapted.peft_config(adapted.section(method), ["q_proj", "v_proj", "o_proj"]))
    made.save_pretrained(tmp_path / "adapter")
    prompts = [[token % 97 for token in prompt] for prompt in PROMPTS[:2]]
    expected = by_transformers(made, prompts, 8)
    assert expected != by_transformers(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), prompts, 8)
    for gpu, ram in (("1GiB", "1GiB"), ("17MiB", "8KiB")):
        with opened(tmp_path / "adapter", gpu=gpu, ram=ram, device="cpu") as ours:
            assert ids_of(ours.generate(prompts, Decoding(new_tokens=8))) == expected
            ((value, _),) = ours.loglikelihoods([(prompts[1], prompts[0])])
            assert value == pytest.approx(log_likelihood(made, prompts[1], prompts[0])[0], abs=1e-3)
    other = adapted.config("llama")
    other.hidden_size = 64
    adapted.base(other).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="the adapter was trained on another base model"):
        OpenedModel.open(tmp_path / "adapter", base=tmp_path / "other", device="cpu")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "nowhere"}))
    with pytest.raises(UserError, match="the adapter's base model nowhere is missing"):
        OpenedModel.open(tmp_path / "adapter", device="cpu")


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return take_apart(LlamaConfig(**LLAMA_70B))  # type: ignore[arg-type]


def query(spec: ModelSpec, machine_name: str) -> Query:
    budgets = machine_budgets(BudgetConfig(), find_machine(machine_name))
    return Query(spec.all_frozen(), "bfloat16", "cuda", budgets.gpu, budgets.ram)


def ask(spec: ModelSpec, machine_name: str, prompts: int, length: int) -> Estimate:
    asked, machine = query(spec, machine_name), find_machine(machine_name)
    plan = asked.plan([length + TOKENS] * prompts, continued=True)
    stored = {name: 2 * buffer.numel for name, buffer in plan.buffers.items()}
    work = {"prompt_tokens": length, "sequences": prompts, "new_tokens": TOKENS}
    return asked.estimate(plan, machine, stored, filled=False, assumed=False, **work)


def test_the_page_has_the_figures_of_the_forecast(spec: ModelSpec) -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| RTX")]
    assert len(rows) == 6
    for machine, prompts, length, weights, kept, token, bound in rows:
        found = ask(spec, MACHINES[machine], int(prompts), int(length.replace(",", "")))
        sizes = [bytes_text(size).removesuffix(" GiB").replace("0 B", "0") for size in found.weights.values()]
        said = {"gpu": "GPU", "ram": "RAM"}[found.keys_values], seconds_text(found.pass_s), found.bound_by
        assert (", ".join(sizes) + " GiB", *said) == (weights, kept, token, bound)


def test_refusals_name_what_would_do(spec: ModelSpec) -> None:
    for tier, gpu, ram in (("gpu", 2**30, 2**36), ("ram", 2**34, 2**29)):
        budgets = {"gpu_bytes": gpu, "ram_bytes": ram}
        asked = replace(query(spec, "rtx4090-64"), **budgets)
        said = rf"--{tier}: \w+ cannot hold one block of this model .* give at least (\w+)"
        with pytest.raises(UserError, match=said) as refusal:
            asked.plan([1], continued=True)
        least = _asked(refusal.value)
        replace(asked, **{f"{tier}_bytes": least}).plan([1], continued=True)
        with pytest.raises(UserError, match=f"--{tier}: "):
            replace(asked, **{f"{tier}_bytes": least - 1024}).plan([1], continued=True)
