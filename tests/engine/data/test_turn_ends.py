"""Which tokens end an assistant's turn, of templates that end turns as published ones do; the template that a run keeps
of its training, and a tokenizer's further templates."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from chat_templates import CHATML, LLAMA, PLAIN, SPECIAL, THINKING, make_tokenizer
from samples import cases
from transformers import AddedToken, AutoTokenizer

from penstock.engine.config import DataConfig, Recipe
from penstock.engine.data.corpus.prepare import prepare_data
from penstock.engine.data.text.chat import FILE, load_template, trained_ends, verify_template
from penstock.engine.data.text.made_tokenizer import train_tokenizer
from penstock.engine.data.text.tokenizer import load_tokenizer, read_otherwise, tokenizer_contents
from penstock.engine.data.text.turn_ends import turn_ends
from penstock.storage.files.errors import UserError

MORE = ["<|user|>", "<|assistant|>", "<|channel|>", "<|message|>", "<|start|>", "<|return|>", "<|call|>", "<|eom_id|>"]
MORE += ["[INST]", "[/INST]", "</s>", "</answer>", "<tool_call>", "</tool_call>", "\n\n"]
EACH = "{%- for m in messages -%}"
DONE = "{%- endfor -%}"
CALLED = "{%- if m.tool_calls -%}"
ARGUMENTS = "(m.tool_calls[0].function.arguments | tojson)"
HARMONY = (
    EACH
    + "{%- if m.role == 'assistant' -%}{%- if m.thinking and loop.last -%}"
    + "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}{%- endif -%}"
    + CALLED
    + "{{- '<|start|>assistant to=look<|message|>' + "
    + ARGUMENTS
    + " + '<|call|>' -}}{%- else -%}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content -}}"
    + "{{- '<|return|>' if loop.last else '<|end|>' -}}{%- endif -%}"
    + "{%- else -%}{{- '<|start|>user<|message|>' + m.content + '<|end|>' -}}{%- endif -%}"
    + DONE
)
"""As gpt-oss': a token ends thoughts as well as earlier turns."""
QWEN_CALLS = (
    EACH
    + "{{- '<|im_start|>' + m.role + '\\n' + m.content -}}"
    + "{%- for call in m.tool_calls or [] -%}{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' -}}"
    + DONE
    + "{{- '<|im_end|>\\n' -}}"
    + DONE
)
ENDS = {
    "chatml": (CHATML, ["<|im_end|>"]),
    "llama": (LLAMA, ["<|eot_id|>"]),
    "thinking": (THINKING, ["<|im_end|>"]),
    "calls": (QWEN_CALLS, ["<|im_end|>"]),
    "text alone": (PLAIN, []),
    "olmo3": (
        EACH
        + "{{- '<|im_start|>' + m.role + '\\n' + m.content -}}{%- if m.role == 'assistant' and loop.last -%}"
        + "{{- eos_token -}}{%- else -%}{{- '<|im_end|>\\n' -}}{%- endif -%}"
        + DONE,
        ["<|im_end|>", "<|end|>"],
    ),
    "phi3": (
        EACH
        + "{{- '<|' + m.role + '|>\\n' + m.content + '<|eot_id|>\\n' -}}"
        + DONE
        + "{%- if not add_generation_prompt -%}{{- eos_token -}}{%- endif -%}",
        ["<|eot_id|>", "<|end|>"],
    ),
    "harmony": (HARMONY, ["<|call|>", "<|return|>"]),
    "llama with calls": (
        EACH
        + "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' -}}"
        + CALLED
        + "{{- '{\"parameters\": ' + "
        + ARGUMENTS
        + " + '}<|eom_id|>' -}}{%- else -%}{{- m.content + '<|eot_id|>' -}}{%- endif -%}"
        + DONE,
        ["<|eom_id|>", "<|eot_id|>"],
    ),
    "two tokens": (
        EACH
        + "{{- '<|start|>' + m.role + m.content + ('</answer>' if m.role == 'assistant' else '') + '<|im_end|>' -}}"
        + DONE,
        ["<|im_end|>"],
    ),
    "mistral": (
        EACH + "{{- '[INST]' + m.content + '[/INST]' if m.role == 'user' else m.content + '</s>' -}}" + DONE,
        ["</s>"],
    ),
    "the next question ends it": (EACH + "{{- '<|' + m.role + '|>\\n' + m.content -}}" + DONE, ["<|user|>"]),
    "white space is no end": (EACH + "{{- m.role + ': ' + m.content + '\\n\\n' -}}" + DONE, []),
    "a system message is wanted": (
        "{%- if messages[0].role != 'system' -%}{{- raise_exception('none') -}}{%- endif -%}" + CHATML,
        ["<|im_end|>"],
    ),
    "parts are wanted": (
        EACH
        + "{{- '<|start|>' + m.role -}}{%- for part in m.content -%}{{- part.text -}}{%- endfor -%}{{- '<|im_end|>' -}}"
        + DONE,
        ["<|im_end|>"],
    ),
    "arguments as text": (
        EACH
        + "{{- '<|start|>' + m.role + m.content -}}"
        + CALLED
        + "{{- m.tool_calls[0].function.arguments + '<|call|>' -}}{%- else -%}{{- '<|im_end|>' -}}{%- endif -%}"
        + DONE,
        ["<|call|>", "<|im_end|>"],
    ),
    "refuses all": ("{{- raise_exception('no') -}}", []),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that knows the tokens of many families, and no template."""
    made = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.add_tokens([AddedToken(token, special=token.startswith("<|"), normalized=False) for token in MORE])
    tokenizer.save_pretrained(made)
    return made


@pytest.mark.parametrize("family", ENDS)
def test_the_tokens_that_end_a_turn(folder: Path, family: str) -> None:
    template, expected = ENDS[family]
    tokenizer = load_tokenizer(folder)
    found = turn_ends({"default": template}, tokenizer)
    assert sorted(tokenizer.decode([token]) for token in found) == sorted(expected)


TRL = find_spec("trl")
assert TRL is not None
assert TRL.origin is not None
PUBLISHED = Path(TRL.origin).parent / "chat_templates"
TOKENS = re.compile(r"<[|｜][^<>|｜\s{}']+[|｜]>|</?\|?[a-z_]+\|?>|\[/?[A-Z_]+\]")
"""What templates write that a tokenizer of theirs has as a token of its own."""
OF_FAMILY = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "diffusion_gemma": ["<turn|>"],
    "gemma4": ["<turn|>"],
    "gemma": ["<end_of_turn>"],
    "glm4moe": ["<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "idefics3": ["<end_of_utterance>"],
    "lfm2": ["<|im_end|>"],
    "llama3": ["<|eot_id|>"],
    "llava_next": ["</s>"],
    "nemotron_3": ["<|im_end|>"],
    "phi3": ["<|end|>"],
    "qwen": ["<|im_end|>"],
    "smolvlm": ["<end_of_utterance>"],
}


@pytest.mark.parametrize("family", cases(OF_FAMILY, "gptoss", "glm4moe", "phi3"))
def test_the_ends_of_published_templates(tmp_path: Path, family: str) -> None:
    """Of those that TRL has."""
    files = [file for file in sorted(PUBLISHED.glob("*.jinja")) if family_of(file) == family]
    texts = {file.stem: file.read_text() for file in files}
    assert texts
    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(tmp_path / "tokenizer"))
    named = sorted({token for text in texts.values() for token in TOKENS.findall(text)} - set(SPECIAL))
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in named])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer")
    for name, text in texts.items():
        found = {loaded.decode([token]) for token in turn_ends({"default": text}, loaded)}
        assert found <= set(OF_FAMILY[family]), name
        assert OF_FAMILY[family][0] in found, name


def family_of(file: Path) -> str | None:
    return next((family for family in OF_FAMILY if file.name.startswith(family)), None)


def test_a_template_of_tools_counts_as_well_and_what_is_no_end_in_one_is_none(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tools = LLAMA.replace("<|eot_id|>", "<|eom_id|>")
    found = turn_ends({"default": LLAMA, "tool_use": tools}, tokenizer)
    assert sorted(tokenizer.decode([token]) for token in found) == ["<|eom_id|>", "<|eot_id|>"]


def test_a_run_keeps_its_template_when_the_file_changes(folder: Path, tmp_path: Path) -> None:
    file, rows = tmp_path / "mine.jinja", tmp_path / "rows.jsonl"
    file.write_text(LLAMA)
    talk = {"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]}
    rows.write_text(json.dumps(talk) + "\n")
    data = DataConfig(source="messages", path=str(rows), chat_template=str(file), tokenizer=str(folder))
    tokenizer, _ = prepare_data(Recipe(name="x", data=data), tmp_path / "data")
    for now in ("changed", None):
        file.unlink() if now is None else file.write_text(now)
        template = load_template(data, tokenizer, tmp_path / "data")
        assert template is not None
        assert template.texts == {"default": LLAMA}
        assert [tokenizer.decode([end]) for end in trained_ends(data, template)] == ["<|eot_id|>"]
    kept = tmp_path / "data" / FILE
    assert verify_template(kept) == kept.stat().st_size
    kept.write_text(kept.read_text().replace("eot_id", "eom_id", 1))
    with pytest.raises(UserError, match=r"chat_template\.json: damaged: its content has CRC-32C"):
        load_template(data, tokenizer, tmp_path / "data")
    text = DataConfig(source="text", path=str(rows), tokenizer=str(folder))
    prepare_data(Recipe(name="x", data=text), tmp_path / "of text")
    assert not (tmp_path / "of text" / FILE).exists()
    assert trained_ends(text, template) == frozenset()


def test_further_templates_are_part_of_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    several = Path(shutil.copytree(folder, tmp_path / "several"))
    plain = load_tokenizer(several).fingerprint
    (several / "chat_template.jinja").write_text(CHATML)
    (several / "additional_chat_templates").mkdir()
    (several / "additional_chat_templates" / "tool_use.jinja").write_text(LLAMA)
    found = load_tokenizer(several)
    assert found.chat_template == {"default": CHATML, "tool_use": LLAMA}
    assert tokenizer_contents(several)["additional_chat_templates/tool_use.jinja"] == LLAMA.encode()
    (several / "additional_chat_templates" / "tool_use.jinja").write_text(PLAIN)
    assert len({plain, found.fingerprint, load_tokenizer(several).fingerprint}) == 3
    replaced = tokenizer_contents(several, {"default": THINKING, "rag": PLAIN})
    of_templates = {name: text.decode() for name, text in replaced.items() if name.endswith(".jinja")}
    assert of_templates == {"chat_template.jinja": THINKING, "additional_chat_templates/rag.jinja": PLAIN}
    with pytest.raises(UserError, match="its name cannot be a file's"):
        tokenizer_contents(several, {"default": THINKING, "../../rag": PLAIN})
    (several / "additional_chat_templates").rename(tmp_path / "elsewhere")
    (several / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"additional_chat_templates: it is a symbolic link .* which is outside"):
        load_tokenizer(several)


def test_a_model_s_type_may_change_its_tokenizer(tmp_path: Path) -> None:
    """transformers has Qwen's own way of cutting text for any tokenizer beside a qwen2."""
    text = "Hello  world, it's   text\n\nwith\tspace 1234 " * 3
    tokenizer = train_tokenizer([text], 300, tmp_path / "own")
    assert read_otherwise(tokenizer, "llama") is None
    said = read_otherwise(tokenizer, "qwen2")
    assert said is not None
    assert "AutoTokenizer reads this tokenizer as a Qwen2Tokenizer, which cuts text otherwise than the run does" in said
    shutil.copytree(tmp_path / "own", tmp_path / "beside")
    (tmp_path / "beside" / "config.json").write_text('{"model_type": "qwen2"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path / "beside")(text)["input_ids"]
    assert theirs != tokenizer.encode_batch([text])[0]
