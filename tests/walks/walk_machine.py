"""The machine of docs/EXTENDING.md, planned on."""

import tiny

from penstock.app.machines import machine_infos
from penstock.app.plan import plan_recipe


def test_it_is_listed_and_planned_on() -> None:
    assert "l40s-256" in [info.name for info in machine_infos()]
    recipe = tiny.recipe(train=tiny.training(device="auto", compute_dtype="bfloat16"))
    result = plan_recipe(recipe, "l40s-256", advice=False)
    assert result["fits"]
    assert result["machine"]["name"] == "l40s-256"
