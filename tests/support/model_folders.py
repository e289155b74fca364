"""Model folders as users have them: small models, saved by transformers with their tokenizers."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from penstock.engine.data.text.made_tokenizer import train_tokenizer

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}


def as_users_have_it(folder: Path, model_type: str, tied: bool) -> Path:
    """A model folder as `save_pretrained` of model and tokenizer writes it, and the hub's page of it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES)
    config.tie_word_embeddings = tied
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    trained = train_tokenizer(["some text to train on"], 260, folder / "own")
    tokenizer = AutoTokenizer.from_pretrained(trained.folder)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    for file in (folder / "own").iterdir():
        file.unlink()
    (folder / "own").rmdir()
    (folder / "README.md").write_text("of the original")
    return folder
