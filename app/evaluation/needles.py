"""The built-in tasks: needles in text (engine/data/needles/retrieval.py), by length and depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.app.evaluation.queried import OnDone, QueriedModel, Requests
from penstock.app.runs.recall_view import RecallMap
from penstock.engine.data.needles.retrieval import KINDS, Haystacks, Kind, Question, found_values, questions, recall
from penstock.engine.data.text.chat import ChatTemplate
from penstock.engine.generate.decode import Decoding
from penstock.storage.files.errors import UserError

NAMES: dict[str, tuple[Kind, ...]] = {"needles": KINDS} | {f"needles_{kind}": (kind,) for kind in KINDS}
"""Name of a task -> what it hides."""
_LENGTHS = (4096, 8192)


def default_lengths(context: int) -> tuple[int, ...]:
    """Lengths where none are given: those of RULER's that are short, or the context where that is shorter."""
    return tuple(length for length in _LENGTHS if length <= context) or (context,)


def make_questions(
    queried: QueriedModel, haystacks: Haystacks, chat: ChatTemplate | None, system: str | None
) -> list[tuple[Question, list[int]]]:
    """The questions and their prompts as token ids, behind a `system` message or text. Raises UserError for a length
    beyond the context, or without room for a question."""
    if queried.limit is not None and (longest := max(haystacks.lengths)) > queried.limit:
        raise UserError(f"--lengths {longest:,}: exceeds the model's context of {queried.limit:,} tokens")
    if haystacks.new_tokens >= queried.context:
        raise UserError(
            f"--answer-tokens {haystacks.new_tokens:,}: leaves no room in a context of {queried.context:,}; give fewer"
        )

    def prompt(question: Question) -> list[int]:
        if chat is None:
            return queried.encode("".join([f"{system}\n\n" if system else "", question.text, "\n", question.begun]))
        messages = [{"role": "system", "content": system}] if system else []
        return queried.encode(chat.prompt([*messages, {"role": "user", "content": question.text}]) + question.begun)

    made = questions(
        haystacks, lambda text: len(queried.encode(text, special=False)), lambda question: len(prompt(question))
    )
    return [(question, prompt(question)) for question in made]


@dataclass(frozen=True, slots=True)
class AllFound:
    """Whether all values of the question at a place are in its answer."""

    asks: Sequence[Question]

    def __call__(self, place: int, text: str) -> bool:
        return all(found_values(self.asks[place], text))


def query_needles(
    queried: QueriedModel,
    haystacks: Haystacks,
    chat: ChatTemplate | None,
    system: str | None,
    *,
    report: Callable[[Requests], None],
    on_done: OnDone,
) -> dict[str, Any]:
    """Ask for the needles; JSON: of each kind its `recall` and, by length and depth, the values that were `right` and
    all that were `asked`. An answer is not gone on with once all of its values are in it."""
    made = make_questions(queried, haystacks, chat, system)
    asks = [question for question, _ in made]
    report(Requests(0, 0, len(made), sum(len(ids) for _, ids in made), haystacks.new_tokens))
    answers = queried.write(
        [ids for _, ids in made],
        Decoding(new_tokens=haystacks.new_tokens),
        on_done,
        AllFound(asks),
    )
    options = asdict(haystacks)
    del options["kinds"]
    return {"options": options, "kinds": {kind: _scores(haystacks, kind, asks, answers) for kind in haystacks.kinds}}


def _scores(haystacks: Haystacks, kind: Kind, asks: list[Question], answers: list[str]) -> dict[str, Any]:
    rows = {length: ([0] * haystacks.depths, [0] * haystacks.depths) for length in haystacks.lengths}
    scores: dict[int, list[float]] = {length: [] for length in haystacks.lengths}
    for question, answer in zip(asks, answers, strict=True):
        if question.kind != kind:
            continue
        right, queried = rows[question.length]
        for depth, result in zip(question.depths, found_values(question, answer), strict=True):
            right[depth] += result
            queried[depth] += 1
        scores[question.length].append(recall(question, answer))
    by_length = [sum(result) / len(result) for result in scores.values()]
    return {
        "lengths": list(rows),
        "right": [right for right, _ in rows.values()],
        "queried": [queried for _, queried in rows.values()],
        "recall_by_length": by_length,
        "recall": sum(by_length) / len(by_length),
    }


def maps(result: Mapping[str, Any]) -> dict[str, RecallMap]:
    """Of each kind in what `query_needles` made, its map."""
    return {
        kind: RecallMap(
            0,
            tuple(one["lengths"]),
            tuple(map(tuple, one["right"])),
            tuple(map(tuple, one["queried"])),
            f"needles, {kind}",
        )
        for kind, one in result["kinds"].items()
    }
