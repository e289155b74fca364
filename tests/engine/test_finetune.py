"""Fine-tuning from a Hugging Face folder: imported, trained, exported and loaded in transformers; with rotary scaling
that the recipe sets, and with special tokens that it adds: the tokenizer's copy, and the rows they get. Runs that train
an adapter: exports as peft reads them, adapters to go on from, and what is refused. Runs of which a part is frozen."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import closing
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import adapted
import pytest
import tiny
import torch
from model_folders import as_users_have_it
from peft import PeftModel
from safetensors.torch import load_file, save_file
from samples import cases
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from penstock.engine.config import AdapterConfig, DataConfig, ModelConfig
from penstock.engine.export import export
from penstock.engine.hf.config import model_config
from penstock.engine.model.spec import layouts
from penstock.engine.train import train_step
from penstock.storage.files.errors import UserError
from penstock.storage.generations.store import NvmeStore

SCALED: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
}
SCALED["llama3"] = SCALED["yarn"] | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ADDED = ["<|user|>", "<|tool|>"]
TEXT = "some text to train on, and <|user|> some more of it\n"
UNTRAINED = r"model\.added_tokens: the rows of new tokens must be trained, but train\.freeze freezes .*"
STEPS = 2
IDS = torch.arange(40)[None] % 97
HALVES = ["*embed_tokens*", "*.layers.0.*", "*.mlp.*"]
"""Half of every layer, and of the lowest blocks everything."""
QUICK: dict[str, Any] = {"global_batch_size": 1, "chunk_tokens": 48}
CASES = {
    "llama": ("lora", ["all-linear", "embed_tokens", "lm_head"]),
    "qwen3": ("dora", ["q_proj", "down_proj"]),
    "gemma3_text": ("rslora", ["model.layers.1.*"]),
    "qwen3_moe": ("lora", ["all-linear", "gate", "gate_up_proj"]),
}


def scaled(origin: Path, rope: Any) -> dict[str, Any]:
    overrides = {"rope_parameters": rope, "max_position_embeddings": 256}
    model, data = ModelConfig(path=str(origin), overrides=overrides), tiny.data(sequence_length=200, max_documents=4)
    return {"model": model, "data": data, "train": tiny.training(steps=1, chunk_tokens=200, global_batch_size=1)}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_users_have_it(tmp_path_factory.mktemp("model") / "origin", "llama", False)


@pytest.mark.parametrize("kind", cases(SCALED, "llama3"))
def test_it_trains_past_the_old_length_and_is_exported(tmp_path: Path, origin: Path, kind: str) -> None:
    run, observer = scaled(origin, SCALED[kind]), tiny.Silent()
    tiny.train_run(tmp_path / "run", observer, **run)
    assert any(message.startswith("self-check: gradients equal") for message in observer.messages)
    export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["rope_parameters"] == SCALED[kind]
    assert "rope_scaling" not in values
    assert values["max_position_embeddings"] == 256
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters["rope_type"] == kind
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before, spec = load_file(origin / "model.safetensors"), tiny.spec_of(tuned.config)
    with closing(NvmeStore.open(tmp_path / "run" / "state")) as store:
        assert set(store.meta) >= {"step", "cursor", "versions"}
        for name, tensor in tiny.parameters(store, spec).items():
            assert torch.equal(tuned.state_dict()[name], tensor.bfloat16().float()), name
            assert "norm" in name or not torch.equal(tensor, before[name].float()), name
        assert set(layouts(spec)) == {array.buffer for array in store.arrays()}


@pytest.mark.parametrize(("rope", "message"), [
    ({"rope_type": "yarm", "factor": 4.0, "rope_theta": 10000.0}, "yarm"),
    ({"rope_type": "linear", "rope_theta": 10000.0}, "factor"),
    ({"rope_type": "yarn", "factor": "four", "rope_theta": 10000.0}, "factor"),
    ({"rope_type": "linear", "factor": 0.0, "rope_theta": 10000.0}, "factor"),
    ({"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0, "beta_fats": 1.0}, "beta_fats"),
    ("yarn", "rope_parameters"),
])  # fmt: skip
def test_a_slip_in_it_is_one_line(tmp_path: Path, origin: Path, rope: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as found:
        tiny.train_run(tmp_path / "run", tiny.Silent(), **scaled(origin, rope))
    assert "\n" not in str(found.value)


def test_tensors_that_the_model_of_the_config_does_not_have_are_told(tmp_path: Path, origin: Path) -> None:
    """They would change what the model computes, were the config the right one: of a bias or a layer more, say."""
    model = Path(shutil.copytree(origin, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    for names in (["model.layers.0.self_attn.rotary_emb.inv_freq"], ["model.layers.9.mlp.up_proj.weight", "x.bias"]):
        save_file(tensors | {name: torch.ones(2) for name in names}, model / "model.safetensors", {"format": "pt"})
        observer = tiny.Silent()
        run = {"model": ModelConfig(path=str(model)), "data": tiny.data(max_documents=4)}
        tiny.train_run(tmp_path / names[0], observer, **run, train=tiny.training(steps=1))
        said = [message for message in observer.messages if "have no place in the" in message]
        assert len(said) == len(names) - 1
    assert f"model.path: {model}: 2 of its tensors have no place in the llama model that" in said[0]
    assert "(model.layers.9.*, x.*)" in said[0]


def sections(folder: Path, origin: Path, added: list[str] = ADDED, **changes: Any) -> dict[str, Any]:
    """Of a run on some text, which is in `folder`."""
    file = folder / "text.txt"
    file.write_text(TEXT * 40)
    data = DataConfig(source="text", path=str(file), sequence_length=16)
    train = tiny.training(**{"steps": 2, "global_batch_size": 1} | changes)
    return {"model": ModelConfig(path=str(origin), added_tokens=added), "data": data, "train": train}


def model_of(folder: Path, tied: bool, rows: int) -> Path:
    """A model folder whose embedding has so many rows, its tokenizer 257 or a few more."""
    as_users_have_it(folder, "llama", tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(rows)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("tied", "spare"), [(False, 0), (True, 9)])
def test_rows_begin_as_the_mean_are_trained_and_exported(tmp_path: Path, tied: bool, spare: int) -> None:
    plain = as_users_have_it(tmp_path / "plain", "llama", tied)
    size = len(AutoTokenizer.from_pretrained(plain))
    origin = model_of(tmp_path / "origin", tied, size + spare)
    # A rate at which bfloat16 keeps every value: what is exported is what was imported.
    run, observer = sections(tmp_path, origin, lr=1e-30), tiny.Silent()
    tiny.train_run(tmp_path / "run", observer, **run)
    said = next(message for message in observer.messages if "tokens added" in message)
    grows, has = f"grows from {size} to {size + 2} rows", f"has {size + spare} rows, with spare rows for them"
    assert said == f"2 tokens added: the embedding {has if spare else grows}; new rows are the mean of the others"
    export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / "out", dtype="float32")
    before, after = load_file(origin / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    tables = ["model.embed_tokens.weight"] + ([] if tied else ["lm_head.weight"])
    for name in tables:
        assert len(after[name]) == max(size + 2, size + spare)
        mean = before[name][:size].float().mean(dim=0)
        assert torch.allclose(after[name][size : size + 2], mean.expand(2, -1), atol=1e-6)
        rest = [*range(size), *range(size + 2, size + spare)]
        assert torch.allclose(after[name][rest], before[name].float()[rest], rtol=0, atol=1e-20)
    assert before.keys() == after.keys()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("a<|user|>b")["input_ids"].count(size) == 1
    assert tokenizer.convert_tokens_to_ids(ADDED) == [size, size + 1]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.vocab_size == max(size + 2, size + spare)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    ids = loaded.generate(**tokenizer("some<|user|>", return_tensors="pt"), max_new_tokens=3, do_sample=False)
    assert ids.shape[1] > 3


def test_new_rows_are_trained(tmp_path: Path, origin: Path) -> None:
    size = len(AutoTokenizer.from_pretrained(origin))
    run = sections(tmp_path, origin, weight_decay=0.0)
    tiny.train_run(tmp_path / "run", tiny.Silent(stop_after=1), **run)
    tiny.train_run(tmp_path / "run", tiny.Silent(), resume=True, **run)
    export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / "out", dtype="float32")
    rows = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"][size : size + 2]
    assert not torch.allclose(rows[0], rows[1], atol=1e-4), "the one that occurs moves another way"


@pytest.mark.parametrize(("added", "freeze", "message"), [
    (["<a>", "<a>"], [], r"model\.added_tokens: '<a>' is listed twice"),
    (["  "], [], "is not a token"),
    (["<|endoftext|>"], [], r"'<\|endoftext\|>' is already a token of .*; remove it"),
    (ADDED, ["*embed_tokens*"], UNTRAINED + "embed"),
    (ADDED, ["lm_head*"], UNTRAINED + "m_hea"),
])  # fmt: skip
def test_what_cannot_be_added(tmp_path: Path, origin: Path, added: list[str], freeze: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as found:
        tiny.train_run(tmp_path / "run", tiny.Silent(), **sections(tmp_path, origin, added, freeze=freeze))
    assert "\n" not in str(found.value)
    assert freeze or not list((tmp_path / "run").rglob("tokenizer*.json"))
    assert not (tmp_path / "run" / "state").exists()


def test_a_tokenizer_beyond_the_embedding_is_refused_with_the_way_out(tmp_path: Path) -> None:
    origin = model_of(tmp_path / "origin", True, 200)
    with pytest.raises(UserError, match=r"beyond the model's vocabulary of 200; .*model\.added_tokens"):
        tiny.train_run(tmp_path / "run", tiny.Silent(), **sections(tmp_path, origin, []))


def folder_of(folder: Path, model_type: str, dtype: torch.dtype = torch.float32) -> Path:
    adapted.base(adapted.config(model_type)).to(dtype).save_pretrained(folder)
    return folder


def adapting(model: Path, adapter: AdapterConfig, **changes: Any) -> dict[str, Any]:
    train = {"steps": STEPS, "lr": 2e-2, "warmup_steps": 0, "global_batch_size": 1, "chunk_tokens": 24} | changes
    return {"model": ModelConfig(path=str(model)), "adapter": adapter, "train": tiny.training(**train)}


def loaded(model: Path, adapter: Path | None = None) -> Any:
    base = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    return base if adapter is None else PeftModel.from_pretrained(base, adapter).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.float()


@pytest.mark.parametrize("model_type", cases(CASES, "llama", "qwen3_moe"))
def test_exports_are_what_peft_makes_of_them(tmp_path: Path, model_type: str) -> None:
    method, targets = CASES[model_type]
    model = folder_of(tmp_path / "model", model_type)
    done = both_exports(tmp_path, adapting(model, adapted.section(method, targets=targets)), tiny.Silent())
    assert done.num_trained < done.num_params
    theirs = loaded(model, tmp_path / "adapter")
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == str(model)
    with_adapter = logits(theirs)
    assert (with_adapter - logits(loaded(model))).abs().max() > 1e-2, "nothing was learnt"
    assert torch.allclose(logits(loaded(tmp_path / "merged")), with_adapter, atol=1e-4)

    merged = dict(theirs.merge_and_unload().named_parameters())
    ours = dict(loaded(tmp_path / "merged").named_parameters())
    assert ours.keys() == merged.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter, merged[name]), name
    names = {file.name for file in model.iterdir()} | {"model.safetensors"}
    assert {file.name for file in (tmp_path / "merged").iterdir()} == names
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == load_file(model / "model.safetensors").keys()


def test_experts_that_are_blocks_of_their_own_are_merged_too(tmp_path: Path) -> None:
    """And in groups: to the bit what peft makes of them."""
    model = folder_of(tmp_path / "model", "qwen3_moe")
    both_exports(tmp_path, adapting(model, adapted.section("lora"), **tiny.GROUPS), tiny.Silent())
    merged = dict(loaded(model, tmp_path / "adapter").merge_and_unload().named_parameters())
    ours = dict(loaded(tmp_path / "merged").named_parameters())
    assert ours.keys() == merged.keys()
    for name, parameter in ours.items():
        assert torch.equal(parameter, merged[name]), name


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_a_base_that_is_finer_than_the_run_computes_is_merged_as_it_is(tmp_path: Path, method: str) -> None:
    """What has no adapter keeps its bits; the rest is what peft makes of the base in its own dtype."""
    model = folder_of(tmp_path / "model", "llama")
    run = adapting(model, adapted.section(method), compute_dtype="bfloat16")
    both_exports(tmp_path, run, tiny.Silent())
    merged = dict(loaded(model, tmp_path / "adapter").merge_and_unload().named_parameters())
    assert merged["model.embed_tokens.weight"].bfloat16().float().ne(merged["model.embed_tokens.weight"]).any()
    found = load_file(tmp_path / "merged" / "model.safetensors")
    for name, parameter in merged.items():
        assert torch.equal(found[name], parameter), name
    # A folder that has changed since is not what the run was trained on.
    base = load_file(model / "model.safetensors")
    save_file({name: tensor * 2 for name, tensor in base.items()}, model / "model.safetensors", {"format": "pt"})
    export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / "again", merged=True)
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.allclose(after[name], tensor, atol=1e-2) for name, tensor in found.items())


def both_exports(folder: Path, run: dict[str, Any], observer: tiny.Silent) -> Any:
    tiny.train_run(folder / "run", observer, **run)
    export(folder / "run", tiny.recipe(**run), out_dir=folder / "merged", merged=True)
    return export(folder / "run", tiny.recipe(**run), out_dir=folder / "adapter")


def test_a_run_goes_on_from_an_adapter_and_a_merge_keeps_the_bases_dtype(tmp_path: Path) -> None:
    """The first loss is that of the model with the adapter; a checkpoint's export is of its step. A base in bfloat16
    trained in float32 is merged in bfloat16, as peft does it with the base as it is loaded."""
    model, fresh = folder_of(tmp_path / "model", "llama", torch.bfloat16), tiny.Silent()
    both_exports(tmp_path, adapting(model, adapted.section("dora")), fresh)
    expected = loaded(model, tmp_path / "adapter").merge_and_unload()
    assert expected.dtype == torch.bfloat16
    found = load_file(tmp_path / "merged" / "model.safetensors")
    for name, parameter in expected.named_parameters():
        assert torch.equal(found[name], parameter), name
    second = adapting(model, adapted.section("dora", start=str(tmp_path / "adapter")))
    observer = tiny.Silent(asks={1: "early"})
    tiny.train_run(tmp_path / "second", observer, storage=tiny.storage(checkpoint_every=1), **second)
    assert observer.metrics[0].loss < fresh.metrics[0].loss - 0.01
    recipe = tiny.recipe(**second)
    assert export(tmp_path / "second", recipe, out_dir=tmp_path / "early", checkpoint="early").step == 1
    early, late = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("early", "adapter"))
    assert early.keys() == late.keys()
    assert not all(torch.equal(early[name], late[name]) for name in early)


def _changed(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | changes))

    return change


def _tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        save_file(change(load_file(file)), file)

    return changed


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "adapter_config.json: not readable"),
    "no LoRA": (_changed(peft_type="IA3"), "an adapter of type IA3; only LoRA is supported"),
    "patterns": (_changed(rank_pattern={"q_proj": 2}), "rank_pattern is set"),
    "rank": (_changed(r=8), "adapter.rank: 4 in the recipe, 8 in "),
    "shapes": (
        _tensors(lambda found: {name: tensor.repeat(1, 2) for name, tensor in found.items()}),
        "the adapter was trained on another base model",
    ),
    "targets": (
        _tensors(lambda found: dict(list(found.items())[1:])),
        "has no adapter for 'model.layers.0.self_attn.k_proj', which the recipe adapts",
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and an adapter of it by plain peft."""
    folder = tmp_path_factory.mktemp("start")
    model = folder_of(folder / "model", "llama")
    settings = adapted.peft_config(adapted.section("lora"), ["k_proj", "q_proj"])
    theirs = adapted.adapted(loaded(model), settings)
    for name, parameter in theirs.named_parameters():
        parameter.data.mul_(20 if "lora_B" in name else 1)
    theirs.save_pretrained(folder / "adapter")
    return model, folder / "adapter"


@pytest.mark.parametrize("broken", BROKEN)
def test_folders_that_no_run_goes_on_from(tmp_path: Path, folders: tuple[Path, Path], broken: str) -> None:
    model, whole = folders
    shutil.copytree(whole, tmp_path / "adapter")
    change, message = BROKEN[broken]
    change(tmp_path / "adapter")
    adapter = adapted.section("lora", targets=["q_proj", "k_proj"], start=str(tmp_path / "adapter"))
    with pytest.raises(UserError) as refusal:
        tiny.train_run(tmp_path / "run", tiny.Silent(), **adapting(model, adapter))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "run" / "state").exists()


def test_another_adapter_is_no_resumption(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    model, _ = folders
    run = adapting(model, adapted.section("lora", targets=["q_proj"]))
    tiny.train_run(tmp_path / "run", tiny.Silent(stop_after=1), **run)
    said = "adapter.alpha: 8.0 in the recipe, 6.0 in the run"
    for changes, message in (({"alpha": 8.0}, said), ({"rank": 2}, "adap")):
        other = run | {"adapter": adapted.section("lora", targets=["q_proj"], **changes)}
        with pytest.raises(UserError, match=message):
            tiny.train_run(tmp_path / "run", tiny.Silent(), resume=True, **other)
    observer = tiny.Silent()
    tiny.train_run(tmp_path / "run", observer, resume=True, **run)
    assert [m.step for m in observer.metrics] == [2]


def test_an_adapter_beside_random_weights_is_exported_merged(tmp_path: Path) -> None:
    run = {"adapter": adapted.section("lora"), "train": tiny.training(steps=1)}
    tiny.train_run(tmp_path / "run", tiny.Silent(), **run)
    told = export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / "merged")
    assert told.adapter is None
    (remark,) = told.remarks
    assert remark.startswith("merged: the adapter was trained on random weights that exist only in this run, so the ")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.float32


def frozen(**changes: Any) -> Any:
    return tiny.training(**({"freeze": HALVES} | changes))


def test_what_is_frozen_has_weights_and_nothing_is_written_of_it(tmp_path: Path) -> None:
    """Counted per tier: memory by kind, and files and bytes on the drive over three commits."""
    t, s = frozen(compute_dtype="bfloat16", **QUICK), tiny.storage(checkpoint_every=1)
    with tiny.session(tmp_path, t=t, s=s, gpu=700_000, ram=420_000) as session:
        plan, root = session.plan, session.store.root
        stays = [buffer for buffer in plan.buffers.values() if buffer.frozen]
        names = {buffer.name for buffer in stays}
        assert names == session.spec.buffers.keys() - session.spec.trained.keys()
        for buffer in stays:
            for tier, memory in (("gpu", session.gpu.buffers), ("ram", session.ram.buffers)):
                held = memory[buffer.name]
                assert set(held) == ({"weights"} if buffer.weights == tier else set())
                assert all(tensor.numel() * tensor.element_size() == 2 * buffer.numel for tensor in held.values())
        files = {path: os.stat(path) for path in root.glob("*.frozen/*/*/c.*.0")}
        assert {path.parts[-3] for path in files} == {"weights"}
        assert len(files) == sum(buffer.num_parts for buffer in stays)
        before = session.store.traffic()[root].bytes_written
        for _ in range(3):
            train_step(session)
        session.finish()
        spans = session.executor.take_spans()
        moved = session.store.traffic()[root].bytes_written - before
        assert {span.lane for span in spans if span.block in names} <= {"nvme_read", "h2d"}
        after = {path: os.stat(path) for path in root.rglob("*.frozen/*/*/c.*.0") if "checkpoints" not in path.parts}
        kinds = ("st_ino", "st_mtime_ns", "st_size")
        assert after.keys() == files.keys()
        assert all(getattr(after[path], kind) == getattr(files[path], kind) for path in after for kind in kinds)
        written = sum(span.bytes for span in spans if span.lane == "nvme_write")
        trained = sum(b.numel for b in plan.buffers.values() if not b.frozen)
        assert 3 * 12 * trained <= written <= 3 * (12 + 2 + 4) * trained + 3 * plan.spill_bytes
        assert moved >= written


def test_a_frozen_run_goes_on_from_checkpoints_and_only_as_it_began(tmp_path: Path) -> None:
    storage = tiny.storage(checkpoint_every=1, keep_last=2, keep_good=None)
    t = frozen(steps=6, compute_dtype="bfloat16", **QUICK)
    straight, again = tiny.Silent(), tiny.Silent()
    tiny.train_run(tmp_path, straight, train=t, storage=storage)
    expected = tiny.digest_of(tmp_path)
    tiny.train_run(tmp_path, again, train=t, storage=storage, resume=True, checkpoint="step-000005")
    assert [m.loss for m in again.metrics] == [m.loss for m in straight.metrics[5:]]
    assert tiny.digest_of(tmp_path) == expected
    assert "of which" in next(text for text in straight.messages if text.startswith("model: "))
    for changes, said in (
        ({"freeze": []}, r"train\.freeze: the run in .* began with \[\"\*embed_tokens"),
        ({"freeze": HALVES[:2]}, r"train\.freeze: .*which a resumed run cannot change"),
        ({"compute_dtype": "float32"}, r"train\.compute_dtype: .*kept in bfloat16.* set train\.compute_dtype=bfloat16"),
    ):
        other = frozen(**{"steps": 8, "compute_dtype": "bfloat16"} | QUICK | changes)
        with pytest.raises(UserError, match=said):
            tiny.train_run(tmp_path, tiny.Silent(), train=other, resume=True, storage=storage)
    assert tiny.digest_of(tmp_path) == expected
    with closing(NvmeStore.open(tmp_path / "state", read_only=True)) as store:
        store.verify()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_an_export_has_the_imported_bits_of_what_is_frozen(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also of those that the run computes with as bfloat16. Experts of which one half is frozen, where the checkpoint
    has them one by one: a conversion makes parameters of both of a block's buffers."""
    overrides = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    shape = tiny.model(model_type="qwen3_moe", overrides=overrides)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(model_config(tiny.recipe(model=shape), None), dtype=dtype)
    model.save_pretrained(tmp_path / "model")
    freeze = ["*embed_tokens*", "*.layers.0.*", "*gate_up_proj", "*.self_attn.*"]
    train = frozen(steps=1, freeze=freeze, compute_dtype="bfloat16", **QUICK)
    run = {"model": ModelConfig(path=str(tmp_path / "model")), "train": train}
    tiny.train_run(tmp_path / "run", tiny.Silent(), **run)
    exported = export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / "out")
    assert exported.num_params == sum(parameter.numel() for parameter in model.parameters())
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    patterns = [*freeze, "*.gate_proj*", "*.up_proj*"]
    assert {name for name in before if any(fnmatch(name, pattern) for pattern in patterns)} <= same
    assert {name for name in before if ".1.mlp.experts" in name and "down_proj" in name}.isdisjoint(same)
