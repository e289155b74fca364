"""A run's attention kernels: how they are chosen and recorded, and what the run says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from msgspec import structs

from penstock.engine.attention.flash_attn import NOT_INSTALLED
from penstock.engine.attention.select import (
    Attends,
    attention_report,
    environment,
    installed,
    measured,
    prepare,
    rankings,
)
from penstock.engine.events import Observer
from penstock.engine.forecast.costs import Conditions
from penstock.engine.forecast.report import predict
from penstock.engine.machine.architectures import Shares, architecture, peak_of
from penstock.engine.machine.presets import attention_rates
from penstock.engine.machine.profile import Machine
from penstock.engine.model import sums
from penstock.engine.model.spec import ModelSpec
from penstock.engine.plan.chunks import Filled
from penstock.engine.plan.plan import Plan
from penstock.storage.files.untrusted import one_line

_INSTALL = {
    "flash2": "pip install --no-build-isolation 'penstock[flash2]'",  # is built here, by the torch that is installed
    "flash4": "pip install 'penstock[flash4]'",
}


class KernelQuery(NamedTuple):
    """What the passes of a plan ask kernels for."""

    attention: list[Attends]
    products: list[tuple[int, int]]
    """Shapes of the weights, alone and joined, whose gradients one kernel may multiply and sum."""
    rows: int
    """Of such products, at most."""


def kernel_query(spec: ModelSpec, plan: Plan) -> KernelQuery:
    """Everything once."""
    products: dict[tuple[int, int], None] = {}
    for block, summed, joined in zip(spec.layers, spec.summed, spec.joined, strict=True):
        trained = spec.params_of(block, trained=True)
        for names in (*((name,) for name in summed), *joined):
            ends = tuple(f".{name}.weight" for name in names)
            if shapes := [param.shape for param in trained if param.name.endswith(ends)]:
                products[sum(shape[0] for shape in shapes), shapes[0][1]] = None
    return KernelQuery(_attends(spec, plan), list(products), plan.max_chunk_tokens)


def _attends(spec: ModelSpec, plan: Plan) -> list[Attends]:
    chunk, total = plan.max_chunk_tokens, plan.max_chunk_tokens if plan.streamed else plan.window_tokens
    if (samples := plan.problem.samples) is not None:  # a prompt goes on in the next chunk, however batches are cut
        total = max(total, 2 * chunk, samples.prompt_tokens + samples.new_tokens, *samples.lengths)
    shapes = (shape for shape in spec.attention if shape is not None)
    result = (
        Attends(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            qk_dim=shape.qk_dim,
            v_dim=shape.v_dim,
            chunk=chunk,
            total=total if shape.chunk is None else min(total, shape.chunk + chunk),
            window=shape.window,
            softcap=shape.softcap,
            pieces=plan.streamed or plan.problem.scores,
        )
        for shape in shapes
    )
    return list(dict.fromkeys(result))


def choose_kernels(
    what: KernelQuery, device: torch.device, dtype: torch.dtype, recorded: Mapping[str, Any] | None = None
) -> list[str]:
    """Choose kernels for all that a run can ask for, while GPU memory is still free; as `recorded`, if given. Returns
    what is wrong with those. Nothing happens on a CPU, where there is one kernel."""
    if not measured(device):
        return []
    known = recorded or {"rankings": None, "products": None}
    lost = prepare(device, dtype, what.attention, known["rankings"])
    if dtype != torch.float32:
        lost += sums.prepare(what.products, what.rows, device, dtype, known["products"])
    torch.cuda.empty_cache()
    return lost


def kernel_record(device: torch.device) -> dict[str, Any]:
    """What a generation records of the kernels that were chosen: with others a resumed run has other bits."""
    result: dict[str, Any] = {"environment": environment(device), "rankings": {}, "products": {}}
    return result | {"rankings": rankings(), "products": sums.choices()} if measured(device) else result


def is_kernel_record(value: Any) -> bool:
    """Whether it is one, as far as anybody may rely on it."""
    if not (isinstance(value, dict) and value.keys() == {"environment", "rankings", "products"}):
        return False
    if not all(isinstance(part, dict) for part in value.values()):
        return False
    texts = [*value["environment"].values()]
    for names in value["rankings"].values():
        if not isinstance(names, list):
            return False
        texts += names
    return all(isinstance(text, str) for text in texts) and all(type(use) is bool for use in value["products"].values())


def changes(recorded: Mapping[str, Any], device: torch.device) -> list[str]:
    """What is another here than where the record was made, in words."""
    before, now = recorded["environment"], environment(device)
    names = [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]
    return [one_line(f"{name} {before.get(name, 'none')}, now {now.get(name, 'none')}", 200) for name in names]


class Faster(NamedTuple):
    """A kernel that is not installed and would be faster on this card, by what is published."""

    gpus: str
    """What such cards are called."""
    kernels: tuple[str, ...]
    """One of them is enough."""
    extra: str
    """Of this package."""
    now: Shares | None
    """Shares of the peak that the fastest of the chosen kernels reach, by head size; None where one is unpublished."""
    then: Shares
    """With the one that is missing."""

    def words(self, gain: float | None) -> str:
        """The line of the log; `gain` is the part of a step's time that the plan expects to save."""
        names = " or ".join(self.kernels)
        if gain is None:
            expected = "no published rates compare it with the current kernel"
        else:
            part = "less than 1%" if gain < 0.01 else f"{gain:.0%}"
            expected = f"by published rates the plan expects {part} of a step's time from it"
        missing = " and is not installed" if len(self.kernels) == 1 else ", and neither is installed"
        return f"attention: {names} would be faster on {self.gpus}{missing}: {_INSTALL[self.extra]}; {expected}"


def report_kernels(
    observer: Observer,
    device: torch.device,
    machine: Machine,
    plan: Plan,
    documents: Sequence[Sequence[int]] | None = None,
    filled: Filled | None = None,
) -> None:
    """Say which kernels are installed for the GPU, and what a faster one that is missing would bring to this plan."""
    observer.on_message(describe(installed(device)), detail=True)
    faster = faster_kernel(machine.gpu, [kind for kind in attention_report() if kind["device"] != "cpu"])
    if faster is not None:
        observer.on_message(faster.words(expected_gain(faster, plan, machine, documents, filled)))


def describe(there: Mapping[str, str | None]) -> str:
    """Which kernels are installed for this GPU, and which are not and why: attention.select.installed in one line."""
    usable = [name for name, reason in there.items() if reason is None]
    others = [f"{name} {reason}" for name, reason in there.items() if reason is not None]
    return "attention kernels installed: " + "; ".join([", ".join(usable) or "none", *others])


def faster_kernel(gpu: str | None, report: Sequence[Mapping[str, Any]]) -> Faster | None:
    """What is missing on the GPU that the driver calls `gpu`, by attention.select.attention_report; None where nothing
    is known of the card, or the missing kernel is installed, could not compute this, or is not faster."""
    known = architecture(gpu)
    if known is None:
        return None
    lacking = [kind for kind in report if all(kind["refused"].get(name) == NOT_INSTALLED for name in known.wanted)]
    chosen = [
        {kind["chosen"].partition(",")[0] for kind in lacking if kind["direction"] == direction}
        for direction in ("forward", "backward")
    ]
    now: dict[int, tuple[float, float]] = {}
    then: dict[int, tuple[float, float]] = {}
    published = True
    for head_dim in known.fastest():
        wanted = [shares for name in known.wanted if (shares := known.shares(name, head_dim)) is not None]
        rates = []
        for index, names in enumerate(chosen):
            present = [shares[index] for name in names if (shares := known.shares(name, head_dim)) is not None]
            published = published and len(present) == len(names)
            best = max(shares[index] for shares in wanted)
            rates.append((max(present, default=best), max([*present, best])))
        now[head_dim], then[head_dim] = (rates[0][0], rates[1][0]), (rates[0][1], rates[1][1])
    if not lacking or (published and now == then):
        return None
    return Faster(f"{known.name} GPUs", known.wanted, known.extra, now if published else None, then)


def expected_gain(
    faster: Faster,
    plan: Plan,
    machine: Machine,
    documents: Sequence[Sequence[int]] | None = None,
    filled: Filled | None = None,
) -> float | None:
    """The part of a step's time that the missing kernel saves: the plan simulated at the published rates of both. None
    where the present kernel's rates or the card's peak are not known."""
    peak = None if machine.gpu is None else peak_of(machine.gpu)
    if faster.now is None or peak is None:
        return None
    now, then = (
        predict(plan, Conditions(structs.replace(machine, attention=rates), None, documents, filled)).step_s
        for rates in (attention_rates(peak, faster.now), attention_rates(peak, faster.then))
    )
    return 1 - then / now
