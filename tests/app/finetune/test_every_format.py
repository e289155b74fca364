"""From each format a real small fine-tune on CPU, from files as users have them: the validation loss falls, plain
transformers loads the export and samples from it."""

from pathlib import Path
from typing import Any

import pytest
from every_format import SOURCES, WAYS, Way
from small_finetunes import finetune, make_models
from transformers import AutoModelForCausalLM, AutoTokenizer

FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
OF_THE_MODEL = {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By chat template."""
    return make_models(tmp_path_factory.mktemp("models"))


def test_every_format_is_there() -> None:
    assert {way.source for way in WAYS} == set(SOURCES)
    assert len({way.name for way in WAYS}) == len(WAYS) == 14


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_fine_tune_from_files_as_users_have_them(tmp_path: Path, models: dict[str, Path], way: Way) -> None:
    found = finetune(way, models[way.template], tmp_path)
    assert found.after < 0.7 * found.before
    assert found.told == pytest.approx(found.after, rel=1e-4)
    assert f"source='{way.source}'" in (tmp_path / "recipe.py").read_text().replace('"', "'")

    export = found.run / "export"
    assert {file.name for file in export.iterdir()} == FILES | OF_THE_MODEL
    for name in OF_THE_MODEL:
        assert (export / name).read_bytes() == (models[way.template] / name).read_bytes()
    model: Any = AutoModelForCausalLM.from_pretrained(export)
    tokenizer: Any = AutoTokenizer.from_pretrained(export)
    question = [{"role": "user", "content": "Basket 7: what colour has the pear?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert len(answer) > 0
    assert tokenizer.decode(answer)
