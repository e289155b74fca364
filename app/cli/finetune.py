"""`penstock finetune` and `penstock data`: the commands, what they print and what they ask."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.app.cli.options import GpusOption, SetOption, argument, complete_recipes, option, with_gpus
from penstock.app.console.working import Working, say, working
from penstock.app.launch import api
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import printable, shell

REFUSED = 1


def finetune(
    model: Annotated[str, argument("MODEL", "Hugging Face folder, or the name of a model on the hub.")],
    data: Annotated[str, argument("DATA", "File or folder with conversations or text, or a data set on the hub.")],
    overrides: SetOption = None,
    gpus: GpusOption = None,
    epochs: Annotated[
        float | None, option("N", "How often to go through the data. Default: depends on its size.")
    ] = None,
    out: Annotated[Path | None, option("FILE", "Recipe file to write, .py or .json. Default: ./MODEL_DATA.py.")] = None,
    run_dir: Annotated[Path | None, option("DIR", "Run directory to create. Default: runs/<name>-<time>.")] = None,
    machine: Annotated[
        str | None, option("NAME|FILE", "Plan for another machine and write the recipe, but do not train.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Train without asking.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the findings, choices and plan as one JSON object, and exit.")
    ] = False,
) -> None:
    """Fine-tune a model on your data.

    Looks at both, chooses the settings, shows the plan, asks, and trains all parameters. The settings are written as an
    ordinary recipe. Exits with 1 if the run does not fit this machine.
    """
    overrides = with_gpus(overrides, gpus)
    from rich.console import Console

    from penstock.app.console.printing import console_page, print_rows
    from penstock.app.finetune.propose import command, propose, recipe_file, require_new, require_new_run, write_recipe
    from penstock.app.finetune.view import report_rows
    from penstock.app.planning.view import print_plan

    if run_dir is not None and (machine is not None or as_json):
        because = "--json" if as_json else "--machine"
        raise UserError(f"--run-dir: has no effect, as with {because} nothing is trained; leave one of them out")
    if out is not None and as_json:
        raise UserError("--out: has no effect, as with --json no recipe is written; leave one of them out")
    asks = not yes and not as_json and sys.stdin.isatty()
    replaces = asks and out is not None and out.is_file() and typer.confirm(f"{printable(out)} exists; replace it?")
    if out is not None and not as_json:
        require_new(out, overwrite=replaces)
    require_new_run(run_dir)
    with Working(each=as_json) as shown:
        result = propose(model, data, overrides=overrides, epochs=epochs, machine=machine or "", listener=shown)
        with shown.step("planning"):
            forecast = api.plan(result.recipe)
    if as_json:
        typer.echo(json.dumps(result.report | {"plan": forecast}))
        return
    console = Console()
    page = console_page(console)
    print_rows(report_rows(result.report, page.width, page.glyphs), console)
    console.print()
    print_plan(forecast, console)
    console.print()
    if not forecast["fits"]:
        raise typer.Exit(REFUSED)
    file = out or recipe_file(result.recipe)
    trains = machine is None
    if trains and not yes:
        if not asks:
            raise UserError("finetune: there is no terminal to ask on; add --yes to train without asking")
        trains = typer.confirm(f"train now? (the recipe will be written to {printable(file)})", default=True)
    write_recipe(result, file, command(model, data, overrides, epochs, machine), overwrite=replaces)
    typer.echo(printable(f"recipe written to {file}; to train it again: ") + shell("penstock", "train", file))
    if trains:
        api.begin(file, run_dir=run_dir, is_shown=True)


def data(
    recipe: Annotated[
        str,
        argument(
            "RECIPE|MODEL", "A recipe, to show its data; or a model, followed by DATA.", autocompletion=complete_recipes
        ),
    ],
    data: Annotated[str | None, argument("DATA", "File, folder, or data set on the hub.")] = None,
    show: Annotated[int | None, option("N", "How many rows to show. Default: 3, with --json all.", min=0)] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object per row: ids, weights, text. The report goes to stderr."),
    ] = False,
    overrides: SetOption = None,
) -> None:
    """Show rows of data as training reads them.

    Prints token ids, which tokens are trained, and the text, then statistics of the whole data.
    """
    from rich.console import Console

    from penstock.app.console.printing import console_page, print_rows
    from penstock.app.finetune.data import open_source
    from penstock.app.finetune.propose import data_report, first_recipe, require_of_data
    from penstock.app.finetune.report import token_row
    from penstock.app.finetune.view import WHOLE_CHARS, found_rows, sample_rows

    if data is None and Path(recipe).expanduser().is_dir():
        raise UserError(f"{recipe}: is a folder; give a recipe, or a model and its data: penstock data MODEL DATA")
    if data is None:
        result, said = api.resolved_recipe(Path(recipe), overrides or [])
        for line in said:
            say(line)
    else:
        result = first_recipe(recipe, data, overrides or [])
        require_of_data(overrides or [])
    with Working() as shown:
        source = open_source(result, shown, with_model=False)
    if as_json:
        for document in itertools.islice(source.documents(), show):
            print(json.dumps(token_row(document, source.tokenizer)), flush=True)
    console = Console(stderr=as_json)
    page, samples = console_page(console), console_page(console)
    with working("counting tokens"):
        report = data_report(source, result, 0 if as_json else 3 if show is None else show)
    sample_rows(samples, report["samples"], most=WHOLE_CHARS)
    found_rows(page, report)
    print_rows([*samples.rows, *page.rows], console)
