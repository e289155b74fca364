"""Cards of several architectures: which kernels are chosen and for what code is compiled, and that they train."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TORCHS = {"torch-cudnn", "torch-cuda-flash"}
ALL = {"flash-attn-2", "flash-attn-3", "flash-attn-4"}
CARDS: dict[str, tuple[list[int], set[str], str, list[str], bool]] = {
    "a100": ([8, 0], {"flash-attn-2"}, "sm_80", [], True),
    "rtx3090": ([8, 6], {"flash-attn-2"}, "sm_86", ["flash-attn-2"], True),
    "rtx4090": ([8, 9], {"flash-attn-2"}, "sm_89", ["flash-attn-2"], True),
    "h100": ([9, 0], ALL, "sm_90a", ["flash-attn-3", "flash-attn-4"], True),
    "h200": ([9, 0], ALL, "sm_90a", [], False),  # of a name that no vendor gives
    "b200": ([10, 0], {"flash-attn-2", "flash-attn-4"}, "sm_100a", ["flash-attn-4"], True),
    "rtx5090": ([12, 0], {"flash-attn-2", "flash-attn-4"}, "sm_120a", ["flash-attn-2"], True),
    "gb10": ([12, 1], {"flash-attn-2", "flash-attn-4"}, "sm_121a", ["flash-attn-4"], True),
}
"""Compute capability, packages with kernels for it, what Triton compiles for, the kernels of which one would be faster
where none is installed, and whether the peak is known."""


def looked_at(card: str, dtype: str, folder: Path) -> dict[str, Any]:
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests" / "support"), os.environ["PYTHONPATH"]))
    variables = {"PYTHONPATH": paths, "STANDIN_CARD": card, "TRITON_CACHE_DIR": str(folder / "triton")}
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "card.py"), str(folder), dtype],
        capture_output=True,
        text=True,
        env=os.environ | variables,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("card", CARDS)
def test_a_card_trains_with_the_kernels_that_it_has(card: str, tmp_path: Path) -> None:
    capability, packages, target, faster, known = CARDS[card]
    found = looked_at(card, "bfloat16", tmp_path)
    assert found["capability"] == capability
    assert found["auto"] == "bfloat16"
    assert found["refusals"] == dict.fromkeys(("auto", "bfloat16", "float32"))
    fastest = {8: "flash-attn-2", 9: "flash-attn-3"}.get(capability[0], "flash-attn-4")
    for steps, kernel in zip(found["steps"], ("torch-cuda-flash", fastest), strict=True):
        assert steps["losses"] == pytest.approx(found["cpu"]["losses"], rel=2**-8)
        assert steps["norms"][0] == pytest.approx(found["cpu"]["norms"][0], rel=2**-8)
        assert steps["kernels"] == [kernel]
    assert found["experts wait"] == (capability[0] not in (9, 10))
    assert found["targets"] == [target]
    assert (found["mfu"] is not None) is known
    alone, there = found["alone"], found["packages"]
    assert set(alone["absent"]) == ALL
    assert {name for name, reason in alone["absent"].items() if reason == "is not installed"} == packages
    assert alone["faster"] == faster
    assert set(there["absent"]) == ALL - packages
    assert all("needs compute capability" in reason for reason in there["absent"].values())
    for direction in ("forward", "backward"):
        deterministic = packages - ({"flash-attn-4"} if capability[0] == 12 and direction == "backward" else set())
        assert set(alone[f"plain, {direction}"]) == TORCHS
        assert set(alone[f"plain, deterministic, {direction}"]) == {"torch-cuda-flash"}
        assert set(there[f"plain, {direction}"]) == TORCHS | packages
        assert set(there[f"plain, deterministic, {direction}"]) == {"torch-cuda-flash"} | deterministic
        for kind, able in (("soft-cap", packages), ("soft-cap, deterministic", deterministic)):
            assert alone[f"{kind}, {direction}"] == []
            assert set(there[f"{kind}, {direction}"]) == able


def test_a_card_without_bfloat16_trains_in_float32(tmp_path: Path) -> None:
    """And says so to whoever asks for bfloat16."""
    found = looked_at("t4", "float32", tmp_path)
    assert found["capability"] == [7, 5]
    assert found["auto"] == "float32"
    message = found["refusals"].pop("bfloat16")
    assert "Tesla T4 has compute capability 7.5, and bfloat16 needs 8.0" in message
    assert message.endswith("use train.compute_dtype=float32")
    assert found["refusals"] == dict.fromkeys(("auto", "float32"))
    for steps in found["steps"]:
        assert steps["losses"] == pytest.approx(found["cpu"]["losses"], rel=1e-4)
        assert steps["norms"] == pytest.approx(found["cpu"]["norms"], rel=1e-4)
        assert steps["kernels"] == ["tiled-reference"]
    assert found["targets"] == ["sm_75"]
    assert set(found["packages"]["absent"]) == ALL | TORCHS
