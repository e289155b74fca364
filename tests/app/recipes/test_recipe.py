import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled

from penstock.app.recipes.fields import fields, top_level
from penstock.app.recipes.recipe import (
    apply_overrides,
    change_run,
    from_json,
    load_recipe,
    resolve_paths,
    save_recipe,
    to_json,
)
from penstock.app.recipes.synonyms import SYNONYMS
from penstock.app.recipes.text import python_text
from penstock.engine.config import AfterConfig, DataConfig, ModelConfig, Recipe, TrainConfig, config_digest
from penstock.storage.files.errors import UserError


def changed(*overrides: str) -> Recipe:
    return apply_overrides(Recipe(name="x"), overrides)


def test_the_machine_is_a_field_that_old_runs_lack_and_a_digest_depends_on_values_not_on_spelling() -> None:
    recipe = changed("machine=gh200-480")
    assert recipe.machine == "gh200-480"
    assert from_json(to_json(recipe)) == recipe
    old = json.loads(to_json(recipe))
    del old["machine"]
    assert from_json(json.dumps(old)) == Recipe(name="x")
    assert config_digest(changed("train.lr=1")) == config_digest(changed("train.lr=1.0"))
    assert config_digest(changed("train.seed=1")) != config_digest(changed("train.seed=2"))


numbers = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | numbers | st.text()
json_values = st.recursive(leaves, lambda i: st.lists(i) | st.dictionaries(st.text(), i), max_leaves=5)


@sampled(10, 100)
@given(st.floats(1e-12, 1e3), st.integers(1, 10**12), st.none() | st.text(), st.dictionaries(st.text(), json_values))
def test_json_is_exact(lr: float, steps: int, prompt: str | None, overrides: dict[str, object]) -> None:
    model, after = ModelConfig(overrides=overrides), AfterConfig(export=True, sample_prompt=prompt)
    recipe = Recipe(name="x", model=model, train=TrainConfig(lr=lr, steps=steps), after=after)
    again = from_json(to_json(recipe))
    assert again == recipe
    assert config_digest(again) == config_digest(recipe)


def test_relative_paths_become_absolute_one_drive_or_several_and_a_bad_list_is_named() -> None:
    data = DataConfig(source="text", path="corpus", tokenizer="/abs")
    found = resolve_paths(Recipe(name="x", data=data, model=ModelConfig(path="~/m")), Path("/here"))
    assert (found.data.path, found.data.tokenizer) == ("/here/corpus", "/abs")
    assert (found.model.path, found.storage.nvme) == (str(Path.home() / "m"), None)
    places = {"none": None, "/mnt/a": "/mnt/a", '["/mnt/a", "b"]': ["/mnt/a", "/here/b"], "b": "/here/b"}
    for text, expected in places.items():
        recipe = resolve_paths(changed(f"storage.nvme={text}"), Path("/here"))
        assert recipe.storage.nvme == expected
        assert from_json(to_json(recipe)) == recipe
    for text in ("[1, 2]", "[", '["/a", null]', "[]"):
        with pytest.raises(UserError, match=r"storage\.nvme"):
            changed(f"storage.nvme={text}")


def test_files_of_rewards_become_absolute_and_commands_stay() -> None:
    rewards = ["mine.py:right", "../a:b.py:short", "/abs/r.py:f", "command: python mine.py:x"]
    found = resolve_paths(changed(*GRPO, f"grpo.reward={json.dumps(rewards)}"), Path("/here/there"))
    assert found.grpo.reward == ["/here/there/mine.py:right", "/here/a:b.py:short", "/abs/r.py:f", rewards[3]]
    assert from_json(to_json(found)) == found


GRPO = ("train.objective=grpo", "train.global_batch_size=16", 'grpo.reward=["r.py:f"]')
BAD_REWARDS = {
    "grpo.reward=[]": "grpo.reward: empty, but train.objective=grpo needs one; name a function, FILE.py:FUNCTION, or",
    "train.global_batch_size=12": "train.global_batch_size: 12 is not a multiple of grpo.num_generations 8; a step",
    "grpo.num_generations=1": "grpo.num_generations: 1 must be at least 2",
    'grpo.reward=["r.py"]': "grpo.reward[0]: 'r.py' is no reward; write FILE.py:FUNCTION, such as",
    'grpo.reward=["r.py:f", "r.txt:f"]': "grpo.reward[1]: 'r.txt:f' is no reward; write",
    'grpo.reward=["r.py:no name"]': "grpo.reward[0]: 'r.py:no name' is no reward; write",
    'grpo.reward=["command: "]': "grpo.reward[0]: names no program behind 'command:'",
    'grpo.reward=["r.py:f", "r.py:f"]': "grpo.reward: one is listed twice; list each once",
    "grpo.reward_weights=[1, 2]": "grpo.reward_weights: 2 weights for 1 rewards of grpo.reward; give one for each",
    'grpo.reward_weights=["a"]': "must be a list of numbers such as [1, 0.5]",
    "grpo.reward_timeout_s=0": "grpo.reward_timeout_s: 0.0 must be above 0",
    "grpo.temperature=0": "grpo.temperature: 0.0 must be above 0, or all completions of a prompt would be the same",
    "grpo.top_p=1.5": "grpo.top_p: 1.5 must be above 0, at most 1",
    "grpo.epsilon=1": "grpo.epsilon: 1.0 must be above 0 and below 1",
    "grpo.epsilon_high=0": "grpo.epsilon_high: 0.0 must be above 0",
    "grpo.beta=-1": "grpo.beta: -1.0 must not be negative",
    "grpo.loss_type=ppo": "grpo.loss_type: 'ppo' must be one of grpo, bnpo, dr_grpo, dapo",
    "grpo.max_completion_length=0": "grpo.max_completion_length: 0 must be at least 1",
}


@pytest.mark.parametrize(("override", "said"), BAD_REWARDS.items())
def test_a_bad_field_of_rewards_is_named(override: str, said: str) -> None:
    assert changed(*GRPO).grpo.reward == ["r.py:f"]
    with pytest.raises(UserError) as caught:
        changed(*GRPO, override)
    assert said in str(caught.value)


TAKEN: dict[str, Any] = {
    "model.num_layers=4": 4, "train.steps=1_000": 1000, "train.lr=3e-4": 3e-4, "train.lr=1": 1.0,
    "train.lr_schedule=linear": "linear", 'train.lr_groups={"*norm*": 0, "*": 0.5}': {"*norm*": 0.0, "*": 0.5},
    "model.tie_embeddings=yes": True, "budgets.gpu=24GiB": "24GiB", "budgets.gpu=1000000": 1000000,
    "data.path=none": None, "data.path=a=b": "a=b", 'model.overrides={"a": [1]}': {"a": [1]},
    "model.overrides.rope_theta=1e6": {"rope_theta": 1e6},
}  # fmt: skip


@pytest.mark.parametrize(("override", "value"), TAKEN.items())
def test_override(override: str, value: object) -> None:
    before = Recipe(name="x")
    section, field = override.partition("=")[0].split(".")[:2]
    found = getattr(getattr(apply_overrides(before, [override]), section), field)
    assert (found, type(found)) == (value, type(value))
    assert before == Recipe(name="x")


def test_overrides_reach_every_field() -> None:
    recipe = Recipe(name="x")
    tree = dataclasses.asdict(recipe)
    checked = 0
    for item in fields():
        section, _, name = item.key.partition(".")
        value = tree[section][name] if name else tree[section]
        text = json.dumps(value) if not isinstance(value, str) else value
        assert apply_overrides(recipe, [f"{item.key}={text}"]) == recipe, item.key
        assert len(item.help) >= 10 or item.key == "train.lr", "it is documented"
        checked += 1
    assert checked == len(top_level()) + sum(len(value) for value in tree.values() if isinstance(value, dict))


BAD_OVERRIDES = {
    "model.num_layer=4": ["model.num_layer", "did you mean 'model.num_layers'"],
    "num_layers=4": ["did you mean 'model.num_layers'"], "train=4": ["no field 'train'", "train."],
    "train.steps.more=4": ["no field 'train.steps.more'"], "zzzzzzzzz=4": ["valid names", "train.steps"],
    "train.Learning-Rate=1e-5": ["no field 'train.Learning-Rate'; did you mean 'train.lr'?"],
    "epochs=3": ["did you mean 'train.steps'?", "not epochs"],
    "lr_scheduler_type=warmup_stable_decay": ["'train.lr_schedule'?", "wsd (warmup_stable_decay)"],
    "neftune_noise_alpha=5": ["no field 'neftune_noise_alpha'; NEFTune is not supported"],
    "data.packing=true": ["data.packing: 'true' must be one of wrap, best_fit, none"],
    "group_by_length=true": ["padding costs nothing"], "train.lr_groups=0.1": ["train.lr_groups", "a JSON object"],
    'train.lr_groups={"*norm*": "low"}': ["train.lr_groups", "a JSON object"],
    'train.lr_groups={"*norm*": -1}': ["train.lr_groups: the factor of '*norm*' is -1.0; give 0 or more"],
    "train.steps=4.5": ["train.steps", "'4.5' must be a whole number"],
    "train.lr=fast": ["train.lr", "'fast' must be a number"], "train.lr=inf": ["train.lr", "finite"],
    "train.lr_schedule=cosin": ["one of cosine, linear, constant", "did you mean 'cosine'"],
    "model.tie_embeddings=maybe": ["true or false"], "model.overrides={a}": ["model.overrides", "JSON"],
    "train.steps": ["write key=value"], "train.steps=0": ["train.steps", "at least 1"],
    "data.sequence_length=1": ["data.sequence_length: 1 must be at least 2"],
    "budgets.ram=lots": ["budgets.ram", "not a size"], "name=a/b": ["name", "folder"],
}  # fmt: skip


@pytest.mark.parametrize(("override", "parts"), BAD_OVERRIDES.items())
def test_bad_override_says_what_and_how(override: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        changed(override)
    for part in parts:
        assert part in str(caught.value)


def test_synonyms_name_fields_that_there_are_and_none_is_a_field_itself() -> None:
    keys = {item.key: item for item in fields()}
    ends = {key.rpartition(".")[2] for key in keys}
    assert {found.key for found in SYNONYMS.values()} <= {*keys, ""}
    assert all(found.key or found.note for found in SYNONYMS.values())
    assert not ends & SYNONYMS.keys()
    with pytest.raises(UserError, match=r"unknown field 'batch_size'; did you mean 'train\.global_batch_size'"):
        from_json('{"name": "x", "batch_size": 4}')
    with pytest.raises(UserError, match=r"unknown field 'data\.block_size'; did you mean 'data\.sequence_length'"):
        from_json('{"name": "x", "data": {"block_size": 4}}')


def test_a_text_in_quotes_is_a_json_string_and_overrides_are_validated_together() -> None:
    texts = {r'"a\n"': "a\n", r'"say \"a\""': 'say "a"', r"a\n": r"a\n", '"a': '"a', '"a" and "b"': '"a" and "b"'}
    for text, value in (texts | {'""': "", "none": None, '"none"': "none"}).items():
        assert changed("after.export=true", f"after.sample_prompt={text}").after.sample_prompt == value
    assert changed('name="y"').name == "y"
    recipe = Recipe(name="x", model=ModelConfig(num_heads=8, num_kv_heads=4))
    both = apply_overrides(recipe, ["model.num_heads=9", "model.num_kv_heads=3"])
    assert (both.model.num_heads, both.model.num_kv_heads) == (9, 3)
    with pytest.raises(UserError, match="not a multiple"):
        apply_overrides(recipe, ["model.num_heads=9"])


BAD_CODE = {
    "x = 1": ["must set a global named 'recipe'"], "recipe = (": ["line 3"],
    "\n\nraise OSError('no disk')": ["line 5", "no disk"],
    "recipe = Recipe(name='x', trian=3)": ["line 3", "'trian'", "'train'"],
    "TrainConfig(num_train_epochs=3)": ["line 3", "did you mean 'train.steps'?", "not epochs"],
    "TrainConfig(steps=0)": ["line 3", "train.steps", "at least 1"],
    "recipe = Recipe(name='x', train=TrainConfig(lr='1e-3'))": ["line 3", "train.lr: '1e-3' must be a number"],
    "recipe = Recipe(name='x', data=DataConfig(tokenizer=3))": ["data.tokenizer", "3"],
    "recipe = Recipe(name='x', model=ModelConfig(overrides={'a': (1, 2)}))": ["model.overrides", "tuples"],
}  # fmt: skip


@pytest.mark.parametrize(("code", "parts"), BAD_CODE.items())
def test_bad_recipe_names_file_and_line(tmp_path: Path, code: str, parts: list[str]) -> None:
    path = tmp_path / "bad.py"
    path.write_text(f"from penstock.app.recipes.recipe import Recipe\nfrom penstock.engine.config import *\n{code}")
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    for part in [str(path), *parts]:
        assert part in str(caught.value)


def test_loading_leaves_the_import_path_alone(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    path = tmp_path / "r.py"
    path.write_text("from penstock.app.recipes.recipe import Recipe\nrecipe = Recipe(name='x')\n")
    before, modules = list(sys.path), set(sys.modules)
    load_recipe(path)
    assert sys.path == before
    assert set(sys.modules) == modules
    path.write_text("import beside\n")
    with pytest.raises(UserError, match="No module named 'beside'"):
        load_recipe(path)


NO_RECIPES = {
    "{": "not JSON", "[]": "one JSON object", "{}": "'name' is missing",
    '{"name": "x", "trian": {}}': "did you mean 'train'",
    '{"name": "x", "train": {"step": 1}}': "did you mean 'train.steps'",
    '{"name": "x", "train": 1}': "'train' must be an object", '{"name": "x", "train": {"steps": true}}': "train.steps",
}  # fmt: skip


@pytest.mark.parametrize(("text", "part"), NO_RECIPES.items())
def test_bad_recipe_json(text: str, part: str) -> None:
    with pytest.raises(UserError, match=r"^runs/x/recipe\.json: ") as caught:
        from_json(text, "runs/x/recipe.json")
    assert part in str(caught.value)


def test_a_resumed_run_may_change_its_budgets_and_drives_and_keeps_its_model_and_data(tmp_path: Path) -> None:
    recipe = Recipe(name="x")
    resumed = change_run(recipe, ["budgets.ram=3GiB", "storage.nvme=fast", "train.lr=1e-5"], tmp_path)
    assert (resumed.budgets.ram, resumed.storage.nvme, resumed.train.lr) == ("3GiB", str(tmp_path / "fast"), 1e-5)
    for override in ("name=y", "model.num_layers=3", "data.sequence_length=8"):
        with pytest.raises(UserError, match="start a new run"):
            change_run(recipe, [override], tmp_path)


def test_a_saved_recipe_says_what_differs_is_loaded_again_and_replaces_nothing_unasked(tmp_path: Path) -> None:
    recipe = changed("name=mine", "train.steps=20", "model.overrides.rope_theta=1e6", "machine=m")
    save_recipe(tmp_path / "mine.json", recipe)
    changes = {"model": {"overrides": {"rope_theta": 1e6}}, "train": {"steps": 20}}
    assert json.loads((tmp_path / "mine.json").read_text()) == {"name": "mine", "machine": "m"} | changes
    assert load_recipe(tmp_path / "mine.json") == recipe
    path = tmp_path / "deep" / "mine.json"
    save_recipe(path, Recipe(name="first"))
    with pytest.raises(UserError, match="exists"):
        save_recipe(path, Recipe(name="second"))
    assert load_recipe(path).name == "first"
    save_recipe(path, Recipe(name="second"), overwrite=True)
    assert load_recipe(path).name == "second"
    assert [file.name for file in path.parent.iterdir()] == ["mine.json"]
    (tmp_path / "file").write_text("")
    for name, message in (("mine.py", r"let its name end in \.json"), ("file/mine.json", "cannot be written")):
        with pytest.raises(UserError, match=message):
            save_recipe(tmp_path / name, Recipe(name="x"))


ODD = [
    "plain", 'a "quoted" \\ word', "two\nlines\tand \x00\x1b[2J", "Käse 学 \u2028 \u202e", "'''", '"""', "{x!r} %s",
    "a \n😀 'quoted'",
]  # fmt: skip


@pytest.mark.parametrize("text", ODD)
def test_a_file_gives_back_the_recipe(tmp_path: Path, text: str) -> None:
    """A Python file, whatever its texts hold."""
    overrides = {"rope": {text: [1, None, True, 1e-6]}, "many": list(range(60))}
    model, train = ModelConfig(path="models/mine", overrides=overrides), TrainConfig(lr=1e-5, warmup_steps=3)
    data = DataConfig(source="messages", path="talks.jsonl", columns={"messages": text})
    after = AfterConfig(export=True, sample_prompt=text)
    recipe, file = Recipe(name="mine", model=model, data=data, train=train, after=after), tmp_path / "mine.py"
    file.write_text(python_text(recipe, [text, "", f"more {text}"], {"train.lr": text, "data.columns": "why " * 40}))
    assert load_recipe(file) == recipe
    source = file.read_text()
    assert all(line.isprintable() for line in source.splitlines())
    assert "if __name__" in source


def test_comments_stand_beside_their_fields_and_defaults_are_left_out() -> None:
    text = python_text(Recipe(name="x", train=TrainConfig(lr=1e-5)), ["About."], {"train.lr": "a reason"})
    assert "        lr=1e-05,  # a reason\n" in text
    assert "steps=" not in text
    assert text.startswith('"""About.\n"""\n\nfrom penstock import Recipe, TrainConfig, run_recipe\n')
