"""Samples: what the model writes behind the recipe's prompts, between two steps.

They use the slots and lanes of the plan and a place of their own for keys and values, and leave nothing behind: a run
that writes samples computes the same bits as one of the same plan that does not.
"""

from __future__ import annotations

import time

from penstock.engine.events import Sample, SampleMetrics
from penstock.engine.generate.decode import Decoding, decode
from penstock.engine.passes import Forward
from penstock.engine.session import Session


def due(session: Session) -> bool:
    """Whether samples are to be written of the step that has ended, before the next one begins."""
    every, step = session.recipe.samples.every, session.step
    return every is not None and step > 0 and (step % every == 0 or session.is_over)


def write(session: Session) -> SampleMetrics:
    """Write the samples with the weights of the step that has ended.

    Its update is applied block by block under the first pass, as it would be under the next step's forward, and its
    generation is committed then if that is due.
    """
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
    committed = session.commit_due(session.step) or session.is_over
    forward = Forward(session, prompts.lengths, commit=committed and session.builder.uncommitted)
    result = decode(forward, prompts.ids, decoding)
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
