"""What an evaluation says: before it begins, on the way, and in the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.app.console.printing import print_rows
from penstock.app.console.rows import ASCII, UNICODE, Row
from penstock.app.console.working import Working
from penstock.app.evaluation.needles import maps
from penstock.app.evaluation.queried import QueriedModel, Requests
from penstock.app.runs.recall_view import map_rows
from penstock.engine.events import Preparing
from penstock.storage.files.units import bytes_text, duration_text, seconds_text
from penstock.storage.files.untrusted import printable


class Reporter:
    """Tells people what is evaluated and how far it is."""

    def __init__(self, console: Console, shown: Working) -> None:
        self._console, self._shown = console, shown
        self._total = self._done = 0
        self._began = 0.0

    def say(self, text: str) -> None:
        self._shown.clear()
        self._console.print(printable(text), markup=False, highlight=False, emoji=False, soft_wrap=True)

    def say_all(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.say(text)

    def asks(self, queried: QueriedModel, requests: Requests) -> None:
        """Say what will be asked and about how long it takes."""
        self._total, self._done = requests.total, 0
        self._began = time.perf_counter()
        self.say(before_line(queried, requests))
        self._show()

    def done(self, count: int) -> None:
        """So many requests more are done."""
        self._done += count
        self._show()

    def _show(self) -> None:
        took_s = time.perf_counter() - self._began
        share = self._done / self._total if self._total else 1.0
        eta = duration_text(took_s * (1 - share) / share) if share else "n/a"
        detail = f"{self._done:,} of {self._total:,} requests answered, ETA {eta}"
        self._shown.on_prepare(Preparing("evaluating", "progress", took_s, detail, share))


def before_line(queried: QueriedModel, requests: Requests) -> str:
    """How much will be asked, how long that takes about, what that is bound by and where the weights are."""
    what, seconds, estimates = [], 0.0, []
    if requests.likelihoods:
        what.append(f"{requests.likelihoods:,} log-likelihoods, {requests.likelihood_tokens:,} tokens")
        estimates.append(queried.estimate(requests.likelihoods, requests.likelihood_tokens, 0))
    if requests.texts:
        written = f"{requests.texts:,} texts of at most {requests.new_tokens:,} tokens"
        what.append(f"{written} after prompts of {requests.prompt_tokens:,} tokens")
        estimates.append(queried.estimate(requests.texts, requests.prompt_tokens, requests.new_tokens))
    if not estimates:
        return "nothing to evaluate"
    seconds, (_, one) = sum(result for result, _ in estimates), estimates[-1]
    where = ", ".join(f"{bytes_text(size)} in {tier}" for tier, size in one.weights.items() if size)
    guess = " (a guess until `penstock probe` has measured this machine)" if one.assumed else ""
    most = " at most" if requests.texts else ""
    return (
        f"evaluating {' and '.join(what)}: about {seconds_text(seconds)}{most}, bound by {one.bound_by}{guess}; "
        f"up to {queried.batch_tokens:,} tokens per pass, about {seconds_text(one.first_s)} each; "
        f"weights: {where or 'n/a'}"
    )


def print_report(result: Mapping[str, Any], console: Console) -> None:
    """Print the metrics as a table, and needles as heat maps."""
    if result["tasks"] or result["groups"]:
        console.print(_table(result))
    if (needles := result["needles"]) is not None:
        glyphs = ASCII if console.options.ascii_only else UNICODE
        rows: list[Row] = [[("hidden numbers found, by context length and by depth of the number", "text")]]
        for one in maps(needles).values():
            rows += [[], *map_rows(one, glyphs)]
        print_rows(rows, console)


def _table(result: Mapping[str, Any]) -> Table:
    table = Table(header_style="bold")
    for name in ("task", "shots", "documents", "metric", "value", "stderr"):
        table.add_column(name, overflow="fold", justify="left" if name in ("task", "metric") else "right")
    for name, task in [*result["tasks"].items(), *result["groups"].items()]:
        first = [printable(name), _count(task["num_fewshot"]), _count(task["documents"])]
        for one in task["metrics"]:
            metric = one["metric"] if one["filter"] == "none" else f"{one['metric']} ({one['filter']})"
            table.add_row(*first, printable(metric), _figure(one["value"]), _figure(one["stderr"]))
            first = ["", "", ""]
    return table


def _count(value: int | None) -> str:
    return "n/a" if value is None else f"{value:,}"


def _figure(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}"
