"""A pass: the model as it would be without its upper layers."""

from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from penstock.engine.passes import evaluations
from penstock.engine.schedule.early_exit import early_exit
from penstock.engine.train import train_step


@pytest.mark.parametrize("layers", [1, 2])
def test_it_is_the_loss_of_a_model_with_so_many_layers(tmp_path: Path, layers: int) -> None:
    with tiny.session(tmp_path) as session:
        assert len(session.spec.attention) > layers
        train_step(session)
        session.finish()
        batch = session.loader.next_step()
        (found,) = evaluations(session, [batch], build=partial(early_exit, layers=layers))
        config = type(session.spec.config)(
            **session.spec.config.to_dict() | {"num_hidden_layers": layers, "layer_types": None}
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        weights = tiny.parameters(session.store, session.spec)
        assert not model.load_state_dict(weights, strict=False).missing_keys
        assert found.total_loss / found.num_targets == pytest.approx(plain_loss(model, batch), rel=1e-5)
        (whole,) = evaluations(session, [batch], first=2)
        assert whole.total_loss != found.total_loss


def plain_loss(model: torch.nn.Module, batch: list) -> float:
    total, count = 0.0, 0
    for m in batch:
        for start, end in zip(m.documents, [*m.documents[1:], len(m.ids)], strict=True):
            labels = m.labels[start:end]
            with torch.no_grad():
                logits = model(m.ids[None, start:end]).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
            count += int((labels != -100).sum())
    return total / count
