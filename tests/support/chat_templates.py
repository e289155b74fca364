"""Chat templates in the styles that models have them, and small tokenizers that know their tokens."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content + '<|im_end|>\\n' -}}{%- endgeneration -%}
{%- else -%}{{- message.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

LLAMA = """\
{%- for message in messages -%}
{%- if loop.first -%}{{- bos_token -}}{%- endif -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content | trim + '<|eot_id|>' -}}{%- endgeneration -%}
{%- else -%}{{- message.content | trim + '<|eot_id|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""

THINKING = """\
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for tool in tools or [] -%}{{- '<|im_start|>tool\\n' + (tool | tojson) + '<|im_end|>\\n' -}}{%- endfor -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' and loop.index0 > last.user -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
"""As Qwen3's: thoughts, empty ones here, stand before the answer to the last question alone."""

PLAIN = """\
{%- for message in messages -%}
{{- '### ' + message.role + '\\n' + message.content + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '### assistant\\n' -}}{%- endif -%}"""
"""No token ends a turn."""

EOS, BOS = "<|end|>", "<|begin|>"
SPECIAL = [EOS, BOS, "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def unmarked(template: str) -> str:
    """The template without its generation markers."""
    return template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")


@cache
def _backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=bytes_, show_progress=False)
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    return str(tokenizer.to_str())


def make_tokenizer(
    folder: Path, template: str | None = None, *, puts_bos: bool = False, special: Sequence[str | AddedToken] = ()
) -> Path:
    """A Hugging Face folder of a byte-level BPE; `puts_bos`: its post-processor begins texts with BOS, as Llama 3's;
    `special`: tokens beside those of SPECIAL."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = Tokenizer.from_str(_backend())
    backend.add_special_tokens(list(special))
    if puts_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, backend.token_to_id(BOS))]
        )
    backend.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "bos_token": BOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
