"""A model that is only queried: its plan, how long it takes to answer, and what it waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from penstock.engine.forecast.costs import Conditions
from penstock.engine.forecast.extrapolate import evaluation_spent, later_spent, sampling_spent
from penstock.engine.forecast.problem import (
    ALLOCATOR_SHARE,
    DRAW_BYTES,
    LOGIT_BYTES,
    LOGITS_BYTES,
    block_shapes,
    temporaries_bytes,
    whole_buffers,
)
from penstock.engine.machine.profile import Machine
from penstock.engine.model.spec import ModelSpec
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.planner import make_plan
from penstock.engine.plan.problem import DTYPE_BYTES, PlanInput, PlanOptions, SampleSpace, SampleTier
from penstock.storage.files.errors import BudgetError, UserError
from penstock.storage.files.units import bytes_text, least_text, seconds_text, size_text

CHUNKS = (4096, 2048, 1024, 256, 64, 16)
"""Tokens that may pass through a layer at once."""
ACTIVATIONS_SHARE = 4
"""A chunk's activations take one part in so many of the GPU's budget, or half more than the shortest chunk's."""
_WAITS_FOR = {"nvme_read": "disk", "h2d": "link", "d2h": "link"}
_WORDS = {"disk": "reading weights from disk", "link": "the link from RAM to the GPU", "compute": "computing"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """How long continuing some sequences will take, and why."""

    first_s: float
    """Of the pass that reads the prompts, and of weights that stay in memory."""
    pass_s: float
    """Of each further one, which gives every sequence a token."""
    total_s: float
    bound_by: str
    """What a pass waits for: disk, link or compute."""
    weights: Mapping[str, int]
    """Bytes of weights on the gpu, in ram and on disk."""
    keys_values: SampleTier
    where: str
    """What lives where, in words."""
    assumed: bool
    """The rates are not this machine's own: it was never probed."""

    def describe(self) -> str:
        """How long it takes, and why, in words."""
        rates = "; assumed rates, `penstock probe` measures them" if self.assumed else ""
        return (
            f"about {seconds_text(self.pass_s)} a token, {seconds_text(self.first_s)} for the first, at most "
            f"{seconds_text(self.total_s)} in all: bound by {_WORDS[self.bound_by]}{rates}"
        )


@dataclass(frozen=True, slots=True)
class Query:
    """A model of which nothing is trained, and what it may use."""

    spec: ModelSpec
    """`all_frozen`."""
    dtype: str
    device_type: str
    gpu_bytes: int
    ram_bytes: int
    """Of one rank, as is what it may use of the GPU."""
    ranks: int = 1
    """Processes that share the weights in RAM, each with a compute device."""

    def logits_bytes(self, rows: int) -> int:
        """What so many rows of logits may take at once, with what is made of them."""
        return min(LOGITS_BYTES[self.device_type], self.spec.vocab_size * (DRAW_BYTES + rows * LOGIT_BYTES))

    def _problem(self, lengths: Sequence[int], chunk: int, *, continued: bool) -> PlanInput:
        spec, cuda = self.spec, self.device_type == "cuda"
        # Layers that carry a state compute each sequence as one chunk, whatever its length.
        rows, row_tokens = (len(lengths), max(lengths)) if spec.whole_documents else (1, sum(lengths))
        chunk = row_tokens if spec.whole_documents else min(chunk, row_tokens)
        return PlanInput(
            blocks=block_shapes(spec, self.dtype),
            buffers=whole_buffers(spec, self.dtype),
            hidden_size=spec.hidden_size,
            compute_dtype=self.dtype,
            micro_batches=rows,
            ranks=self.ranks,
            rows=1,
            row_tokens=row_tokens,
            chunk_tokens=chunk,
            chunk_per_row=spec.whole_documents,
            workspace_bytes=temporaries_bytes(
                spec,
                chunk,
                row_tokens,
                rows * row_tokens,
                compute_bytes=DTYPE_BYTES[self.dtype],
                device_type=self.device_type,
                logits_bytes=self.logits_bytes(len(lengths) if continued else chunk),
            ),
            gpu_budget=self.gpu_bytes,
            ram_budget=self.ram_bytes,
            allocator_share=ALLOCATOR_SHARE if cuda else 0,
            device_reads=not cuda,
            state_kinds=(),
            samples=SampleSpace(lengths=tuple(lengths), keeps=not spec.recurrent, vocabulary=spec.vocab_size)
            if continued
            else None,
        )

    def plan(self, lengths: Sequence[int], *, continued: bool) -> Plan:
        """For sequences that come to `lengths` tokens, which are `continued`, or scored; where there is memory for it,
        for some more, so that not every larger batch is planned anew.

        Raises UserError with the least budget that would do.
        """
        with suppress(UserError):
            result = self._plan(self._more(lengths), continued=continued)
            if sample_tier(result) != "nowhere" or self.spec.recurrent:
                return result
        return self._plan(lengths, continued=continued)

    def _more(self, lengths: Sequence[int]) -> list[int]:
        """Lengths of as many sequences or some more, that come to as many tokens or some more."""
        count, total = _rounded(len(lengths), 4), sum(lengths)
        if self.spec.whole_documents:
            return [_rounded(max(lengths), 16)] * count
        others = max(1, count - len(lengths))
        return [*lengths, *[(_rounded(total, 16) - total) // others] * others]

    def _plan(self, lengths: Sequence[int], *, continued: bool) -> Plan:
        fits: list[Plan] = []
        refusals: list[BudgetError] = []
        for chunk in CHUNKS[: 1 if self.spec.whole_documents else None]:
            problem = self._problem(lengths, chunk, continued=continued)
            for streamed in (False,) if continued or not problem.may_stream else (False, True):
                try:
                    fits.append(make_plan(problem, PlanOptions(streamed=streamed)))
                    break
                except BudgetError as error:
                    refusals.append(error)
        fits = [plan for plan in fits if sample_tier(plan) != "nowhere"] or fits
        if fits:
            most = max(self.gpu_bytes // ACTIVATIONS_SHARE, 3 * _activations(fits[-1]) // 2)
            return next(plan for plan in fits if _activations(plan) <= most)
        least = min(refusals, key=lambda refusal: (refusal.tier == "gpu", refusal.need_bytes))
        shares = self.ranks if least.tier == "ram" else 1
        total, given = sum(lengths), shares * (self.gpu_bytes if least.tier == "gpu" else self.ram_bytes)
        raise UserError(
            f"--{least.tier}: {size_text(given)} cannot hold one block of this model with the keys and values of "
            f"{total:,} tokens; give at least {least_text(shares * least.need_bytes)}"
            + (", or fewer tokens" * (total > 1))
        )

    # ------------------------------------------------------------------ time

    def estimate(
        self,
        plan: Plan,
        machine: Machine,
        stored: Mapping[str, int],
        *,
        prompt_tokens: int,
        sequences: int,
        new_tokens: int,
        filled: bool,
        assumed: bool,
    ) -> Estimate:
        """Of `sequences` prompts of `prompt_tokens` each that get `new_tokens` more, or are scored, where that is 0.
        `stored`: bytes of each buffer on disk. `filled`: what stays in memory is there already."""
        machine = machine.of_rank(self.ranks)
        if new_tokens:
            first = sampling_spent(plan, Conditions(machine), sequences, prompt_tokens)
            later = later_spent(plan, Conditions(machine), sequences, prompt_tokens + new_tokens // 2)
        else:
            documents = list(range(0, plan.window_tokens, max(1, prompt_tokens)))
            on = Conditions(machine, documents=[documents] * plan.problem.micro_batches)
            first = later = evaluation_spent(plan, on)
        loading = [buffer.name for buffer in plan.buffers.values() if buffer.weights != "nvme"]
        load_s = 0.0 if filled else sum(stored[name] for name in loading) / machine.nvme_read_bytes_per_s
        lane = max(later.busy_s, key=later.busy_s.__getitem__)
        return Estimate(
            first_s=load_s + first.seconds,
            pass_s=later.seconds,
            total_s=load_s + first.seconds + max(0, new_tokens - 1) * later.seconds,
            bound_by=_WAITS_FOR.get(lane, "compute"),
            weights=weights_bytes(plan),
            keys_values=sample_tier(plan) or "nowhere",
            where=describe(plan, self.device_type),
            assumed=assumed,
        )


def _rounded(number: int, share: int) -> int:
    """A number or more, at most by one part in `share`, a power of 2."""
    step = 1 << max(0, (number // share).bit_length() - 1)
    return -(-number // step) * step


def sample_tier(plan: Plan) -> SampleTier | None:
    """Where keys and values of continued sequences are cached; None where nothing is continued."""
    return None if plan.problem.samples is None else plan.problem.samples.tier


def _activations(plan: Plan) -> int:
    """Bytes on the compute device that grow with a chunk's tokens."""
    return sum(plan.tiers["gpu"].parts[name] for name in ("activation slots", "workspace"))


def weights_bytes(plan: Plan) -> dict[str, int]:
    """Bytes of the weights on the gpu, in ram and on disk."""
    held = {"gpu": 0, "ram": 0, "disk": 0}
    for buffer in plan.buffers.values():
        held["disk" if buffer.weights == "nvme" else buffer.weights] += buffer.numel * buffer.weight_bytes
    return held


def describe(plan: Plan, device_type: str) -> str:
    """Where the weights and keys and values live, in words."""
    held = weights_bytes(plan)
    names = {"gpu": "stay on the GPU" if device_type == "cuda" else "stay in memory", "ram": "stay in RAM"}
    parts = [f"{bytes_text(held[tier])} {words}" for tier, words in names.items() if held[tier]]
    if held["disk"]:
        parts.append(f"{bytes_text(held['disk'])} are read from disk for every pass")
    cached = names | {"nowhere": "are not kept: the whole text is read again for every token"}
    tier = sample_tier(plan)
    return ", ".join(parts) + ("" if tier is None else f"; keys and values {cached[tier]}")
