"""From a recipe to the best plan for a machine: this one, or one of which only the profile is here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.engine.config import PART_STEP, SAMPLED, Recipe, parse_bytes
from penstock.engine.forecast.choices import chunk_options
from penstock.engine.forecast.costs import Calibration, Conditions
from penstock.engine.forecast.extrapolate import estimate_completions, estimate_evaluation
from penstock.engine.forecast.least import MemoryTier, NoPlanError, helps, least, why_not
from penstock.engine.forecast.problem import (
    ALLOCATOR_SHARE,
    block_shapes,
    buffer_shape,
    learned,
    most_prompt_tokens,
    retained_generations,
    temporaries_bytes,
    with_tower,
)
from penstock.engine.forecast.search import SearchResult, search
from penstock.engine.machine.budgets import Budgets
from penstock.engine.machine.profile import Machine
from penstock.engine.model.groups import cut, num_experts
from penstock.engine.model.spec import ModelSpec, depths
from penstock.engine.objectives.base import find_objective
from penstock.engine.optim.base import find_optimizer
from penstock.engine.optim.groups import lr_factors
from penstock.engine.plan.chunks import Filled
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.planner import make_plan, sample_spaces
from penstock.engine.plan.problem import (
    DTYPE_BYTES,
    FP32,
    NO_VISION,
    BufferShape,
    PlanInput,
    PlanOptions,
    Routing,
    SampleSpace,
    VisionSpace,
)
from penstock.storage.files.errors import BudgetError, UserError
from penstock.storage.files.units import bytes_text
from penstock.storage.offsite.location import mover_bytes
from penstock.storage.tier.chunk import ChunkFormat
from penstock.storage.tier.layout import part_numel_even


def buffer_shapes(spec: ModelSpec, recipe: Recipe) -> tuple[BufferShape, ...]:
    """The model's flat buffers, and those of its reference where one is kept, cut into parts as the recipe says."""
    part_bytes = parse_bytes(recipe.storage.part_bytes, "storage.part_bytes")
    whole = find_optimizer(recipe.train).granularity == "parameter"
    shapes = [
        buffer_shape(
            name,
            buffer,
            buffer.numel if whole else part_numel_even(buffer.numel, part_bytes // FP32),
            recipe.train.compute_dtype,
        )
        for name, buffer in spec.buffers.items()
    ]
    kept = [shape for shape in shapes if not shape.frozen] if recipe.keeps_reference else []
    return (*shapes, *(shape.reference for shape in kept))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """What a plan is made for: a model, a batch and a machine."""

    spec: ModelSpec
    recipe: Recipe
    budgets: Budgets
    device_type: str
    """cuda or cpu."""
    ranks: int = 1
    """Processes of the run, each with a compute device; `budgets` are those of one, with its share of the RAM."""
    device_reads: bool = True
    """NVMe reads reach the compute device's memory without a stage in RAM."""
    reader_bytes: int = 0
    """Pinned RAM that the reader takes for itself."""
    graph_bytes: Mapping[str, int] | None = None
    """Calibration.graph_bytes_per_token, once there is one."""
    prompt_tokens: tuple[int, ...] | None = None
    """Of the prompts of the recipe's samples; None: as many as they can be."""
    vision: VisionSpace = NO_VISION
    """Of the images in the data, where these are known."""

    longest_prompt: int | None = None
    """Tokens of the longest prompt that is completed; None: what a row leaves."""
    reference_rows: int | None = None
    """Of answers that the reference model reads before training; None: not known yet."""
    place: SampleSpace | None = None
    """Where completions are sampled, and how many at once; None: the planner chooses."""

    def __post_init__(self) -> None:
        lr_factors(self.recipe.train, depths(self.spec), self.spec.frozen_params)  # before anything is made

    def problem(self, chunk_tokens: int) -> PlanInput:
        """What the planner has to solve with chunks of that length."""
        spec, recipe, budgets = self.spec, self.recipe, self.budgets
        data, train, storage = recipe.data, recipe.train, recipe.storage
        objective = find_objective(recipe)
        if train.sharded and self.vision.whole_chunks:
            raise UserError(
                "train.parallel: tokens of an image attend to one another both ways, so that no sequence with images "
                "can be divided; use train.parallel=data"
            )
        groups = self._routing.groups if self._routing is not None else 1
        if train.spread_experts and groups < self.ranks:
            raise UserError(
                f"train.spread_experts: {self.ranks} GPUs need as many groups of experts at least, and there are "
                f"{groups}; set train.expert_groups, or leave train.spread_experts out"
            )
        buffers = buffer_shapes(spec, recipe)
        largest_file = ChunkFormat(max(buffer.part_numel for buffer in buffers) * FP32).file_bytes
        optimizer = find_optimizer(train)
        tokens = data.sequence_length if spec.whole_documents else chunk_tokens
        temporaries = temporaries_bytes(
            spec,
            tokens,
            train.micro_batch_size * data.sequence_length,
            train.global_batch_size * data.sequence_length,
            compute_bytes=DTYPE_BYTES[train.compute_dtype],
            device_type=self.device_type,
            deterministic=train.deterministic,
            score_bytes=objective.score_bytes,
        )
        compiled = self.device_type == "cuda" and train.compile != "off"
        return PlanInput(
            blocks=with_tower(
                learned(block_shapes(spec, train.compute_dtype, compiled=compiled), self.graph_bytes or {}),
                spec,
                self.vision.flops_per_token,
            ),
            buffers=buffers,
            hidden_size=spec.hidden_size,
            compute_dtype=train.compute_dtype,
            gradient_dtype=train.gradient_dtype,
            micro_batches=train.micro_batches // (1 if train.sharded else self.ranks),
            replicas=train.replicas or 1,
            sharded=train.sharded,
            ranks=self.ranks,
            rows=train.micro_batch_size,
            row_tokens=data.sequence_length,
            chunk_tokens=chunk_tokens,
            chunk_per_row=spec.whole_documents,
            workspace_bytes=max(temporaries, self.vision.work_bytes),
            gpu_budget=budgets.gpu,
            ram_budget=budgets.ram,
            allocator_share=ALLOCATOR_SHARE if self.device_type == "cuda" else 0,
            device_reads=self.device_reads,
            reader_bytes=self.reader_bytes,
            vision=self.vision,
            offsite_bytes=0 if storage.offsite is None else mover_bytes(largest_file),
            activation_checkpointing=train.activation_checkpointing,
            kv_window=train.kv_window,
            nvme_budget=budgets.nvme,
            nvme_capacity=budgets.nvme_capacity,
            state_kinds=optimizer.state_kinds,
            retained_generations=retained_generations(recipe),
            samples=self.samples,
            last_good=storage.keep_good is not None,
            scores=objective.whole_sequences,
            routing=self._routing if train.skip_idle_experts else None,
            spread_experts=train.spread_experts,
            # The loss of the routers' balance is over all of a step's tokens, as is KTO's KL divergence.
            one_group=spec.balances_routers(train.router_aux_loss) or objective.mismatched,
        )

    @property
    def _routing(self) -> Routing | None:
        """None where no layer has several groups of experts."""
        groups = {block.group for block in self.spec.blocks if block.group is not None}
        if not groups:
            return None
        return Routing(max(end for _, end in groups), self.spec.experts_per_token, len(groups))

    @property
    def samples(self) -> SampleSpace | None:
        """What the samples need room for; None where the recipe asks for none."""
        if self.place is not None:
            return self.place
        recipe, wanted, lengths = self.recipe, self.recipe.samples, tuple[int, ...]()
        if wanted.every is not None:
            tokens = most_prompt_tokens(wanted) if self.prompt_tokens is None else self.prompt_tokens
            lengths = tuple(count + wanted.tokens for count in tokens)
        space = SampleSpace(lengths=lengths, keeps=not self.spec.recurrent, vocabulary=self.spec.vocab_size)
        if recipe.train.objective in SAMPLED:
            new, copies = recipe.grpo.max_completion_length, recipe.grpo.num_generations
            longest = min(recipe.prompt_room, self.longest_prompt or recipe.prompt_room)
            space = replace(
                space,
                prompts=-(-recipe.prompts_per_generation // (recipe.train.replicas or 1)),
                copies=copies,
                prompt_tokens=longest,
                new_tokens=new,
                shared=self.spec.takes_prefixes,
            )
        return space if space.rows else None

    @property
    def chunks(self) -> list[int]:
        data, train = self.recipe.data, self.recipe.train
        if self.spec.whole_documents:
            return [data.sequence_length]
        if self.vision.whole_chunks:
            return [train.micro_batch_size * data.sequence_length]
        if train.chunk_tokens is not None:
            return [train.chunk_tokens]
        return chunk_options(train.micro_batch_size * data.sequence_length)

    def plan(self, choice: PlanOptions) -> Plan:
        """The plan of one choice, with the longest chunk there is. Raises BudgetError."""
        return make_plan(self.problem(self.chunks[-1]), choice)

    def refusal(self) -> BudgetError | None:
        """Why no plan fits, of the combination that needs least; None where one does."""
        return why_not(self.problem, self.chunks)

    def search(
        self,
        machine: Machine,
        calibration: Calibration | None = None,
        documents: Sequence[Sequence[int]] | None = None,
        filled: Filled | None = None,
        *,
        known: tuple[int, PlanOptions] | None = None,
        only: tuple[int, PlanOptions] | None = None,
        before: SearchResult | None = None,
        rough: bool = False,
    ) -> SearchResult:
        """engine.forecast.search.search of this model, recipe and budgets. Raises BudgetError where no plan fits: how
        much would do, and what of the recipe to lower instead."""
        on = Conditions(machine, calibration, documents, filled)
        for task in self._placed():
            try:
                return search(
                    task.problem,
                    self.chunks,
                    on,
                    known=known,
                    only=only,
                    before=before,
                    rough=rough,
                    beside=lambda plan: sum(self.generation_s(plan, on).values()) / self.recipe.grpo.num_steps,
                )
            except NoPlanError as error:
                refusal = error
        raise self._explained(refusal) from None

    def generation_s(self, plan: Plan, on: Conditions, *, full: bool = False) -> dict[str, float]:
        """Seconds in which the completions of a generation, if each has all tokens that it may have, are sampled, and
        find their log-probabilities where several steps are trained on them, and those of the reference model."""
        recipe, steps, copies = self.recipe, self.recipe.grpo.steps_per_generation, self.recipe.grpo.num_generations
        if recipe.train.objective not in SAMPLED:
            return {}

        def logps_s(*, of_reference: bool) -> float:
            return steps * estimate_evaluation(plan, on, of_reference=of_reference, full=full)

        return {
            "sampling_s": estimate_completions(
                plan, on, prompts=recipe.prompts_per_generation, copies=copies, full=full
            ),
            "logps_s": logps_s(of_reference=False) if recipe.wants_old_logps else 0.0,
            "reference_s": logps_s(of_reference=True) if recipe.keeps_reference else 0.0,
        }

    def _placed(self) -> list[PlanRequest]:
        """The same with each place for completions, the best first: more time goes to them than to steps."""
        space = self.samples
        if space is None or not space.prompts:
            return [self]
        return [replace(self, place=place) for place in sample_spaces(self.problem(self.chunks[-1]), space)]

    def settled(self) -> PlanRequest:
        """The same with each budget of "least" in bytes, the GPU's first. Raises BudgetError where no plan fits."""
        task = self
        tiers: tuple[MemoryTier, ...] = ("gpu", "ram")
        for tier in tiers:
            if tier not in self.budgets.least:
                continue
            try:
                need_bytes, margin_bytes = least(task.problem, task.chunks, tier)
            except NoPlanError as error:
                raise task._explained(error) from None
            why = "the least that a plan needs"
            if margin_bytes:
                why += f", and {bytes_text(margin_bytes)} for saved graphs, whose sizes are not measured yet"
            task = replace(task, budgets=task.budgets.with_size(tier, need_bytes + margin_bytes, why))
        return task

    def grouped(
        self,
        machine: Machine,
        documents: Sequence[Sequence[int]] | None = None,
        filled: Filled | None = None,
    ) -> PlanRequest:
        """The same with the experts of a layer, where they are blocks of their own, in as many groups as the recipe
        says, or else as the step is soonest with: more of them while that gets shorter. Raises BudgetError where no
        number of them fits."""
        train = self.recipe.train
        if train.split_layers != "experts" or train.expert_groups is not None or self.budgets.least:
            return self
        experts, result, best_s = num_experts(self.spec), self, math.inf
        refused: BudgetError | None = None
        least = self.ranks if train.spread_experts else 1
        for number in (n for n in range(least, experts + 1) if experts % n == 0):
            recipe = replace(self.recipe, train=replace(train, expert_groups=number))
            task = replace(self, spec=cut(self.spec, number), recipe=recipe)
            try:
                step_s = task.search(machine, documents=documents, filled=filled, rough=True).best.step_s
            except BudgetError as error:
                refused = error
                if error.tier != "gpu":
                    break  # smaller blocks take as much elsewhere
                continue
            if step_s >= best_s and number >= self.ranks:  # so many may be spread
                break
            if step_s < best_s:
                result, best_s = task, step_s
        if result is self and refused is not None:
            raise refused
        return result

    def sharing(self, tier: str | None) -> int:
        """How many ranks have a tier in common, of which budgets, needs and plans are one's share."""
        return self.ranks if tier == "ram" else 1

    def changed(self, values: Mapping[str, Any]) -> PlanRequest:
        """The same with fields of the recipe changed. Raises UserError where a value is not allowed."""
        task = self
        for name, value in values.items():
            section, _, field = name.partition(".")
            if section == "budgets":
                sizes: dict[str, Any] = {field: parse_bytes(value, name) // self.sharing(field)}
                task = replace(task, budgets=replace(task.budgets, **sizes))
            else:
                changed: dict[str, Any] = {section: replace(getattr(task.recipe, section), **{field: value})}
                task = replace(task, recipe=replace(task.recipe, **changed))
        return task

    def _explained(self, error: NoPlanError) -> BudgetError:
        """A refusal that also names what of the recipe to lower instead: each was tried, and lowers the need."""
        result: dict[str, list[str]] = {}
        for verb, name, value in self._instead(error):
            try:
                task = self.changed({name: value})
            except UserError:
                continue
            if helps(task.problem, task.chunks, error):
                result.setdefault(verb, []).append(name if verb == "lower" else f"{name}={str(value).lower()}")
        ways = [f"{verb} {' or '.join(filter(None, (', '.join(n[:-1]), n[-1])))}" for verb, n in result.items()]
        message = ", or ".join([str(error), *ways])
        return BudgetError(message, tier=error.tier, need_bytes=error.need_bytes, budget_bytes=error.budget_bytes)

    def _instead(self, error: NoPlanError) -> Iterator[tuple[str, str, Any]]:
        """(lower or set, field, value) of what may need less; where a field has a number, half of it."""
        data, train, storage = self.recipe.data, self.recipe.train, self.recipe.storage
        micro, sequences = train.micro_batch_size, train.global_batch_size
        yield "lower", "train.chunk_tokens", error.chunk_tokens // 2
        yield "lower", "train.micro_batch_size", max((n for n in range(1, micro) if sequences % n == 0), default=0)
        yield "lower", "train.global_batch_size", sequences // 2 // micro * micro
        yield "lower", "data.sequence_length", data.sequence_length // 2
        part = parse_bytes(storage.part_bytes, "storage.part_bytes")
        yield "lower", "storage.part_bytes", part // 2 // PART_STEP * PART_STEP
        yield "lower", "storage.keep_last", storage.keep_last - 1
        if storage.keep_best:
            yield "set", "storage.keep_best", False
        if train.activation_checkpointing == "none":
            yield "set", "train.activation_checkpointing", "auto"
        if train.kv_window != "auto":
            yield "set", "train.kv_window", "auto"
