"""Which recipes fit this machine: kept answers, and plans of the others, one at a time, while nobody is waiting.

Recipes are planned that come with Penstock or are JSON. Loading a user's Python file runs it, so of such a one nothing
is known until it has been opened in Configure. What is planned takes a process beside the application, which gives way
to all else and ends with the last plan, or when planning is ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.storage.files.errors import UserError
from penstock.tui.data.recipes import RecipeEntry

if TYPE_CHECKING:
    from penstock.app.planning.fits import Fit
    from penstock.app.recipes.recipe import Recipe

_NICENESS = 19
_MOST_S = 60.0
"""Of planning, in one stay on Home; the next one goes on."""
_ONE_S = 20.0
"""For one recipe, the loading of the planner aside; one that takes longer stays unknown."""
_LOADING_S = 40.0
_HERE_S = 5.0
_PAUSE_S = 0.25


class HomePlans:
    """Answers for the recipes of a list. `may_plan`: whether missing ones are planned at all."""

    def __init__(self, root: Path, *, may_plan: bool) -> None:
        self._root, self._may_plan = root, may_plan
        self._here, self._looked = "", -_HERE_S
        """This machine's digest, empty before the first look, and when it was taken by `time.monotonic`."""
        self._fits: dict[tuple[str, str], Fit] = {}
        """(recipe's digest, machine's) -> answer, of the recipes that are listed."""
        self._opened: dict[Path, tuple[str, Recipe]] = {}
        """A user's program -> the digest of its content, and what it made, once it was opened."""
        self._left_s = _MOST_S

    def begin_stay(self) -> None:
        self._left_s = _MOST_S

    def look(self, entries: Sequence[RecipeEntry]) -> dict[Path, Fit | None]:
        """What is known of each recipe, by kept answers too. In any thread, one at a time."""
        from penstock.app.planning.fits import here_digest, read_fit

        here = self._here
        if time.monotonic() - self._looked >= _HERE_S:
            here, self._looked = here_digest(self._root), time.monotonic()
        result: dict[Path, Fit | None] = {}
        for entry in entries:
            key = (entry.digest, here)
            if key not in self._fits and entry.digest and (fit := read_fit(*key)) is not None:
                self._fits[key] = fit
            result[entry.path] = self._fits.get(key)
        listed = {entry.digest for entry in entries}
        for key in [key for key in self._fits if key[0] not in listed or key[1] != here]:
            self._fits.pop(key, None)
        self._here = here  # last: what is kept for this machine is known before anything is planned for it
        return result

    def will_plan(self, entry: RecipeEntry) -> bool:
        """Whether an answer that is missing will come by itself."""
        if not self._may_plan or self._left_s <= 0 or not entry.digest or entry.problem is not None:
            return False
        return not entry.is_program or self._opened.get(entry.path, ("",))[0] == entry.digest

    def opened(self, path: Path, digest: str, recipe: Recipe) -> None:
        """The user has opened a recipe, which ran it."""
        if digest:
            self._opened[path] = (digest, recipe)

    def learn(self, digest: str, forecast: dict[str, Any]) -> None:
        """A plan for this machine that was made elsewhere, of the recipe of that content."""
        if not digest:
            return
        from penstock.app.planning.fits import fit_of, here_digest

        self._keep(digest, here_digest(self._root), fit_of(forecast))

    async def plan(self, entries: Sequence[RecipeEntry], is_idle: Callable[[], bool]) -> None:
        """Plan the recipes whose answer is missing, in their order; `look` has each answer once it is there.

        Waits for `is_idle` before each, and ends when so much time of the stay is spent. Cancelled, it ends the process
        that plans.
        """
        from penstock.tui.data.plan_client import PlanClient

        wanted = [e for e in entries if self.will_plan(e) and (e.digest, self._here) not in self._fits]
        if not wanted or not self._here:
            return
        client = PlanClient(self._root, lambda: None, niceness=_NICENESS)
        limit_s = _LOADING_S
        try:
            for entry in wanted:
                while not is_idle():
                    await asyncio.sleep(_PAUSE_S)
                begun = time.monotonic()
                again = await self._plan_one(client, entry, limit_s)
                self._left_s -= time.monotonic() - begun
                if not again or self._left_s <= 0:
                    return
                limit_s = _ONE_S
        except Exception:
            self._may_plan = False  # it would fail again
            raise
        finally:
            await client.close()

    async def _plan_one(self, client: Any, entry: RecipeEntry, limit_s: float) -> bool:
        """Whether the planner can be asked again."""
        from penstock.app.planning.fits import Fit, fit_of

        key = (entry.digest, self._here)
        try:
            recipe = self._recipe(entry)
        except UserError as error:
            self._fits[key] = Fit(fits=None, message=str(error))
            return True
        asking = asyncio.ensure_future(client.plan(recipe, None, advice=False))
        await asyncio.wait([asking], timeout=limit_s)
        if not asking.done():
            client.forget()
            self._fits[key] = Fit(fits=None, message="planning takes a while; open the recipe to see its plan")
            return True
        state = asking.result()
        if state is None or state.trouble is not None:
            self._may_plan = False
            return False
        if state.forecast is None or state.error is not None:
            self._fits[key] = Fit(fits=None, message=state.error or "no answer")
        else:
            self._keep(*key, fit_of(state.forecast))
        return True

    def _keep(self, digest: str, here: str, fit: Fit) -> None:
        from penstock.app.planning.fits import keep_fit

        self._fits[digest, here] = fit
        keep_fit(digest, here, fit)

    def _recipe(self, entry: RecipeEntry) -> Recipe:
        """For this machine, with absolute paths. Raises UserError."""
        from penstock.app.recipes.recipe import apply_overrides, load_recipe, resolve_paths

        recipe = self._opened[entry.path][1] if entry.is_program else load_recipe(entry.path)
        return resolve_paths(apply_overrides(recipe, ["machine="]), self._root)
