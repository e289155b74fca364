"""Tasks of lm-evaluation-harness, asked of a streamed model. Importing this imports the harness."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import io
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from penstock.app.evaluation.queried import OnDone, Pair, QueriedModel, Requests
from penstock.app.hub.access import is_unreachable, online, replaced
from penstock.app.hub.names import offline_wanted
from penstock.engine.data.text.chat import ChatTemplate
from penstock.engine.generate.decode import Decoding
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line, printable

_DEFAULT_NEW_TOKENS = 256
_BOOTSTRAP_DRAWS = 1000
"""For the standard error of a metric that is no mean: known to some 2 %."""
_SEED, _OTHER_SEED = 0, 1234
"""Of Python's random, and of numpy's, torch's and the examples': those with which the harness itself starts."""
_NAMED = 3
"""Near names that an error lists at most."""
_GREEDY_ANYWAY = {"do_sample", "top_k", "top_p", "min_p", "typical_p", "temperature", "num_return_sequences"}
"""Settings of generation that change nothing where the likeliest token is taken."""


class TaskNames(NamedTuple):
    """Tasks that there are."""

    manager: TaskManager
    names: list[str]


def _manager(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """The index of tasks; the harness's own, which takes seconds to read, only where a name asks for it."""
    if include_path is not None:
        own = TaskManager(include_path=str(include_path), include_defaults=False)
        if all(_matching(name, own) for name in names):
            return own
    return TaskManager(include_path=None if include_path is None else str(include_path))


def _matching(name: str, manager: TaskManager) -> list[str]:
    if name in manager.all_tasks:
        return [name]
    return fnmatch.filter(manager.all_tasks, name) if any(mark in name for mark in "*?[") else []


def find_tasks(names: Sequence[str], include_path: Path | None, others: Sequence[str] = ()) -> TaskNames:
    """The tasks, groups and tags of `names`, in which * stands for anything. Raises UserError for one that there is
    not, with the nearest names, `others` among them."""
    if include_path is not None and not include_path.is_dir():
        raise UserError(
            f"--include-path {printable(include_path)}: no such folder; give a folder with tasks as .yaml files"
        )
    manager = _manager(names, include_path)
    result: list[str] = []
    for name in names:
        if not (matches := _matching(name, manager)):
            known = [*manager.all_tasks, *others]
            near = difflib.get_close_matches(name, known, n=_NAMED) or [k for k in known if name in k][:_NAMED]
            hint = f"did you mean {' or '.join(map(printable, near))}?" if near else "`lm_eval ls tasks` lists them"
            raise UserError(f"--tasks {printable(name)}: no such task; {hint}")
        result += matches
    return TaskNames(manager, list(dict.fromkeys(result)))


def query_tasks(
    queried: QueriedModel,
    index: TaskNames,
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat: ChatTemplate | None = None,
    system: str | None = None,
    report: Callable[[Requests], None],
    say: Callable[[str], None],
    on_done: OnDone,
) -> dict[str, Any]:
    """Evaluate tasks; JSON: `tasks` and `groups` by name, each with its `metrics`.

    `limit`: the first so many documents of each task; `num_fewshot`: examples before each question, None as many as the
    task says; `chat`: prompts are a user's message under this template, `system` is one before it, or before every
    text. `report` hears once what will be evaluated, `say` of data that is fetched, `on_done` of requests that are
    done. Raises UserError for tasks that cannot be evaluated.
    """
    model = HarnessModel(queried, chat, report, on_done)
    with _seeded(), _silent():
        loaded = _load(index, say)
        tasks = loaded["tasks"]
        for name, task in tasks.items():
            _require_possible(name, task)
            _configure(task, num_fewshot)
        model.tasks = list(tasks.values())
        try:
            results: Any = evaluate(
                lm=model,
                task_dict=loaded,
                limit=limit,
                bootstrap_iters=_BOOTSTRAP_DRAWS,
                log_samples=False,
                system_instruction=system,
                apply_chat_template=chat is not None,
                fewshot_as_multiturn=chat is not None,
            )
        except (ValueError, TypeError, LookupError, AssertionError, AttributeError) as error:
            if model.asking or isinstance(error, UserError):
                raise
            raise UserError(f"--tasks {printable(','.join(index.names))}: cannot be used: {one_line(error)}") from error
    return _results(results)


def _load(index: TaskNames, say: Callable[[str], None]) -> Any:
    """Tasks with their data: local and cached data asks nobody; what is on the hub is fetched if the user lets it."""
    try:
        with _offline(True):
            return index.manager.load(index.names)
    except Exception as error:
        if not _is_offline(error):
            raise _no_task(index.names, error) from error
        wanted = ", ".join(map(printable, index.names))
        if offline_wanted():
            raise UserError(
                f"--tasks {wanted}: HF_HUB_OFFLINE is set and data of it is not in the cache ({one_line(error, 200)}); "
                "run it once on a machine with a network"
            ) from error
    say(f"fetching the data of {wanted} from the hub")
    try:
        with online(), _offline(False):
            return index.manager.load(index.names)
    except Exception as error:
        raise _no_task(index.names, error) from error


def _no_task(names: Sequence[str], error: Exception) -> UserError:
    return UserError(
        f"--tasks {printable(','.join(names))}: cannot be loaded: {type(error).__name__}: {one_line(error)}"
    )


def _is_offline(error: Exception) -> bool:
    return is_unreachable(error) or isinstance(error, ConnectionError) or "ffline" in str(error)


@contextlib.contextmanager
def _offline(value: bool) -> Iterator[None]:
    """Whether the hub's libraries ask it."""
    from datasets import config
    from huggingface_hub import constants

    with replaced(constants, HF_HUB_OFFLINE=value), replaced(config, HF_HUB_OFFLINE=value):
        yield


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """The harness's own bars and words are not shown, and it starts no processes."""
    logger, level, own = logging.getLogger("lm_eval"), logging.getLogger("lm_eval").level, os.environ
    before = own.get("DISABLE_MULTIPROC")
    logger.setLevel(logging.ERROR)
    own["DISABLE_MULTIPROC"] = "1"
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
        if before is None:
            del own["DISABLE_MULTIPROC"]
        else:
            own["DISABLE_MULTIPROC"] = before


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Tasks that draw find the generators as the harness's own command sets them; afterwards they are as before."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(_SEED)
        np.random.seed(_OTHER_SEED)
        torch.manual_seed(_OTHER_SEED)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _require_possible(name: str, task: Any) -> None:
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(f"--tasks {printable(name)}: runs code that the model writes, which is not supported")
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"--tasks {printable(name)}: needs images or sound; only text is supported")


def _configure(task: Any, num_fewshot: int | None) -> None:
    """Examples before each question, as the harness's own command counts them: a task that has 0 keeps it."""
    own = task.get_config("num_fewshot")
    if own != 0 and num_fewshot is not None:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=_OTHER_SEED)


def _results(result: Mapping[str, Any]) -> dict[str, Any]:
    """The harness's results as ours: its keys are "metric,filter" and "metric_stderr,filter"."""
    groups = result.get("groups", {})
    return {
        "tasks": {
            name: _task(name, values, result) for name, values in result["results"].items() if name not in groups
        },
        "groups": {name: _task(name, values, result) for name, values in groups.items()},
    }


def _task(name: str, values: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    metrics = []
    for key, value in values.items():
        metric, comma, filter_name = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        higher = result.get("higher_is_better", {}).get(name, {}).get(metric)
        stderr = _number(values.get(f"{metric}_stderr,{filter_name}"))
        one = {"metric": metric, "filter": filter_name, "value": _number(value), "stderr": stderr}
        metrics.append(one | {"higher_is_better": higher})
    samples = result.get("n-samples", {}).get(name, {}).get("effective")
    return {
        "alias": values.get("alias", name),
        "version": result.get("versions", {}).get(name),
        "num_fewshot": result.get("n-shot", {}).get(name),
        "documents": samples,
        "metrics": metrics,
    }


def _number(value: Any) -> float | None:
    """A figure; None for what is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if np.isfinite(number) else None


class HarnessModel(TemplateLM):
    """What lm-evaluation-harness asks: texts, as its own `hf` model reads them, log-likelihoods and continuations."""

    def __init__(
        self, queried: QueriedModel, chat: ChatTemplate | None, report: Callable[[Requests], None], on_done: OnDone
    ) -> None:
        super().__init__()
        self._queried, self._chat, self._report, self._on_done = queried, chat, report, on_done
        self._announced = False
        self.tasks: list[Any] = []
        self.asking = False
        """Whether the model itself is being asked, or failed when it was."""

    @property
    def eot_token_id(self) -> int:
        return self._queried.end_id

    @property
    def prefix_token_id(self) -> int:
        return self._queried.prefix_id

    @property
    def max_length(self) -> int:
        return self._queried.context

    @property
    def tokenizer_name(self) -> str:
        return self._queried.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return self._queried.encode(string, special=add_special_tokens is not False)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return None if self._chat is None else self._chat.texts["default"]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        assert self._chat is not None
        goes_on = not add_generation_prompt
        try:
            return self._chat.prompt(chat_history, goes_on=goes_on)
        except UserError:
            without = [message for message in chat_history if message["role"] != "system"]
            if len(without) == len(chat_history):
                raise
            return self._chat.prompt(without, goes_on=goes_on)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        self._announce()
        with self._asks():
            return self._queried.loglikelihoods([(context, ids) for _, context, ids in requests], self._on_done)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        self._announce()
        windows = [self._windows(request.args[0]) for request in requests]
        totals = []
        with self._asks():
            result = iter(self._queried.loglikelihoods([pair for pairs in windows for pair in pairs], lambda _: None))
            for pairs in windows:
                totals.append(sum(next(result)[0] for _ in pairs))
                self._on_done(1)
        return totals

    def _windows(self, text: str) -> list[Pair]:
        """Windows over a text of any length, in which each token is predicted once."""
        ids = self.tok_encode(text)
        windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
        return [make_disjoint_window(window) for window in windows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        self._announce()
        groups: dict[tuple[Decoding, tuple[str, ...]], list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(self._writing(request), []).append(number)
        result: dict[int, str] = {}
        with self._asks():
            for (decoding, until), numbers in groups.items():
                prompts = [self.tok_encode(requests[number].args[0]) or [self.prefix_token_id] for number in numbers]
                texts = self._queried.write(prompts, decoding, self._on_done, until=until)
                result |= dict(zip(numbers, texts, strict=True))
        return [result[number] for number in range(len(requests))]

    def _writing(self, request: Any) -> tuple[Decoding, tuple[str, ...]]:
        """How a text is continued, and the texts before the first of which it ends."""
        settings: Any = dict(normalize_gen_kwargs(request.args[1], _DEFAULT_NEW_TOKENS))
        until, new_tokens = settings.pop("until"), settings.pop("max_gen_toks")
        sampled = bool(settings.get("do_sample")) and float(settings.get("temperature", 0.0)) > 0
        settings = {name: value for name, value in settings.items() if value is not None}
        known = {"do_sample", "temperature", "top_p"} if sampled else _GREEDY_ANYWAY
        unknown = set(settings) - known - ({"num_beams"} if settings.get("num_beams") == 1 else set())
        if unknown:
            raise UserError(
                f"--tasks {printable(request.task_name)}: its generation_kwargs ask for {printable(min(unknown))}, "
                "which is not done here"
            )
        until = tuple(stop for stop in [*until, self._queried.tokenizer.decode([self.eot_token_id])] if stop)
        if not sampled:
            return Decoding(new_tokens=new_tokens), until
        temperature, top_p = float(settings["temperature"]), float(settings.get("top_p", 1.0))
        return Decoding(new_tokens=new_tokens, temperature=temperature, top_p=top_p), until

    @contextlib.contextmanager
    def _asks(self) -> Iterator[None]:
        self.asking = True
        yield
        self.asking = False

    def _announce(self) -> None:
        """Count what all tasks ask, before the first of it is asked."""
        if self._announced:
            return
        self._announced = True
        likelihoods = likelihood_tokens = texts = prompt_tokens = new_tokens = 0
        for request in (request for task in self.tasks for request in task.instances):
            if request.request_type == "generate_until":
                texts += request.repeats
                prompt_tokens += request.repeats * len(self._queried.encode(request.args[0]))
                new_tokens = max(new_tokens, self._writing(request)[0].new_tokens)
            else:
                likelihoods += request.repeats
                likelihood_tokens += request.repeats * len(self._queried.encode("".join(request.args)))
        self._report(Requests(likelihoods, likelihood_tokens, texts, prompt_tokens, new_tokens))
