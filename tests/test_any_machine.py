"""The first two recipes start, train, survive their kill and export on any CPU, in any environment."""

from pathlib import Path

import pytest
from starts import SMALL, STARTS, TOGETHER, survives

from penstock.app.plan import plan_recipe
from penstock.app.recipe import apply_overrides, load_recipe


def test_every_start_is_one_of_those_together() -> None:
    together = [name for names in TOGETHER.values() for name in names]
    assert sorted([*together, "as it is", "no terminal"]) == sorted(STARTS)  # the others have no terminal either


@pytest.mark.parametrize("names", TOGETHER.values(), ids=TOGETHER.keys())
def test_it_starts_anywhere(tmp_path: Path, names: tuple[str, ...]) -> None:
    survives("quickstart" if "float32" in names else "text_small", tmp_path, *names)


@pytest.mark.long
@pytest.mark.parametrize("recipe", SMALL)
@pytest.mark.parametrize("name", STARTS)
def test_each_recipe_starts_anywhere(tmp_path: Path, recipe: str, name: str) -> None:
    survives(recipe, tmp_path, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", SMALL)
def test_the_recipes_as_they_are_fit_in_either_dtype(recipe: str, dtype: str) -> None:
    wanted = apply_overrides(load_recipe(recipe), [f"train.compute_dtype={dtype}"])
    found = plan_recipe(wanted, advice=False)
    assert found["fits"]
    assert all(found["tiers"][tier]["peak_bytes"] <= found["tiers"][tier]["budget_bytes"] for tier in ("gpu", "ram"))
