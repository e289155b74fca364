"""The page of all architectures."""

from typing import Any

from benchmarks.architectures import page


def of(model_type: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": model_type, "ok": True, "max_rel_error": 9.12e-7, "reason": None, "cut": "chunks"} | fields


def test_types_are_listed_by_verdict_and_reason() -> None:
    t5 = {"ok": False, "max_rel_error": None, "cut": None}
    t5 |= {"reason": "model type 't5' is an encoder-decoder model; only others can be trained"}
    bart = t5 | {"reason": t5["reason"].replace("t5", "bart")}
    wrong = {"ok": False, "max_rel_error": 0.5, "reason": "w|v: differs"}
    lines = [of("qwen3"), of("wrong", **wrong), of("t5", **t5), of("llama"), of("mamba", cut="documents")]
    text = page([*lines, of("bart", **bart), {"types": 6}], "today, torch 9")
    assert text.startswith("# The self-check on all 6 types of language model of transformers, CPU\n\ntoday, torch 9\n")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows == [
        "| verdict | model types |",
        "| exact in chunks | 2 |",
        "| exact in one chunk per document | 1 |",
        "| refused | 3 |",
        "| model type | max relative error |",
        "| llama | 9.1e-07 |",
        "| qwen3 | 9.1e-07 |",
        "| model type | max relative error |",
        "| mamba | 9.1e-07 |",
        "| reason | model types |",
        "| is an encoder-decoder model | bart, t5 |",
        "| w/v: differs | wrong |",
    ]
