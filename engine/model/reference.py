"""One optimizer step in plain words: block after block, chunk after chunk, with everything in memory.

The engine's step is this one, cut into ops that overlap, with weights, gradients and state on their way between three
tiers; in float32 both give the same bits. Where a self-check (engine/self_check.py) has to tell rounding from a
mistake, it computes `forward_backward` in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.attention.chunk import AttentionState
from penstock.engine.config import TrainConfig
from penstock.engine.model.groups import own_values
from penstock.engine.model.images import Images
from penstock.engine.model.layers import LayerInputs
from penstock.engine.model.recurrence import Segment, States
from penstock.engine.model.runner import ModelRunner
from penstock.engine.model.sequences import coefficients, mismatched_sums, sequences_of, totals_of, with_divergence
from penstock.engine.model.skeleton import weight_dtype
from penstock.engine.model.spec import EMBED, HEAD, VISION, ModelSpec, depths, layouts
from penstock.engine.model.tokens import (
    ChunkTokens,
    MicroBatch,
    chunk_ranges,
    last_positions,
    mean_by_weight,
    total_weight,
)
from penstock.engine.objectives.base import OBJECTIVES, Objective
from penstock.engine.objectives.sequences import Found
from penstock.engine.optim.base import MASTER, UpdateRange, find_optimizer
from penstock.engine.optim.groups import lr_factors, with_factors
from penstock.engine.optim.lr import clip_coefficient, learning_rate

Tensors = Mapping[str, Tensor]
"""By the parameter's state-dict name."""


class Training:
    """A model in training: per flat buffer its rounded weights, its gradient and the optimizer's float32 state."""

    def __init__(
        self,
        runner: ModelRunner,
        train: TrainConfig,
        parameters: Tensors,
        objective: Objective = OBJECTIVES["next_token"],
    ) -> None:
        """`parameters`: float32 values to begin with."""
        optimizer, spec = find_optimizer(train), runner.spec
        self.runner, self.train, self.num_steps = runner, train, 0
        self.forward_backward = partial(forward_backward, runner, z_loss=train.z_loss, objective=objective)
        self.optimizer, self.layouts = optimizer.make("fused"), layouts(spec)
        self.optimizer = with_factors(self.optimizer, lr_factors(train, depths(spec)))
        dtypes = {name: weight_dtype(runner.dtype, float32=buffer.float32) for name, buffer in spec.buffers.items()}
        self.weights = {b: torch.zeros(layout.numel, dtype=dtypes[b]) for b, layout in self.layouts.items()}
        for name, weights in self.by_name(self.weights).items():
            weights.copy_(parameters[name])
        # What is frozen has weights and nothing else.
        sizes = {name: buffer.layout.numel for name, buffer in spec.trained.items()}
        self.state = {b: {kind: torch.zeros(numel) for kind in optimizer.state_kinds} for b, numel in sizes.items()}
        for name, master in self.by_name({b: kinds[MASTER] for b, kinds in self.state.items()}).items():
            master.copy_(parameters[name])
        self.gradients = {buffer: torch.zeros(numel) for buffer, numel in sizes.items()}
        self.measured: dict[str, float] = {}
        """What the objective found of the last step beside its loss, by name."""

    def by_name(self, flats: Tensors) -> dict[str, Tensor]:
        """Views of all parameters in `flats`, one flat tensor per buffer."""
        return {name: view for b, flat in flats.items() for name, view in self.layouts[b].views(flat).items()}

    def step(self, streams: Sequence[MicroBatch], chunk_tokens: int, logits_bytes: int) -> tuple[float, float]:
        """One optimizer step on a batch; its loss and the norm of its gradient."""
        for gradient in self.gradients.values():
            gradient.zero_()
        weights, gradients = self.by_name(self.weights), self.by_name(self.gradients)
        found = Found()
        loss = self.forward_backward(weights, gradients, streams, chunk_tokens, logits_bytes, found=found)
        self.measured = found.metrics

        squares = [torch.linalg.vector_norm(gradient).square().double() for gradient in self.gradients.values()]
        norm = float(torch.stack(squares).sum().sqrt())
        clip = clip_coefficient(norm, self.train.clip_norm)

        self.num_steps += 1
        lr = learning_rate(self.train, self.num_steps)
        scalars = self.optimizer.scalars(self.train, lr, self.num_steps, clip, torch.device("cpu"))
        for buffer, state in self.state.items():
            whole = UpdateRange(self.layouts[buffer], 0, self.layouts[buffer].numel)
            # Updates the master weights by the clipped gradient and rounds them into the weights.
            self.optimizer.step(state, self.gradients[buffer], self.weights[buffer], whole, scalars)
        return loss, norm


def in_buffers(spec: ModelSpec, tensors: Tensors) -> dict[str, Tensor]:
    """Copies of parameters, or of what is as large, that lie as in the model's flat buffers: of those of which all are
    there."""
    result: dict[str, Tensor] = {}
    for buffer in spec.buffers.values():
        own = own_values(buffer, tensors)
        if len(own) == len(buffer.params):
            like = next(iter(own.values()))
            flat = torch.zeros(buffer.layout.numel, dtype=like.dtype, device=like.device)
            result |= {name: view.copy_(own[name]) for name, view in buffer.layout.views(flat).items()}
    return result


def forward_backward(
    runner: ModelRunner,
    weights: Tensors,
    gradients: Tensors,
    streams: Sequence[MicroBatch],
    chunk_tokens: int,
    logits_bytes: int,
    *,
    in_pieces: bool = False,
    z_loss: float = 0.0,
    objective: Objective = OBJECTIVES["next_token"],
    found: Found | None = None,
) -> float:
    """The objective's loss, usually the mean of the targets by their weights; adds its gradients to `gradients`
    (float32).

    `weights`: all parameters in the runner's dtype, laid out as in flat buffers (`in_buffers`); likewise `gradients`,
    which has those that are trained. `in_pieces`: attention goes over one chunk of keys at a time. With `z_loss` the
    gradients, not the loss, are those of PaLM's term as well (model/loss.py). `found`: takes what an objective
    over whole sequences measures.
    """
    layers, num_layers = runner.layers, len(runner.spec.attention)
    total = sum(total_weight(stream.labels, stream.weights) for stream in streams)
    ranges = [chunk_ranges(stream, None if runner.spec.whole_documents else chunk_tokens) for stream in streams]
    chunks = [chunk for s, cuts in zip(streams, ranges, strict=True) for chunk in _cut(runner, s, cuts, in_pieces)]

    # What images are to the text model, where the vision tower is trained: an image belongs to the chunk in which it
    # begins, and what is found of it is left in its stream.
    pictured = [
        (runner.tower, stream.images, start, end)
        for stream, of_stream in zip(streams, ranges, strict=True)
        for start, end in of_stream
        if runner.tower is not None and stream.images is not None
    ]
    for tower, of_stream_images, start, end in pictured:
        tower.look(_of_block(runner, VISION, weights), of_stream_images, start, end)

    # Forward. Every layer's input is saved, and of its attention keys, values, output and log-sum-exp.
    here = _of_block(runner, EMBED, weights)
    hidden = [runner.embed(here, chunk.tokens.ids, chunk.tokens.positions) for chunk in chunks]
    for x, chunk in zip(hidden, chunks, strict=True):
        if chunk.images is not None:
            chunk.images.embed(x)
    if layers.balance is not None:
        layers.balance.begin()
    inputs: list[list[Tensor]] = []
    attended: list[list[AttentionState | None]] = []
    sent: list[list[tuple[Tensor, ...]]] = [[] for _ in range(num_layers)]
    """What layers handed to a part that is a block of its own."""
    begun: list[list[States | None]] = []
    """What layers remember beside attention of the tokens before each chunk."""
    for layer in range(num_layers):
        here = _of_layer(runner, layer, weights)
        inputs.append(hidden)
        states = (
            layers.states(layer, s.documents, cuts, () if s.images is None else s.images.both_ways)
            for s, cuts in zip(streams, ranges, strict=True)
        )
        attended.append([state for of_stream in states for state in of_stream])
        outputs, remembered, recurrent = [], None, runner.spec.state_of(layer) is not None
        begun.append([])
        for x, chunk, state in zip(hidden, chunks, attended[layer], strict=True):
            if layers.balance is not None:
                layers.balance.watch(chunk.filled, counting=True)
            begun[layer].append(remembered)
            if recurrent:
                handlers = layers.segment_handlers(layer, state)
                y, remembered = layers.forward_segments(layer, here, x, chunk.segments, handlers, remembered)
            else:
                y = layers.forward(layer, here, x, chunk.inputs, state, keys=chunk.keys)
            sent[layer].append(layers.sent)
            if chunk.images is not None:
                chunk.images.add(layer, y)
            for group in range(runner.branches.groups(layer)):
                y = runner.branches.forward(layer, here, y, sent[layer][-1], group=group)
            outputs.append(y)
        hidden = outputs
    if layers.balance is not None:
        layers.balance.settle(sum(stream.num_filled for stream in streams))

    # Loss, and the gradient of the last layer's output in its place. From here on the last chunk comes first: later
    # queries add to the gradients of earlier keys.
    here, sums = _of_block(runner, HEAD, weights), _of_block(runner, HEAD, gradients)
    losses, backwards = torch.zeros(len(chunks)), range(len(chunks))[::-1]
    found = Found() if found is None else found
    targets, heat = [chunk.tokens for chunk in chunks], objective.temperature
    if objective.whole_sequences:
        # What each target counts follows from the scores of all.
        pairs = zip(hidden, targets, strict=True)
        names = objective.statistics
        scores = [runner.evaluate(here, x, tokens, logits_bytes, heat, names).scores for x, tokens in pairs]
        logps, *statistics = torch.cat(scores, dim=1).cpu()
        whole = sequences_of(streams, logps, totals_of(streams, objective), dict(zip(names, statistics, strict=True)))
        if objective.mismatched:
            totals = with_divergence(whole.totals, streams, mismatched_sums(streams, whole))
            whole = whole._replace(totals=totals)
        made, measured = coefficients(objective, whole)
        found.add(measured)
        parts = made.to(runner.device).split([of_chunk.shape[1] for of_chunk in scores])
        targets = [replace(tokens, weights=part) for tokens, part in zip(targets, parts, strict=True)]
        total = 1.0
    for i in backwards:
        scale = mean_by_weight(1.0, total)
        more = {"z_loss": z_loss, "temperature": heat}
        losses[i], hidden[i] = runner.head(here, hidden[i], targets[i], scale, sums, logits_bytes, **more)

    # Backward: a layer's gradient is of its input now, no longer of its output. It ends with the lowest block that is
    # trained; with nothing frozen that is the embedding, or the tower.
    lowest, embed = runner.spec.lowest_trained, int(runner.spec.vision is not None)
    above = {n for block in runner.spec.blocks[lowest:] for n in (block.layer, block.branch_of) if n is not None}
    for layer in sorted(above, reverse=True):
        here, sums = (_of_layer(runner, layer, tensors) for tensors in (weights, gradients))
        behind: States = ()
        recurrent = runner.spec.state_of(layer) is not None
        for i in backwards:
            x, state, chunk = inputs[layer][i], attended[layer][i], chunks[i]
            if layers.balance is not None:
                layers.balance.watch(chunk.filled, counting=False)
            given, dy = sent[layer][i], hidden[i]
            if chunk.images is not None:
                chunk.images.take(layer + 1, dy)
            dsent: Sequence[Tensor] = ()
            for group in reversed(range(runner.branches.groups(layer))):
                dsent = runner.branches.backward(layer, here, given, dy, sums, group=group, dsent=dsent)
            if recurrent:
                handlers, before = layers.segment_handlers(layer, state), begun[layer][i]
                hidden[i], behind = layers.backward_segments(
                    layer, here, x, dy, chunk.segments, handlers, before, behind, sums, dsent=dsent
                )
                continue
            hidden[i] = layers.backward(layer, here, x, dy, chunk.inputs, state, sums, keys=chunk.keys, dsent=dsent)
    here, sums = _of_block(runner, EMBED, weights), _of_block(runner, EMBED, gradients)
    for i in backwards if lowest <= embed else ():
        dx, images = hidden[i], chunks[i].images
        if images is not None:
            images.take(0, dx)
            dx = images.without(dx)
        runner.embed_backward(here, chunks[i].tokens, dx, sums)
    for tower, of_stream_images, start, end in pictured[::-1] if lowest < embed else ():
        here, sums = _of_block(runner, VISION, weights), _of_block(runner, VISION, gradients)
        tower.backward(here, of_stream_images, start, end, sums)
    return found.loss if objective.whole_sequences else mean_by_weight(float(losses.double().sum()), total)


def _of_layer(runner: ModelRunner, layer: int, tensors: Tensors) -> dict[str, Tensor]:
    """Those that a decoder layer computes with, its branch included."""
    blocks = [block.name for block in runner.spec.blocks if layer in (block.layer, block.branch_of)]
    return {name: tensor for block in blocks for name, tensor in _of_block(runner, block, tensors).items()}


def _of_block(runner: ModelRunner, block: str, tensors: Tensors) -> dict[str, Tensor]:
    """Those in `tensors` that a block computes with: its own, and for a head that shares it the embedding."""
    params = runner.spec.params_of(next(b for b in runner.spec.blocks if b.name == block))
    return {param.name: tensors[param.name] for param in params if param.name in tensors}


class _Chunk(NamedTuple):
    tokens: ChunkTokens
    inputs: LayerInputs
    segments: list[Segment]
    """Its documents, of a model whose layers remember."""
    keys: Sequence[tuple[int, int]] | None
    filled: int
    """Its tokens before the padding."""
    images: Images | None


def _cut(runner: ModelRunner, stream: MicroBatch, ranges: Sequence[tuple[int, int]], in_pieces: bool) -> list[_Chunk]:
    longest, keys = last_positions(stream.positions, stream.documents), ranges if in_pieces else None
    chunks = []
    for start, end in ranges:
        positions = stream.positions[start:end]
        weights = None if stream.weights is None else stream.weights[start:end]
        tokens = ChunkTokens.of(stream.ids[start:end], stream.labels[start:end], positions, weights).to(runner.device)
        last, of = longest[start:end], stream.documents
        images = None if stream.images is None else stream.images.part(start, end)
        places = tokens.positions if images is None or images.positions is None else images.positions
        segments = runner.segments(places, last, start, of) if any(runner.spec.states) else []
        filled = max(0, min(stream.num_filled, end) - start)
        chunks.append(_Chunk(tokens, runner.inputs(places, last), segments, keys, filled, images))
    return chunks
