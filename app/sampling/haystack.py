"""Asking an exported model about a haystack (engine/data/needles), by plain transformers."""

from __future__ import annotations

from pathlib import Path

_AROUND = 2
"""Words shown on either side of what was asked."""


def haystack_line(folder: Path, length: int, seed: int, base: str | None = None) -> str:
    """How a model folder (an adapter's with its `base`) answers a haystack of `length` tokens that the run with this
    `data.seed` never had, in words: text that the folder's own tokenizer reads, of which the last question is shown."""
    import numpy as np
    import torch

    from penstock.app.sampling.exported import load_exported
    from penstock.engine.data.needles.haystacks import VOCABULARY, haystack

    ids, weights = haystack(length, np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, length]))))
    words = [VOCABULARY[number] for number in ids]
    tokenizer, model = load_exported(folder, base)
    inputs = tokenizer(" ".join(words), return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        likeliest = model(**inputs).logits[0].argmax(dim=-1).tolist()
    queried = np.flatnonzero(weights)
    said = [tokenizer.decode([likeliest[position - 1]]) for position in queried]
    right = sum(answer == words[position] for answer, position in zip(said, queried, strict=True))
    name, answer = words[queried[-1] - 1], said[-1]
    position = words.index(name)
    around = " ".join(words[max(0, position - _AROUND) : position + 2 + _AROUND])
    verdict = "correct" if answer == words[queried[-1]] else f"wrong, the answer is {words[queried[-1]]}"
    return (
        f"plain transformers with the exported model answer {right} of {len(queried)} questions about a context of "
        f"{length:,} tokens; '{around}' is at token {position:,}, and for '{name}' the model answers {answer}: "
        f"{verdict}"
    )
