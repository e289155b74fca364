"""`penstock check --all`: every type is checked by a process of its own, and whatever becomes of that the others go on;
what there is at Ctrl-C is kept."""

import io
import json
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli_process import REAL, is_running, refusal, started, wait_until
from rich.console import Console

from penstock.app.planning.check import check_types
from penstock.app.planning.check_view import (
    IN_CHUNKS,
    IN_DOCUMENTS,
    REFUSED,
    counts,
    counts_text,
    print_types,
    result_line,
    verdict,
)


def of(model_type: str, **fields: Any) -> dict[str, Any]:
    empty = {"ok": False, "max_rel_error": None, "worst_parameter": None, "reason": None, "cut": None}
    return {"model_type": model_type, **empty, **fields}


LLAMA = of("llama", ok=True, max_rel_error=9.1e-7, worst_parameter="loss", cut="chunks")
MAMBA = of("mamba", ok=True, max_rel_error=5.6e-7, worst_parameter="loss", cut="documents")
WRONG = of("wrong", max_rel_error=0.5, worst_parameter="w", reason="w: differs by 0.5", cut="chunks")
BART = of("bart", reason="model type 'bart' is an\nencoder-decoder model")


def checkers(pid: int | None = None) -> list[psutil.Process]:
    """The processes that check a type each: their parent is the server that they are forked from."""
    servers = psutil.Process(pid).children()
    return [each for server in servers for each in server.children()]


def test_types_are_told_apart_each_in_its_process() -> None:
    found = {result["model_type"]: result for result in check_types(["qwen2", "bart", "mamba", "gemma4_assistant"])}
    assert {name: verdict(result) for name, result in found.items()} == {
        "qwen2": IN_CHUNKS,
        "bart": REFUSED,
        "mamba": IN_DOCUMENTS,
        "gemma4_assistant": REFUSED,  # transformers cannot even make its default config
    }
    assert found["qwen2"].keys() == LLAMA.keys()
    assert found["qwen2"]["max_rel_error"] < 1e-5
    assert "encoder-decoder" in found["bart"]["reason"]
    assert "no default config" in found["gemma4_assistant"]["reason"]


def test_one_that_hangs_or_crashes_is_refused_and_the_others_go_on() -> None:
    (hung,) = check_types(["beam"], limit_s=0.0)
    assert (verdict(hung), hung["reason"]) == (REFUSED, "not done after 0s")

    def crash() -> None:
        wait_until(lambda: bool(checkers()))
        checkers()[0].kill()

    killer = threading.Thread(target=crash)
    killer.start()
    crashed, fine = check_types(["beam"]), check_types(["qwen2"])
    (result,) = crashed
    killer.join()
    assert "ended (SIGKILL)" in result["reason"]
    assert [verdict(each) for each in fine] == [IN_CHUNKS]


def test_ctrl_c_keeps_what_there_is_and_leaves_no_process(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with output.open("w") as file:
        process = started(tmp_path, *REAL, "check", "--all", "--json", stdout=file)
        wait_until(lambda: output.read_text().count("\n") >= 2)
        wait_until(lambda: bool(checkers(process.pid)))
        left = [each.pid for each in checkers(process.pid)]
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 130
    *results, summary = map(json.loads, output.read_text().splitlines())
    assert summary["checked"] == len(results) < summary["types"]
    assert summary["counts"] == counts(results)
    wait_until(lambda: not any(map(is_running, left)))


@pytest.mark.long
def test_killed_it_leaves_no_process(tmp_path: Path) -> None:
    process = started(tmp_path, *REAL, "check", "--all")
    wait_until(lambda: bool(checkers(process.pid)))
    left = [each.pid for each in checkers(process.pid)]
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(is_running, left)))


def test_rows_say_the_verdict_the_error_and_why() -> None:
    out = io.StringIO()
    print_types([LLAMA, MAMBA, WRONG, BART], Console(file=out, width=80))
    assert [line.split() for line in out.getvalue().splitlines()] == [
        ["✓", "llama", *IN_CHUNKS.split(), "9.1e-07"],
        ["✓", "mamba", *IN_DOCUMENTS.split(), "5.6e-07"],
        ["✗", "wrong", "refused", "5.0e-01"],
        ["w:", "differs", "by", "0.5"],
        ["✗", "bart", "refused"],
        ["is", "an", "encoder-decoder", "model"],
    ]
    found = counts([LLAMA, MAMBA, WRONG, BART])
    assert found == {IN_CHUNKS: 1, IN_DOCUMENTS: 1, REFUSED: 2}
    text = "1 exact in chunks; 1 exact in one chunk per document; 2 refused"
    assert counts_text(found, 4) == f"{text}: 4 types"
    assert counts_text(found, 9) == f"{text}: 4 of 9 types, the others were not checked"
    assert result_line(LLAMA) == "llama: exact in chunks, largest relative error 9.1e-07"
    assert result_line(WRONG) == "wrong: refused: w: differs by 0.5"


@pytest.mark.parametrize("arguments", [[], ["here", "--all"]], ids=str)
def test_it_is_of_one_model_or_of_all(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert "name a MODEL, or give --all" in refusal(capsys, "check", *arguments)
