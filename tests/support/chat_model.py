"""A tiny model folder with a tokenizer and a ChatML template, and files of conversations, made on the spot."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with generation markers."""
_FRUIT = ("apple", "pear", "plum", "cherry", "melon", "fig", "quince", "grape")
_COLOURS = ("red", "green", "blue", "yellow", "purple", "brown", "golden", "black")


def talk(number: int, turns: int = 1) -> dict[str, Any]:
    """A conversation: what colour a fruit has, which is the same whenever it is asked."""
    chance = random.Random(number)
    messages = []
    for _ in range(turns):
        fruit = chance.randrange(len(_FRUIT))
        messages.append({"role": "user", "content": f"What colour has the {_FRUIT[fruit]}?"})
        messages.append({"role": "assistant", "content": f"The {_FRUIT[fruit]} is {_COLOURS[fruit]}."})
    return {"messages": messages}


def write_talks(path: Path, count: int = 60) -> Path:
    """A file of conversations, a line each, of one to four turns."""
    path.write_text("".join(json.dumps(talk(number, 1 + number % 4)) + "\n" for number in range(count)))
    return path


def make_tokenizer(folder: Path, *, template: str | None = TEMPLATE) -> None:
    """A byte-level BPE of some 350 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bytes_, special = sorted(pre_tokenizers.ByteLevel.alphabet()), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=350, special_tokens=special, initial_alphabet=bytes_, show_progress=False)
    texts = (message["content"] for number in range(50) for message in talk(number, 4)["messages"])
    tokenizer.train_from_iterator(texts, trainer)
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = template
    fast.save_pretrained(folder)


def make_chat_model(folder: Path, *, template: str | None = TEMPLATE, **config: Any) -> Path:
    """A Qwen3-shaped model of some 60,000 parameters with random weights, its tokenizer and its template."""
    make_tokenizer(folder, template=template)
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 352, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 1024}
    shape["tie_word_embeddings"] = True
    make: Any = Qwen3Config
    model = AutoModelForCausalLM.from_config(make(**(shape | config)), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder
