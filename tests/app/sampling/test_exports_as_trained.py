"""An export is what was trained: its template, where its turns end, its weights, and files beside them that mislead."""

import json
import re
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_model import TEMPLATE, make_chat_model, talk, write_talks
from cli_process import refusal
from safetensors.torch import load_file, save_file
from samples import cases
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import penstock
from penstock import AdapterConfig, AfterConfig, BudgetConfig, DataConfig, ModelConfig, Recipe, TrainConfig
from penstock.app.cli.main import main
from penstock.app.launch.run import sample_text
from penstock.app.planning.inputs import require_weights
from penstock.app.runs.directory import read_recipe
from penstock.app.sampling.exported import load_exported
from penstock.storage.files.errors import UserError
from penstock.storage.files.model_folder import INDEX_NAME
from penstock.storage.files.safetensors import CheckpointReader

Captured = pytest.CaptureFixture[str]

ASKED = "What colour has the apple?"
SMALL: dict[str, Any] = {"gpu": "1GiB", "ram": "1GiB"}
TOOLS = TEMPLATE.replace("{% for message", "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% for message")


def base_model(folder: Path, **config: Any) -> Path:
    """A model without a template, whose texts end with <|endoftext|>."""
    make_chat_model(folder, template=None, **config)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<|endoftext|>"}))
    return folder


def trained(folder: Path, base: Path, steps: int = 1, after: AfterConfig | None = None, **data: Any) -> Path:
    """A run on conversations; `after`, and changes of the data section."""
    source = {"source": "messages", "path": str(write_talks(folder / "rows.jsonl")), "sequence_length": 128}
    recipe = Recipe(
        name="tuned",
        model=ModelConfig(path=str(base)),
        data=DataConfig(**(source | data)),
        train=TrainConfig(
            steps=steps,
            global_batch_size=4,
            lr=1e-2,
            compute_dtype="float32",
            compile="off",
            calibrate=False,
            device="cpu",
        ),
        budgets=BudgetConfig(**SMALL),
        after=after or AfterConfig(),
    )
    return penstock.train(recipe, run_dir=folder / "run")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("as trained")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """Of a base model, with a template that the recipe gives and that is gone now; it has learned to end a turn."""
    (folder / "mine.jinja").write_text(TEMPLATE)
    made = trained(folder, base_model(folder / "base"), 40, chat_template=str(folder / "mine.jinja"))
    (folder / "mine.jinja").unlink()
    return made


@pytest.fixture(scope="module")
def exported(run: Path, folder: Path) -> Path:
    return penstock.export(run, folder / "out")


def test_the_export_of_a_run_that_kept_no_template(run: Path, tmp_path: Path, capsys: Captured) -> None:
    """As one of an earlier version, whose template's file is gone."""
    old = Path(shutil.copytree(run, tmp_path / "run"))
    (old / "data" / "chat_template.json").unlink()
    assert main(["export", str(old), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert "mine.jinja cannot be read" in said
    assert "the export has the chat template of the tokenizer's folder, if that has one" in said
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template is None


def ends_of(folder: Path) -> Any:
    return json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


def test_a_turn_s_end_stops_the_export_and_the_chat(run: Path, exported: Path) -> None:
    out = exported
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.convert_ids_to_tokens(ends_of(out)) == ["<|endoftext|>", "<|im_end|>"]
    answers = [penstock.sample(where, ASKED, chat=True, tokens=40, **SMALL)[0] for where in (run, out)]
    assert answers[0] == answers[1]
    assert answers[0].endswith(".")
    messages = [{"role": "user", "content": ASKED}]
    writer = pipeline("text-generation", model=str(out), tokenizer=str(out))
    written = writer(messages, max_new_tokens=40, do_sample=False)[0]["generated_text"]
    assert written[-1]["content"] == answers[0]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert [penstock.sample(where, prompt, tokens=40, **SMALL)[0] for where in (run, out)] == answers


def test_of_an_adapter_as_well(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.jinja").write_text(TEMPLATE)
    adapter = AdapterConfig(method="lora", rank=4)
    recipe = read_recipe(run)
    recipe = replace(recipe, adapter=adapter, train=replace(recipe.train, steps=2))
    other = penstock.train(recipe, run_dir=folder / "adapter run")
    alone, merged = penstock.export(other, folder / "adapter"), penstock.export(other, folder / "merged", merged=True)
    capsys.readouterr()
    tokenizer = AutoTokenizer.from_pretrained(alone)
    assert AutoTokenizer.from_pretrained(merged).chat_template == tokenizer.chat_template == TEMPLATE
    for out in (alone, merged):
        assert tokenizer.convert_ids_to_tokens(ends_of(out)) == ["<|endoftext|>", "<|im_end|>"]
    card = (alone / "README.md").read_text()
    assert 'model.generation_config = GenerationConfig.from_pretrained("adapter")' in card
    answers = [penstock.sample(where, ASKED, chat=True, tokens=40, **SMALL)[0] for where in (other, alone, merged)]
    assert answers[0] == answers[1] == answers[2]
    left = with_files(Path(shutil.copytree(folder / "base", folder / "with a stale adapter")), adapter_config=STALE)
    assert sample_text(alone, "The", 2, str(left)) == sample_text(alone, "The", 2, str(folder / "base"))


def test_the_end_of_a_turn_ends_a_chat_with_any_folder(exported: Path, tmp_path: Path) -> None:
    """A chat, not a text: a base model whose files name another end."""
    out = Path(shutil.copytree(exported, tmp_path / "chatty"))
    (out / "generation_config.json").unlink()
    (answer,) = penstock.sample(out, ASKED, chat=True, tokens=40, **SMALL)
    assert answer.endswith(".")
    prompt = f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n"
    (text,) = penstock.sample(out, prompt, tokens=40, **SMALL)
    assert text.startswith(f"{answer}<|im_end|>")


def test_several_templates_travel_and_code_that_a_config_names(tmp_path: Path, capsys: Captured) -> None:
    model = base_model(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = {"default": TEMPLATE, "tool_use": TOOLS}
    tokenizer.save_pretrained(model)
    names = {"AutoConfig": "configuration_own.OwnConfig", "AutoModel": "somebody/else--modeling_far.Far"}
    names["AutoModelForY"] = "code/modeling_own.Own"
    changed(model, auto_map=names | {"AutoModelForCausalLM": "modeling_own.Own", "AutoModelForX": "gone.Gone"})
    changed(model, "tokenizer_config", auto_map={"AutoTokenizer": ["tokenization_own.Own", None]})
    code = {f"{name}.py": "raise SystemExit\n" for name in ("configuration_own", "tokenization_own", "helper")}
    code["modeling_own.py"] = "from .helper import it\nraise SystemExit\n"
    for name, text in (code | {"other.py": ""}).items():
        (model / name).write_text(text)
    run = trained(tmp_path, model)
    out = tmp_path / "out"
    assert main(["export", str(run), str(out)]) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert re.search(r"auto_map names code that \S+ does not have: code/modeling_own\.py, gone\.py", said)
    assert {file.name: file.read_text() for file in out.glob("*.py")} == code
    assert AutoModelForCausalLM.from_pretrained(out, trust_remote_code=False).config.model_type == "qwen3"
    found = AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    assert found.chat_template == {"default": TEMPLATE, "tool_use": TOOLS}
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    messages = talk(0)["messages"]
    for given in (None, tools):
        asked = {"tools": given, "tokenize": False}
        assert found.apply_chat_template(messages, **asked) == tokenizer.apply_chat_template(messages, **asked)


def with_files(folder: Path, **files: Any) -> Path:
    """JSON files beside a model, as `adapter_config=...`; None takes one away."""
    for name, value in files.items():
        file = folder / f"{name}.json"
        file.unlink() if value is None else file.write_text(json.dumps(value))
    return folder


def changed(folder: Path, name: str = "config", **fields: Any) -> None:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


STALE = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "somebody/base"}


@pytest.mark.parametrize("weights", cases([False, True], True))
def test_an_adapter_that_was_left_beside_a_model(tmp_path: Path, capsys: Captured, weights: bool) -> None:
    model = with_files(make_chat_model(tmp_path / "model"), adapter_config=STALE)
    if weights:
        save_file({"base_model.model.x.lora_A.weight": torch.ones(4, 4)}, model / "adapter_model.safetensors")
    whole = "has an adapter_config.json beside a whole model: the model's weights in model.safetensors are used, the "
    run = trained(tmp_path, model)
    assert whole in capsys.readouterr().out.replace("\n", " ")
    out = tmp_path / "out"
    assert main(["export", str(run), str(out)]) == 0
    assert not list(out.glob("adapter*"))
    assert AutoModelForCausalLM.from_pretrained(out).config.model_type == "qwen3"
    assert main(["sample", str(model), "--prompt", "The", "--tokens", "2", "--gpu", "1GiB", "--ram", "1GiB"]) == 0
    assert whole in capsys.readouterr().err


def trained_again(run_dir: Path, run: Path, **changes: Any) -> Path:
    return penstock.train(replace(read_recipe(run), **changes), run_dir=run_dir)


def test_the_weights_that_transformers_loads_are_taken(tmp_path: Path, capsys: Captured) -> None:
    model, other = make_chat_model(tmp_path / "model"), tmp_path / "other"
    make_chat_model(other)
    third = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        for parameter in third.parameters():
            parameter.mul_(0.5)
    third.save_pretrained(other, max_shard_size="40KB")
    shards = sorted(other.glob("model-*"))
    assert len(shards) > 1

    def taken() -> bool:
        """Whether it is model.safetensors' values that a reader has, as transformers has them."""
        name = "model.norm.weight"
        theirs = AutoModelForCausalLM.from_pretrained(model).state_dict()[name]
        ours = CheckpointReader(model).read(name)
        assert torch.equal(theirs, ours)
        return torch.equal(ours, tensors(model)[name])

    for file in (other / INDEX_NAME, *shards):
        shutil.copy(file, model)
        assert taken(), "the index and some of its shards are there"
    assert trained(tmp_path, model).is_dir()
    said = f"has model.safetensors and {INDEX_NAME}: model.safetensors is used, as transformers does"
    assert said in capsys.readouterr().out.replace("\n", " ")
    changed(model, transformers_weights=INDEX_NAME)
    assert not taken()
    out = penstock.export(trained_again(tmp_path / "again", tmp_path / "run"), tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(out).config.model_type == "qwen3"
    changed(model, transformers_weights="../model.safetensors")
    with pytest.raises(UserError, match=r"transformers_weights must be the name of a \.safetensors file in the folder"):
        CheckpointReader(model)


def test_a_head_that_contradicts_the_config_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    model = make_chat_model(tmp_path / "model")
    stored = tensors(model)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"] + 1
    save_file(stored, model / "model.safetensors", {"format": "pt"})
    monkeypatch.chdir(tmp_path)
    rows = write_talks(tmp_path / "rows.jsonl")
    before = sorted(tmp_path.iterdir())
    said = refusal(capsys, "finetune", "model", str(rows), "--yes", "--out", "mine.py", "--run-dir", "run")
    both = ("'lm_head.weight' and 'model.embed_tokens.weight' differ", "(tie_word_embeddings is true)")
    for part in (*both, "model.overrides.tie_word_embeddings=false"):
        assert part in said
    with pytest.raises(UserError, match=r"'lm_head\.weight' and 'model\.embed_tokens\.weight' differ"):
        trained(tmp_path, model)
    assert sorted(tmp_path.iterdir()) == before
    assert both[0] in refusal(capsys, "sample", "model", "--prompt", "x")
    overrides: dict[str, Any] = {"tie_word_embeddings": False}
    require_weights(Recipe(name="untied", model=ModelConfig(path=str(model), overrides=overrides)))


WAYS: dict[str, dict[str, Any]] = {
    "an attention that is not here": {"_attn_implementation": "flash_attention_2"},
    "its other name": {"attn_implementation": "flash_attention_2"},
    "tuples": {"return_dict": False},
    "experts that are not known": {"_experts_implementation": "none such"},
    "both": {"_attn_implementation": "flash_attention_2", "return_dict": False},
}


@pytest.mark.parametrize("way", cases(WAYS, "both"))
def test_how_a_config_wants_its_model_run_is_set_aside(tmp_path: Path, capsys: Captured, way: str) -> None:
    """Of a whole run, its export and the sample behind it, as of its base under an adapter."""
    model = make_chat_model(tmp_path / "model")
    changed(model, **WAYS[way])
    run = trained(tmp_path, model, after=AfterConfig(export=True, sample_prompt="The", sample_tokens=2))
    said = capsys.readouterr().out.replace("\n", " ")
    fields = ", ".join(WAYS[way])
    assert f"config.json: left out, as it is how transformers is to run the model: {fields}" in said
    assert "sample, at most 2 tokens by transformers after the prompt" in said
    assert not WAYS[way].keys() & json.loads((run / "export" / "config.json").read_text()).keys()
    found = AutoModelForCausalLM.from_pretrained(run / "export")
    assert found(torch.tensor([[1, 2]])).logits.shape == (1, 2, 352)
    assert load_exported(model, None)[1](torch.tensor([[1, 2]])).logits.shape == (1, 2, 352)


@pytest.mark.parametrize(("content", "package"), [(b"\n\x0e\n\x05<unk>", "sentencepiece"), (b"IQ== 0\n", "tiktoken")])
def test_a_vocabulary_of_a_package_that_is_missing(tmp_path: Path, content: bytes, package: str) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    model = make_chat_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.model").write_bytes(content)
    with pytest.raises(UserError, match=f"takes the package {package}, which is not installed; install it with `pip "):
        trained(tmp_path, model)


def test_tensors_that_the_model_has_no_use_for_are_told_of_and_travel(tmp_path: Path, capsys: Captured) -> None:
    """As where a config.json has fewer layers than the weights."""
    model = make_chat_model(tmp_path / "model")
    changed(model, num_hidden_layers=1, layer_types=["full_attention"])
    run = trained(tmp_path, model)
    said = capsys.readouterr().out.replace("\n", " ")
    assert "11 of its tensors have no place in the " in said
    assert tensors(penstock.export(run, tmp_path / "out")).keys() == tensors(model).keys()


def test_weights_that_can_run_code_are_named(tmp_path: Path) -> None:
    model = make_chat_model(tmp_path / "model")
    torch.save(tensors(model), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"has weights as \*\.bin, .* and no \*\.safetensors; load the model with trans"
    ):
        trained(tmp_path, model)
