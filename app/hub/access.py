"""How the hub is reached, and what is said where it refuses or cannot be reached: one line, and what to do."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.app.hub.names import HubName, Kind
from penstock.storage.files.errors import UserError
from penstock.storage.files.untrusted import one_line, shell


def cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repo_folder(hub: HubName, kind: Kind) -> Path:
    return cache() / f"{kind}s--{hub.name.replace('/', '--')}"


def elsewhere(hub: HubName, kind: Kind) -> str:
    """How to get a repository to a machine that has no network."""
    words = ["hf", "download", hub.name, *(["--repo-type", "dataset"] if kind == "dataset" else [])]
    words += ["--revision", hub.revision] if hub.revision else []
    folder = repo_folder(hub, kind)
    return (
        f"on a machine with a network run `{shell(*words)}` and copy its ~/.cache/huggingface/hub/{folder.name} to "
        f"{folder}"
    )


@contextlib.contextmanager
def replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    """Names of a module have these values meanwhile."""
    before = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def online() -> contextlib.AbstractContextManager[None]:
    """The hub may be asked: Penstock keeps its libraries offline otherwise (`stay_offline`)."""
    from huggingface_hub import constants

    return replaced(constants, HF_HUB_OFFLINE=False, HF_HUB_DISABLE_TELEMETRY=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """huggingface_hub's own warnings are not shown: what matters of them is said here. Bars are for terminals."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars, logging

    before, bars = logging.get_verbosity(), not are_progress_bars_disabled() and not sys.stderr.isatty()
    logging.set_verbosity_error()
    if bars:
        disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            enable_progress_bars()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_unreachable(error: BaseException) -> bool:
    """Whether an error means that the hub could not be reached, or is down."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    for one in _chain(error):
        if isinstance(one, HfHubHTTPError):
            return one.response is not None and one.response.status_code >= 500
        if isinstance(one, OfflineModeIsEnabled | ConnectionError | TimeoutError):
            return True
        if type(one).__module__.startswith(("httpx", "httpcore", "requests", "urllib3")):
            return True
    return False


@contextlib.contextmanager
def explaining(hub: HubName, kind: Kind) -> Iterator[None]:
    """What huggingface_hub raises is one line: what, and what to do."""
    try:
        yield
    except UserError:
        raise
    except KeyboardInterrupt:
        raise UserError(
            f"{hub}: interrupted; complete files stay in the cache, and the same command continues from there"
        ) from None
    except Exception as error:
        raise UserError(f"{hub}: {explain_hub(error, hub, kind)}") from error


def explain_hub(error: Exception, hub: HubName, kind: Kind, *, pushing: bool = False) -> str:
    """An error of huggingface_hub in one line: what is wrong, and what to do."""
    from huggingface_hub import constants, errors

    url = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{hub.name}"
    for one in _chain(error):
        if isinstance(one, errors.GatedRepoError):
            return f"is gated; accept its terms at {url}, then log in with `hf auth login` (or set HF_TOKEN)"
        if isinstance(one, errors.RevisionNotFoundError):
            return f"has no revision '{hub.revision}'; look at {url} for its branches and tags"
        if isinstance(one, errors.RepositoryNotFoundError) and pushing:
            return "you have no write access there; log in with `hf auth login` and a token that has it"
        if isinstance(one, errors.RepositoryNotFoundError):
            what = "model" if kind == "model" else "data set"
            return f"no such {what} is on the hub, or it is private; correct the name, or log in with `hf auth login`"
        if isinstance(one, errors.HfHubHTTPError) and one.response is not None:
            status = one.response.status_code
            if status in (401, 403):
                why = one_line(one.server_message or one, 200)
                return f"the hub refuses ({status}: {why}); log in with `hf auth login`, with a token that may do this"
    if is_unreachable(error) and pushing:
        return f"{constants.ENDPOINT} cannot be reached ({one_line(error, 160)})"
    if is_unreachable(error):
        return f"{constants.ENDPOINT} cannot be reached ({one_line(error, 160)}); connect, or {elsewhere(hub, kind)}"
    if isinstance(error, OSError) and error.errno is not None and not pushing:
        return f"{one_line(error.strerror)} ({cache()}); free space there, or set HF_HOME to another folder"
    if pushing:
        return one_line(error, 300)
    return f"{one_line(error, 300)}; complete files stay in the cache: run the same command again"
