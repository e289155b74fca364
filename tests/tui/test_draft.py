"""Drafts: every edit is checked at once, what is wrong stands at its field, and what is right makes a recipe."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.app.recipe import apply_overrides, load_recipe
from penstock.engine.config import Recipe
from penstock.storage.errors import UserError
from penstock.tui.data.draft import Draft, choices_of, error_field, field_table, get, kind_of, value_text

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.py"))


@pytest.fixture
def draft() -> Draft:
    return Draft(load_recipe(RECIPES[0].with_name("text_small.py")))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_field_shows_what_the_recipe_says(path: Path) -> None:
    recipe = load_recipe(path)
    draft = Draft(recipe)
    for key in field_table():
        assert "\n" not in draft.text(key)
        draft.set(key, draft.text(key) + " ")  # differs as a text, not as a value
        if kind_of(key) == "text" and not isinstance(get(recipe, key), str):
            assert not draft.is_changed(key), key
            assert key not in draft.errors
        draft.reset(key)
    assert draft.recipe == recipe
    assert draft.differences == []


def test_a_change_or_a_fix_makes_another_recipe(draft: Draft) -> None:
    texts = {"model.overrides": '{"rope_theta": 1e6}', "train.steps": "20", "train.clip_norm": ""}
    texts |= {"storage.nvme": '["/a", "/b"]', "after.sample_prompt": "two\\nlines, a \\\\ and a \\t"}
    for key, text in texts.items():
        draft.set(key, text)
    assert (draft.recipe.train.steps, draft.recipe.train.clip_norm) == (20, None)
    assert draft.recipe.after.sample_prompt == "two\nlines, a \\ and a \t"
    assert draft.recipe.model.overrides == {"rope_theta": 1e6}
    assert draft.recipe.storage.drives == ["/a", "/b"]
    assert [item.key for item in draft.differences] == list(texts)
    assert (draft.differences[1].before, draft.differences[2].after) == ("84", "")
    draft.set("train.lr", "fast")
    draft.reset("train.steps")
    assert draft.text("train.steps") == "84"
    draft.set("train.lr", "0.001")
    assert draft.is_changed("train.lr") is False
    draft.apply(["train.global_batch_size=16", "train.gradient_dtype=bfloat16", 'storage.nvme=["/mnt/a b"]'])
    assert (draft.recipe.train.global_batch_size, draft.recipe.storage.nvme) == (16, ["/mnt/a b"])
    draft.apply(["model.overrides.rope_theta=5", "train.chunk_tokens=none", r'after.sample_prompt="quoted\n"'])
    assert (draft.recipe.model.overrides, draft.recipe.train.chunk_tokens) == ({"rope_theta": 5}, None)
    assert draft.recipe.after.sample_prompt == "quoted\n"
    draft.set("after.sample_prompt", r'"quoted"\n')  # as it is typed
    assert draft.recipe.after.sample_prompt == '"quoted"\n'
    with pytest.raises(UserError, match="not a size"):
        draft.apply(["budgets.gpu=much"])
    assert draft.recipe.budgets.gpu == "least"
    draft.set("train.lr", "fast")  # what is wrong elsewhere stays
    draft.apply(["train.steps=9"])
    assert (draft.text("train.steps"), set(draft.errors)) == ("9", {"train.lr"})


def test_what_is_wrong_stands_at_its_fields_and_choices_go_round(draft: Draft) -> None:
    for key, text, part in (
        ("train.steps", "many", "'many' must be a whole number"),
        ("train.steps", "", "must be a whole number"),
        ("name", "a/b", "folder"),
        ("storage.nvme", "[", "a list of texts"),
        ("data.sequence_length", "1", "at least 2"),
    ):
        draft.set(key, text)
        assert (draft.recipe, list(draft.errors)) == (None, [key])
        assert part in draft.errors[key]
        assert not draft.errors[key].startswith(key)
        draft.reset(key)
        assert draft.recipe == draft.base
    wrong = {"train.steps": "x", "train.lr": "-1", "budgets.gpu": "much", "data.seed": "1.5"}
    for key, text in wrong.items():
        draft.set(key, text)
    assert set(draft.errors) == set(wrong)
    assert "above 0" in draft.errors["train.lr"]
    draft.reset_all()
    assert (draft.errors, draft.recipe) == ({}, draft.base)
    draft.set("model.num_kv_heads", "3")
    assert set(draft.errors) == {"model.num_heads", "model.num_kv_heads"}
    draft.set("model.num_heads", "6")
    assert draft.errors == {}
    draft.set("after.export", "false")
    assert "set after.export=true" in draft.errors["after.sample_prompt"]
    draft.reset_all()
    assert choices_of("train.lr_schedule") == ("cosine", "linear", "constant", "wsd")
    for by, expected in ((1, "linear"), (1, "constant"), (1, "wsd"), (1, "cosine"), (-1, "wsd")):
        draft.cycle("train.lr_schedule", by)
        assert draft.text("train.lr_schedule") == expected
    draft.cycle("train.calibrate", 1)
    assert draft.recipe.train.calibrate is False
    assert (kind_of("train.calibrate"), kind_of("data.source"), kind_of("budgets.gpu")) == ("switch", "choice", "text")
    assert error_field("model.path: /x does not exist") == "model.path"
    assert error_field("data.sequence_length 8 is more than model.max_position 4") == "data.sequence_length"
    assert error_field("name: 'a b' must be letters") == "name"
    assert error_field("the disk is full") is None
    for value, text in {3e-5: "3e-5", 1e6: "1e6", 0.1: "0.1", 1234567.0: "1234567.0", 2.5e-8: "2.5e-8"}.items():
        assert value_text("train.lr", value) == text


typed = st.text(max_size=8) | st.integers(-2, 10**4).map(str) | st.sampled_from(["true", "1e-3", "2GiB", "[]", "{}"])


@settings(max_examples=40)
@given(edits=st.lists(st.tuples(st.sampled_from(list(field_table())), typed), max_size=6))
def test_any_edits_make_a_recipe_or_say_what_is_wrong(edits: list[tuple[str, str]]) -> None:
    draft = Draft(Recipe(name="x"))
    for key, text in edits:
        draft.set(key, text)
    assert (draft.recipe is None) == bool(draft.errors)
    assert all(key in field_table() and message for key, message in draft.errors.items())
    if draft.recipe is not None:
        changed = {key for key in field_table() if get(draft.recipe, key) != get(draft.base, key)}
        assert {item.key for item in draft.differences} == changed
    for key, _ in edits:
        draft.reset(key)
    assert (draft.recipe, draft.differences) == (draft.base, [])


@given(st.text(max_size=30))
@example("{\n  ")
@example("[1] ")
def test_a_text_field_keeps_every_character(text: str) -> None:
    base = apply_overrides(Recipe(name="x"), ["after.export=true"])
    base = dataclasses.replace(base, after=dataclasses.replace(base.after, sample_prompt=text))
    draft = Draft(Recipe(name="x"))
    draft.set("after.export", "true")
    draft.set("after.sample_prompt", value_text("after.sample_prompt", text))
    if text.strip() and text.strip().lower() not in ("none", "null"):
        assert draft.recipe == base, json.dumps(text)
