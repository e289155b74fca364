"""Samples: what the model writes behind the recipe's prompts, between two steps.

They use the slots and lanes of the plan and a place of their own for keys and values, and leave nothing behind: a run
that writes samples computes the same bits as one of the same plan that does not.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

from penstock.engine.events import Sample, SampleMetrics
from penstock.engine.generate.decode import Continuation, Decoding, decode
from penstock.engine.passes import Forward
from penstock.engine.session import Session


def due(session: Session) -> bool:
    """Whether samples are to be written of the step that has ended, before the next one begins."""
    every, step = session.recipe.samples.every, session.step
    return every is not None and step > 0 and (step % every == 0 or session.is_over)


def write(session: Session) -> SampleMetrics:
    """Write the samples with the weights of the step that has ended."""
    prompts = session.prompts
    assert prompts is not None
    started, config = time.perf_counter(), prompts.config
    decoding = Decoding(
        new_tokens=config.tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        seed=config.seed,
        stop_ids=prompts.stop_ids,
    )
    result = continued(session, prompts.ids, decoding)
    return SampleMetrics(
        step=session.step,
        samples=[
            Sample(
                prompt=prompt,
                text=prompts.text(number, written.ids),
                tokens=len(written.ids) + written.ended,
                ended=written.ended,
            )
            for number, (prompt, written) in enumerate(zip(config.prompts, result, strict=True))
        ],
        seconds=time.perf_counter() - started,
        time=time.time(),
    )


def continued(
    session: Session,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    copies: int = 1,
    at_once: int | None = None,
) -> list[Continuation]:
    """`copies` continuations of each prompt side by side, by the weights of the step that has ended, of at most
    `at_once` prompts at a time; on every rank those of all.

    The step's update is applied block by block under each rank's first pass, as it would be under the next step's
    forward, and its generation is committed then if that is due.
    """
    ranks, committed = session.ranks, session.commit_due(session.step) or session.is_over
    groups = session.plan.problem.divided(len(prompts), at_once or len(prompts))
    own, found = groups[ranks.rank :: ranks.count], []
    for members in own or groups[:1]:
        some, how = prompts[members.start : members.stop], decoding
        if not own:  # it does what the others do under their first pass, and no more
            some, how = some[:1], replace(decoding, new_tokens=1)
        lengths, new_tokens = [len(prompt) + how.new_tokens for prompt in some], how.new_tokens if copies > 1 else 0
        due = committed and session.builder.uncommitted
        forward = Forward(session, lengths, copies=copies, new_tokens=new_tokens, commit=due)
        found.append(decode(forward, some, how, copies=copies, first=members.start * copies))
    return list(itertools.chain.from_iterable(ranks.in_turns(found if own else [])))
