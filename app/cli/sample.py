"""`penstock sample`: what it takes and prints."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.app.cli.options import argument, option
from penstock.app.console.working import Working, say
from penstock.engine import preparing
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import printable

if TYPE_CHECKING:
    from penstock.engine.opened_model import OpenedModel


def sample(
    model: Annotated[
        str,
        argument(
            "RUN|FOLDER",
            "Run directory or the name of one in runs/; Hugging Face folder, or the name of a model on the hub.",
        ),
    ],
    prompts: Annotated[
        list[str] | None, option("TEXT", "Text to continue; may be repeated, all are read together.", "--prompt")
    ] = None,
    prompt_file: Annotated[Path | None, option("FILE", "File with one more prompt; - is standard input.")] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Use the chat template: answer the prompts, or chat in the terminal without any."),
    ] = False,
    tokens: Annotated[
        int | None, option("N", "Most tokens to generate per prompt. Default: 64, with --chat 1024.")
    ] = None,
    temperature: Annotated[float, option("T", "Sampling temperature; 0 always takes the most likely token.")] = 0.0,
    top_p: Annotated[float, option("P", "Sample from the most likely tokens with total probability P.")] = 1.0,
    seed: Annotated[int, option("N", "Seed of the sampling.")] = 0,
    checkpoint: Annotated[
        str | None, option("NAME", "For a run: use this checkpoint, not the last generation.")
    ] = None,
    gpu: Annotated[str | None, option("SIZE", "GPU memory to use, for example 20GiB. Default: what is free.")] = None,
    ram: Annotated[str | None, option("SIZE", "RAM to use. Default: what is free.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Generate text or chat with a model, also one that does not fit in memory.

    Its weights are streamed. Where they are kept and how long it will take is printed to stderr first.
    """
    from penstock.app.sampling import sample as sampling

    given = [*(prompts or []), *([sampling.read_prompt(prompt_file)] if prompt_file is not None else [])]
    if not chat and not given:
        raise UserError("give --prompt TEXT, --prompt-file FILE or --chat")
    if as_json and not given:
        raise UserError("--json: cannot be used in an interactive chat; give --prompt TEXT")
    with Working() as shown, ExitStack() as stack:
        with shown.step(f"opening {model}"):
            result = stack.enter_context(sampling.opened(model, checkpoint=checkpoint, gpu=gpu, ram=ram))
        shown.clear()
        stack.callback(_remark_on, result)
        _remark_on(result)
        decoding = sampling.decoding_of(
            result, (1024 if chat else 64) if tokens is None else tokens, temperature, top_p, seed, chat=chat
        )
        if not given:
            shown.end()
            sampling.chat(result, decoding, _ask, on_start=say, on_text=_show)
            return
        between = "\n" if chat else ""
        alone = len(given) == 1 and not as_json

        count, most = 0, decoding.new_tokens * len(given)

        def begin(text: str) -> None:
            shown.clear()
            say(text)
            if alone and not chat:
                _show(given[0])

        def more(sequence: int, text: str) -> None:
            nonlocal count
            count += 1
            preparing.report(count / most, f"{count:,} of at most {most:,} tokens")
            if alone:
                if sys.stdout.isatty():  # what is being written shows how far it is
                    shown.end()
                _show(text)

        with shown.step("reading the prompt and writing"):
            samples = sampling.continued(result, given, decoding, chat=chat, on_start=begin, on_text=more)
        if as_json:
            print(json.dumps(sampling.as_json(result, samples)))
        elif alone:
            print(flush=True)
        else:
            for number, one in enumerate(samples, 1):
                _show(f"[{number}] {one.prompt}{between}{one.text}\n\n")
        say(sampling.took(result))


def _remark_on(model: OpenedModel) -> None:
    for remark in model.take_remarks():
        say(remark)


def _show(text: str) -> None:
    print(printable(text), end="", flush=True)


def _ask() -> str | None:
    """The next message; None at the end of the input. A Ctrl-C at the prompt ends the chat, too."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None
