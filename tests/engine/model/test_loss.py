"""The head's loss: exact at every block size, in the logits' own memory, within its limit of bytes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import sampled
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.engine.hf.config import model_config
from penstock.engine.model.anatomy import Initializer
from penstock.engine.model.loss import CrossEntropy, LogitsCost, even_pieces, rows_at_once
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.spec import HEAD
from penstock.engine.model.tokens import ChunkTokens

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3}


@pytest.mark.parametrize("work_bytes", [1, 3 * 4 * 257, 1 << 20])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_cross_entropy_is_torchs(dtype: torch.dtype, work_bytes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (10 * torch.randn(20, 257, generator=generator)).to(dtype)
    logits[4] += 1e4  # only differences count
    labels = torch.randint(257, (20,), generator=generator)
    exact = logits.double().clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, labels, reduction="sum")
    (gradient,) = torch.autograd.grad(0.3 * expected, exact)
    loss = CrossEntropy(compile=False)(logits, labels, torch.ones(20, dtype=torch.float64), 0.3, work_bytes)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(logits.double(), gradient, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype] * 0.3)


@sampled(30, 200)
@given(
    weights=st.lists(st.floats(2.0**-10, 8.0, width=32), min_size=1, max_size=12),
    z_loss=st.sampled_from([0.0, 1e-4, 0.3]),
    rows_at_once=st.integers(1, 12),
)
def test_weighted_loss_and_z_loss_are_autograds(weights: list[float], z_loss: float, rows_at_once: int) -> None:
    """In float64: the sum of weight x cross entropy, and the gradient of that and of the squared log-partition's."""
    rows, vocab = len(weights), 31
    generator = torch.Generator().manual_seed(rows)
    logits = 4 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64) + 2
    labels, shares = torch.randint(vocab, (rows,), generator=generator), torch.tensor(weights).double()
    exact = logits.clone().requires_grad_()
    entropy = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    total = (shares * (entropy + z_loss * torch.logsumexp(exact, -1).square())).sum()
    (gradient,) = torch.autograd.grad(0.7 * total, exact)
    loss = CrossEntropy(compile=False)(logits, labels, shares, 0.7, 8 * vocab * rows_at_once, z_loss)
    torch.testing.assert_close(loss, (shares * entropy.detach()).sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(logits, gradient, rtol=1e-10, atol=1e-13)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_loss_takes_weights_and_z_loss(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(9, 40, generator=generator)).to(dtype)
    labels, shares = torch.randint(40, (9,), generator=generator), torch.rand(9, generator=generator).double() + 0.1
    both = [logits.clone(), logits.clone()]
    losses = [
        CrossEntropy(compile=compile)(x, labels, shares, 0.5, 1 << 20, 0.05)
        for compile, x in zip((False, True), both, strict=True)
    ]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(both[1], both[0], rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@given(st.integers(1, 500), st.integers(1, 300))
def test_pieces_are_few_and_alike(rows: int, most: int) -> None:
    sizes = [piece.shape[0] for piece in even_pieces(torch.arange(3 * rows).view(rows, 3), most)]
    assert sum(sizes) == rows
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1, "a rest"
    assert len(sizes) == -(-rows // most), "more than there need be"
    assert torch.equal(torch.cat([*even_pieces(torch.arange(rows), most)]), torch.arange(rows))


@pytest.mark.parametrize("targets", [1, 9, 10, 11, 20, 21])
def test_the_head_leaves_no_rest_of_a_few_rows(targets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 rows at once, 21 targets are three times 7 and not 10, 10 and 1; evaluation cuts them as training does."""
    runner, weights = head_of()
    grads = {name: torch.zeros(tensor.shape) for name, tensor in weights.items()}
    x = torch.randn(24, runner.spec.hidden_size, dtype=torch.bfloat16)
    labels = torch.full((24,), -100).index_fill_(0, torch.arange(targets) + 2, 7)
    tokens = ChunkTokens.of(torch.zeros(24, dtype=torch.int64), labels, torch.arange(24))
    runner.evaluate(weights, x, tokens, 1 << 20)  # looks at a row of logits once
    seen: list[int] = []
    real = runner._skeleton.logits

    def logits(rows: Tensor) -> Tensor:
        seen.append(rows.shape[0])
        return real(rows)

    monkeypatch.setattr(runner._skeleton, "logits", logits)
    monkeypatch.setattr("penstock.engine.model.loss.rows_at_once", lambda logits_bytes, cost: 10)
    runner.head(weights, x, tokens, 1.0, grads, 1 << 20)
    count = -(-targets // 10)
    assert len(seen) == count
    assert set(seen) <= {targets // count, -(-targets // count)}
    trained = list(seen)
    runner.evaluate(weights, x, tokens, 1 << 20)
    assert seen == 2 * trained


def head_of(**model: Any) -> tuple[ModelRunner, dict[str, Tensor]]:
    config = model_config(tiny.recipe(model=tiny.model(**model)), None)
    spec = tiny.spec_of(config)
    runner = ModelRunner(spec, device="cpu", dtype=torch.bfloat16)
    names = next(block.buffers for block in spec.blocks if block.name == HEAD)
    initializer = Initializer(spec, 0)
    return runner, {k: t.bfloat16() for name in names for k, t in initializer.values(name).items()}


class PeakOfLogits(TorchDispatchMode):
    """The most bytes that tensors of `vocab` columns took together."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self._vocab, self._hidden = vocab, hidden
        self._live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(tensor, Tensor) or tensor.shape[-1:] != (self._vocab,):
                continue
            if self._hidden in tensor.shape:
                continue  # a parameter's gradient
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live:
                self._live[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, storage._cdata, None)
            self.peak = max(self.peak, sum(self._live.values()))
        return result


@pytest.mark.parametrize(
    ("model", "overrides", "rows_per_limit"),
    [("llama", {}, 1.0), ("qwen3", {}, 1.0), ("cohere", {}, 0.3), ("gemma2", {"final_logit_softcapping": 5.0}, 0.2)],
)
def test_logits_stay_within_their_limit(model: str, overrides: dict[str, Any], rows_per_limit: float) -> None:
    runner, weights = head_of(model_type=model, overrides=overrides, tie_embeddings=model in ("cohere", "gemma2"))
    vocab, limit, rows = 300, 64 * 300 * 2, 160
    tokens = ChunkTokens.of(torch.zeros(rows, dtype=torch.int64), torch.arange(rows), torch.arange(rows))
    x = torch.randn(rows, 32).bfloat16()
    grads = {name: torch.zeros(tensor.shape) for name, tensor in weights.items()}
    runner.head(weights, x, tokens, 1.0, grads, limit)  # finds the cost of a row
    with PeakOfLogits(vocab, 32) as seen:
        runner.head(weights, x, tokens, 1.0, grads, limit)
    assert limit * rows_per_limit * 0.7 <= seen.peak <= limit


def test_autograd_is_asked_whether_the_logits_may_be_overwritten() -> None:
    x, w = torch.randn(2, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    plain = LogitsCost.of(lambda: x @ w.T, [w])
    assert plain == LogitsCost(row_bytes=30 * 4, in_place=True)
    scaled = LogitsCost.of(lambda: (x @ w.T) * 0.5, [w])
    assert scaled.in_place
    capped = LogitsCost.of(lambda: torch.tanh(x @ w.T), [w])
    assert not capped.in_place, "tanh's backward reads its result"
    assert capped.row_bytes > scaled.row_bytes > plain.row_bytes
    assert rows_at_once(8 * 1200, plain) == 70
    assert rows_at_once(1, plain) == 1
