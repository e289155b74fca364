"""The head's loss: exact at every block size, in the logits' own memory, within its limit of bytes. The load-balancing
loss of mixtures of experts: transformers' own total gradient, streamed on any plan. What the host knows of a batch."""

import functools
import math
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_training import plain_model
from samples import cases, sampled
from tiny_plans import PLANS
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig
from weighted import WeightedLoader

from penstock.engine.hf.config import model_config
from penstock.engine.model.anatomy import Initializer
from penstock.engine.model.loss import CrossEntropy, LogitsCost, even_pieces, log_probabilities_, rows_at_once
from penstock.engine.model.reference import forward_backward, in_buffers
from penstock.engine.model.router import balancing_loss, router_coefficient
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.spec import HEAD
from penstock.engine.model.tokens import ChunkTokens, MicroBatch
from penstock.engine.model.trace import random_model
from penstock.engine.objectives.base import OBJECTIVES
from penstock.engine.objectives.statistics import ENTROPY, MEAN_LOGIT
from penstock.engine.plan.problem import BYTES_PER_TOKEN
from penstock.engine.self_check import relative_errors
from penstock.engine.session import Session
from penstock.storage.files.errors import UserError

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3}
BALANCED = ("nvme-recomputed", "gpu", "nvme-streamed-spilled")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 24},
}
WEIGHT = 0.7
"""Large, so that the loss is most of a router's gradient."""


@pytest.mark.parametrize("work_bytes", [1, 3 * 4 * 257, 1 << 20])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_cross_entropy_is_torchs(dtype: torch.dtype, work_bytes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (10 * torch.randn(20, 257, generator=generator)).to(dtype)
    logits[4] += 1e4  # only differences count
    labels = torch.randint(257, (20,), generator=generator)
    exact = logits.double().clone().requires_grad_()
    expected = cross_entropy(exact, labels, reduction="sum")
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
    entropy = cross_entropy(exact, labels, reduction="none")
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
    pairs = zip((False, True), both, strict=True)
    losses = [CrossEntropy(compile=compile)(x, labels, shares, 0.5, 1 << 20, 0.05) for compile, x in pairs]
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
    trained = list(seen)
    assert len(trained) == count
    assert set(trained) <= {targets // count, -(-targets // count)}
    runner.evaluate(weights, x, tokens, 1 << 20)
    assert seen == 2 * trained


def head_of(**model: Any) -> tuple[ModelRunner, dict[str, Tensor]]:
    config = model_config(tiny.recipe(model=tiny.model(**model)), None)
    spec = tiny.spec_of(config)
    runner = ModelRunner(spec, device="cpu", dtype=torch.bfloat16)
    names = next(block.buffers for block in spec.blocks if block.name == HEAD)
    initializer = Initializer(spec, 0)
    return runner, {k: t.bfloat16() for name in names for k, t in initializer.values(name).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("work_bytes", [1, 5000, 1 << 20])
def test_statistics_are_those_of_the_formula_and_change_no_log_probability(dtype: torch.dtype, work_bytes: int) -> None:
    torch.manual_seed(0)
    logits, labels = (5 * torch.randn(40, 300)).to(dtype), torch.randint(0, 300, (40,))
    exact = logits.double()
    (plain,) = log_probabilities_(logits.clone(), labels, work_bytes)
    scores, means, entropies = log_probabilities_(logits.clone(), labels, work_bytes, (MEAN_LOGIT, ENTROPY))
    assert torch.equal(scores, plain)
    torch.testing.assert_close(means, exact.mean(dim=-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropies, torch.special.entr(exact.softmax(dim=-1)).sum(dim=-1), rtol=1e-5, atol=1e-6)
    (_, alone) = log_probabilities_(logits.clone(), labels, work_bytes, (ENTROPY,))
    assert torch.equal(alone, entropies)


def test_a_token_that_cannot_be_adds_nothing_to_the_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf], [80.0, -math.inf, -math.inf, -200.0]])
    _, entropies = log_probabilities_(logits, torch.tensor([0, 0]), 1 << 20, (ENTROPY,))
    assert entropies.tolist() == pytest.approx([math.log(2), 0], abs=1e-7)


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
            if not isinstance(tensor, Tensor) or tensor.shape[-1:] != (self._vocab,) or self._hidden in tensor.shape:
                continue  # the last is a parameter's gradient
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


def config_of(kind: str, **overrides: Any) -> PretrainedConfig:
    heads = {"num_kv_heads": 4, "head_dim": None} if kind == "olmoe" else {}
    m = tiny.model(model_type=kind, num_layers=2, overrides=FAMILIES.get(kind, {}) | overrides, **heads)
    return model_config(tiny.recipe(model=m), None)


@pytest.mark.parametrize("kind", cases(FAMILIES, "mixtral", "qwen2_moe"))
def test_it_is_the_total_gradient_of_one_forward_in_transformers(kind: str) -> None:
    """Of `model(..., labels, output_router_logits=True)` over one document, which is streamed in chunks of 7."""
    config = config_of(kind, router_aux_loss_coef=WEIGHT)
    spec, source = tiny.spec_of(config), random_model(config, 1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.load_state_dict(source.state_dict())
    ids = torch.randint(300, (40,), generator=torch.Generator().manual_seed(0))
    output = model(input_ids=ids[None], labels=ids[None], output_router_logits=True)
    output.loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {}
    for weight in (WEIGHT, 0.0):
        runner = ModelRunner(spec, device="cpu", dtype=torch.float32, router_aux_loss=weight)
        weights = in_buffers(spec, {name: parameter.detach() for name, parameter in source.named_parameters()})
        grads = in_buffers(spec, {name: torch.zeros_like(tensor) for name, tensor in weights.items()})
        loss = forward_backward(runner, weights, grads, [MicroBatch.of([ids])], 7, 1 << 14)
        found[weight] = relative_errors(grads, expected)
        alone = float((output.loss - WEIGHT * output.aux_loss).detach())
        assert loss == pytest.approx(alone, rel=1e-5), "the cross entropy alone"
    assert max(found[WEIGHT].values()) < 1e-5
    assert max(found[0.0].values()) > 1e-2


@pytest.mark.parametrize("kind", cases(FAMILIES, "mixtral", "qwen2_moe"))
def test_padding_is_left_out_as_by_an_attention_mask(kind: str) -> None:
    """Of two rows as one batch of transformers, padded to 40 tokens; here they are two micro-batches."""
    config = config_of(kind, router_aux_loss_coef=WEIGHT)
    spec, source = tiny.spec_of(config), random_model(config, 1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.load_state_dict(source.state_dict())
    ids, lengths = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(0)), (40, 17)
    mask = torch.arange(40) < torch.tensor(lengths)[:, None]
    labels = ids.masked_fill(~mask, -100)
    model(input_ids=ids, attention_mask=mask.long(), labels=labels, output_router_logits=True).loss.backward()
    streams = [
        replace(MicroBatch.of([row[:length], row[length:]] if length < 40 else [row]), filled=length)
        for row, length in zip(ids, lengths, strict=True)
    ]
    for stream in streams:
        stream.labels[stream.num_filled :] = -100
    runner = ModelRunner(spec, device="cpu", dtype=torch.float32, router_aux_loss=WEIGHT)
    weights = in_buffers(spec, {name: parameter.detach() for name, parameter in source.named_parameters()})
    grads = in_buffers(spec, {name: torch.zeros_like(tensor) for name, tensor in weights.items()})
    forward_backward(runner, weights, grads, streams, 7, 1 << 14)
    found = relative_errors(grads, {name: parameter.grad for name, parameter in model.named_parameters()})
    assert max(found.values()) < 1e-5


@pytest.mark.parametrize("pieces", [False, True])
def test_means_of_sequences_are_autograds(pieces: bool) -> None:
    """Of documents of 1 to 40 targets in two streams, whose chunks of 7 cut most of them."""
    config = config_of("qwen3")
    spec, source = tiny.spec_of(config), random_model(config, 1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.load_state_dict(source.state_dict())
    generator = torch.Generator().manual_seed(0)
    streams = [[torch.randint(300, (n,), generator=generator) for n in lengths] for lengths in ((41, 2, 9), (12, 30))]
    each = [model(input_ids=ids[None], labels=ids[None]).loss for documents in streams for ids in documents]
    expected = torch.stack(each).mean()
    expected.backward()
    runner = ModelRunner(spec, device="cpu", dtype=torch.float32)
    weights = in_buffers(spec, {name: parameter.detach() for name, parameter in source.named_parameters()})
    grads = in_buffers(spec, {name: torch.zeros_like(tensor) for name, tensor in weights.items()})
    batch, objective = [MicroBatch.of(documents) for documents in streams], OBJECTIVES["sequence_mean"]
    loss = forward_backward(runner, weights, grads, batch, 7, 1 << 14, in_pieces=pieces, objective=objective)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    found = relative_errors(grads, {name: parameter.grad for name, parameter in model.named_parameters()})
    assert max(found.values()) < 1e-5


def plain_gradients(model: Any, session: Session) -> dict[str, Tensor]:
    """What transformers alone finds of the next step's real tokens, balanced over all of them together."""
    micro_batches = session.loader.next_step()
    targets, routed, losses = sum(m.num_targets for m in micro_batches), [], []
    for m in micro_batches:
        end = len(m.ids) if m.filled is None else m.filled
        for first, last in zip(m.documents, [*m.documents[1:], len(m.ids)], strict=True):
            if first < end:
                some = slice(first, min(last, end))
                output = model(input_ids=m.ids[None, some], output_router_logits=True)
                routed.append(output.router_logits)
                losses.append(cross_entropy(output.logits[0], m.labels[some], ignore_index=-100, reduction="sum"))
    model.zero_grad()
    (torch.stack(losses).sum() / targets + WEIGHT * balancing_loss(model, routed)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("name", cases(BALANCED, "nvme-streamed-spilled"))
def test_a_step_balances_over_all_its_tokens_and_no_padding(tmp_path: Path, name: str, model_type: str) -> None:
    """Adam's first moments after two steps whose update is next to nothing; micro-batches are padded, and layers of a
    hybrid run document by document."""
    policy, budgets = PLANS[name]
    overrides = tiny.HYBRID if model_type == "qwen3_next" else EXPERTS
    m = tiny.model(model_type=model_type, num_layers=3 if overrides is tiny.HYBRID else 2, overrides=overrides)
    options: dict[str, Any] = {"steps": 2, "global_batch_size": 3, "clip_norm": None, "lr": 1e-30, "weight_decay": 0.0}
    t = tiny.training(router_aux_loss=WEIGHT, **options, **policy)
    with tiny.session(tmp_path, m=m, t=t, **budgets) as session:
        padded = functools.partial(WeightedLoader, filled=[1.0, 0.3], weights=False)
        begin, loader, model = session.loader.cursor, session.loader, plain_model(session)
        session.loader = padded(loader)  # type: ignore[assignment]
        first, second = (plain_gradients(model, session) for _ in range(2))
        loader.seek(begin)
        session.loader = padded(loader)  # type: ignore[assignment]
        tiny.steps(session)
        moments = tiny.first_moments(session.store, session.spec)
    expected = {parameter: 0.1 * (0.9 * first[parameter] + second[parameter]) for parameter in moments}
    errors = relative_errors(moments, expected)
    assert max(errors.values()) <= 3e-5, max(errors, key=errors.__getitem__)


def test_a_model_without_it_is_refused_in_one_line() -> None:
    for kind in ("llama", "qwen3"):
        with pytest.raises(UserError, match=rf"train\.router_aux_loss: 0\.01, but model type '{kind}' defines no"):
            router_coefficient(config_of(kind), 0.01)
        assert router_coefficient(config_of(kind), None) == router_coefficient(config_of(kind), 0.0) == 0
    assert router_coefficient(config_of("mixtral", router_aux_loss_coef=0.5), None) == 0, "the config leaves it off"
    assert router_coefficient(config_of("mixtral", output_router_logits=True), 0.0) == 0
    assert router_coefficient(config_of("mixtral", output_router_logits=True, router_aux_loss_coef=0.3), None) == 0.3
    with pytest.raises(UserError, match="pads every row"):
        router_coefficient(config_of("qwen3_moe"), 0.1, whole_documents=True)


@pytest.mark.long
def test_compiled_layers_balance_alike(tmp_path: Path) -> None:
    """Compiled chunks are not cut where padding begins: what they hold of it is computed and not counted."""
    m = tiny.model(model_type="qwen3_moe", num_layers=2, overrides=EXPERTS)
    found = []
    for compile in ("off", "on"):
        t = tiny.training(steps=2, global_batch_size=3, router_aux_loss=WEIGHT, compile=compile)
        with tiny.session(tmp_path / compile, m=m, t=t) as session:
            session.loader = WeightedLoader(session.loader, [1.0, 0.3])  # type: ignore[assignment]
            found.append([x for metrics in tiny.steps(session) for x in (metrics.loss, metrics.grad_norm)])
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_chunk_tokens_are_those_of_the_labels_and_ids() -> None:
    ids, labels = torch.tensor([7, 2, 7, 9, 2]), torch.tensor([2, -100, 9, -100, -100])
    tokens = ChunkTokens.of(ids, labels, torch.tensor([0, 1, 0, 1, 2]))
    assert tokens.rows.tolist() == [0, 2]
    assert tokens.labels.tolist() == [2, 9]
    assert tokens.distinct.tolist() == [2, 7, 9]
    assert torch.equal(tokens.distinct[tokens.row_of], ids)
    assert tokens.weights.tolist() == [1.0, 1.0]
    weighted = ChunkTokens.of(ids, torch.tensor([2, 7, 9, 9, -100]), ids, torch.tensor([0.1, 0, 2, 0.5, 3]))
    assert weighted.rows.tolist() == [0, 2, 3], "a label of weight 0 is no target"
    assert torch.equal(weighted.weights, torch.tensor([0.1, 2, 0.5]).double())
    assert sum(t.numel() for t in weighted.tensors()) * 8 <= 5 * BYTES_PER_TOKEN
    back = ChunkTokens.of_tensors(weighted.tensors())
    assert torch.equal(back.weights, weighted.weights)
    assert torch.equal(back.labels, weighted.labels)
    empty = ChunkTokens.of(ids, torch.full((5,), -100), torch.arange(5))
    assert empty.rows.numel() == empty.labels.numel() == 0
