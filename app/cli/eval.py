"""`penstock eval`: the command. What asks the model is imported when it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from penstock.app.cli.options import JsonOption, argument, option
from penstock.storage.files.untrusted import printable


def evaluate(
    ctx: typer.Context,
    where: Annotated[str, argument("RUN|FOLDER", "Run directory, the name of one in runs/, or a Hugging Face folder.")],
    tasks: Annotated[
        str,
        option(
            "NAMES",
            "Tasks, separated by commas: those of lm-evaluation-harness (needs the extra `eval`) or the built-in "
            "needles, needles_single, needles_multikey, needles_multivalue.",
        ),
    ],
    limit: Annotated[int | None, option("N", "Use only the first N documents of each task.")] = None,
    num_fewshot: Annotated[int | None, option("N", "Examples before each question.")] = None,
    include_path: Annotated[Path | None, option("DIR", "Folder with your own tasks, as .yaml files.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    system: Annotated[str | None, option("TEXT", "System message before each question.")] = None,
    lengths: Annotated[
        str | None, option("TOKENS", "Needles: context lengths, for example 4k,32k; k is 1,024. Default: 4k,8k.")
    ] = None,
    depths: Annotated[int, option("N", "Needles: number of depths at which facts are hidden.")] = 5,
    samples: Annotated[int, option("N", "Needles: questions per kind, length and depth.")] = 2,
    answer_tokens: Annotated[int, option("N", "Needles: tokens of each length reserved for the answer.")] = 128,
    filler: Annotated[str, option("KIND", "Needles: text around the facts, essay or noise.")] = "essay",
    seed: Annotated[int, option("N", "Seed of the needles and of sampling.")] = 0,
    batch_tokens: Annotated[
        int | None, option("N", "Most tokens to read per pass over the weights. Default: 32,768.")
    ] = None,
    checkpoint: Annotated[
        str | None, option("NAME", "For a run: use this checkpoint, not the last generation.")
    ] = None,
    gpu: Annotated[str | None, option("SIZE", "GPU memory to use, for example 20GiB. Default: what is free.")] = None,
    ram: Annotated[str | None, option("SIZE", "RAM to use, for example 48GiB. Default: what is free.")] = None,
    gpus: Annotated[int | None, option("N", "GPUs to use, each for batches of its own. Default: all.")] = None,
    out: Annotated[Path | None, option("FILE", "Also write the results to this JSON file.")] = None,
    svg: Annotated[Path | None, option("FILE", "Write the heat maps as an SVG picture.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a run or a model on lm-evaluation-harness tasks and needles.

    The weights are streamed, so the model need not fit in memory. The number of questions and the expected time are
    printed first. Results for a run are kept in its evals/.
    """
    from penstock.app.evaluation import run
    from penstock.app.planning.fit import context_sizes

    # Options are parameters of the same names there.
    given = ctx.params | {
        "tasks": [name.strip() for name in tasks.split(",") if name.strip()],
        "lengths": None if lengths is None else context_sizes(lengths, "--lengths"),
    }
    given.pop("as_json")
    result = run.evaluate(**given)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
        return
    from rich.console import Console

    from penstock.app.evaluation.report import print_report

    print_report(result, Console())
    for file in result["files"]:
        typer.echo(printable(f"written to {file}"))
