"""Alpaca's instructions: `instruction` and `input` ask, `output` answers; `system` and `history` where there are any.

Instruction and input, an empty line between them, become the user's turn where the tokenizer has a chat template. Where
it has none, the prompt is the text that Alpaca was trained with ("Below is an instruction that describes a task...").
"""

from __future__ import annotations

from typing import Any

from penstock.engine.data.formats.base import VERDICTS, kind, optional_text, text_field, unpacked
from penstock.engine.data.formats.images import FIELDS as IMAGES
from penstock.engine.data.formats.images import with_images
from penstock.engine.data.samples import Completion, Conversation, RowError

FIELDS = ("instruction", "output", "input", "system", "history", *VERDICTS, *IMAGES)
_ABOUT = "Below is an instruction that describes a task"
_WITH_INPUT = f"{_ABOUT}, paired with an input that provides further context."
_WRITE = "Write a response that appropriately completes the request."


def matches(fields: dict[str, Any]) -> bool:
    return isinstance(fields.get("instruction"), str) and isinstance(fields.get("output"), str)


def convert(fields: dict[str, Any], where: str) -> Conversation:
    instruction, output = text_field(fields, "instruction", where), text_field(fields, "output", where)
    given, system = optional_text(fields, "input", where), optional_text(fields, "system", where)
    if not (instruction.strip() or given.strip()):
        raise RowError(f"{where}: `instruction` and `input` are empty; one of them must ask something")
    if not output.strip():
        raise RowError(f"{where}: `output` is empty, so there is nothing to train on")
    history = _history(fields, where)
    question = "\n\n".join(part for part in (instruction, given) if part)
    messages = [{"role": "system", "content": system}] if system else []
    for request, answer in [*history, (question, output)]:
        messages += [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
    prompt = f"{system or (_WITH_INPUT if given else f'{_ABOUT}.') + ' ' + _WRITE}\n\n"
    for request, answer in history:
        prompt += f"### Instruction:\n{request}\n\n### Response:\n{answer}\n\n"
    prompt += f"### Instruction:\n{instruction}\n\n" + (f"### Input:\n{given}\n\n" if given else "") + "### Response:\n"
    messages, images = with_images(messages, fields, where)
    return Conversation(where, messages, plain=Completion(where, prompt, output), images=images)


def _history(fields: dict[str, Any], where: str) -> list[tuple[str, str]]:
    """Earlier questions and answers."""
    history = unpacked(fields.get("history")) or []
    for pair in history if isinstance(history, list) else [history]:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise RowError(f"{where}: `history` holds {kind(pair)}; expected a list of [question, answer]")
    return [(request, answer) for request, answer in history]
