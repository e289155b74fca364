"""How many GPUs a run takes of those that there are, and what of a step they share."""

from typing import Any

import pytest
import tiny
import torch

from penstock.engine.ranks.count import query_count, rank_count, with_replicas
from penstock.storage.files.errors import UserError


def there(monkeypatch: pytest.MonkeyPatch, *kinds: str, visible: str | None = None) -> None:
    """A machine with such GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: kinds[index])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


@pytest.mark.parametrize(
    ("changes", "count", "sharded"),
    [
        ({"global_batch_size": 8}, 4, False),
        ({"global_batch_size": 6}, 3, False),
        ({"global_batch_size": 1}, 4, True),
        ({"global_batch_size": 2}, 4, True),
        ({"global_batch_size": 2, "parallel": "data"}, 2, False),
        ({"global_batch_size": 8, "parallel": "context"}, 4, True),
        ({"global_batch_size": 1, "replicas": 6}, 3, True),
        ({"global_batch_size": 1, "activation_checkpointing": "none"}, 1, False),
        ({"global_batch_size": 1, "gradient_dtype": "bfloat16"}, 1, False),
        ({"global_batch_size": 1, "gpus": 3}, 3, True),
    ],
    ids=str,
)
def test_all_are_used_that_can_share_a_step(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], count: int, sharded: bool
) -> None:
    there(monkeypatch, *["H200"] * 4)
    recipe = tiny.recipe(train=tiny.training(**{"device": "auto", "kv_window": "auto"} | changes))
    found = rank_count(recipe)
    assert found == (count, [str(i) for i in range(count)])
    train = with_replicas(recipe, count).train
    assert train.sharded == sharded
    assert train.replicas in (None, 6, count)


def test_gpus_of_another_kind_are_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    there(monkeypatch, "RTX 4090", "RTX 3090", "RTX 4090", visible="GPU-a,GPU-b,GPU-c")
    train = tiny.training(device="auto", kv_window="auto", global_batch_size=6)
    assert rank_count(tiny.recipe(train=train)) == (2, ["GPU-a", "GPU-c"])
    train.gpus = 2
    assert rank_count(tiny.recipe(train=train)) == (2, ["GPU-a", "GPU-c"])
    train.gpus = 3
    with pytest.raises(UserError, match=r"train.gpus: GPU 0 is RTX 4090 and GPU 1 RTX 3090: .* use 2, or name"):
        rank_count(tiny.recipe(train=train))
    assert query_count(None, "auto") == (2, ["GPU-a", "GPU-c"])
    with pytest.raises(UserError, match=r"--gpus: GPU 0 is RTX 4090 and GPU 1 RTX 3090: .* use 2, or name"):
        query_count(3, "auto")
