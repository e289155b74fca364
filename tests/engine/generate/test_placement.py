"""What lives where and how long it takes, of a model that fits nowhere: the figures of docs/sample.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from penstock.engine.config import BudgetConfig, parse_bytes
from penstock.engine.generate.forecast import Estimate, forecast
from penstock.engine.generate.placement import Sizes, place
from penstock.engine.machine.budgets import machine_budgets
from penstock.engine.machine.presets import find_machine
from penstock.engine.model.anatomy import take_apart
from penstock.engine.model.spec import ModelSpec
from penstock.storage.errors import UserError
from penstock.storage.units import bytes_text, seconds_text

PAGE = Path(__file__).parents[3] / "docs" / "sample.md"
MACHINES = {"RTX 4090, 64 GB RAM": "rtx4090-64", "RTX 4090, 128 GB RAM": "rtx4090-128"}
LLAMA_70B = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
LLAMA_70B |= {"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072}
TOKENS = 64


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return take_apart(LlamaConfig(**LLAMA_70B))  # type: ignore[arg-type]


def ask(spec: ModelSpec, machine_name: str, prompts: int, length: int) -> Estimate:
    sizes, machine = Sizes.of(spec, 2), find_machine(machine_name)
    budgets = machine_budgets(BudgetConfig(), machine)
    room = prompts * (length + TOKENS)
    placement = place(sizes, room, gpu_bytes=budgets.gpu, ram_bytes=budgets.ram, staged=True)
    how = {"cuda": True, "where": "", "assumed": False, "filled": False}
    work = {"prompt_tokens": length, "sequences": prompts, "new_tokens": TOKENS}
    return forecast(spec, sizes, placement, sizes.buffers, machine, **how, **work)


def test_the_page_has_the_figures_of_the_forecast(spec: ModelSpec) -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| RTX")]
    assert len(rows) == 6
    for machine, prompts, length, weights, kept, token, bound in rows:
        found = ask(spec, MACHINES[machine], int(prompts), int(length.replace(",", "")))
        sizes = [bytes_text(size).removesuffix(" GiB").replace("0 B", "0") for size in found.weights.values()]
        assert ", ".join(sizes) + " GiB" == weights
        said = {"gpu": "GPU", "ram": "RAM"}[found.keys_values], seconds_text(found.pass_s), found.bound_by
        assert said == (kept, token, bound)


def test_refusals_name_what_would_do(spec: ModelSpec) -> None:
    sizes = Sizes.of(spec, 2)
    with pytest.raises(UserError, match=r"--gpu: 1GiB cannot hold one block .* give at least (\w+)") as refusal:
        place(sizes, 1, gpu_bytes=2**30, ram_bytes=2**36, staged=True)
    least = parse_bytes(str(refusal.value).rpartition(" ")[2], "least")
    place(sizes, 1, gpu_bytes=least, ram_bytes=2**36, staged=True)
    with pytest.raises(UserError, match="--gpu: "):
        place(sizes, 1, gpu_bytes=least - 1024, ram_bytes=2**36, staged=True)
    with pytest.raises(UserError, match="--ram: 512MiB cannot hold one block of this model on its way") as refusal:
        place(sizes, 1, gpu_bytes=2**34, ram_bytes=2**29, staged=True)
    least = parse_bytes(str(refusal.value).rpartition(" ")[2], "least")
    place(sizes, 1, gpu_bytes=2**34, ram_bytes=least, staged=True)
    with pytest.raises(UserError, match="--ram: "):
        place(sizes, 1, gpu_bytes=2**34, ram_bytes=least - 1024, staged=True)
