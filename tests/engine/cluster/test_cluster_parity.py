"""FSDP2 with two ranks against the engine: the same recipe, the same losses, step by step, in float32."""

from pathlib import Path
from typing import Any

import pytest
import tiny
from chat_model import make_chat_model, write_talks
from cluster_ranks import train_on_ranks

from penstock.app.recipe import to_dict
from penstock.engine.config import AdapterConfig, DataConfig, ModelConfig, Recipe, StorageConfig

STEPS = 20
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def recipes(folder: Path) -> dict[str, Recipe]:
    """Everything that decides what is trained on what, a few things at a time."""
    chat = make_chat_model(folder / "chat-model")
    talks = write_talks(folder / "talks.jsonl")

    def of(train: dict[str, Any], **sections: Any) -> Recipe:
        settings = {"steps": STEPS, "global_batch_size": 4, "chunk_tokens": 96, "lr": 3e-3, "warmup_steps": 3} | train
        whole = {"storage": StorageConfig(checkpoint_every=1000), **sections}
        return tiny.recipe(train=tiny.training(**settings), **whole)

    def masked(**changes: Any) -> dict[str, Any]:
        data = DataConfig(source="messages", path=str(talks), sequence_length=96, **changes)
        return {"model": ModelConfig(path=str(chat)), "data": data}

    experts = tiny.model(model_type="qwen3_moe", overrides=EXPERTS)
    return {
        "plain": of({"z_loss": 1e-2, "lr_schedule": "wsd", "activation_checkpointing": "full"}),
        "tied": of({"micro_batch_size": 2}, model=tiny.model(tie_embeddings=True)),
        "groups": of({"lr_groups": {"*embed_tokens*": 0.1}, "layer_lr_decay": 0.8, "freeze": ["*.layers.0.*"]}),
        "masked": of(
            {"validate_every": 8, "validate_first": True, "validation_sequences": 6},
            **masked(packing="best_fit", validation_documents=7),
        ),
        "unpacked": of({"clip_norm": None}, **masked(packing="none")),
        "lora": of({}, adapter=AdapterConfig(method="lora", rank=4), **masked(packing="best_fit")),
        "dora": of({"activation_checkpointing": "none"}, adapter=AdapterConfig(method="dora", rank=4)),
        "experts": of({}, model=experts),
        "balanced": of({"global_batch_size": 2, "router_aux_loss": 0.1}, model=experts),
        "balanced turn": of({"global_batch_size": 1, "router_aux_loss": 0.1}, model=experts),
        "recurrent": of({}, model=tiny.model(model_type="qwen3_next", overrides=tiny.HYBRID)),
        "capped": of({}, model=tiny.model(model_type="gemma2", overrides={"sliding_window": 16})),
    }


SPREAD = ("plain", "masked", "lora", "balanced turn", "capped")
"""Those that are also trained with each context spread over both ranks."""


@pytest.mark.long
def test_losses_are_those_of_the_engine(tmp_path: Path) -> None:
    whole = recipes(tmp_path)
    cases = {name: (recipe, 1) for name, recipe in whole.items() if name != "balanced turn"}
    cases |= {f"{name} spread": (whole[name], 2) for name in SPREAD}
    found = train_on_ranks(tmp_path, {name: (to_dict(recipe), spread) for name, (recipe, spread) in cases.items()})
    alone: dict[str, tiny.Silent] = {}
    for name, (recipe, _) in cases.items():
        plain = name.removesuffix(" spread")
        if plain not in alone:
            alone[plain] = tiny.Silent()
            tiny.train(recipe, run_dir=tmp_path / f"{name} alone", observer=alone[plain], resume=False)
        here, there = alone[plain], found[name]
        assert len(there["losses"]) == STEPS
        losses = [m.loss for m in here.metrics]
        assert there["losses"] == pytest.approx(losses, abs=1e-4), name
        assert there["norms"] == pytest.approx([m.grad_norm for m in here.metrics], rel=1e-3), name
        assert there["tokens"] == [m.tokens for m in here.metrics], name
        validations = [(m.step, m.loss, m.accuracy) for m in here.validations]
        assert there["validations"] == [pytest.approx(each, abs=1e-4) for each in validations], name
        assert len(validations) == (4 if plain == "masked" else 0)
