"""What `penstock finetune` chooses: cases worked by hand."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.app.finetune_defaults import Found, choose, held_out, row_length


def found(lengths: list[int], **changes: Any) -> Found:
    """Documents of these lengths and a model of 1.5 B parameters; an epoch has as many rows as their tokens fill."""

    def rows(data: Mapping[str, Any]) -> int:
        left = len(lengths) - (data["data.validation_documents"] or 0)
        return math.ceil(sum(lengths[:left]) / data["data.sequence_length"])

    facts: dict[str, Any] = {"num_params": 1_500_000_000, "context": 32_768, "text": False, "rows": rows}
    return Found(lengths=np.asarray(lengths), **(facts | changes))


def values(lengths: list[int], given: dict[str, Any] | None = None, epochs: float | None = None, **changes: Any) -> Any:
    items = choose(found(lengths, **changes), given or {}, epochs)
    assert all(item.why for item in items)
    return {item.key: item.value for item in items}


def test_a_thousand_conversations_of_500_tokens() -> None:
    # 8 of 500 tokens are 4,000: rows of 4,096. 980 of them fill 119.6 rows; an epoch of 16 steps leaves 7 rows a step,
    # and 4 is the power of two below. 3 epochs of 120 rows, 4 a step, are 90 steps, 3 % of which are 2.7.
    assert values([500] * 1000) == {
        "data.sequence_length": 4096, "data.packing": "best_fit", "data.long_documents": "cut",
        "data.validation_documents": 20, "train.global_batch_size": 4, "train.steps": 90, "train.lr": 2e-5,
        "train.warmup_steps": 3, "train.lr_schedule": "cosine", "train.weight_decay": 0.01, "train.clip_norm": 1.0,
        "train.compute_dtype": "auto", "train.validate_every": 12, "storage.checkpoint_every": 18,
        "after.export": True,
    }  # fmt: skip


def test_ten_short_ones_hold_nothing_out_and_are_a_row_a_step() -> None:
    chosen = values([40] * 10)
    assert (chosen["data.sequence_length"], chosen["data.validation_documents"]) == (128, None)
    assert (chosen["train.global_batch_size"], chosen["train.steps"], chosen["train.warmup_steps"]) == (1, 12, 1)
    assert "train.validate_every" not in chosen


def test_a_recurrent_model_has_a_document_a_row() -> None:
    chosen = values([500] * 1000, recurrent=True)
    assert (chosen["data.sequence_length"], chosen["data.packing"]) == (512, "none")


def test_a_row_covers_the_documents() -> None:
    for lengths, context, text, row, why in (
        ([100] * 999 + [100_000], 32_768, False, 1024, "10 typical documents"),  # the outlier is 500 times the p99
        ([3000] * 40, 2048, False, 2048, "the model's own context"),
        ([3000] * 40, 5000, False, 4096, "covers the longest, 3,000"),
        ([100_000] * 3, 131_072, True, 8192, "rows of more than 8,192 have to be set by you"),
        ([100_000] * 3, 131_072, False, 32_768, "rows of more than 32,768 have to be set by you"),
        ([2048] * 10, None, False, 2048, "covers the longest, 2,048"),
        ([100] * 97 + [2000] * 3, 32_768, False, 2048, "covers the longest, 2,000"),
    ):
        length, reason = row_length(np.asarray(lengths), context, text=text)
        assert (length, why in reason) == (row, True), reason


def test_a_few_are_held_out_and_larger_models_take_smaller_steps() -> None:
    assert [held_out(count) for count in (39, 40, 1000, 10**6)] == [None, 4, 20, 256]
    rates = {5e5: 1e-3, 5e7: 2e-4, 5e8: 5e-5, 1.5e9: 2e-5, 7e9: 1e-5, 32e9: 1e-5, 7e10: 5e-6}
    assert {params: values([500] * 1000, num_params=int(params))["train.lr"] for params in rates} == rates


def test_much_data_is_read_once_in_steps_of_131_072_tokens_by_a_large_model() -> None:
    chosen = values([1000] * 200_000, num_params=8 * 10**9)  # 200 M tokens
    assert (chosen["data.sequence_length"], chosen["train.global_batch_size"]) == (8192, 16)
    assert chosen["train.steps"] == math.ceil(math.ceil(199_744_000 / 8192) / 16)


def test_what_the_user_sets_stays_and_the_rest_follows() -> None:
    given = {"data.sequence_length": 1000, "train.lr": 3e-4, "data.validation_documents": None}
    items = {item.key: item for item in choose(found([500] * 1000), given, 2)}
    assert items["data.sequence_length"][1:] == (1000, "set by you")
    assert items["train.lr"].value == 3e-4
    assert "train.validate_every" not in items
    # 500 rows an epoch, 31 a step at the most for 16 steps of it.
    assert items["train.global_batch_size"].value == 16
    assert items["train.steps"].value == math.ceil(2 * 500 / 16)
    assert "2 epochs of 500 rows, 16 a step" in items["train.steps"].why


def test_an_adapter_takes_ten_times_the_rate() -> None:
    items = {item.key: item for item in choose(found([500] * 1000, num_params=7 * 10**9), {"adapter.method": "lora"})}
    assert items["train.lr"].value == 1e-4
    assert "an adapter" in items["train.lr"].why
