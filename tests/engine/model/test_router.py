"""The load-balancing loss of mixtures of experts: transformers' own total gradient, streamed on any plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from plain import plain_model
from samples import cases
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PretrainedConfig
from weighted import WeightedLoader

from penstock.engine.hf.config import model_config
from penstock.engine.model.check import TokenStream, check_model, relative_errors
from penstock.engine.model.reference import forward_backward, in_buffers
from penstock.engine.model.router import balancing_loss, router_coefficient
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.trace import random_model
from penstock.engine.session import Session
from penstock.storage.errors import UserError

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 24},
}
WEIGHT = 0.7
"""Large, so that the loss is most of a router's gradient."""


def config_of(kind: str, **overrides: Any) -> PretrainedConfig:
    heads = {"num_kv_heads": 4, "head_dim": None} if kind == "olmoe" else {}
    m = tiny.model(model_type=kind, num_layers=2, overrides=FAMILIES.get(kind, {}) | overrides, **heads)
    return model_config(tiny.recipe(model=m), None)


@pytest.mark.parametrize("kind", cases(FAMILIES, "mixtral", "qwen2_moe"))
def test_it_is_the_total_gradient_of_one_forward_in_transformers(kind: str) -> None:
    """Of `model(..., labels, output_router_logits=True)` over one document, which is streamed in chunks of 7."""
    config = config_of(kind, router_aux_loss_coef=WEIGHT)
    spec, source = tiny.spec_of(config), random_model(config, 1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.load_state_dict(source.state_dict())
    ids = torch.randint(300, (40,), generator=torch.Generator().manual_seed(0))
    output = model(input_ids=ids[None], labels=ids[None], output_router_logits=True)
    output.loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {}
    for weight in (WEIGHT, 0.0):
        runner = ModelRunner(spec, device="cpu", dtype=torch.float32, router_aux_loss=weight)
        weights = in_buffers(spec, {name: parameter.detach() for name, parameter in source.named_parameters()})
        grads = in_buffers(spec, {name: torch.zeros_like(tensor) for name, tensor in weights.items()})
        loss = forward_backward(runner, weights, grads, [TokenStream.of([ids])], 7, 1 << 14)
        found[weight] = relative_errors(grads, expected)
        assert loss == pytest.approx(float((output.loss - WEIGHT * output.aux_loss).detach()), rel=1e-5), (
            "the cross entropy alone"
        )
    assert max(found[WEIGHT].values()) < 1e-5
    assert max(found[0.0].values()) > 1e-2


@pytest.mark.long
@pytest.mark.parametrize("pieces", [False, True])
def test_the_self_check_covers_it(pieces: bool) -> None:
    aux = 0.3
    result = check_model(config_of("qwen3_moe"), pieces=pieces, router_aux_loss=aux)
    assert result.ok, result.reason
    switched_on = config_of("mixtral", output_router_logits=True, router_aux_loss_coef=aux)
    assert router_coefficient(switched_on, None) == aux
    assert check_model(switched_on, pieces=pieces).ok


STREAMED = {"kv_window": "streamed", "chunk_tokens": 7}
FLOORS = {"gpu": tiny.FLOOR, "ram": tiny.FLOOR}
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nvme-recomputed": ({"activation_checkpointing": "full"}, FLOORS),
    "gpu": ({}, {}),
    "nvme-streamed": (STREAMED, FLOORS),
}


def plain_gradients(model: Any, session: Session) -> dict[str, Tensor]:
    """What transformers alone finds of the next step's real tokens, balanced over all of them together."""
    micro_batches = session.loader.next_step()
    targets, routed, losses = sum(m.num_targets for m in micro_batches), [], []
    for m in micro_batches:
        end = len(m.ids) if m.filled is None else m.filled
        for first, last in zip(m.documents, [*m.documents[1:], len(m.ids)], strict=True):
            if first < end:
                some = slice(first, min(last, end))
                output = model(input_ids=m.ids[None, some], output_router_logits=True)
                routed.append(output.router_logits)
                losses.append(cross_entropy(output.logits[0], m.labels[some], ignore_index=-100, reduction="sum"))
    model.zero_grad()
    (torch.stack(losses).sum() / targets + WEIGHT * balancing_loss(model, routed)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", cases(PLANS, "nvme-streamed"))
def test_a_step_balances_over_all_its_tokens_and_no_padding(tmp_path: Path, name: str) -> None:
    """Adam's first moments after two steps whose update is next to nothing; micro-batches are padded."""
    policy, budgets = PLANS[name]
    m = tiny.model(model_type="qwen3_moe", num_layers=2, overrides=EXPERTS)
    options: dict[str, Any] = {"steps": 2, "global_batch_size": 3, "clip_norm": None, "lr": 1e-30, "weight_decay": 0.0}
    t = tiny.training(router_aux_loss=WEIGHT, **options, **policy)
    found = []
    for _ in range(2):
        with tiny.session(tmp_path / str(len(found)), m=m, t=t, **budgets) as session:
            session.loader = WeightedLoader(session.loader, [1.0, 0.3], weights=False)  # type: ignore[assignment]
            if not found:
                model = plain_model(session)
                found.append([plain_gradients(model, session) for _ in range(2)])
                continue
            tiny.steps(session)
            moments = tiny.first_moments(session.store, session.spec)
    first, second = found[0]
    for parameter, moment in moments.items():
        expected = 0.1 * (0.9 * first[parameter] + second[parameter])
        assert (moment - expected).norm() <= 3e-5 * expected.norm(), parameter


def test_a_model_without_it_is_refused_in_one_line() -> None:
    for kind in ("llama", "qwen3"):
        with pytest.raises(UserError, match=rf"train\.router_aux_loss: 0\.01, but model type '{kind}' defines no"):
            router_coefficient(config_of(kind), 0.01)
        assert router_coefficient(config_of(kind), None) == router_coefficient(config_of(kind), 0.0) == 0
    assert router_coefficient(config_of("mixtral", router_aux_loss_coef=0.5), None) == 0, "the config leaves it off"
    assert router_coefficient(config_of("mixtral", output_router_logits=True), 0.0) == 0
    with pytest.raises(UserError, match="pads every row"):
        router_coefficient(config_of("qwen3_moe"), 0.1, recurrent=True)


@pytest.mark.long
def test_compiled_layers_balance_alike(tmp_path: Path) -> None:
    """Compiled chunks are not cut where padding begins: what they hold of it is computed and not counted."""
    m = tiny.model(model_type="qwen3_moe", num_layers=2, overrides=EXPERTS)
    found = []
    for compile in ("off", "on"):
        t = tiny.training(steps=2, global_batch_size=3, router_aux_loss=WEIGHT, compile=compile)
        with tiny.session(tmp_path / compile, m=m, t=t) as session:
            session.loader = WeightedLoader(session.loader, [1.0, 0.3])  # type: ignore[assignment]
            found.append([x for metrics in tiny.steps(session) for x in (metrics.loss, metrics.grad_norm)])
    assert found[1] == pytest.approx(found[0], rel=1e-4)
