"""Nothing that a user sets is silently without effect: every field counts, or is refused or told where it does not."""

import json
import re
from pathlib import Path

import pytest
import tiny
from cli_process import REPOSITORY
from idle_fields import ALWAYS, CASES, Case, made, page
from recipe_texts import recipe_text

import penstock
from penstock.app.cli.main import main
from penstock.app.planning.opened import opened
from penstock.app.recipes.fields import fields
from penstock.app.recipes.recipe import (
    apply_overrides,
    change_run,
    from_run_json,
    load_recipe,
    resolve_paths,
    to_run_json,
)
from penstock.app.runs.directory import read_recipe
from penstock.engine.config import DataConfig, ModelConfig, Recipe
from penstock.engine.config.effects import RULES, idle_fields, idle_notes, require_effect
from penstock.engine.hf.config import make_config, model_config
from penstock.storage.files.errors import UserError
from penstock.tui.data.draft import Draft


def test_every_field_counts_or_is_said_not_to() -> None:
    """A new field is put into ALWAYS, or gets a rule and a case; each rule is the one that a case meets."""
    keys, ruled = {item.key for item in fields()}, {rule.key for rule in RULES}
    assert keys == ALWAYS | ruled
    assert not ALWAYS & ruled
    assert {case.key for case in CASES} == ruled
    said = {idle.said for case in CASES for idle in idle_fields(made(*case.without, case.setting))}
    assert all(
        any(rule.why.partition("; ")[2] in line and line.startswith(rule.key) for line in said) for rule in RULES
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.setting} {' '.join(case.without)}"[:80])
def test_a_field_without_effect_is_refused_or_told_and_one_with_effect_is_not(case: Case) -> None:
    default = {item.key: item.default for item in fields()}[case.key]
    recipe = made(*case.without, case.setting)
    found = [idle for idle in idle_fields(recipe) if idle.key == case.key]
    assert len(found) == 1, "once"
    assert found[0].value != default
    assert re.match(rf"{re.escape(case.key)}: .+ has no effect, as .+; .+, or leave it at .+", found[0].said)
    if found[0].refused:
        with pytest.raises(UserError, match=re.escape(found[0].said)):
            require_effect(recipe)
        assert found[0].said not in idle_notes(recipe)
    else:
        assert found[0].said in idle_notes(recipe)
    assert case.key not in [idle.key for idle in idle_fields(made(*case.within, case.setting))]
    reset = apply_overrides(recipe, [f"{case.key}={json.dumps(default)}"], is_run=True)
    assert case.key not in [idle.key for idle in idle_fields(reset)], "at its default nothing is said"


def test_what_parts_of_a_mixture_say_is_looked_at_part_by_part() -> None:
    parts = [{"path": "a", "source": "text", "split": "train"}, {"path": "b", "source": "jsonl", "split": "train"}]
    (idle,) = idle_fields(Recipe(name="x", data=DataConfig(mixture=parts)))
    assert idle.said.startswith("data.mixture[0].split: train has no effect, as data.source=text reads no rows")


def test_every_field_is_read_by_something() -> None:
    sources = [
        path.read_text()
        for package in ("app", "engine", "storage")
        for path in (REPOSITORY / package).rglob("*.py")
        if path.parent != REPOSITORY / "engine" / "config"
    ]
    names = {word for text in sources for word in re.findall(r"(?:\.|\"|')([a-z_0-9]+)", text)}
    sections = {path.read_text() for path in (REPOSITORY / "engine" / "config").glob("*.py")}
    within = {word for text in sections for word in re.findall(r"self\.([a-z_0-9]+)", text)}
    assert {item.key for item in fields() if item.key.rpartition(".")[2] not in names | within} == set()


def test_the_form_shows_it_at_the_field_and_a_run_that_was_so_goes_on() -> None:
    draft = Draft(Recipe(name="x"))
    draft.set("train.lr_schedule", "constant")
    draft.set("train.min_lr_ratio", "0.5")
    assert "has no effect, as train.lr_schedule=constant never falls" in draft.errors["train.min_lr_ratio"]
    old = made("train.lr_schedule=constant", "train.min_lr_ratio=0.5", "data.source=python_stdlib", "data.path=/mine")
    assert from_run_json(to_run_json(old), "recipe.json") == old
    assert change_run(old, ["train.steps=200"], Path("/")).train.steps == 200
    with pytest.raises(UserError, match=r"storage\.keep_best: true has no effect, as no validation is made"):
        change_run(old, ["storage.keep_best=true"], Path("/"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"body": "one two three {i}"}}\n' for i in range(40)))
    (tmp_path / "notes.txt").write_text("one two three\n" * 40)
    return tmp_path


def test_the_source_is_found_from_the_data_and_kept_with_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `finetune` finds it; a run's recipe says what was found, so that the data need not be looked at again."""
    data = {"source": "auto", "path": "notes.txt", "seed": 3, "order": "kept"}
    (folder / "tiny.py").write_text(recipe_text(data=data))
    assert main(["train", "tiny.py", "--run-dir", "run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("data.source=auto: text is found in") == 1
    assert said.count("data.seed: 3 has no effect, as data.order=kept draws nothing") == 1
    kept = read_recipe(folder / "run").data
    assert (kept.source, kept.path) == ("text", str(folder / "notes.txt"))
    assert json.loads((folder / "run" / "data" / "corpus" / "meta.json").read_text())["num_documents"] == 1
    (folder / "notes.txt").unlink()
    assert main(["resume", "run", "--set", "train.steps=2"]) == 0
    capsys.readouterr()
    (folder / "notes.txt").write_text("one two three\n" * 40)
    assert main(["plan", "tiny.py", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [note.partition(":")[0] for note in notes] == ["data.source=auto", "data.seed"]
    assert main(["plan", "tiny.py"]) == 0
    said = "".join(capsys.readouterr().out.split())  # lines end within long paths
    assert all(said.count("".join(note.split())) == 1 for note in notes)


def test_columns_split_and_mixture_are_found_or_asked_for(folder: Path) -> None:
    columns = {"text": "body"}
    found, said = opened(Recipe(name="x", data=DataConfig(path="rows.jsonl", columns=columns)))
    assert (found.data.source, found.data.columns) == ("jsonl", columns)
    assert said == ["data.source=auto: jsonl is found in rows.jsonl"]
    with pytest.raises(UserError, match=r"columns body match no known format"):
        opened(Recipe(name="x", data=DataConfig(path="rows.jsonl")))
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for split in ("train", "test"):
        (folder / "talks" / split).mkdir(parents=True)
        (folder / "talks" / split / "0.jsonl").write_text(json.dumps({"talk": chat}) + "\n")
    mixture = [{"path": "talks", "split": "test"}, {"path": "notes.txt", "weight": 2}]
    found, said = opened(Recipe(name="x", data=DataConfig(mixture=mixture)))
    assert [part.source for part in found.data.parts] == ["messages", "text"]
    assert found.data.mixture[0] == mixture[0] | {"source": "messages", "columns": {"messages": "talk"}}
    assert len(said) == 2
    with pytest.raises(UserError, match=r"data\.chat_template: .* has no effect, as data\.source=text is no format of"):
        opened(Recipe(name="x", data=DataConfig(path="notes.txt", chat_template="chat.jinja")))


def test_a_file_of_the_cache_keeps_the_name_that_says_what_it_is(folder: Path) -> None:
    """The blob that it is a link to has none, and would be read as plain text."""
    snapshot = folder / "datasets--owner--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "blobs").mkdir()
    (snapshot.parents[1] / "blobs" / "b0").write_text('{"text": "one"}\n')
    (snapshot / "train.jsonl").symlink_to("../../blobs/b0")
    (folder / "way").symlink_to(snapshot)
    (folder / "mine.jsonl").symlink_to("rows.jsonl")
    places = {str(snapshot / "train.jsonl"): snapshot / "train.jsonl", "way/train.jsonl": snapshot / "train.jsonl"}
    for given, kept in (places | {"way": snapshot, "mine.jsonl": folder / "mine.jsonl"}).items():
        recipe = resolve_paths(Recipe(name="x", data=DataConfig(path=given)), folder)
        assert recipe.data.path == str(kept)
        if given in places:
            assert opened(recipe)[0].data.source == "jsonl"


def test_a_kind_of_model_that_the_folder_is_not_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(
        json.dumps(json.loads(make_config({"model_type": "llama"}, "x").to_json_string()))
    )
    for name, value in (("model_type", "mixtral"), ("tie_embeddings", True), ("num_layers", 3)):
        recipe = Recipe(name="x", model=ModelConfig(path=str(folder), **{name: value}))  # type: ignore[arg-type]
        with pytest.raises(UserError, match=rf"model\.{name}: {value} in the recipe, but .* in "):
            model_config(recipe, None)


@pytest.mark.usefixtures("folder")
def test_no_data_is_an_error_that_says_how_to_give_it_and_a_plan_needs_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("tiny.py").write_text(recipe_text(data={"source": "auto", "path": None}, model={"vocab_size": 300}))
    assert main(["train", "tiny.py"]) == 2
    said = capsys.readouterr().err
    assert "data.path: the recipe names no data; name your data with --set data.path=" in said
    assert "data.source=random" in said
    assert "python_stdlib" in said
    assert main(["plan", "tiny.py"]) == 0
    for source in ("python_stdlib", "random", "needles"):
        assert main(["plan", "tiny.py", "--set", f"data.source={source}", "--set", "data.path=rows.jsonl"]) == 2
        assert f"has no effect, as data.source={source} reads no path" in capsys.readouterr().err
    Path("bad.json").write_text('{"name": "x", "adapter": {"rank": 8}}')
    with pytest.raises(UserError, match=r"recipe bad\.json: adapter\.rank: 8 has no effect, as adapter\.method is"):
        load_recipe("bad.json")


def test_what_only_the_model_tells_is_told_by_the_plan_and_the_run(tmp_path: Path) -> None:
    model = tiny.model(model_type="mamba", overrides={"time_step_rank": 4, "state_size": 8})
    recipe = tiny.recipe(model=model, data=tiny.data(packing="best_fit"), train=tiny.training(steps=1))
    notes = penstock.plan(recipe)["notes"]
    said = ["data.packing: best_fit has no effect, as the model carries a state from token to token"]
    said.append("train.chunk_tokens: 16 has no effect, as the model carries a state from token to token")
    assert [note.partition(": a ")[0] for note in notes] == said
    messages: list[str] = []
    penstock.train(recipe, run_dir=tmp_path / "run", on_message=messages.append)
    assert [messages.count(note) for note in notes] == [1, 1]
    assert penstock.plan(tiny.recipe())["notes"] == []


def test_the_page_of_the_docs_is_what_is_said_today() -> None:
    assert (REPOSITORY / "docs" / "results" / "fields-without-effect.md").read_text() == page()
