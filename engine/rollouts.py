"""Completions for training with rewards: sampled between two steps by the run's own passes, rewarded, and kept.

Old log-probabilities come from the weights, kernels and lanes that train: between a sampler's numbers and a trainer's
there is no difference to correct. A generation is a file of the run; one that a killed process has left is gone on with
where it fits: what was sampled is not sampled again, what was rewarded is not rewarded again. Those of a validation are
not kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from penstock.engine.config import COMMAND, GrpoConfig, given_fields, reward_function
from penstock.engine.data.completions import CompletionLoader, Generation
from penstock.engine.events import REWARD, Observer, Sample, SampleMetrics, ValidationMetrics
from penstock.engine.generate.decode import Decoding
from penstock.engine.generate.text import text_behind
from penstock.engine.passes import evaluations
from penstock.engine.samples import continued
from penstock.engine.schedule.passes import evaluation
from penstock.engine.session import Session
from penstock.storage.files.disk import make_folder
from penstock.storage.files.errors import ensure

_FIRST_PASS = 1 << 29
"""What the first pass of log-probabilities is numbered: validations of the same step begin with 1."""
_VALIDATION = 2**32 - 1
"""What the draws of validations are numbered, where those of a generation have the number of its step."""
_SHOWN = 4
"""Completions of a generation that are shown as samples."""
_KEPT = 2
"""Generations whose files stay, where none is trained on in several steps."""


def sample(session: Session, observer: Observer) -> None:
    """Make the next generation with the weights of the step that has ended, and give it to the loader.

    The ranks sample and score in turns; the first one alone gives rewards and keeps files. Raises UserError where a
    reward function does not give rewards.
    """
    loader, config, step, ranks = session.loader, session.recipe.grpo, session.step, session.ranks
    assert isinstance(loader, CompletionLoader)
    documents = loader.draw()

    def kept() -> tuple[Generation | None, tuple[str, str]]:
        """What there is of this generation already, with no advantages if these are of other rewards."""
        make_folder(loader.folder, loader.folder.parent)
        there, (made_by, rewarded_by) = Generation.read(loader.folder, step), _made_by(session)
        if there is None or (there.made_by, there.documents) != (made_by, documents):
            return None, (made_by, rewarded_by)
        if there.rewarded_by != rewarded_by:
            there.advantages = []
        return there, (made_by, rewarded_by)

    generation, (made_by, rewarded_by) = ranks.of_first(kept)
    if generation is None:
        began = time.perf_counter()
        generation = _sampled(session, documents, config.num_generations, session.step)
        generation.made_by = made_by
        generation.measured["sampling_s"] = time.perf_counter() - began
        if ranks.first:
            generation.save(loader.folder)
    if not generation.advantages:
        began = time.perf_counter()
        if session.recipe.wants_old_logps:
            generation.old = _log_probabilities(session, generation)
            generation.measured["logps_s"], began = time.perf_counter() - began, time.perf_counter()
        if session.recipe.keeps_reference:
            generation.base = _log_probabilities(session, generation, of_reference=True)
            generation.measured["reference_s"], began = time.perf_counter() - began, time.perf_counter()
        scored = generation

        def give_rewards() -> Generation:
            prompts, texts = _reward(session, scored)
            scored.rewarded_by = rewarded_by
            totals, scored.advantages = advantages(scored, config, session.recipe.train.objective)
            measured = _measured(scored, totals, config, config.num_generations)
            scored.measured |= measured | {"reward_s": time.perf_counter() - began}
            scored.save(loader.folder)
            observer.on_sample(_shown(step, prompts, texts, scored, totals))
            return scored

        generation = ranks.of_first(give_rewards)
    loader.begin(generation)
    if ranks.first:
        _forget(loader, step)


def validate(session: Session) -> ValidationMetrics:
    """Reward completions of the prompts that are held out, sampled with the weights of the step that has ended, drawn
    alike each time: what changes is the model. The update and commit as in `sample`."""
    loader, config, began = session.loader, session.recipe.grpo, time.perf_counter()
    assert isinstance(loader, CompletionLoader)
    copies = config.num_validated
    documents = [document for document in loader.held_out for _ in range(copies)]
    generation = _sampled(session, documents, copies, _VALIDATION)

    def measured() -> dict[str, float]:
        _reward(session, generation)
        return _measured(generation, rewarded(generation, config), config, copies)

    return ValidationMetrics(
        step=session.step,
        loss=None,
        tokens=sum(map(len, generation.completions)),
        measured=session.ranks.of_first(measured),
        seconds=time.perf_counter() - began,
        time=time.time(),
    )


def _made_by(session: Session) -> tuple[str, str]:
    """Digests of what completions, and of what rewards, depend on beside the weights and the completions."""
    assert session.rewards is not None
    fields = {key: value for key, value in given_fields(session.recipe).items() if key != "train.steps"}
    of_rewards = {key: fields.pop(key) for key in list(fields) if key.startswith("grpo.reward")}
    made_by = [fields, session.loader.corpus.info.content], [of_rewards, session.rewards.identity]
    first, second = (hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest() for what in made_by)
    return first, second


def _sampled(session: Session, documents: Sequence[int], copies: int, draw: int) -> Generation:
    """Completions, `copies` of each prompt side by side, of as many prompts at a time as the plan has room for; those
    of another number `draw` are drawn otherwise."""
    corpus, config, space = session.loader.corpus, session.recipe.grpo, session.plan.problem.samples
    assert space is not None
    decoding = Decoding(
        new_tokens=config.max_completion_length,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=session.recipe.train.seed * 2**32 + draw,
        stop_ids=session.stop_ids,
    )
    prompts = [corpus.tokens[corpus.starts[i] : corpus.starts[i + 1]].tolist() for i in documents[::copies]]
    result = continued(session, prompts, decoding, copies=copies, at_once=space.at_once(copies))
    completions = [one.ids + ([] if one.end is None else [one.end]) for one in result]
    return Generation(
        step=session.step,
        made_by="",
        documents=list(documents),
        completions=completions,
        ended=[one.end is not None for one in result],
    )


def _reward(session: Session, generation: Generation) -> tuple[list[Any], list[str]]:
    """Give the completions their rewards; (prompts, texts) of them. Raises UserError where a function gives none."""
    assert session.rewards is not None
    rows = [session.loader.corpus.row(document) for document in generation.documents]
    texts = _texts(session, generation)
    prompts = [row["prompt"] for row in rows]
    talks = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    scores = session.rewards.scores(prompts, talks, generation.completions, rows)
    generation.rewards = [[None if math.isnan(value) else value for value in of_one] for of_one in scores]
    return prompts, texts


def _log_probabilities(session: Session, generation: Generation, *, of_reference: bool = False) -> list[list[float]]:
    """Of each token of the completions, by the present weights, or by the model that the run began with."""
    loader, size, ranks = session.loader, session.plan.group, session.ranks
    assert isinstance(loader, CompletionLoader)
    batches = loader.batches(generation, range(len(generation.completions)))
    passes = [batches[at : at + size] for at in range(0, len(batches), size)]
    first, build = _FIRST_PASS + of_reference * len(batches), partial(evaluation, of_reference=of_reference)
    own = evaluations(session, passes[ranks.rank :: ranks.count], first=first, build=build)
    found = [score for scores in ranks.in_turns([data.scores.tolist() for data in own]) for score in scores]
    masked = session.recipe.grpo.mask_truncated_completions
    result, at = [], 0
    for ids, ended in zip(generation.completions, generation.ended, strict=True):
        count = len(ids) if ended or not masked else 0
        result.append(found[at : at + count])
        at += count
    ensure(at == len(found), "log-probabilities of other tokens")
    return result


def rewarded(generation: Generation, config: GrpoConfig) -> list[float]:
    """The reward of each completion: those of all functions added up, NaN where there is none."""
    weights = config.reward_weights or [1.0] * len(generation.rewards)
    return [_sum(values, weights) for values in zip(*generation.rewards, strict=True)]


def advantages(generation: Generation, config: GrpoConfig, objective: str) -> tuple[list[float], list[float]]:
    """(reward, advantage) of each completion. What no function rewards has no advantage, and NaN as its reward.

    grpo: reward - the mean of the prompt's, over their standard deviation (that of all for "batch") + 1e-4. rloo:
    reward, less beta times log(probability / the reference model's), - the mean of the prompt's others.
    """
    totals = of_all = rewarded(generation, config)
    if objective == "rloo" and config.beta:
        ratios = [math.fsum(a) - math.fsum(b) for a, b in zip(generation.old, generation.base, strict=True)]
        totals = [reward - config.beta * ratio for reward, ratio in zip(of_all, ratios, strict=True)]
    size = config.num_generations
    groups = [totals[at : at + size] for at in range(0, len(totals), size)]
    of_batch = _deviation(totals)
    result = []
    for group in groups:
        known = [reward for reward in group if not math.isnan(reward)]
        mean, spread = _mean(known), _deviation(group) if config.scale_rewards == "group" else of_batch
        for reward in group:
            if math.isnan(reward) or (objective == "rloo" and len(known) < 2):
                result.append(0.0)
            elif objective == "rloo":
                result.append(reward - (math.fsum(known) - reward) / (len(known) - 1))
            else:
                result.append((reward - mean) / (1.0 if config.scale_rewards == "none" else spread + 1e-4))
    return of_all, result


def _sum(values: Sequence[float | None], weights: Sequence[float]) -> float:
    """Of the rewards of one completion that there are; NaN where there is none."""
    known = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None]
    return math.fsum(known) if known else math.nan


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _deviation(values: Iterable[float]) -> float:
    """The sample standard deviation of those that are known; 0 for fewer than two."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.stdev(known) if len(known) > 1 else 0.0


def _measured(generation: Generation, totals: Sequence[float], config: GrpoConfig, size: int) -> dict[str, float]:
    """By TRL's names; of each prompt there are `size` completions."""
    lengths = [len(ids) for ids in generation.completions]
    spreads = [_deviation(totals[at : at + size]) for at in range(0, len(totals), size) if size > 1]
    known = [total for total in totals if not math.isnan(total)]
    result = {
        REWARD: _mean(known),
        "reward_std": _deviation(totals),
        "frac_reward_zero_std": _mean([float(spread == 0) for spread in spreads]),
        "completions/mean_length": _mean(lengths),
        "completions/clipped_ratio": _mean([float(not ended) for ended in generation.ended]),
    }
    for entry, values in zip(config.reward, generation.rewards, strict=True):
        name = entry if entry.startswith(COMMAND) else reward_function(entry)[1]
        own = [value for value in values if value is not None]
        result |= {f"rewards/{name}/mean": _mean(own)} if own else {}
    return {name: value for name, value in result.items() if not math.isnan(value)}


def _texts(session: Session, generation: Generation) -> list[str]:
    corpus, tokenizer = session.loader.corpus, session.tokenizer
    assert tokenizer is not None
    texts = []
    for document, ids, ended in zip(generation.documents, generation.completions, generation.ended, strict=True):
        prompt = corpus.tokens[corpus.starts[document] : corpus.starts[document + 1]].tolist()
        shown = [token for token in (ids[:-1] if ended else ids) if token not in tokenizer.special_ids]
        texts.append(text_behind(tokenizer, prompt, shown))
    return texts


def _shown(
    step: int, prompts: Sequence[Any], texts: Sequence[str], generation: Generation, totals: Sequence[float]
) -> SampleMetrics:
    """The first completions, with their rewards."""
    samples = [
        Sample(
            prompt=prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False),
            text=text,
            tokens=len(ids),
            ended=ended,
            reward=None if math.isnan(reward) else reward,
        )
        for prompt, text, ids, ended, reward in zip(
            prompts[:_SHOWN], texts, generation.completions, generation.ended, totals, strict=False
        )
    ]
    seconds = generation.measured["sampling_s"]
    return SampleMetrics(step=step, samples=samples, seconds=seconds, time=time.time())


def _forget(loader: CompletionLoader, step: int) -> None:
    """Delete the files of generations that are trained on in one step, but for the newest: resumed from a checkpoint, a
    run makes them again. Where steps go on with one, a checkpoint needs its file."""
    if loader.num_steps > 1:
        return
    files = sorted(loader.folder.glob("step-*.json"))
    for file in files[:-_KEPT]:
        file.unlink(missing_ok=True)
