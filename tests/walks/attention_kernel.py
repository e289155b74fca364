"""An attention kernel: it is chosen, and its gradients are transformers'."""

from transformers import Qwen3Config

from penstock.engine.attention.select import attention_report, forget
from penstock.engine.self_check import check_model


def test_it_is_chosen_and_its_gradients_are_transformers() -> None:
    forget()
    for pieces in (False, True):
        result = check_model(
            Qwen3Config(sliding_window=16, use_sliding_window=True, max_window_layers=1), pieces=pieces
        )
        assert result.ok, result.reason
    report = [entry for entry in attention_report() if entry["dtype"] == "float32"]
    assert {entry["direction"] for entry in report} == {"forward", "backward"}
    assert {entry["window"] for entry in report} == {False, True}
    assert all(entry["chosen"].startswith("plain,") for entry in report)
