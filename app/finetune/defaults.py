"""What `penstock finetune` chooses, each value with its reason in a few words: arithmetic on what was found of the
model and the data. A field that the user has set stays as it is, and what depends on it follows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.engine.config.data import Comparison
from penstock.storage.files.units import count_text, params_text

LEARNING_RATES = (
    (10 * 10**6, 1e-3),
    (100 * 10**6, 2e-4),
    (10**9, 5e-5),
    (5 * 10**9, 2e-5),
    (50 * 10**9, 1e-5),
    (math.inf, 5e-6),
)
"""Parameters below which -> peak learning rate. Alpaca, whose parameters were all trained, took 2e-5 for 7B and 1e-5
for 13B with a cosine and 3 % of warm-up; models of today have seen more and keep what they know at less. Smaller models
take more. The master weights are float32, so that no step is lost in rounding."""
ADAPTER_RATE = 10
"""An adapter learns best at some ten times the rate of the model itself, whatever its rank ("LoRA Without Regret",
Thinking Machines Lab, 2025)."""
COMPARED_RATE = 5e-7
"""Peak learning rate where answers are compared, whatever the model's size: TRL's scripts for DPO and KTO, and Zephyr's
and Tulu's recipes have it, with ten times as much for an adapter."""
REWARD_RATE = 1e-5
"""Of a reward model, all parameters trained, as of most of Llama 2's (arXiv 2307.09288, section 3.2.2)."""
OBJECTIVES = {
    "pairs": ("dpo", "pairs of a chosen and a rejected answer"),
    "unpaired": ("kto", "answers with a verdict, not in pairs"),
}
"""What answers are compared by."""
WARMUP = 0.03
"""Of the steps."""
EPOCHS = ((10 * 10**6, 3), (100 * 10**6, 2), (math.inf, 1))
"""Tokens below which -> epochs. Repeating text up to four times is nearly as good as new text (arXiv 2305.16264)."""
LARGE = 7 * 10**9
STEP_TOKENS = (65_536, 131_072)
"""Of a step, of models below `LARGE` parameters and from there on: what streams wants more work for each pass."""
LEAST_STEPS = 16
"""Of an epoch, where the data has as many rows."""
LEAST_ROW, MOST_ROW = 128, {"rows": 32_768, "text": 8_192}
"""Tokens. Of text no document need be whole; a conversation that is cut has lost its end."""
PACKED_ROW, PACKED_DOCUMENTS, PACKED_ROWS = 8_192, 8, 32
"""A row grows beyond the longest document until `PACKED_DOCUMENTS` usual ones fit, as then best-fit packing leaves
little empty; up to so many tokens, and while an epoch keeps `PACKED_ROWS` rows."""
OUTLIER = 4
"""A longest document of more than so many times the 99th percentile is an outlier: the row covers the percentile."""
HELD_OUT, LEAST_HELD, MOST_HELD, LEAST_DOCUMENTS = 0.02, 4, 256, 40
"""Share of the documents held out, at least and at most; below `LEAST_DOCUMENTS` none is."""
SAMPLE_TOKENS = 60, 200
"""Behind the beginning of a text; of an answer at most."""


class Default(NamedTuple):
    """A field that was chosen, or given."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What decides the defaults."""

    num_params: int
    context: int | None
    """Longest position that the model is made for; None: not known."""
    text: bool
    """Documents are text, all of it trained, which may be split anywhere."""
    images: bool = False
    """Some have images, and those are never cut."""
    lengths: NDArray[np.int64]
    """[documents] tokens that each takes of a row."""
    rows: Callable[[Mapping[str, Any]], int]
    """Rows of an epoch with these fields, by their dotted names."""
    comparison: Comparison = ""
    """Whether documents are pairs of answers, or answers with a verdict."""
    whole_documents: bool = False
    """The model carries a state from token to token that it cannot hand on: a row is one document."""


def choose(facts: Found, given: Mapping[str, Any], epochs: float | None = None) -> list[Default]:
    """The fields of a fine-tune in the order of the recipe. `given`: what the user has set, by dotted names."""
    made = _Made(given)
    _data(made, facts)
    _steps(made, facts, epochs)
    _optimizer(made, facts)
    _looks(made)
    return list(made.chosen.values())


class _Made:
    """Fields as they are chosen."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given, self.chosen = given, dict[str, Default]()

    def set(self, key: str, value: Any, why: str) -> Any:
        """The value of a field: the given one, or `value`."""
        if key in self.given:
            value, why = self.given[key], "set by you"
        self.chosen[key] = Default(key, value, why)
        return value

    def value(self, key: str) -> Any:
        return self.chosen[key].value


def _data(made: _Made, facts: Found) -> None:
    count = len(facts.lengths)
    row, why = row_length(
        facts.lengths,
        facts.context,
        text=facts.text,
        packed=not facts.whole_documents,
        pairs=facts.comparison == "pairs",
    )
    made.set("data.sequence_length", row, why)
    if facts.whole_documents:
        made.set("data.packing", "none", "one document per row, as the model carries a state from token to token")
    else:
        what = "both answers of a pair in one row" if facts.comparison == "pairs" else "whole documents"
        made.set("data.packing", "best_fit", f"{what}, arranged to leave little space empty")
    if facts.text:
        made.set("data.long_documents", "split", "longer documents are split into several")
    elif facts.images:
        made.set("data.long_documents", "drop", "documents with images are never cut")
    elif facts.comparison:
        made.set("data.long_documents", "drop", "answers are compared whole: those longer than a row are left out")
    else:
        made.set("data.long_documents", "cut", "documents longer than a row lose their end")
    held = held_out(count)
    if held is None:
        why = f"{count:,} documents are too few to hold any out"
    else:
        why = f"{held / count:.1%} of {count:,}, held out of training"
    made.set("data.validation_documents", held, why)


def _steps(made: _Made, facts: Found, epochs: float | None) -> None:
    if facts.comparison:
        made.set("train.objective", *OBJECTIVES[facts.comparison])
    row = made.value("data.sequence_length")
    rows = facts.rows({key: item.value for key, item in made.chosen.items()})
    wanted = STEP_TOKENS[facts.num_params >= LARGE]
    batch = _power_below(max(1, min(wanted // row, rows // LEAST_STEPS)))
    step = f"{batch * row:,} tokens a step"
    short = batch * 2 * row <= wanted and rows // LEAST_STEPS < batch * 2
    made.set("train.global_batch_size", batch, f"{step}, to have enough steps" if short else step)
    batch = made.value("train.global_batch_size")
    tokens = int(facts.lengths.sum())
    if epochs is None and facts.comparison:
        epochs, usual = 1, ", as usual where answers are compared"
    elif epochs is None:
        epochs = next(number for most, number in EPOCHS if tokens < most)
        usual = f", as usual for {count_text(tokens)} tokens"
    else:
        usual = ""
    named = f"{epochs:g} epoch{'' if epochs == 1 else 's'} of {rows:,} rows, {batch:,} a step{usual}"
    made.set("train.steps", max(1, math.ceil(epochs * rows / batch)), named)


def _optimizer(made: _Made, facts: Found) -> None:
    steps = made.value("train.steps")
    rate = next(rate for most, rate in LEARNING_RATES if facts.num_params < most)
    size = params_text(facts.num_params)
    usual = f"usual for {size} parameters, all trained"
    if made.given.get("train.objective") == "reward":
        rate, usual = REWARD_RATE, "usual for a reward model, all parameters trained"
    elif facts.comparison:
        rate, usual = COMPARED_RATE, "usual where answers are compared and all parameters trained"
    if made.given.get("adapter.method", "none") == "none":
        made.set("train.lr", rate, usual)
    else:
        rate = float(f"{rate * ADAPTER_RATE:g}")
        made.set(
            "train.lr", rate, f"an adapter on {size} parameters: {ADAPTER_RATE} times the rate for training them all"
        )
    made.set("train.warmup_steps", min(steps - 1, math.ceil(WARMUP * steps)), f"{WARMUP:.0%} of the steps")
    made.set("train.lr_schedule", "cosine", "decays to a tenth at the end")
    made.set("train.weight_decay", 0.01, "low, as the training is short")
    made.set("train.clip_norm", 1.0, "limits the effect of an unusual batch")
    made.set("train.compute_dtype", "auto", "bfloat16 where the device has it; master weights are float32")


def _looks(made: _Made) -> None:
    """When it is looked at, committed and exported."""
    steps, held = made.value("train.steps"), made.value("data.validation_documents")
    if held is not None:
        made.set("train.validate_every", max(1, math.ceil(steps / 8)), "eight validations in the run")
    made.set("storage.checkpoint_every", min(50, max(1, math.ceil(steps / 5))), "most steps that a crash can cost")
    made.set("after.export", True, "a Hugging Face folder at the end")


def row_length(
    lengths: NDArray[np.int64], context: int | None, *, text: bool, packed: bool = True, pairs: bool = False
) -> tuple[int, str]:
    """Tokens of a row, a power of two unless the model's context is none, and why. No pair is an outlier: one that a
    row does not hold is left out."""
    what = "pairs" if pairs else "documents"
    longest, usual = int(lengths.max()), int(np.median(lengths))
    share = math.ceil(np.percentile(lengths, 99))
    outliers = longest > OUTLIER * share and not pairs
    covered = share if outliers else longest
    row = max(LEAST_ROW, _power_above(covered))
    most = MOST_ROW["text" if text else "rows"]
    why = f"covers 99 % of the {what}, up to {share:,} tokens" if outliers else f"covers the longest, {longest:,}"
    if row > most:
        row, why = most, f"{what} have up to {longest:,} tokens; rows of more than {most:,} have to be set by you"
    tokens = int(lengths.sum())
    while packed and row < min(PACKED_ROW, PACKED_DOCUMENTS * usual) and tokens >= PACKED_ROWS * 2 * row:
        row, why = (
            row * 2,
            f"{max(1, row * 2 // max(1, usual)):,} typical {what} of {usual:,} tokens packed into each row",
        )
    if context is not None and row > context:
        row, why = context, f"the model's own context; the longest {what[:-1]} has {longest:,}"
    return row, why


def held_out(num_documents: int) -> int | None:
    """Documents to hold out; None for none."""
    if num_documents < LEAST_DOCUMENTS:
        return None
    return min(MOST_HELD, max(LEAST_HELD, round(HELD_OUT * num_documents)))


def _power_above(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(0, number - 1).bit_length()


def _power_below(number: int) -> int:
    """The largest power of two that is not above."""
    return 1 << (number.bit_length() - 1)
