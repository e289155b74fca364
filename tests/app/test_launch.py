from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from penstock.app.launch import sample_text
from penstock.engine.data.tokenizer import train_tokenizer


def test_sample_is_the_prompt_and_tokens_drawn_with_a_seed(tmp_path: Path) -> None:
    """A model that is all but certain of each token leaves the draw one choice: the most likely tokens."""
    train_tokenizer(["def read(self):\n    return self.file\n"] * 20, 280, tmp_path)
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "head_dim": 8}
    config = AutoConfig.for_model("qwen3", vocab_size=280, num_attention_heads=2, num_key_value_heads=1, **shape)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    assert sample_text(tmp_path, "def read", 12) == sample_text(tmp_path, "def read", 12)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e5)
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("def read", return_tensors="pt").input_ids
    num_prompt = ids.shape[1]
    for _ in range(12):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert sample_text(tmp_path, "def read", 12) == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert ids.shape[1] == num_prompt + 12
