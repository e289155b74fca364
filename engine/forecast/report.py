"""What a plan promises: time, memory, bytes and FLOPs of a step and of a whole run, as JSON-ready data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.engine.config import SAMPLED
from penstock.engine.forecast.costs import Calibration, Conditions
from penstock.engine.forecast.extrapolate import (
    estimate,
    estimate_completions,
    estimate_evaluation,
    estimate_samples,
    num_ops,
)
from penstock.engine.forecast.flops import active_params, executed_flops, model_flops
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.forecast.search import SearchResult, promised_s
from penstock.engine.forecast.simulate import Simulation
from penstock.engine.machine.peaks import peak_flops, utilisation
from penstock.engine.machine.profile import Machine
from penstock.engine.objectives.base import find_objective
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.planner import frozen_bytes, generation_bytes
from penstock.engine.plan.problem import FP32, PlanOptions
from penstock.engine.schedule.action import LANES, WORKING
from penstock.storage.files.errors import BudgetError, UserError
from penstock.storage.tier.chunk import ChunkFormat

if TYPE_CHECKING:
    from penstock.engine.model.tokens import MicroBatch

WHOLE_OPS = 30_000
"""Steps of up to so many ops are simulated whole for the forecast."""
_DOUBLINGS = 12


def forecast(
    task: PlanRequest,
    machine: Machine,
    result: SearchResult,
    calibration: Calibration | None = None,
    batch: Sequence[MicroBatch] | None = None,
    simulation: Simulation | None = None,
) -> dict[str, Any]:
    """The forecast of the best plan found. `batch`: a typical step's; None: every row is one document. `simulation`:
    what `predict` gave for it."""
    plan = result.plan
    on = Conditions(machine, calibration)
    if batch is not None:
        own = batch[: plan.problem.micro_batches]  # of one rank
        on = replace(on, documents=[m.documents for m in own], filled=[m.filled for m in own])
    if simulation is None:
        as_searched = calibration is None and batch is None and num_ops(plan) > WHOLE_OPS
        simulation = result.best.simulation if as_searched else predict(plan, on)
    lengths = [n for m in batch for n in m.lengths] if batch is not None else rows(task)
    step_s = promised_s(simulation.step_s)
    counted = batch is not None and not find_objective(task.recipe).reward_model
    tokens = sum(m.num_targets for m in batch or ()) if counted else sum(lengths)
    continued = [each for m in batch or () for each in m.continued]
    wanted = model_flops(task.spec, lengths, continued)
    ranks = plan.problem.ranks
    alike = 1 if plan.problem.sharded else ranks
    of_rank = [n for m in own for n in m.lengths] if batch is not None else lengths[: len(lengths) // alike]
    done = alike * executed_flops(task.spec, plan, of_rank, on.filled, continued).total
    peak = None if machine.gpu is None else peak_flops(machine.gpu)
    peak = None if peak is None else ranks * peak
    return plan.to_json() | {
        "fits": True,
        **_task_json(task, machine, tokens),
        **_frozen_json(task, plan),
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "bound_by": simulation.bound_by,
        "lanes": {
            lane: {
                "busy_s": simulation.busy_s[lane],
                "bytes": simulation.bytes[lane],
                "share": min(1.0, simulation.busy_s[lane] / step_s),
            }
            for lane in (LANES if ranks > 1 else WORKING)
        },
        "bytes_per_step": {lane: ranks * moved for lane, moved in simulation.bytes.items()},
        "model_flops": wanted,
        "executed_flops": done,
        "mfu": utilisation(wanted, step_s, peak),
        "hfu": utilisation(done, step_s, peak),
        "run": _whole_run(task, plan, on, simulation),
        "reasons": reasons(result),
        "calibrated": calibration is not None,
    }


def predict(plan: Plan, on: Conditions) -> Simulation:
    """The step that the forecast promises."""
    return estimate(plan, on, full=num_ops(plan) <= WHOLE_OPS)


def _validation_s(task: PlanRequest, plan: Plan, on: Conditions) -> float:
    """Seconds that a validation adds to the run; 0 where the recipe asks for none."""
    recipe, train, full = task.recipe, task.recipe.train, num_ops(plan) <= WHOLE_OPS
    if train.validate_every is None:
        return 0.0
    if train.objective in SAMPLED:
        prompts, copies = recipe.prompts_per_validation, recipe.grpo.num_validated
        return estimate_completions(plan, on, prompts=prompts, copies=copies, full=full)
    passes = -(-(train.validation_sequences or train.global_batch_size) // train.global_batch_size)
    return passes * estimate_evaluation(plan, on, full=full)


def refusal(task: PlanRequest, machine: Machine, error: BudgetError) -> dict[str, Any]:
    """The forecast of what does not fit, without the changes that would make it fit (engine/forecast/advice.py)."""
    times = task.sharing(error.tier)
    return {
        "fits": False,
        **_task_json(task, machine, sum(rows(task))),
        "refusal": {
            "tier": error.tier,
            "short_bytes": times * (error.need_bytes - error.budget_bytes),
            "message": str(error),
            "changes": [],
        },
        "tiers": {
            str(error.tier): {
                "budget_bytes": times * error.budget_bytes,
                "peak_bytes": times * error.need_bytes,
                "parts": {},
            }
        },
    }


def rows(task: PlanRequest) -> list[int]:
    """Lengths of a step's documents when each row is one."""
    return [task.recipe.data.sequence_length] * task.recipe.train.global_batch_size


def _task_json(task: PlanRequest, machine: Machine, tokens_per_step: int) -> dict[str, Any]:
    """What is trained on which machine, and where the figures of both come from."""
    spec = task.spec
    return {
        "machine": {"name": machine.name, "source": machine.source, "gpu": machine.gpu},
        "model": {
            "type": spec.model_type,
            "params": spec.num_params,
            "trained_params": spec.num_trained,
            "active_params": active_params(spec),
            "layers": len(spec.attention),
        },
        "ranks": task.ranks,
        "context": task.recipe.data.sequence_length,
        "tokens_per_step": tokens_per_step,
        "steps": task.recipe.train.steps,
        "budgets": task.budgets.why,
        "budgets_given": {
            tier: str(given) for tier in ("gpu", "ram") if (given := getattr(task.recipe.budgets, tier)) is not None
        },
    }


def _frozen_json(task: PlanRequest, plan: Plan) -> dict[str, Any]:
    """What is frozen, and what that saves: bytes of a parameter that is, and of one that is trained."""
    spec, p = task.spec, plan.problem
    if spec.num_trained == spec.num_params:
        return {}
    trained = p.compute_bytes + p.gradient_bytes + len(p.state_kinds) * FP32
    params = spec.num_params - spec.num_trained
    each: float = p.compute_bytes
    if p.copy_bytes:  # the scales and tables, which are not quantised, included
        each = round(sum(buffer.nbytes for buffer in p.buffers if buffer.frozen) / params, 2)
    return {"frozen": {"params": params, "param_bytes": each, "trained_param_bytes": trained}}


def _whole_run(task: PlanRequest, plan: Plan, on: Conditions, simulation: Simulation) -> dict[str, Any]:
    """Seconds of all steps with their commits, validations and samples, and what is written to each drive by the end. A
    commit writes through the state that is not on NVMe; the drive works on it while the next step computes, so that it
    costs time only as far as that step leaves the drive none. The first generation is written before the first step."""
    machine, kinds = on.machine, len(plan.problem.state_kinds)
    steps, every = task.recipe.train.steps, task.recipe.storage.checkpoint_every
    resident = [buffer for buffer in plan.buffers.values() if buffer.state in ("gpu", "ram")]
    through = kinds * sum(b.num_parts * ChunkFormat(b.part_numel * FP32).file_bytes for b in resident)
    whole = generation_bytes(plan.problem) + frozen_bytes(plan.problem)
    commits = -(-steps // every)
    validations = 0 if task.recipe.train.validate_every is None else -(-steps // task.recipe.train.validate_every)
    validation_s, samples = _validation_s(task, plan, on), _samples(task, plan, on)
    reference = _reference(task, plan, on)
    between_s = validations * validation_s + (samples["times"] * samples["seconds"] if samples else 0.0)
    between_s += reference["seconds"] if reference else 0.0
    generations = _generations(task, plan, on)
    if generations:
        between_s += generations["times"] * sum(v for name, v in generations.items() if name.endswith("_s"))
    idle_s = max(0.0, simulation.step_s - simulation.busy_s["nvme_write"])
    ranks = plan.problem.ranks
    held_up_s = max(0.0, through / ranks / machine.nvme_write_bytes_per_s - idle_s)
    per_step = ranks * simulation.bytes["nvme_write"]
    written = steps * per_step + commits * through + whole
    drives = max(1, len(task.recipe.storage.drives) or len(machine.drives))
    shares = []
    for index in range(drives):
        drive = machine.drives[min(index, len(machine.drives) - 1)]
        path = task.recipe.storage.drives[index] if index < len(task.recipe.storage.drives) else drive.path
        endurance = drive.endurance_bytes
        shares.append(
            {
                "path": path,
                "bytes_written": written // drives,
                "bytes_written_per_step": per_step // drives,
                "endurance_bytes": endurance,
                "endurance_share": None if endurance is None else written / drives / endurance,
            }
        )
    return {
        "seconds": steps * promised_s(simulation.step_s) + commits * held_up_s + between_s,
        "commits": commits,
        "validations": validations,
        "validation_s": validation_s,
        "samples": samples,
        "reference": reference,
        "generations": generations,
        "drives": shares,
    }


def _reference(task: PlanRequest, plan: Plan, on: Conditions) -> dict[str, Any] | None:
    """How many rows the reference model reads before training, and how long that takes; None where it is not needed.
    Where the data are not known, all steps have rows of their own."""
    train = task.recipe.train
    if not find_objective(task.recipe).reference:
        return None
    count = train.steps * train.global_batch_size if task.reference_rows is None else task.reference_rows
    each_s = estimate_evaluation(plan, on, full=num_ops(plan) <= WHOLE_OPS)
    return {"rows": count, "seconds": -(-count // train.global_batch_size) * each_s}


def _generations(task: PlanRequest, plan: Plan, on: Conditions) -> dict[str, Any] | None:
    """What completions are sampled to be trained on, if each has all tokens that it may have: how often, and seconds of
    each time as `PlanRequest.generation_s`. What rewards take is not known. None where the recipe asks for none."""
    train, config = task.recipe.train, task.recipe.grpo
    if train.objective not in SAMPLED:
        return None
    steps, space = config.num_steps, plan.problem.samples
    assert space is not None
    return {
        "times": -(-train.steps // steps),
        "steps": steps,
        "prompts": task.recipe.prompts_per_generation,
        "at_once": space.prompts,
        "completions": config.num_generations,
        "tokens": config.max_completion_length,
        **task.generation_s(plan, on, full=num_ops(plan) <= WHOLE_OPS),
    }


def _samples(task: PlanRequest, plan: Plan, on: Conditions) -> dict[str, Any] | None:
    """What samples are written, how often, and how long they take each time; None where the recipe asks for none."""
    config = task.recipe.samples
    if config.every is None:
        return None
    full = num_ops(plan) <= WHOLE_OPS
    seconds = estimate_samples(plan, on, new_tokens=config.tokens, full=full) if plan.problem.samples else 0.0
    times = -(-task.recipe.train.steps // config.every)
    asked = {"every": config.every, "prompts": len(config.prompts), "tokens": config.tokens}
    return asked | {"times": times, "seconds": seconds}


_WORDS: dict[str, dict[Any, str]] = {
    "streamed": {True: "a window that streams", False: "the whole window on the GPU"},
    "gpu_first": {
        "graphs": "saved graphs first",
        "blocks": "resident blocks first",
        "half": "half for resident blocks",
        "graphs only": "saved graphs and no block resident",
        "saved activations": "saved activations on the GPU first",
        "weights": "weights on the GPU first",
    },
    "recompute": {"none": "attention saved", "half": "half of attention recomputed", "all": "attention recomputed"},
    "ram_first": {
        "activations": "no activation on NVMe",
        "weights": "weights first",
        "state": "state first",
        "frozen last": "saved activations before frozen weights",
    },
    "stages": {4: "four parts in flight", 2: "two parts in flight"},
    "spare_slots": {1: "one layer fetched ahead", 2: "two layers fetched ahead"},
    "spread": {True: "experts spread over the GPUs", False: "all experts on every GPU"},
    "offloaded_graphs": {
        "none": "no graph leaves the GPU",
        "rest": "graphs leave for what room RAM has left",
        "quarter": "a quarter of the graphs leaves the GPU",
        "half": "half of the graphs leaves the GPU",
        "most": "three quarters of the graphs leave the GPU",
        "all": "all graphs leave the GPU",
    },
}


def _group(micro_batches: int) -> str:
    words = f"groups of {micro_batches:,} micro-batches" if micro_batches > 1 else "groups of one micro-batch"
    return words if micro_batches else "one group"


def reasons(result: SearchResult) -> dict[str, str]:
    """Choice -> why it was made: what the best of each alternative would have come to."""
    words = {name: of.__getitem__ for name, of in _WORDS.items()}
    named: dict[str, Callable[[Any], str]] = {"chunk_tokens": "{:,} tokens".format, **words, "group": _group}
    texts = {name: _reason(result, name, word) for name, word in named.items()}
    return {name: text for name, text in texts.items() if text}


def _reason(result: SearchResult, name: str, word: Callable[[Any], str]) -> str:
    def value_of(chunk_tokens: int, choice: PlanOptions) -> Any:
        return chunk_tokens if name == "chunk_tokens" else getattr(choice, name)

    best: dict[Any, float] = {}
    for c in result.tried:
        value = value_of(c.chunk_tokens, c.choice)
        best[value] = min(c.whole_s, best.get(value, c.whole_s))
    mine = value_of(result.best.chunk_tokens, result.best.choice)
    others = sorted(
        (seconds / result.best.whole_s - 1, word(value)) for value, seconds in best.items() if value != mine
    )
    compared = [f"{other} {'the same' if slower < 5e-4 else f'{slower:+.1%} time'}" for slower, other in others]
    refused = {value_of(chunk, choice) for chunk, choice, _ in result.refused} - best.keys()
    compared += sorted(f"{word(value)} does not fit" for value in refused)
    return f"{word(mine)}; {', '.join(compared)}" if compared else ""


def compute_bound_tokens(task: PlanRequest, machine: Machine, result: SearchResult) -> int | None:
    """Tokens per step from which computing takes longest; None where more sequences change nothing about it. Tried by
    doubling or halving the sequences of a step with the same choices."""
    train, choice = task.recipe.train, result.best.choice
    per_row = task.recipe.data.sequence_length

    def bound(sequences: int) -> bool | None:
        try:
            changed = replace(train, global_batch_size=sequences, chunk_tokens=result.best.chunk_tokens)
            plan = replace(task, recipe=replace(task.recipe, train=changed)).plan(choice)
        except UserError:  # it does not fit, or the recipe does not allow it
            return None
        return estimate(plan, Conditions(machine)).bound_by == "compute"

    sequences = train.global_batch_size
    if bound(sequences):
        while sequences % 2 == 0 and bound(sequences // 2):
            sequences //= 2
        return sequences * per_row
    for _ in range(_DOUBLINGS):
        sequences *= 2
        answer = bound(sequences)
        if answer is None:
            break
        if answer:
            return sequences * per_row
    return None
