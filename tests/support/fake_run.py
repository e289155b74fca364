"""Runs the real command line with a stand-in for training and export: `python fake_run.py train RECIPE ...`.

The stand-in trains nothing: it sleeps through its steps, commits a step number and reports as the engine does.
FAKE_PREPARE_S and FAKE_STEP_S set the seconds before the first step and of a step; FAKE_FAIL_AT=step:user, step:bug
or step:threads makes a step fail.
With FAKE_SCRIPT=1 the first argument is a recipe to run as a script.
"""

import os
import runpy
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from penstock.engine.config import Recipe
from penstock.engine.events import Progress, Span, StepMetrics, UnderWay, ValidationMetrics
from penstock.engine.preparing import Checklist
from penstock.storage.files.errors import UserError

PLAN = {
    "blocks": [
        {"name": name, "weights": tier, "state": tier, "gradient": tier, "bytes": 14 * 2**20}
        for name, tier in (("embed", "gpu"), ("layers.0", "ram"), ("layers.1", "ram"), ("head", "nvme"))
    ],
    "tiers": {},
    "bytes_per_step": {"nvme_read": 4096, "nvme_write": 8192},
    "spilled_activations": {"chunks": 0, "bytes": 0},
    "saved_graphs": {"chunks": 0, "bytes": 0},
    "layer_chunks": 6,
}


def train(recipe: Recipe, *, run_dir: Path, observer: Any, resume: bool, checkpoint: str | None) -> Any:
    train = recipe.train
    committed = run_dir / "state" / "committed"
    committed.parent.mkdir(exist_ok=True)
    with Checklist(observer).step("tokenizing the data"):
        time.sleep(float(os.environ.get("FAKE_PREPARE_S", "0")))
    first = int(committed.read_text()) if committed.exists() else 0
    assert resume or first == 0
    fail_at, _, fail_how = os.environ.get("FAKE_FAIL_AT", "0:").partition(":")
    step_s = float(os.environ.get("FAKE_STEP_S", "0.01"))
    begin = time.monotonic()
    observer.on_plan(PLAN, [])
    step = first
    while step < train.steps and goes_on(observer, step):
        step += 1
        start = time.monotonic() - begin
        observer.on_progress(Progress([], start, [UnderWay("compute", "forward", "layers.0", 0, step, start)]))
        time.sleep(step_s)
        end = time.monotonic() - begin
        if step == int(fail_at):
            if fail_how == "user":
                raise UserError("loss is NaN in step 3, chunk 1")
            raise RuntimeError("can't start new thread" if fail_how == "threads" else "a bug")
        spans = [
            Span("h2d", "weights", "layers.0", -1, start, (start + end) / 2, 4096, step, 2 * step - 2),
            Span("compute", "forward", "layers.0", 0, start, end, 0, step, 2 * step - 1, (2 * step - 2,)),
        ]
        observer.on_progress(Progress(spans, end, []))
        rates = {"tokens": 100, "step_s": step_s, "tokens_per_s": 100 / step_s}
        observer.on_step(StepMetrics(step=step, loss=8.0 / step, grad_norm=1.0, lr=1e-3, **rates))
        if train.validate_every is not None and step % train.validate_every == 0:
            measured = ValidationMetrics(step=step, loss=9.0 / step, tokens=50, seconds=0.01, time=time.time())
            observer.on_validation(measured)
        committed.write_text(str(step))
        for name in observer.checkpoint_requests():
            observer.on_checkpoint(name, step, None)
    end = time.monotonic() - begin
    last = Span("nvme_write", "commit", "layers.0", -1, end, end + 0.01, 4096, train.steps)
    observer.on_progress(Progress([last], end, []))
    tiers = {name: {"budget_bytes": 2**30, "peak_bytes": 2**29} for name in ("gpu", "ram", "nvme")}
    lanes = {"h2d": {"busy_s": 0.5, "bytes": 4096}, "compute": {"busy_s": 1.0, "bytes": 0}}
    stopped = step < train.steps
    return SimpleNamespace(
        tiers=tiers, lanes=lanes, drives=[], gpu_memory=None, attention={}, stopped=stopped, early_end=None, steps=step
    )


def goes_on(observer: Any, step: int) -> bool:
    want = observer.wanted()
    if want == "pause":
        observer.on_pause(True)
        while (want := observer.wanted()) == "pause":
            for name in observer.checkpoint_requests():
                observer.on_checkpoint(name, step, None)
            time.sleep(0.02)
        observer.on_pause(False)
    return bool(want == "run")


def export(run_dir: Path, recipe: Recipe, *, out_dir: Path, **_: Any) -> SimpleNamespace:
    committed = (run_dir / "state" / "committed").read_text()
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / "config.json").write_text(committed)
    counts = {"step": int(committed), "num_params": 1, "num_trained": 1}
    return SimpleNamespace(model_type="none", auto_class="AutoModel", adapter=None, remarks=[], **counts)


if __name__ == "__main__":
    for name, function in (("train", train), ("export", export)):
        sys.modules[f"penstock.engine.{name}"] = fake = ModuleType(f"penstock.engine.{name}")
        setattr(fake, name, function)
    # What is begun beside the imports of the real one has nothing to do here.
    beside = {
        "penstock.engine.data.corpus.prepare": ("prepare_text_ahead", "cancel_text_ahead", "require_readable"),
        "penstock.engine.machine.compilers": ("compile_headers",),
    }
    trains = os.environ.get("FAKE_SCRIPT") or sys.argv[1] in ("train", "resume")
    for module, names in beside.items() if trains else ():
        sys.modules[module] = ModuleType(module)
        for name in names:
            setattr(sys.modules[module], name, lambda *_: None)
    if os.environ.get("FAKE_SCRIPT"):
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    from penstock.app.cli.main import main

    sys.exit(main(sys.argv[1:]))
