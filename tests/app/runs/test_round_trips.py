"""What is exported of a run renders, tokenises and answers as the run does, in whatever loads it: transformers, its
pipelines, peft and Penstock itself; of 25 model types, whole, as an adapter, merged, in small files and in bfloat16."""

import json
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from chat_model import TEMPLATE, make_tokenizer, talk, write_talks
from peft import PeftModel
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, pipeline

import penstock
from penstock import AdapterConfig, AfterConfig, BudgetConfig, DataConfig, ModelConfig, Recipe, TrainConfig
from penstock.app.launch.run import export_run
from penstock.app.runs.directory import read_recipe
from penstock.engine.data.text.tokenizer import load_tokenizer
from penstock.engine.model.shrink import shrink
from penstock.engine.model.trace import random_model
from penstock.storage.generations.store import NvmeStore

NAMES = (
    "llama mistral helium qwen2 qwen3 phi phi3 olmo2 olmo3 gemma gemma2 gemma3_text cohere cohere2 granite "
    "starcoder2 stablelm glm glm4 smollm3 mixtral qwen2_moe qwen3_moe gpt_oss deepseek_v3 granitemoe ernie4_5 exaone4"
)
TYPES: dict[str, dict[str, Any]] = {name: {} for name in NAMES.split()}
FORMS = ("whole", "sharded", "bf16", "adapter", "merged")
OFTEN = [("qwen3_moe", "whole"), ("qwen3_moe", "merged")]
PAIRS = [(name, form) for name in TYPES for form in FORMS]
CASES = [pytest.param(*pair, marks=() if pair in OFTEN else pytest.mark.long) for pair in PAIRS]
ASKED = [{"role": "user", "content": "What colour has the apple?"}]
TOKENS = 6
SMALL: dict[str, Any] = {"gpu": "1GiB", "ram": "1GiB"}


def small_config(model_type: str) -> PretrainedConfig:
    """As the self-check has it, with room for the tokens of conversations."""
    config, _ = shrink(CONFIG_MAPPING[model_type](**TYPES[model_type]))
    text = config.get_text_config(decoder=True)
    text.vocab_size = 352
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(text, name, 0)
    return config


class Case:
    """A model type's folder and its runs."""

    def __init__(self, model_type: str, folder: Path) -> None:
        self.folder, self.config = folder, small_config(model_type)
        self.rows = write_talks(folder / "rows.jsonl", 8)
        self.template = folder / "mine.jinja"
        self.template.write_text(TEMPLATE)

    @cache  # noqa: B019
    def base(self, dtype: torch.dtype, shards: str = "5GB") -> Path:
        """A base model: no template, and its texts end otherwise than the turns of the data."""
        folder = self.folder / f"{str(dtype).removeprefix('torch.')}-{shards}"
        random = random_model(self.config)
        model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        model.load_state_dict(random.state_dict())
        model.to(dtype).save_pretrained(folder, max_shard_size=shards)
        make_tokenizer(folder, template=None)
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<|endoftext|>"}))
        return folder

    @cache  # noqa: B019
    def run(self, base: Path, adapter: bool = False) -> Path:
        recipe = Recipe(
            name="tuned",
            model=ModelConfig(path=str(base)),
            data=DataConfig(
                source="messages", path=str(self.rows), chat_template=str(self.template), sequence_length=64
            ),
            train=TrainConfig(
                steps=1,
                global_batch_size=1,
                lr=1e-2,
                compute_dtype="float32",
                compile="off",
                calibrate=False,
                device="cpu",
            ),
            adapter=AdapterConfig(method="lora", rank=4) if adapter else AdapterConfig(),
            budgets=BudgetConfig(**SMALL),
        )
        return penstock.train(recipe, run_dir=self.folder / f"run-{base.name}-{adapter}", on_message=lambda text: None)

    @cache  # noqa: B019
    def exported(self, form: str) -> tuple[Path, Path]:
        """The export, and its run."""
        base = self.base(torch.bfloat16 if form == "bf16" else torch.float32, "40KB" if form == "sharded" else "5GB")
        run = self.run(base, form in ("adapter", "merged"))
        after = AfterConfig(
            export=True,
            export_merged=form == "merged",
            export_dtype="float32" if form == "merged" else "auto",
            export_shard="40kB" if form == "sharded" else "5GB",
        )
        out = self.folder / f"out-{form}"
        export_run(run, read_recipe(run), out, after=after)
        return out, run


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def trained_model(run: Path, base: Path, dtype: torch.dtype) -> Any:
    """The base in transformers with the parameters of the run's last generation rounded to `dtype`, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with closing(NvmeStore.open(run / "state", read_only=True)) as store:
        values = tiny.parameters(store, tiny.spec_of(model.config))
    missing, unexpected = model.load_state_dict({name: value.to(dtype) for name, value in values.items()}, strict=False)
    assert not unexpected
    assert not {name for name, _ in model.named_parameters()} & set(missing)
    return model


def answer_of(model: Any, ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Greedily, by transformers."""
    with torch.no_grad():
        made = model.generate(torch.tensor([list(ids)]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    found: list[int] = made[0, len(ids) :].tolist()
    return found[:-1] if found and found[-1] in ends else found


def logits_of(model: Any, ids: Sequence[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(ids)])).logits
    return logits


@pytest.mark.parametrize(("case", "form"), CASES, indirect=["case"])
def test_an_export_is_its_run(case: Case, form: str) -> None:
    out, run = case.exported(form)
    base = Path(str(read_recipe(run).model.path))
    # It renders and tokenises as the run did.
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    rendered = tokenizer.apply_chat_template(talk(3, 2)["messages"], tokenize=False)
    plain: Any = AutoTokenizer.from_pretrained(base)
    assert rendered == plain.apply_chat_template(talk(3, 2)["messages"], chat_template=TEMPLATE, tokenize=False)
    ids = load_tokenizer(base).encode_batch([rendered])[0]
    assert tokenizer(rendered, add_special_tokens=False)["input_ids"] == ids
    asked = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=True)["input_ids"]
    # It has the run's weights.
    config = json.loads(((base if form == "adapter" else out) / "config.json").read_text())
    dtype = torch.bfloat16 if form == "bf16" else torch.float32
    assert getattr(torch, config["dtype"]) == dtype
    found: Any
    if form == "adapter":
        whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        found = PeftModel.from_pretrained(whole, str(out)).eval()
    else:
        assert (len(list(out.glob("*.safetensors"))) > 1) == (form == "sharded")
        found = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    if form in ("whole", "sharded", "bf16"):
        expected = trained_model(run, base, dtype)
        values = found.state_dict()
        assert all(torch.equal(value, values[name]) for name, value in expected.state_dict().items())
        torch.testing.assert_close(logits_of(found, ids), logits_of(expected, ids), rtol=1e-5, atol=1e-5)
    elif form == "merged":
        alone, _ = case.exported("adapter")
        whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        adapted: Any = PeftModel.from_pretrained(whole, str(alone)).eval()
        torch.testing.assert_close(logits_of(found, ids), logits_of(adapted, ids), rtol=1e-4, atol=1e-4)
    # It answers as the run does, whoever asks, and stops where a turn ends.
    ends = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|endoftext|>", "<|im_end|>"]
    if form != "adapter":
        assert found.generation_config.eos_token_id == ends
    else:
        found.generation_config.eos_token_id = ends
    answer = tokenizer.decode(answer_of(found, asked, ends))
    options: dict[str, Any] = {"chat": True, "tokens": TOKENS, **SMALL}
    assert penstock.sample(out, ASKED[0]["content"], **options) == [answer]
    if form != "bf16":  # whose weights are rounded
        assert penstock.sample(run, ASKED[0]["content"], **options) == [answer]
    write: Any = pipeline("text-generation", model=str(out), tokenizer=str(out), dtype=torch.float32)
    if form == "adapter":
        write.model.generation_config.eos_token_id = ends
    written = write(ASKED, max_new_tokens=TOKENS, do_sample=False)[0]["generated_text"][-1]["content"]
    special = tokenizer(answer, add_special_tokens=False)["input_ids"]
    assert written == tokenizer.decode(special, skip_special_tokens=True)
