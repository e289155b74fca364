"""Text by streamed weights: models and runs opened to be asked, prompts continued, a chat."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.app.console.loading import loading
from penstock.app.hub.fetch import model_folder
from penstock.app.hub.names import on_hub
from penstock.app.runs.checkpoints import checkpoint_named
from penstock.app.runs.directory import RunDir, find_run, is_live, read_recipe
from penstock.app.sampling.exported import base_folder
from penstock.engine.config import parse_bytes
from penstock.engine.ranks.ranks import ALONE, Ranks
from penstock.storage.files.errors import UserError
from penstock.storage.files.links import require_no_entry
from penstock.storage.files.units import seconds_text
from penstock.storage.files.untrusted import printable, shell

if TYPE_CHECKING:
    from penstock.engine.generate.decode import Decoding
    from penstock.engine.opened_model import OpenedModel


@dataclass(frozen=True, slots=True)
class Sample:
    """What was put behind a prompt."""

    prompt: str
    text: str
    """Without the prompt."""
    ids: list[int]
    prompt_tokens: int
    ended: bool
    """At an end of text, or of the context; else it has all the tokens that were asked for."""


@contextmanager
def opened(
    given: str | Path,
    *,
    checkpoint: str | None = None,
    gpu: str | int | None = None,
    ram: str | int | None = None,
    device: str = "auto",
    ranks: Ranks = ALONE,
) -> Iterator[OpenedModel]:
    """A run, by its directory or its name, or a model: a Hugging Face folder or a name on the hub. `gpu`, `ram`: sizes
    as recipes have them; None: what is free. `ranks`: each opens it. UserError for what is neither."""
    gpu_bytes = None if gpu is None else parse_bytes(gpu, "--gpu")
    ram_bytes = None if ram is None else parse_bytes(ram, "--ram")
    where, run = find_model(given)
    if run is None and checkpoint is not None:
        raise UserError(f"--checkpoint {checkpoint}: {where} is a model's folder; only runs have checkpoints")
    with ExitStack() as stack:
        if run is not None:
            checkpoint = checkpoint_named(run, checkpoint)
            if checkpoint is None and ranks.first:
                if is_live(run):
                    now = shell("penstock", "checkpoint", run, "now")
                    raise UserError(f"{run}: is running; keep a checkpoint of it (`{now}`), then add --checkpoint now")
                stack.enter_context(RunDir.open(run, read_only=True))
        with loading():
            from penstock.engine.opened_model import OpenedModel

        recipe = None if run is None else read_recipe(run)
        yield stack.enter_context(
            OpenedModel.open(
                where,
                recipe=recipe,
                checkpoint=checkpoint,
                gpu_bytes=gpu_bytes,
                ram_bytes=ram_bytes,
                device=device,
                base=None if run is not None else base_folder(where),
                ranks=ranks,
            )
        )


def find_model(where: str | Path) -> tuple[Path, Path | None]:
    """The folder of a model, or of a run, and the run if it is one. UserError for what is neither."""
    path = Path(where).expanduser()
    if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        return path, None
    require_no_entry(path)
    if path.is_dir() and not (path / "recipe.json").is_file():
        raise UserError(
            f"{printable(path)}: not a model: neither a run, which has a recipe.json, nor a Hugging Face folder, "
            "which has a config.json"
        )
    if on_hub(where) is not None and not path.exists():
        return model_folder(where), None
    run = find_run(str(where))
    return run, run


def continued(
    model: OpenedModel,
    prompts: Sequence[str],
    decoding: Decoding,
    *,
    chat: bool = False,
    on_start: Callable[[str], None] | None = None,
    on_text: Callable[[int, str], None] | None = None,
) -> list[Sample]:
    """Continue texts, batched; `chat`: answer each as a message. `on_start` is told what lives where and how long it
    will take; `on_text` gets (prompt, more text) as it comes."""
    from penstock.engine.generate.text import TextStream

    ids = [
        model.encode_chat([{"role": "user", "content": prompt}]) if chat else model.encode(prompt) for prompt in prompts
    ]
    tokenizer = model.tokenizer
    model.require_context(ids)
    assert tokenizer is not None
    streams = [TextStream(tokenizer, prompt) for prompt in ids]
    report = on_text or (lambda sequence, text: None)
    if on_start is not None:
        estimate = model.estimate(max(map(len, ids)), len(ids), decoding.new_tokens)
        on_start(f"{model.describe()}: {estimate.where}; {estimate.describe()}")
    result = model.generate(ids, decoding, lambda sequence, token: report(sequence, streams[sequence].add(token)))
    for sequence, stream in enumerate(streams):
        report(sequence, stream.end())
    return [
        Sample(prompt, stream.text, some.ids, len(tokens), some.ended)
        for prompt, stream, some, tokens in zip(prompts, streams, result, ids, strict=True)
    ]


def took(model: OpenedModel) -> str:
    """What the last call really took, in words."""
    first, later = model.passes_s[:1], model.passes_s[1:]
    said = f"{len(model.passes_s):,} passes in {seconds_text(sum(model.passes_s))}"
    if later:
        said += f": {seconds_text(sum(later) / len(later))} a token, {seconds_text(first[0])} for the first"
    return said


def chat(
    model: OpenedModel,
    decoding: Decoding,
    ask: Callable[[], str | None],
    *,
    on_start: Callable[[str], None] | None = None,
    on_text: Callable[[str], None],
) -> list[dict[str, str]]:
    """Answer what `ask` gives, until that is None; the conversation. `on_text` gets answers as they come; a
    KeyboardInterrupt meanwhile ends the answer, not the chat."""
    from penstock.engine.generate.text import TextStream

    model.encode_chat([{"role": "user", "content": "?"}])  # says so where it cannot chat
    messages: list[dict[str, str]] = []
    assert model.tokenizer is not None
    while (said := ask()) is not None:
        if not said.strip():
            continue
        messages.append({"role": "user", "content": said})
        ids = model.encode_chat(messages)
        model.require_context([ids])
        if on_start is not None and len(messages) == 1:
            estimate = model.estimate(len(ids), 1, decoding.new_tokens)
            on_start(f"{model.describe()}: {estimate.where}; {estimate.describe()}")
        stream = TextStream(model.tokenizer, ids)

        def reported(sequence: int, token: int, stream: TextStream = stream) -> None:
            on_text(stream.add(token))

        try:
            model.generate([ids], decoding, reported, reuse=True)
        except KeyboardInterrupt:
            on_text(" [stopped]")
        on_text(stream.end() + "\n")
        messages.append({"role": "assistant", "content": stream.text})
    return messages


def decoding_of(
    model: OpenedModel, tokens: int, temperature: float, top_p: float, seed: int, *, chat: bool = False
) -> Decoding:
    """`chat`: the texts are answers. Raises UserError for values that nothing can be drawn with."""
    from penstock.engine.generate.decode import Decoding

    if tokens < 1:
        raise UserError(f"--tokens: {tokens} must be at least 1")
    if not 0 <= temperature <= 100:
        raise UserError(f"--temperature: {temperature:g} must be from 0 (the most likely token) to 100")
    if not 0 < top_p <= 1:
        raise UserError(f"--top-p: {top_p:g} must be above 0, at most 1")
    for option, is_given in (("--top-p", top_p != 1), ("--seed", seed != 0)):
        if is_given and temperature == 0:
            raise UserError(
                f"{option}: has no effect, as --temperature 0 always takes the most likely token; set --temperature "
                "above 0, or leave it out"
            )
    stops = model.chat_stop_ids if chat else model.stop_ids
    return Decoding(new_tokens=tokens, temperature=temperature, top_p=top_p, seed=seed, stop_ids=stops)


def sample(
    model: str | Path,
    prompts: str | Sequence[str],
    *,
    chat: bool = False,
    tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    checkpoint: str | None = None,
    gpu: str | int | None = None,
    ram: str | int | None = None,
    on_text: Callable[[int, str], None] | None = None,
) -> list[str]:
    """Continue one text or several, batched, by a run or a model whose weights are streamed; the texts behind them.

    `model`: a run's directory or name, a Hugging Face folder or a name on the hub. `chat`: the prompts are messages,
    put into its tokenizer's chat template, and the texts answers. `tokens`: at most so many of each. `temperature`: 0
    takes the likeliest token, always. `gpu`, `ram`: what may be used of each, as "20GiB"; None: what is free. `on_text`
    gets (number of the prompt, more text) as it comes. Raises UserError.
    """
    given = [prompts] if isinstance(prompts, str) else list(prompts)
    if not given:
        return []
    with opened(model, checkpoint=checkpoint, gpu=gpu, ram=ram) as result:
        decoding = decoding_of(result, tokens, temperature, top_p, seed, chat=chat)
        return [one.text for one in continued(result, given, decoding, chat=chat, on_text=on_text)]


def read_prompt(file: Path) -> str:
    """The text of a file, or of standard input where it is `-`."""
    try:
        return sys.stdin.read() if str(file) == "-" else file.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--prompt-file: {file} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"--prompt-file: {file} is not UTF-8 text") from None


def as_json(model: OpenedModel, samples: Sequence[Sample]) -> dict[str, Any]:
    """What `penstock sample --json` prints."""
    return {
        "samples": [asdict(one) for one in samples],
        "passes": len(model.passes_s),
        "seconds": sum(model.passes_s),
    }
