"""Kill -9 while a model is imported, or exported: the run can be begun again, and no half folder passes for a model."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from contextlib import closing
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from samples import samples
from test_train import train_run
from transformers import AutoModelForCausalLM

from engine import opening
from engine.config import ModelConfig
from engine.export import export
from engine.hf import weights
from engine.hf.config import model_config
from storage.nvme import NvmeStore

KILLS = samples(1, 3)
"""Of an import, and of an export."""

CHANGING = ("open", "write", "pwrite", "pwritev", "fsync", "replace", "mkdir")


def die_at(moment: int, during: Callable[..., Any]) -> Callable[..., Any]:
    """`during`, in which this process dies by SIGKILL before the call number `moment` that changes the disk.

    It leaves their number in the file "calls" where it lives through it.
    """

    def watched(*args: Any, **options: Any) -> Any:
        calls = 0

        def count(call: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **options)

            return counted

        with pytest.MonkeyPatch.context() as patch:
            for name in CHANGING:
                patch.setattr(os, name, count(getattr(os, name)))
            result = during(*args, **options)
        Path("calls").write_text(str(calls))
        return result

    return watched


def import_and_train(folder: Path, model: ModelConfig, moment: int, resume: bool) -> None:
    os.chdir(folder.parent)
    opening._fill_new = die_at(moment, opening._fill_new)
    train_run(folder, tiny.Silent(), model=model, resume=resume)


def export_to(out_dir: Path, folder: Path, model: ModelConfig, moment: int) -> None:
    os.chdir(folder.parent)
    weights.export_folder = die_at(moment, weights.export_folder)
    export(folder, tiny.recipe(model=model), out_dir=out_dir)


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny", "engine.train", "test_train"])
    return context


def in_child(processes: ForkServerContext, act: Callable[..., None], *args: Any) -> int | None:
    child = processes.Process(target=act, args=args)
    child.start()
    child.join(60)
    return child.exitcode


def digest(folder: Path) -> str:
    with closing(NvmeStore.open(folder / "state", read_only=True)) as store:
        return tiny.digest(store)


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.sampled
def test_a_killed_import_begins_again_and_a_killed_export_is_no_model(
    tmp_path: Path, processes: ForkServerContext
) -> None:
    source = tmp_path / "model"
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(model_config(tiny.recipe(), None)).save_pretrained(source)
    model, chance = ModelConfig(path=str(source)), random.Random(0)
    straight, whole = tmp_path / "straight", tmp_path / "whole"
    assert in_child(processes, import_and_train, straight, model, 0, False) == 0
    calls = int((tmp_path / "calls").read_text())
    for number in range(KILLS):
        folder = tmp_path / f"run{number}"
        assert in_child(processes, import_and_train, folder, model, chance.randint(1, calls), False) == -signal.SIGKILL
        assert in_child(processes, import_and_train, folder, model, 0, number % 2 == 1) == 0
        assert digest(folder) == digest(straight)

    assert in_child(processes, export_to, whole, straight, model, 0) == 0
    calls, expected = int((tmp_path / "calls").read_text()), content(whole)
    assert "config.json" in expected
    for number in range(KILLS):
        out = tmp_path / f"out{number}"
        assert in_child(processes, export_to, out, straight, model, chance.randint(1, calls)) == -signal.SIGKILL
        left = content(out) if out.exists() else {}
        assert "config.json" not in left or left.items() >= expected.items()
