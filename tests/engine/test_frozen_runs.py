"""Runs of which a part is frozen: the same bits on every tier, and of what is frozen weights and nothing else."""

from __future__ import annotations

import os
import random
import re
from contextlib import closing
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from samples import samples
from transformers import AutoModelForCausalLM

from penstock.engine.config import ModelConfig
from penstock.engine.export import export
from penstock.engine.hf.config import model_config
from penstock.engine.train import train_step
from penstock.storage.errors import UserError
from penstock.storage.nvme import NvmeStore

HALVES = ["*embed_tokens*", "*.layers.0.*", "*.mlp.*"]
"""Half of every layer, and of the lowest blocks everything."""
TIERS = [("1GiB", "1GiB"), (tiny.FLOOR, "1GiB"), (tiny.FLOOR, tiny.FLOOR), (700_000, 420_000)]
"""As tiny.TIERS, for what a frozen model needs: all on the GPU, in RAM, on NVMe, some of it on each."""


QUICK: dict[str, Any] = {"global_batch_size": 1, "chunk_tokens": 48}


def frozen(**changes: Any) -> Any:
    return tiny.training(**({"freeze": HALVES} | changes))


POLICIES = [
    {"chunk_tokens": 9, "kv_window": "streamed"},
    {"chunk_tokens": 20},
    {"chunk_tokens": 9, "activation_checkpointing": "none"},
    {"chunk_tokens": 9, "activation_checkpointing": "full"},
]


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(POLICIES)))
def test_placement_and_delays_change_no_bit(tmp_path: Path, number: int) -> None:
    digests, tiers, policy = set(), set(), POLICIES[number]
    whole = policy.get("activation_checkpointing") == "none"
    for tier, (gpu, ram) in enumerate([*TIERS[:1], ("1GiB", tiny.FLOOR)] if whole else TIERS):
        for seed in range(samples(1, 4)):
            t = frozen(compute_dtype="bfloat16", global_batch_size=1, **policy)
            with tiny.session(tmp_path / f"{tier}-{seed}", t=t, gpu=gpu, ram=ram) as session:
                tiny.delay(session, random.Random(f"{policy} {tier} {seed}"))
                tiers |= {b.weights for b in session.plan.buffers.values() if b.frozen}
                tiny.steps(session, 2)
                digests.add(tiny.digest(session.store))
    assert len(digests) == 1
    assert tiers == ({"gpu"} if whole else {"gpu", "ram", "nvme"})


@pytest.mark.parametrize(("gpu", "ram"), TIERS[3:])
def test_what_is_frozen_has_weights_and_nothing_is_written_of_it(
    tmp_path: Path, gpu: str | int, ram: str | int
) -> None:
    """Counted per tier: memory by kind, and files and bytes on the drive over three commits."""
    t, s = frozen(compute_dtype="bfloat16", **QUICK), tiny.storage(checkpoint_every=1)
    with tiny.session(tmp_path, t=t, s=s, gpu=gpu, ram=ram) as session:
        plan, root = session.plan, session.store.root
        stays = [buffer for buffer in plan.buffers.values() if buffer.frozen]
        assert {b.name for b in stays} == session.spec.frozen
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
        names = {buffer.name for buffer in stays}
        assert {span.lane for span in spans if span.block in names} <= {"nvme_read", "h2d"}
        after = {path: os.stat(path) for path in root.rglob("*.frozen/*/*/c.*.0") if "checkpoints" not in path.parts}
        kinds = ("st_ino", "st_mtime_ns", "st_size")
        assert [[getattr(after[p], k) for k in kinds] for p in after] == [
            [getattr(files[p], k) for k in kinds] for p in after
        ]
        assert after.keys() == files.keys()
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


def test_what_cannot_be_frozen_is_said_before_anything_is_written(tmp_path: Path) -> None:
    said = "train.lr_groups: '*.mlp.*' matches only frozen parameters, which have no learning rate; remove it"
    train = tiny.training(freeze=["*.mlp.*"], lr_groups={"*.mlp.*": 0.1})
    with pytest.raises(UserError, match=re.escape(said)):
        tiny.train_run(tmp_path, tiny.Silent(), train=train)
    assert not (tmp_path / "state").exists()


def test_an_export_has_the_imported_bits_of_what_is_frozen(tmp_path: Path) -> None:
    """Experts of which one half is frozen, where the checkpoint has them one by one: a conversion makes parameters of
    both of a block's buffers."""
    overrides = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    shape = tiny.model(model_type="qwen3_moe", overrides=overrides)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(model_config(tiny.recipe(model=shape), None), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    freeze = ["*embed_tokens*", "*.layers.0.*", "*gate_up_proj", "*.self_attn.*"]
    run: dict[str, Any] = {
        "model": ModelConfig(path=str(tmp_path / "model")),
        "train": frozen(steps=1, freeze=freeze, compute_dtype="bfloat16", **QUICK),
    }
    tiny.train_run(tmp_path / "run", tiny.Silent(), **run)
    exported = export(tmp_path / "run", tiny.recipe(**run), out_dir=tmp_path / "out")
    assert exported.num_params == sum(parameter.numel() for parameter in model.parameters())
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    stays = {
        name for name in before if any(fnmatch(name, p) for p in freeze) or ".gate_proj" in name or ".up_proj" in name
    }
    assert stays <= same
    assert {name for name in before if ".1.mlp.experts" in name and "down_proj" in name}.isdisjoint(same)
