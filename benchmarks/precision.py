"""What a learning rate of 1e-6 teaches weights in bfloat16, with and without masters: docs/results/precision.md.

A small model learns Python from the interpreter's library, which gives its weights the magnitudes of a trained
model's; rounded to bfloat16, as models are published, it then goes on at a low rate on another kind of text, the
language's English reference. Every way to go on starts at the same values, sees the same batches in the same order
and has AdamW's same settings; each runs in a process of its own, one after the other.

Losses are those of the weights as they are at that step (what the forward pass and an export see), on the same held
out documents, computed in float32 by transformers, so that no way is marked by another's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.parts.process import call, require_matplotlib, two_plots
from benchmarks.parts.process import save as save_plots
from benchmarks.parts.session import NOBODY
from penstock.app.bench.process import require_folders, scratch
from penstock.app.console.working import Working
from penstock.engine.config import BudgetConfig, DataConfig, ModelConfig, Recipe, StorageConfig, TrainConfig
from penstock.engine.data.corpus.prepare import prepare_data
from penstock.engine.data.loader import DataLoader, ValidationSet
from penstock.engine.data.loading import make_loader, make_validation
from penstock.engine.export import export
from penstock.engine.hf.config import model_config
from penstock.engine.model.anatomy import model_spec
from penstock.engine.model.tokens import MicroBatch
from penstock.engine.opening import open_session
from penstock.engine.runtime.past import StateReader
from penstock.engine.runtime.state import read_parameters
from penstock.engine.train import train, train_step

CASES = {
    "float32": "float32 throughout, plain PyTorch",
    "weights": "Penstock: bfloat16 weights of float32 masters",
    "masters": "the masters themselves",
    "stochastic": "bfloat16 in place, rounded stochastically",
    "in_place": "bfloat16 in place",
}
"""What is measured, and what the plot calls it."""
RUNS = ("float32", "penstock", "stochastic", "in_place")
"""Ways to go on; all but penstock, of which weights and masters are measured, name what is measured of them."""
ROW_TOKENS, ROWS = 256, 4
_HELD_OUT, _VALIDATION_ROWS = 12, 32

Weights = dict[str, Tensor]
"""By the parameter's state-dict name."""


def main(
    save: Path,
    steps: int = 300,
    before_steps: int = 300,
    every: int = 25,
    lr: float = 1e-6,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Train for --before-steps, go on for --steps at --lr in every way and measure each --every steps.

    Writes SAVE.json (of each way its rows of step, loss and share of weights that differ from the start's) and their
    plot SAVE.svg. Some minutes on a CPU.
    """
    require_folders(folder, save.parent)
    require_matplotlib()
    with scratch(folder) as path, Working() as shown:
        with shown.step(f"{before_steps} steps on Python"):
            call(begin, path, before_steps, what="the model to start from")
        cases: dict[str, list[dict[str, float]]] = {}
        for run in RUNS:
            with shown.step(f"{steps} steps at {lr:g}, {run}"):
                cases |= call(go_on, run, path, steps, every, lr, what=run)
    cases = {case: cases[case] for case in CASES}
    report: dict[str, Any] = {"lr": lr, "steps": steps, "before_steps": before_steps, "cases": cases}
    report["learnt"] = learnt(cases)
    save_plots(report, plotted(report), save)
    print(f"{steps} steps at {lr:g}, learnt of what float32 learns:")
    for case, share in report["learnt"].items():
        first, last = cases[case][0], cases[case][-1]
        moved = f"loss {first['loss']:.4f} to {last['loss']:.4f}, {last['changed']:.1%} of the weights changed"
        print(f"{CASES[case]}: {share:.0%}, {moved}")
    return report


def learnt(cases: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """How far each case's loss has fallen, as a share of how far that of float32 has."""
    fallen = {case: rows[0]["loss"] - rows[-1]["loss"] for case, rows in cases.items()}
    return {case: one / fallen["float32"] for case, one in fallen.items()}


def plotted(report: dict[str, Any]) -> Any:
    """The figure: loss and changed weights over the steps."""
    figure, axes = two_plots("loss on documents held out", "share of the weights that changed")
    styles = {"float32": ("0.75", "-", 5.0), "weights": ("C0", "-", 1.8), "masters": ("C0", ":", 1.8)}
    styles |= {"stochastic": ("C2", "--", 1.5), "in_place": ("C3", "-", 1.8)}
    for case, rows in report["cases"].items():
        color, line, width = styles[case]
        for axis, key in zip(axes, ("loss", "changed"), strict=True):
            x, y = [row["step"] for row in rows], [row[key] for row in rows]
            axis.plot(x, y, line, color=color, linewidth=width, label=CASES[case])
            axis.set_xlabel(f"steps at a learning rate of {report['lr']:g}")
    axes[1].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes[0].legend(fontsize=8)
    return figure


# ---------------------------------------------------------------------- what is trained, each in a process of its own


def begin(folder: str, steps: int) -> None:
    """Train the model to start from, into the folder's `model`, in bfloat16; write the text to go on with."""
    root = Path(folder)
    recipe = Recipe(
        name="begin",
        model=ModelConfig(
            model_type="qwen3",
            num_layers=4,
            hidden_size=128,
            intermediate_size=384,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            tie_embeddings=False,
        ),
        data=DataConfig(
            source="python_stdlib", max_documents=200, tokenizer_vocab_size=2048, sequence_length=ROW_TOKENS
        ),
        train=_training(steps=steps, lr=2e-3, lr_schedule="cosine", warmup_steps=min(20, steps)),
        budgets=BudgetConfig(gpu="1GiB", ram="1GiB"),
        storage=StorageConfig(checkpoint_every=10**9),
    )
    train(recipe, run_dir=root / "begin", observer=NOBODY, resume=False)
    export(root / "begin", recipe, out_dir=root / "model")
    from pydoc_data.topics import topics

    (root / "text").mkdir()
    for name, text in topics.items():
        (root / "text" / f"{name}.txt").write_text(text, encoding="utf-8")


def _training(**changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "global_batch_size": ROWS,
        "micro_batch_size": ROWS,
        "compute_dtype": "bfloat16",
        "compile": "off",
        "calibrate": False,
        "device": "cpu",
    }
    return TrainConfig(**(settings | changes))


def _recipe(root: Path, steps: int, lr: float) -> Recipe:
    """Going on from the folder's `model` with its `text`."""
    return Recipe(
        name="go-on",
        model=ModelConfig(path=str(root / "model")),
        data=DataConfig(
            source="text", path=str(root / "text"), sequence_length=ROW_TOKENS, validation_documents=_HELD_OUT
        ),
        train=_training(steps=steps, lr=lr, lr_schedule="constant"),
        budgets=BudgetConfig(gpu="1GiB", ram="1GiB"),
        storage=StorageConfig(checkpoint_every=10**9),
    )


def go_on(run: str, folder: str, steps: int, every: int, lr: float) -> dict[str, list[dict[str, float]]]:
    """Train on in one way; of what is measured (step, loss, changed) of every `every` steps, the first before any."""
    root = Path(folder)
    recipe = _recipe(root, steps, lr)
    judge = _Judge(recipe, root / run)
    ways: dict[str, Callable[[], Iterable[dict[str, Weights]]]] = {
        "penstock": lambda: _penstock(recipe, root / run, every),
        "float32": lambda: _plain(run, recipe, judge.loader, every, torch.float32),
        "in_place": lambda: _plain(run, recipe, judge.loader, every, torch.bfloat16),
        "stochastic": lambda: _plain(run, recipe, judge.loader, every, torch.bfloat16, stochastic=True),
    }
    first, rows = judge.row(0, judge.start), dict[str, list[dict[str, float]]]()
    for number, result in enumerate(ways[run](), start=1):
        for case, weights in result.items():
            rows.setdefault(case, [first]).append(judge.row(number * every, weights))
    return rows


class _Judge:
    """Measures weights: their loss on documents held out, in float32, and how many are not as they were."""

    def __init__(self, recipe: Recipe, run_dir: Path) -> None:
        corpus = prepare_data(recipe, run_dir / "data").corpus
        config = model_config(recipe, None)
        spec = model_spec(config, recipe)
        measured = replace(recipe.train, validate_every=1, validation_sequences=_VALIDATION_ROWS)
        validation = make_validation(corpus, spec, replace(recipe, train=measured))
        assert validation is not None
        self.loader = make_loader(corpus, spec, recipe)
        self._validation: ValidationSet = validation
        self._model = _load(recipe, torch.float32)
        self.start = {name: p.detach().clone() for name, p in self._model.named_parameters()}

    @torch.no_grad()
    def row(self, step: int, weights: Weights) -> dict[str, float]:
        for name, parameter in self._model.named_parameters():
            parameter.copy_(weights[name])
        loss, targets = 0.0, 0
        for batches in self._validation.passes(1):
            for batch in batches:
                loss += float(_loss_sum(self._model, batch))
                targets += batch.num_targets
        changed = sum(int((weights[name] != value).sum()) for name, value in self.start.items())
        return {
            "step": step,
            "loss": loss / targets,
            "changed": changed / sum(value.numel() for value in self.start.values()),
        }


def _penstock(recipe: Recipe, run_dir: Path, every: int) -> Iterable[dict[str, Weights]]:
    """Weights and masters of every `every` steps of a run."""
    with open_session(recipe, run_dir=run_dir, observer=NOBODY, resume=False) as session:
        for step in range(1, recipe.train.steps + 1):
            train_step(session)
            if step % every == 0:
                session.finish()
                masters: Weights = {}
                state = StateReader(session.store, session.spec, recipe.train)
                for name, buffer in session.spec.buffers.items():
                    masters |= read_parameters(state, name, buffer)
                yield {"weights": {n: master.bfloat16() for n, master in masters.items()}, "masters": masters}


def _plain(
    case: str, recipe: Recipe, loader: DataLoader, every: int, dtype: torch.dtype, *, stochastic: bool = False
) -> Iterable[dict[str, Weights]]:
    """The weights of every `every` steps of torch's fused AdamW, on them as they are, in `dtype`.

    `stochastic`: AdamW computes in float32, with moments in float32, and what comes of it is rounded stochastically.
    """
    t, model = recipe.train, _load(recipe, dtype)
    parameters = dict(model.named_parameters())
    stepped = {n: p.detach().float().requires_grad_() for n, p in parameters.items()} if stochastic else parameters
    generator = torch.Generator().manual_seed(0)
    groups = [
        {
            "params": [p for p in stepped.values() if (p.ndim > 1) == decayed],
            "weight_decay": t.weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    adamw = torch.optim.AdamW(groups, lr=t.lr, betas=(t.beta1, t.beta2), eps=t.eps, fused=True)
    for step in range(1, t.steps + 1):
        (batch,) = loader.next_step()
        (_loss_sum(model, batch) / batch.num_targets).backward()
        if stochastic:
            for name, parameter in parameters.items():
                assert parameter.grad is not None
                stepped[name].grad = parameter.grad.float()
        assert t.clip_norm is not None
        nn.utils.clip_grad_norm_(stepped.values(), t.clip_norm)
        adamw.step()
        model.zero_grad()
        if stochastic:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(rounded_stochastically(stepped[name].detach(), generator))
                    stepped[name].copy_(parameter)
        if step % every == 0:
            yield {case: {name: p.detach() for name, p in parameters.items()}}


def rounded_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """float32 values as bfloat16, each to one of its two neighbours, the more likely the nearer: right on average.

    bfloat16 is float32's upper half; noise below it carries into it as often as the lower half is large.
    """
    noise = torch.randint(0, 1 << 16, values.shape, generator=generator, dtype=torch.int32)
    return ((values.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32).bfloat16()


def _load(recipe: Recipe, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    assert recipe.model.path is not None
    model: nn.Module = AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=dtype, attn_implementation="sdpa")
    return model


def _loss_sum(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Summed over the batch's targets, in float32; positions that begin anew keep its documents apart."""
    logits = model(input_ids=batch.ids[None], position_ids=batch.positions[None], use_cache=False).logits[0]
    return nn.functional.cross_entropy(logits.float(), batch.labels, ignore_index=-100, reduction="sum")
