"""Weights in and out: Hugging Face checkpoints to the fp32 parameters of flat buffers and back, a block at a time."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from penstock.engine import preparing
from penstock.engine.data.text.tokenizer import TOKENIZER_FILES, write_tokenizer_files
from penstock.engine.hf import generation
from penstock.engine.hf.config import with_floats, without_floats, without_implementation
from penstock.engine.hf.conversion import Conversion, ConversionPlan
from penstock.engine.hf.language_head import tensors_of_head
from penstock.engine.hf.named_code import named_code
from penstock.engine.hf.quantised import DequantisingReader, open_checkpoint, remarks_on_quantised, without_quantisation
from penstock.engine.model import groups, skeleton
from penstock.engine.model.adapters import is_adapter, plain_name
from penstock.engine.model.anatomy import Initializer, initial_constants
from penstock.engine.model.reward import SCORE, is_reward
from penstock.engine.model.spec import HEAD, ModelSpec, block_of, buffers_of_blocks
from penstock.storage.files.disk import atomic_write, require_writable
from penstock.storage.files.errors import UserError, ensure
from penstock.storage.files.model_folder import read_model_file
from penstock.storage.files.safetensors import CheckpointReader, CheckpointWriter, Tensors
from penstock.storage.files.untrusted import one_line, parse_object

FLOAT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes of trained tensors: those that fp32 holds exactly."""

_COPIED_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken"}
_COPIED_BYTES = 1 << 28
"""Of one file; the largest tokenizers have some tens of MB."""


class NewRows(NamedTuple):
    """Rows of the embedding and the head for tokens that a recipe adds: they begin as the mean of the rows before."""

    stored: PretrainedConfig
    """The config of the checkpoint, whose tables may be smaller than the model's."""
    first: int
    end: int
    """The rows [first, end)."""

    @classmethod
    def make(cls, stored: PretrainedConfig, num_added: int, tokenizer_size: int) -> NewRows:
        """For the last `num_added` of the ids below `tokenizer_size`."""
        rows = stored.get_text_config(decoder=True).vocab_size
        return cls(stored, min(tokenizer_size - num_added, rows), tokenizer_size)

    def describe(self, num_added: int) -> str:
        """What is done, in words."""
        rows, tokens = self.stored.get_text_config(decoder=True).vocab_size, "token" + "s" * (num_added != 1)
        if self.end > rows:
            grows = f"the embedding grows from {rows:,} to {self.end:,} rows"
        else:
            grows = f"the embedding has {rows:,} rows, with spare rows for them"
        return f"{num_added:,} {tokens} added: {grows}; new rows are the mean of the others"

    def fill(self, values: Tensor, rows: int) -> Tensor:
        """A table [stored rows, ...] or a bias [stored rows], float32, grown to `rows`."""
        mean = values[: self.first].mean(dim=0, keepdim=True)
        grown = torch.cat([values, mean.expand(max(0, rows - len(values)), *values.shape[1:])])
        grown[self.first : self.end] = mean
        return grown


def import_blocks(
    layout: CheckpointLayout, new_rows: NewRows | None = None, seed: int = 0
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Every buffer of the spec, or its base, in order with fp32 parameters by name; a block is in memory at a time.

    `new_rows`: of the tables by token id, which may be smaller in the checkpoint. `seed`: of parameters that the
    checkpoint lacks.

    Raises UserError at once for a tensor of a dtype that fp32 does not hold; while reading, when tied tensors differ.
    """
    for name in layout.trained:
        if (dtype := layout.reader.tensors[name][0]) not in FLOAT_DTYPES:
            raise UserError(
                f"{layout.reader.file(name)}: tensor '{name}' is {dtype}, which fp32 cannot represent exactly; convert "
                f"it to one of {', '.join(FLOAT_DTYPES)}"
            )
    return groups.cut_values(layout.cut, _import_blocks(layout, new_rows, seed))


def _import_blocks(
    layout: CheckpointLayout, new_rows: NewRows | None, seed: int
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    spec = layout.spec
    tables = set() if new_rows is None else skeleton.vocabulary_tables(skeleton.build(spec.config))
    for block, buffers in buffers_of_blocks(spec).items():
        values = dict(layout.read_block(block))
        for buffer in buffers:
            params = spec.buffers[buffer].params
            if layout.lacking & {param.name for param in params}:
                made = Initializer(spec, seed).values(buffer)
                values |= {name: made[name] for name in layout.lacking & made.keys()}
            if all(is_adapter(param.name) for param in params):
                continue
            for param in params:
                if new_rows is not None and plain_name(param.name) in tables:
                    values[param.name] = new_rows.fill(values[param.name], param.shape[0])
                elif tuple(values[param.name].shape) != tuple(param.shape):
                    raise UserError(
                        f"model.added_tokens: model type '{spec.model_type}' has another table by token id, "
                        f"'{param.name}', which Penstock cannot enlarge; leave the tokens out"
                    )
            yield buffer, {param.name: values[param.name] for param in params}


def require_tied(folder: Path, config: PretrainedConfig) -> None:
    """UserError where a checkpoint holds two tensors that are one in the model of `config`, and they differ."""
    reader, model = open_checkpoint(folder), skeleton.build(config)
    require_same_twice(reader, ConversionPlan(model, reader), _canonical_names(model))


def remarks_on_tensors(folder: Path, config: PretrainedConfig, trained: Collection[str] = ()) -> list[str]:
    """What is to be said of a checkpoint: that it is quantised, and of tensors that are not of the trained model.
    `trained`: parameters of the vision tower that are."""
    reader, model = open_checkpoint(folder), skeleton.build(config)
    unused = ConversionPlan(model, reader).unused
    if is_reward(config) and SCORE not in reader.tensors:
        head = tensors_of_head(config, reader)
        unused = [name for name in unused if name not in head]
    whole = skeleton.build_whole(config)
    in_whole = None if whole is None else ConversionPlan(whole, reader)
    others = set(unused if in_whole is None else in_whole.unused)
    if trained and in_whole is not None:
        used_too = {n for c in in_whole.conversions if not {*trained}.isdisjoint(c.targets) for n in c.sources}
        unused = [name for name in unused if name not in used_too]
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ())]
    patterns += [] if whole is None else [*(whole._keys_to_ignore_on_load_unexpected or ())]
    ignored = {name for name in others if any(re.search(pattern, name) for pattern in patterns)}
    kinds = {
        "are of the vision tower or another part that text does not use": [n for n in unused if n not in others],
        f"are ones that transformers' {config.model_type} model leaves out": [n for n in unused if n in ignored],
        f"have no place in the {config.model_type} model that config.json describes": [
            n for n in unused if n in others - ignored
        ],
    }
    used = reader.tensors.keys() - set(unused)
    said = remarks_on_quantised(reader)
    for what, names in kinds.items():
        names = [name for name in names if not name.endswith("rotary_emb.inv_freq")]  # a table that models compute
        if names:
            said.append(
                f"{folder}: {len(names):,} of its tensors {what} ({_where(names, used)}): they are not trained, and "
                "go to the export as they are"
            )
            if "config.json" in what:
                said[-1] += "; check config.json if they belong to the model"
    return said


def _where(names: Iterable[str], others: Iterable[str]) -> str:
    """The shortest beginnings of `names` that no name of `others` has, at most three of them."""
    taken = {".".join(parts[:end]) for parts in (name.split(".") for name in others) for end in range(len(parts))}
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        starts = (".".join(parts[:end]) for end in range(1, len(parts)))
        found[next((start + ".*" for start in starts if start not in taken), name)] = None
    more = f" and {len(found) - 3:,} more" if len(found) > 3 else ""
    return one_line(", ".join([*found][:3])) + more


def require_same_twice(reader: CheckpointReader, plan: ConversionPlan, canonical: Mapping[str, str]) -> None:
    """The same, of a checkpoint that is planned already; `canonical`: as `_canonical_names`."""
    first: dict[str, str] = {}
    for conversion in plan.conversions:
        if conversion.transform is None:
            name = conversion.sources[0]
            one = first.setdefault(canonical[conversion.targets[0]], name)
            if one != name and not _same_bits(reader.read(one).float(), reader.read(name).float()):
                raise _not_tied(reader, one, name)


def _not_tied(reader: CheckpointReader, one: str, other: str) -> UserError:
    return UserError(
        f"{reader.folder}: '{one}' and '{other}' differ, but config.json makes them one tensor (tie_word_embeddings is "
        "true); to use both, set model.overrides.tie_word_embeddings=false or correct config.json; to use the first "
        "alone, remove the other from the checkpoint"
    )


class CheckpointLayout:
    """Which conversions of a checkpoint belong to which block of `spec`, and what is only kept."""

    def __init__(self, spec: ModelSpec, reader: CheckpointReader, stored: PretrainedConfig | None = None) -> None:
        """`stored`: the config of the checkpoint where its tables have fewer rows than the model's.

        UserError naming tensor and file when a tensor is missing, or has another shape than the config makes it.
        """
        self.cut, self.spec, self.reader = spec, groups.uncut(spec), reader
        spec = self.spec
        model = skeleton.build(spec.config if stored is None else stored)
        self._rows = {param.name: param.shape for param in spec.params}
        self.plan = ConversionPlan(model, reader)
        self._tower, of_tower = self.plan, list[Conversion]()
        if spec.vision is not None and (whole := skeleton.build_whole(spec.config)) is not None:
            own = {param.name for param in spec.params_of(spec.vision)}
            self._tower = ConversionPlan(whole, reader)
            of_tower = [c for c in self._tower.conversions if not own.isdisjoint(c.targets)]
        self._of_tower = {name for conversion in of_tower for name in conversion.sources}
        owner = {
            param.name: block_of(name)
            for name, buffer in spec.buffers.items()
            for param in buffer.params
            if not is_adapter(param.name)
        }
        named = {plain_name(name): name for name in (*owner, *spec.constants)}
        self.canonical = {name: named.get(first, first) for name, first in _canonical_names(model).items()}
        """The model's state-dict name to the name under which the parameter stands in its buffer."""
        self.canonical |= {target: target for conversion in of_tower for target in conversion.targets}
        self.of_block: dict[str, list[Conversion]] = {block: [] for block in buffers_of_blocks(spec)}
        self.of_constants: list[Conversion] = []
        self.kept = [name for name in self.plan.unused if name not in self._of_tower]
        """Tensors that training does not change: unused ones and persistent buffers."""
        made: set[str] = set()
        for conversion in (*self.plan.conversions, *of_tower):
            names = [self.canonical[target] for target in conversion.targets]
            blocks = {owner.get(name) for name in names}
            ensure(len(blocks) == 1, f"{conversion.sources} make parameters of several blocks")
            block = blocks.pop()
            if block is None:
                ensure(all(name in spec.constants for name in names), f"{names} are neither trained nor constants")
                self.of_constants.append(conversion)
                self.kept += conversion.sources
            else:
                self.of_block[block].append(conversion)
                made.update(names)
        self.lacking = frozenset({SCORE} - made if is_reward(spec.config) else ())
        """Parameters that a language model's checkpoint has not, and a reward model begins with random ones of."""
        if self.lacking:
            head = tensors_of_head(spec.config, reader)
            self.kept = [name for name in self.kept if name not in head]
        missing = next((name for name in owner if name not in made | self.lacking), None)
        if missing is not None:
            raise UserError(
                f"{reader.folder}: no tensor provides the model's parameter '{missing}'; the checkpoint is "
                "incomplete, or "
                f"its config.json belongs to another model"
            )

    def plan_of(self, conversion: Conversion) -> ConversionPlan:
        """Which plan carries it out: that of the text model, or that of the whole model for a trained vision tower."""
        return self._tower if conversion.sources[0] in self._of_tower else self.plan

    @property
    def trained(self) -> list[str]:
        """Names, in the checkpoint, of the tensors that hold parameters."""
        return [name for group in self.of_block.values() for conversion in group for name in conversion.sources]

    def exported(self, conversion: Conversion) -> list[tuple[str, str, tuple[int, ...]]]:
        """(name, dtype, shape) of the tensors that an export writes for `conversion`."""
        if conversion.transform is None:
            name = conversion.sources[0]
            dtype, shape = self.reader.tensors[name]
            return [(name, dtype, self._rows.get(self.canonical[conversion.targets[0]], shape))]
        if conversion.exported or conversion.targets == conversion.sources:
            return [(name, *self.reader.tensors[name]) for name in conversion.sources]
        dtype = self.reader.tensors[conversion.sources[0]][0]
        return [(name, dtype, self.plan_of(conversion).shapes[name]) for name in conversion.targets]

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes that an export like the checkpoint gives the parameters, by state-dict name."""
        return {
            self.canonical[target]: FLOAT_DTYPES[dtype]
            for conversion in itertools.chain(self.of_constants, *self.of_block.values())
            for target in conversion.targets
            if (dtype := self.reader.tensors[conversion.sources[0]][0]) in FLOAT_DTYPES
        }

    def read_constants(self) -> dict[str, Tensor]:
        """The persistent buffers that the checkpoint holds, by state-dict name, in its dtypes."""
        made = [self._convert(conversion) for conversion in self.of_constants]
        return {self.canonical[name]: tensor for tensors in made for name, tensor in tensors.items()}

    def read_block(self, block: str) -> Iterator[tuple[str, Tensor]]:
        """The parameters of a block, float32, by the names that they have in its buffers."""
        done: dict[str, Tensor] = {}
        for conversion in self.of_block[block]:
            for target, tensor in self._convert(conversion).items():
                name = self.canonical[target]
                if name not in done:
                    done[name] = tensor.float()
                    yield name, done[name]
                elif not _same_bits(done[name], tensor.float()):
                    first = next(c for c in self.of_block[block] if name in (self.canonical[t] for t in c.targets))
                    raise _not_tied(self.reader, first.sources[0], conversion.sources[0])

    def _convert(self, conversion: Conversion) -> dict[str, Tensor]:
        """The model's tensors that `conversion` makes, in the checkpoint's dtype; proven to give it back bit by bit."""
        tensors = {name: self.reader.read(name) for name in conversion.sources}
        if len({tensor.dtype for tensor in tensors.values()}) > 1:
            tensors = {name: tensor.float() for name, tensor in tensors.items()}
        made = self.plan_of(conversion).apply(conversion, tensors)
        if conversion.exported:
            for name, tensor in self.plan_of(conversion).revert(conversion, made).items():
                if not _same_bits(tensor, tensors[name]):
                    raise UserError(
                        f"{self.reader.file(name)}: the change of layout that transformers makes to '{name}' cannot be "
                        f"undone exactly; save the model with transformers first and import that"
                    )
        return made


ReadBuffer = Callable[[str], Mapping[str, Tensor]]
"""Gives the fp32 parameters of one buffer by state-dict name; called once for each buffer, in order."""


def export_folder(
    out_dir: Path,
    spec: ModelSpec,
    read_buffer: ReadBuffer,
    *,
    constants: Mapping[str, Tensor],
    origin: Path | None,
    tokenizer: Mapping[str, bytes],
    dtype: str,
    eos_id: int | None = None,
    stops: Collection[int] = (),
    stored: PretrainedConfig | None = None,
    convert: bool = False,
    max_shard_bytes: int = 5 * 10**9,
) -> list[str]:
    """Write a Hugging Face folder; one block is in memory at a time. What is to be said of it.

    With an `origin`, the folder that the model was imported from, every tensor has its name, layout and dtype there,
    what was not trained is copied, and config and generation config are the origin's, byte for byte (where the config
    of `spec` says otherwise than the origin's, these fields are changed).
    Without, tensors are in `dtype` (a torch dtype's name) and laid out as transformers saves them, persistent buffers
    with their values in `constants`, else their initial ones; the config's end of text is `eos_id`.
    What is trained and computed with in float32 (model/float32.py) is float32 either way, as transformers saves it.
    `tokenizer`: its files, by path. `stops`: tokens that end a text, which the generation config is to name.
    `stored`: the origin's config where its tables have fewer rows. `convert`: trained tensors are in `dtype` with an
    origin too, and its config says so. A file of weights has at most `max_shard_bytes`.

    Raises UserError for an `out_dir` that has files, a full disk, a lost origin and values that float16 does not hold.
    """
    was_there = out_dir.exists()
    require_writable(out_dir)
    if any(out_dir.iterdir()):
        raise UserError(f"{out_dir}: the folder is not empty; name another, so that no file is replaced by mistake")
    export, remarks = _Export(out_dir, spec, read_buffer, stops, max_shard_bytes), list[str]()
    try:
        if origin is not None:
            remarks = export.like(origin, stored, dtype if convert else None)
        else:
            values = constants if set(constants) == set(spec.constants) else initial_constants(spec) | dict(constants)
            remarks = export.fresh(dict(values), FLOAT_DTYPES[dtype], eos_id)
    except UserError:
        if not was_there and not any(out_dir.iterdir()):
            out_dir.rmdir()
        raise
    write_tokenizer_files(out_dir, tokenizer)
    return remarks + export.remarks()


@dataclass
class _Export:
    """A folder that is being written."""

    out_dir: Path
    spec: ModelSpec
    read_buffer: ReadBuffer
    stops: Collection[int]
    max_shard_bytes: int
    _flushed = _values = 0
    """Values that float16 made zero, and all that were rounded to it."""

    def __post_init__(self) -> None:
        self._kept = self.spec.float32_params - self.spec.frozen_params
        """What is trained and computed with in float32."""

    def like(self, origin: Path, stored: PretrainedConfig | None, dtype: str | None) -> list[str]:
        """With the origin's names, layout and, unless there is a `dtype`, dtypes. What is to be said of it."""
        reader = open_checkpoint(origin)
        layout = CheckpointLayout(self.spec, reader, stored)
        config, left_out = _config_like(self.spec.config, origin / "config.json", dtype)
        copied = {name: read_model_file(origin, name, _COPIED_BYTES) for name in _copied_names(origin)}
        code, missing = named_code(origin, copied | {"config.json": config})
        copied |= code
        tensors = [(name, *reader.tensors[name]) for name in layout.kept]
        if layout.lacking:
            like = dtype or reader.tensors[layout.of_block[HEAD][0].sources[0]][0]
            tensors += [(p.name, like, p.shape) for p in self.spec.params if p.name in layout.lacking]
        for conversions in layout.of_block.values():
            for conversion in conversions:
                kept = any(layout.canonical[target] in self._kept for target in conversion.targets)
                of_all = "float32" if kept else dtype
                tensors += [(n, of_all or own, shape) for n, own, shape in layout.exported(conversion)]
        dtypes = {name: FLOAT_DTYPES.get(dtype) for name, dtype, _ in tensors}

        def made(block: str, params: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
            for conversion in layout.of_block[block]:
                values = {target: params[layout.canonical[target]] for target in conversion.targets}
                for name, tensor in layout.plan_of(conversion).revert(conversion, values).items():
                    yield name, self._rounded(name, tensor, dtypes[name])
            for name in layout.lacking & params.keys():
                yield name, self._rounded(name, params[name], dtypes[name])

        self._write(tensors, ((name, reader.read(name)) for name in layout.kept), made)
        for name, content in copied.items():
            atomic_write(self.out_dir / name, content)
        generation.write_generation_config(self.out_dir, origin, self.spec.config, self.stops)
        atomic_write(self.out_dir / "config.json", config)
        said = []
        if left_out:
            said.append(f"config.json: left out, as it is how transformers is to run the model: {', '.join(left_out)}")
        if isinstance(reader, DequantisingReader):
            said.append("config.json: quantization_config left out, as the exported weights are not quantised")
        if missing:
            said.append(f"auto_map names code that {origin} does not have: {', '.join(map(one_line, missing))}")
        return said

    def fresh(self, constants: dict[str, Tensor], dtype: torch.dtype, eos_id: int | None) -> list[str]:
        """As transformers saves a model that was made from its config. What is to be said of it."""
        model = skeleton.build(self.spec.config)
        empty = {name: tensor.to("meta") for name, tensor in constants.items()}
        dtypes = {p.name: skeleton.weight_dtype(dtype, float32=p.name in self._kept) for p in self.spec.params}
        empty |= {p.name: torch.empty(p.shape, dtype=dtypes[p.name], device="meta") for p in self.spec.params}
        saved = revert_weight_conversion(model, empty).items()
        tensors = [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in saved]

        def made(block: str, params: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
            rounded = {name: self._rounded(name, tensor, dtypes[name]) for name, tensor in params.items()}
            laid_out: dict[str, Tensor] = revert_weight_conversion(model, rounded)
            return laid_out.items()

        self._write(tensors, revert_weight_conversion(model, constants).items(), made)
        config = copy.deepcopy(self.spec.config)
        config.architectures = [type(model).__name__]
        config.dtype = dtype
        if hasattr(config, "auto_map"):
            del config.auto_map  # the code that it names is not here
        if eos_id is not None:
            config.eos_token_id = eos_id
        config.save_pretrained(self.out_dir)
        GenerationConfig.from_model_config(config).save_pretrained(self.out_dir)
        generation.write_generation_config(self.out_dir, None, config, self.stops)
        if skeleton.build_whole(config) is None:
            return []
        return ["only the text part is exported: transformers gives the vision tower and the like random values"]

    def _write(
        self,
        tensors: Tensors,
        fixed: Iterable[tuple[str, Tensor]],
        made: Callable[[str, dict[str, Tensor]], Iterable[tuple[str, Tensor]]],
    ) -> None:
        """All `tensors`: the `fixed` ones, then what is `made` of each block and its parameters."""
        owned = buffers_of_blocks(self.spec)
        with CheckpointWriter(self.out_dir, tensors, self.max_shard_bytes) as writer:
            for name, tensor in fixed:
                writer.write(name, tensor)
            for number, (block, buffers) in enumerate(owned.items()):
                preparing.report(number / len(owned), block)
                params = {name: value for buffer in buffers for name, value in self.read_buffer(buffer).items()}
                for name, tensor in made(block, params):
                    writer.write(name, tensor)

    def _rounded(self, name: str, values: Tensor, dtype: torch.dtype | None) -> Tensor:
        """`values` in `dtype`. Raises UserError naming the tensor where float16 does not hold a finite value."""
        rounded = values.to(dtype)
        if values.dtype != torch.float32 or dtype != torch.float16:
            return rounded
        lost = rounded.isinf() & values.isfinite()
        if lost.any():
            raise UserError(
                f"export: tensor '{name}' holds {float(values[lost][0]):.6g}, but the largest float16 value is "
                f"{torch.finfo(dtype).max:g}; export as bfloat16 or float32"
            )
        self._flushed += int(((rounded == 0) & (values != 0)).sum())
        self._values += values.numel()
        return rounded

    def remarks(self) -> list[str]:
        if not self._flushed:
            return []
        return [f"float16: {self._flushed:,} of {self._values:,} values are too small for it and became 0"]


def _copied_names(origin: Path) -> list[str]:
    """Files beside the weights that an export takes along as they are; the tokenizer's are written by themselves."""
    others = (*TOKENIZER_FILES, "config.json", generation.NAME, "adapter_config.json")
    return sorted(
        file.name
        for file in origin.iterdir()
        if file.suffix in _COPIED_SUFFIXES
        and file.name not in others
        and not file.name.endswith(".index.json")
        and not file.is_dir()
    )


def _config_like(config: PretrainedConfig, file: Path, dtype: str | None) -> tuple[bytes, list[str]]:
    """`file`'s bytes; where `config` or `dtype` says otherwise than the file, the file with these fields changed. The
    names of fields that would keep the export from being loaded, and are left out."""
    original = read_model_file(file.parent, file.name, _COPIED_BYTES)
    stored = parse_object(original)
    plain = without_quantisation(stored)
    values, left_out = without_implementation(with_floats(plain))
    before = type(config).from_dict(copy.deepcopy(values)).to_dict()
    incidental = ("_name_or_path", "transformers_version", *left_out)
    changed = {k: v for k, v in config.to_dict().items() if k not in incidental and before.get(k) != v}
    if dtype is not None:
        names = [name for name in ("dtype", "torch_dtype") if name in values] or ["dtype"]
        changed |= {name: dtype for name in names if values.get(name) != dtype}
    same = not changed and not left_out and plain == stored
    written = json.dumps(without_floats(values | changed), indent=2) + "\n"
    return original if same else written.encode(), left_out


def _canonical_names(model: PreTrainedModel) -> dict[str, str]:
    """Every state-dict name to the first name of the same parameter: other than itself for tied ones."""
    first: dict[int, str] = {}
    names = {name: name for name in model.state_dict()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[name] = first.setdefault(id(parameter), name)
    return names


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bytes; unlike ==, true of NaN and false of zeros of different sign."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
