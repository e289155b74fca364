"""The export of a run's generation as a Hugging Face folder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from penstock.engine.config import AdapterConfig, Recipe
from penstock.engine.data.text.chat import FILE as TEMPLATE_FILE
from penstock.engine.data.text.chat import ChatTemplate, load_template, trained_ends
from penstock.engine.data.text.tokenizer import TextTokenizer, read_otherwise, tokenizer_contents
from penstock.engine.hf import weights
from penstock.engine.hf.adapter_folder import write_adapter
from penstock.engine.hf.generation import stop_ids, write_generation_config
from penstock.engine.hf.named_code import named_code
from penstock.engine.hf.quantised import open_checkpoint
from penstock.engine.model import groups, skeleton
from penstock.engine.model.adapter_values import AdapterLayers
from penstock.engine.model.adapters import plain_name
from penstock.engine.model.anatomy import take_apart
from penstock.engine.model.reward import is_reward, padding_of
from penstock.engine.model.spec import ModelSpec, block_of, buffers_of_blocks
from penstock.engine.run_files import with_saved_inputs
from penstock.engine.runtime.past import StateReader
from penstock.engine.runtime.sources import RunSource
from penstock.engine.runtime.state import read_parameters
from penstock.storage.files.errors import UserError

SHARD_BYTES = 5 * 10**9


class Exported(NamedTuple):
    step: int | None
    num_params: int
    num_trained: int
    model_type: str
    auto_class: str
    """The class of transformers that loads it."""
    adapter: AdapterConfig | None
    """What was exported is this adapter alone."""
    remarks: list[str]
    """What is to be said of it."""


def export(
    run_dir: Path,
    recipe: Recipe,
    *,
    out_dir: Path,
    checkpoint: str | None = None,
    dtype: str = "auto",
    max_shard_bytes: int = SHARD_BYTES,
    merged: bool = False,
) -> Exported:
    """Write the last committed generation of a run, or a checkpoint's, as a Hugging Face folder, block by block; of a
    run that trains an adapter a folder of that, or, with `merged` and where the base is random weights, the base with
    it. A base that was quantised is written as the run computed with it.

    `dtype` of the trained tensors: a torch dtype's name, or auto: each as in the model that the run began with, an
    adapter's float32. The run, which may be running, is only read. Raises UserError when it has no generation,
    `out_dir` cannot be written, a value does not fit float16, or an adapter cannot be merged.
    """
    with closing(RunState(run_dir, recipe, checkpoint)) as run:
        named, recipe, lacks_model = recipe.model.path, run.recipe, run.lacks_model
        spec, origin, stored = _with_padding(groups.uncut(run.spec), run.tokenizer), run.origin, run.stored
        adapter, constants = spec.adapter, run.constants

        state = StateReader(run.store, run.spec, run.recipe.train)

        def of_buffer(name: str) -> Mapping[str, Tensor]:
            return read_parameters(state, name, run.spec.buffers[name])

        parameters = groups.reading_uncut(run.spec, of_buffer)

        alone = adapter is not None and not merged and origin is None
        merged = merged or alone
        if adapter is not None and not merged:
            write_adapter(
                out_dir,
                spec,
                parameters,
                base=named,
                dtype="float32" if dtype == "auto" else dtype,
                tokenizer=run.tokenizer_files(),
                stops=run.stops(),
                origin=origin,
            )
            remarks: list[str] = []
        else:
            if lacks_model and spec.vision is not None:
                raise UserError(
                    f"model.path: {named} is missing here, and the vision tower, which is trained, is exported as that "
                    "folder lays it out; restore the folder"
                )
            usual = "float32" if recipe.train.compute_dtype == "float32" else "bfloat16"
            like = None if lacks_model else origin
            rows = stored if recipe.model.added_tokens and like is not None else None
            whole = spec
            read: weights.ReadBuffer = parameters
            frozen = (a for a in run.store.arrays() if a.fixed and a.buffer in run.spec.buffers)
            arrays = ((groups.uncut_name(run.spec, a.buffer), a.dtype) for a in frozen)
            fixed = {name: getattr(torch, array_dtype) for name, array_dtype in arrays}
            fixed = {name: dtype for name, dtype in fixed.items() if not spec.buffers[name].stored}
            if fixed and like is not None:
                read = _unrounded(spec, parameters, fixed, like, rows)
            if adapter is not None:
                whole = take_apart(spec.config, split_layers=recipe.train.split_layers)
                dtypes: dict[str, torch.dtype] = {}
                if dtype == "auto" and like is not None:
                    dtypes = weights.CheckpointLayout(whole, open_checkpoint(like), rows).dtypes()
                other = weights.FLOAT_DTYPES[usual if dtype == "auto" else dtype]
                read = _merging(spec, whole, read, lambda name: dtypes.get(name, other))
                constants = {plain_name(name): tensor for name, tensor in constants.items()}
            remarks = weights.export_folder(
                out_dir,
                whole,
                read,
                constants=constants,
                origin=like,
                eos_id=None if run.tokenizer is None else run.tokenizer.eos_id,
                tokenizer=run.tokenizer_files(),
                stops=run.stops(),
                dtype=usual if dtype == "auto" else dtype,
                stored=rows,
                convert=dtype != "auto",
                max_shard_bytes=max_shard_bytes,
            )
            if lacks_model:
                write_generation_config(out_dir, origin, spec.config, run.stops())
                remarks.append(
                    f"model.path: {named} is missing here, so tensors have transformers' own names and only the text "
                    "layers are exported; restore the folder for an export like the original"
                )
            if alone:
                remarks.append(
                    "merged: the adapter was trained on random weights that exist only in this run, so the whole "
                    "model is exported"
                )
        remarks += run.said
        if run.tokenizer is not None and run.tokenizer.folder != origin:
            said = read_otherwise(run.tokenizer, spec.model_type)
            remarks += [] if said is None else [said]
        step = run.store.meta.get("step")
        return Exported(
            step=step if isinstance(step, int) else None,
            num_params=spec.num_params,
            num_trained=spec.num_trained,
            model_type=spec.model_type,
            auto_class=skeleton.auto_class(spec.config).__name__,
            adapter=None if merged else adapter,
            remarks=remarks,
        )


class RunState(RunSource):
    """A generation of a run, open for reading, and what it is the state of. It may be read while the run is running."""

    def __init__(self, run_dir: Path, recipe: Recipe, checkpoint: str | None = None) -> None:
        """The last committed generation, or a checkpoint's. Raises UserError when there is none."""
        self.recipe = with_saved_inputs(recipe, run_dir)
        """With what serves here in the place of what it names."""
        self.lacks_model = self.recipe.model.path != recipe.model.path
        """Whether of the model's folder, which is not here, there are the small files."""
        super().__init__(run_dir, self.recipe, checkpoint)
        self.template: ChatTemplate | None = None
        """That of its conversations, or the tokenizer's own."""
        self.said: list[str] = []
        """What is to be said of it."""
        data = run_dir / "data"
        try:
            if self.tokenizer is not None:
                self.template = load_template(self.recipe.data, self.tokenizer, data)
        except BaseException as error:
            if not isinstance(error, UserError) or (data / TEMPLATE_FILE).exists():
                self.close()
                raise
            self.said.append(f"{error}: the export has the chat template of the tokenizer's folder, if that has one")

    def tokenizer_files(self) -> dict[str, bytes]:
        """What makes up the tokenizer, with the chat template that was trained, by path."""
        folder, other = self.origin, None
        if self.tokenizer is not None:
            folder, own = self.tokenizer.folder, self.tokenizer.chat_template
            known = {"default": own} if isinstance(own, str) else own
            if self.template is not None and self.template.texts != known:
                other = self.template.texts
        if folder is None or not folder.is_dir():
            return {}
        result = tokenizer_contents(folder, other)
        return result | named_code(folder, result)[0]

    def stops(self) -> frozenset[int]:
        """Tokens that end a text or a turn of what the run writes."""
        if self.tokenizer is None:
            return frozenset()
        ends = trained_ends(self.recipe.data, self.template)
        return ends | stop_ids(self.origin, self.stored, self.tokenizer)


def _with_padding(spec: ModelSpec, tokenizer: TextTokenizer | None) -> ModelSpec:
    """A reward model whose config names no padding with the tokenizer's: without any, transformers takes one text at a
    time. What ends texts as well is none: transformers would read the reward of the token before it."""
    if tokenizer is None or not is_reward(spec.config) or padding_of(spec.config) is not None:
        return spec
    if tokenizer.pad_id is None or tokenizer.pad_id == tokenizer.eos_id or tokenizer.pad_id >= spec.vocab_size:
        return spec
    config = copy.deepcopy(spec.config)
    config.pad_token_id = tokenizer.pad_id
    return replace(spec, config=config)


def _unrounded(
    spec: ModelSpec,
    read: weights.ReadBuffer,
    fixed: Mapping[str, torch.dtype],
    origin: Path,
    stored: PretrainedConfig | None,
) -> weights.ReadBuffer:
    """Reads what is frozen as `origin` has it, where a run stores it in a dtype that does not hold that (`fixed`, by
    buffer), unless it has changed there since."""
    layout = weights.CheckpointLayout(spec, open_checkpoint(origin), stored)
    dtypes = layout.dtypes()

    def read_buffer(name: str) -> Mapping[str, Tensor]:
        values, dtype = read(name), fixed.get(name)
        if dtype is None or all(torch.promote_types(dtypes[n], dtype) == dtype for n in values if n in dtypes):
            return values
        first = dict(layout.read_block(block_of(name)))
        same = {n for n, v in values.items() if n in first and torch.equal(first[n].to(dtype).float(), v)}
        return {n: first[n] if n in same else v for n, v in values.items()}

    return read_buffer


def _merging(
    spec: ModelSpec, whole: ModelSpec, read: weights.ReadBuffer, dtypes: Callable[[str], torch.dtype]
) -> weights.ReadBuffer:
    """Reads `whole`, the model without an adapter, from the buffers of `spec`, the one that has it: a block with the
    first of its buffers, of the others nothing."""
    layers, owned = AdapterLayers(spec), buffers_of_blocks(spec)
    first = {buffers[0] for buffers in buffers_of_blocks(whole).values()}
    layers.require_mergeable()

    def read_buffer(name: str) -> Mapping[str, Tensor]:
        if name not in first:
            return {}
        values = {param: tensor for buffer in owned[block_of(name)] for param, tensor in read(buffer).items()}
        return layers.merged(values, dtypes)

    return read_buffer
