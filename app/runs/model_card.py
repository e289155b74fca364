"""The README.md of an exported model: what it was made of, how, and what came of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.app.console.loading import versions
from penstock.app.hub.names import HubName
from penstock.app.recipes.recipe import changes
from penstock.app.runs.files import JsonLines, number
from penstock.engine.config import Recipe
from penstock.storage.files.disk import atomic_write
from penstock.storage.files.errors import UserError
from penstock.storage.files.model_folder import ADAPTER_CONFIG_NAME, is_adapter_folder, read_model_file
from penstock.storage.files.untrusted import parse_object, printable, shell

if TYPE_CHECKING:
    from penstock.engine.export import Exported

NAME = "README.md"
_CONFIG_BYTES = 1 << 24
_SNAPSHOT = re.compile(r"/(models|datasets)--([^/]+?)--([^/]+)/snapshots/([0-9a-f]{40})(?=/|$)")
_REWARD = [
    'text = "..."  # the prompt and the answer; of a conversation what tokenizer.apply_chat_template makes of it',
    'reward = model(**tokenizer(text, return_tensors="pt")).logits.item()',
]
_PACKAGES = ("penstock", "torch", "transformers", "peft", "datasets")


def write_card(folder: Path, run_path: Path, recipe: Recipe, exported: Exported) -> None:
    """Write the card of an export of a run, with the front matter that the hub reads, durably."""
    named = _by_names(recipe)
    base, data = _hub_name(recipe.model.path), _hub_name(recipe.data.path)
    adapter = exported.adapter
    library = "transformers" if adapter is None else "peft"
    rewards = recipe.train.objective == "reward"
    front = [f"library_name: {library}", f"pipeline_tag: text-{'classification' if rewards else 'generation'}"]
    front += [f"base_model: {base.name}"] if base is not None else []
    front += ["base_model_relation: adapter"] if base is not None and adapter is not None else []
    front += ["datasets:", f"- {data.name}"] if data is not None else []
    front += ["tags:", "- penstock", f"- {json.dumps(exported.model_type)}"]
    front += ["- lora"] if recipe.adapter.is_used else []
    began = "random weights" if recipe.model.path is None else f"`{named.model.path}`"
    lines = [
        "---",
        *front,
        "---",
        f"# {recipe.name}",
        "",
        f"{_what(named, exported)}, started from {began}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in _facts(run_path, named, exported)),
        "",
        "## Use",
        "",
        "```python",
        *_imports(folder, exported),
        "",
        *_loading(folder, named, exported),
        f'tokenizer = AutoTokenizer.from_pretrained("{folder.name}")',
        *_REWARD * rewards,
        "```",
        "",
        *(f"{line}  " for line in other_programs(folder.name, adapter_config(folder)) if not rewards),
        "",
        "## Made by",
        "",
        "This recipe, as `recipe.json`:",
        "",
        "```json",
        json.dumps(changes(named), indent=2),
        "```",
        "",
        "```",
        shell("penstock", "train", "recipe.json"),
        "```",
    ]
    atomic_write(folder / NAME, printable("\n".join(lines)) + "\n")


def _what(recipe: Recipe, exported: Exported) -> str:
    section, trained = recipe.adapter, f"{exported.num_trained:,}"
    if exported.adapter is not None:
        return (
            f"A {section.method} adapter of {trained} parameters (rank {section.rank}, alpha {section.alpha:g}) for a "
            f"{exported.model_type} model, trained with Penstock"
        )
    size = f"A {exported.model_type} model of {exported.num_params:,} parameters"
    if section.is_used:
        return f"{size} with a {section.method} adapter merged in, of which {trained} were trained with Penstock"
    how = "all of them" if exported.num_trained == exported.num_params else f"{trained} of them"
    return f"{size}, {how} trained with Penstock"


def _imports(folder: Path, exported: Exported) -> list[str]:
    if exported.adapter is None:
        return [f"from transformers import {exported.auto_class}, AutoTokenizer"]
    names = [exported.auto_class, "AutoTokenizer"] + ["GenerationConfig"] * _has_ends(folder)
    return ["from peft import PeftModel", f"from transformers import {', '.join(names)}"]


def _has_ends(folder: Path) -> bool:
    """Whether an adapter's texts end otherwise than its base's, which nothing that loads it knows by itself."""
    return (folder / "generation_config.json").is_file()


def _loading(folder: Path, recipe: Recipe, exported: Exported) -> list[str]:
    if exported.adapter is None:
        return [f'model = {exported.auto_class}.from_pretrained("{folder.name}")']
    hub = _hub_name(recipe.model.path)
    base = recipe.model.path if hub is None else hub.name
    return [
        f"base = {exported.auto_class}.from_pretrained({json.dumps(str(base))}{_labels(exported)})",
        f'model = PeftModel.from_pretrained(base, "{folder.name}")',
        *[f'model.generation_config = GenerationConfig.from_pretrained("{folder.name}")'] * _has_ends(folder),
    ]


def _labels(exported: Exported) -> str:
    """What a language model's folder does not say of the reward model that it is the base of."""
    return ", num_labels=1" if exported.auto_class == "AutoModelForSequenceClassification" else ""


def adapter_config(folder: Path) -> dict[str, Any] | None:
    """What an adapter's folder says of it; None for the folder of a whole model. UserError where it cannot be read."""
    if not is_adapter_folder(folder):
        return None
    try:
        return parse_object(read_model_file(folder, ADAPTER_CONFIG_NAME, _CONFIG_BYTES))
    except ValueError as error:
        raise UserError(f"{folder / ADAPTER_CONFIG_NAME}: not readable ({error}); copy or download it again") from None


def other_programs(folder: Path | str, adapter: dict[str, Any] | None = None) -> list[str]:
    """How an exported folder comes to other programs, a line each; `adapter`: what `adapter_config` says of it."""
    if adapter is not None:
        if adapter.get("use_dora"):
            return ["for vLLM, llama.cpp and Ollama, which do not support DoRA: export it with --merged"]
        base = str(adapter.get("base_model_name_or_path"))
        option = "--base" if Path(base).is_dir() else "--base-model-id"
        lora = shell("vllm", "serve", base, "--enable-lora", "--lora-modules", f"{Path(folder).name}={folder}")
        return [
            f"for vLLM: {lora} --max-lora-rank {adapter.get('r')}",
            f"for llama.cpp: {shell('python', 'convert_lora_to_gguf.py', folder, option, base)}",
        ]
    gguf = shell("python", "convert_hf_to_gguf.py", folder, "--outtype", "bf16")
    return [
        f"for llama.cpp, if it has this architecture: {gguf}",
        f"for Ollama, likewise: echo FROM {shell(folder)} > Modelfile && ollama create NAME -f Modelfile",
    ]


def _facts(run_path: Path, recipe: Recipe, exported: Exported) -> list[tuple[str, str]]:
    from penstock.engine.data.corpus.files import read_info

    facts = [("steps", f"{'unknown' if exported.step is None else f'{exported.step:,}'} of {recipe.train.steps:,}")]
    where = recipe.data.path or ", ".join(str(part.get("path")) for part in recipe.data.mixture) or recipe.data.source
    facts.append(("data", f"`{where}` ({recipe.data.source})"))
    try:
        info = read_info(run_path / "data" / "corpus")
        facts.append(("rows and tokens", info.words()))
        facts.append(("SHA-256 of the tokens", f"`{info.content}`"))
    except (UserError, OSError):
        pass  # what became of the run's data since does not keep its model back
    facts += [(name, text) for name, text in _losses(run_path, exported.step)]
    return [*facts, ("versions", ", ".join(f"{name} {version}" for name, version in versions(*_PACKAGES).items()))]


def _losses(run_path: Path, step: int | None) -> list[tuple[str, str]]:
    """Of the exported step, or the last one before it that was measured."""
    result = []
    for title, file in (("training loss", "metrics.jsonl"), ("validation loss", "validation.jsonl")):
        last: tuple[int, float] | None = None
        for line in JsonLines(run_path / file).steps():
            loss = number(line.get("loss"))
            if loss is not None and (step is None or line["step"] <= step):
                last = line["step"], loss
        if last is not None:
            result.append((title, f"{last[1]:.4f} (step {last[0]:,})"))
    return result


def _hub_name(path: str | None) -> HubName | None:
    """The repository and commit whose snapshot in the hub's cache a path is; None for any other path."""
    match = None if path is None else _SNAPSHOT.search(path)
    return None if match is None else HubName(f"{match[2]}/{match[3]}", match[4])


def _by_names(recipe: Recipe) -> Recipe:
    """The recipe as another machine takes it: names on the hub in place of snapshots in this one's cache."""

    def named(path: Any) -> Any:
        hub = _hub_name(path) if isinstance(path, str) else None
        return path if hub is None else str(hub)

    data = replace(
        recipe.data,
        path=named(recipe.data.path),
        tokenizer=named(recipe.data.tokenizer),
        mixture=[{key: named(value) for key, value in part.items()} for part in recipe.data.mixture],
    )
    return replace(recipe, model=replace(recipe.model, path=named(recipe.model.path)), data=data)
