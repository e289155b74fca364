"""Adapter folders as peft writes them: adapter_config.json beside adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.config import AdapterConfig
from penstock.engine.data.text.tokenizer import write_tokenizer_files
from penstock.engine.hf import generation
from penstock.engine.model import adapters, skeleton
from penstock.engine.model.reward import SCORE, SCORE_MODULE, is_reward
from penstock.engine.model.spec import ModelSpec
from penstock.storage.files.disk import atomic_write, require_writable
from penstock.storage.files.errors import UserError
from penstock.storage.files.model_folder import ADAPTER_CONFIG_NAME as CONFIG_NAME
from penstock.storage.files.model_folder import has_model_file, read_model_file
from penstock.storage.files.safetensors import CheckpointReader, CheckpointWriter
from penstock.storage.files.untrusted import one_line, parse_object

WEIGHTS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_CONFIG_BYTES = 1 << 24
_FLOATS = ("float32", "bfloat16", "float16")
_SNAPSHOT = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/[0-9a-f]{40}(?=/|$)")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def peft_key(name: str) -> str:
    """What peft calls a parameter of the adapter, or one that is trained whole beside it, in a file."""
    if not adapters.is_adapter(name):
        return _PREFIX + name
    module = adapters.adapted_module(name)
    kind, *rest = name[len(module) + 1 :].split(".")
    assert rest[0] == adapters.NAME, name
    rest = [] if kind == adapters.MAGNITUDE else rest[1:]
    return _PREFIX + ".".join([module, kind, *rest])


def write_adapter(
    out_dir: Path,
    spec: ModelSpec,
    read_buffer: Callable[[str], Mapping[str, Tensor]],
    *,
    base: str | None,
    dtype: str,
    tokenizer: Mapping[str, bytes],
    stops: Collection[int] = (),
    origin: Path | None = None,
) -> None:
    """Write an adapter folder that peft loads, a buffer at a time.

    `read_buffer` gives the float32 parameters of one of the spec's buffers; `base`: folder or hub name of the model
    that the adapter belongs to; `dtype`: of its tensors; `tokenizer`: files that come along, by path. `stops`:
    what ends a text, which a generation_config.json says where that in `origin`, the base's folder, does not.
    Raises UserError when `out_dir` cannot be written or holds something.
    """
    assert spec.adapter is not None
    require_writable(out_dir)
    if any(out_dir.iterdir()):
        raise UserError(f"{out_dir}: the folder is not empty; name another, so that no file is replaced by mistake")
    own = [name for name, buffer in spec.buffers.items() if not buffer.frozen]
    tensors = [(peft_key(p.name), dtype, p.shape) for name in own for p in spec.buffers[name].params]
    with CheckpointWriter(out_dir, tensors, single=WEIGHTS_NAME) as writer:
        for buffer in own:
            for name, values in read_buffer(buffer).items():
                writer.write(peft_key(name), values.to(getattr(torch, dtype)))
    write_tokenizer_files(out_dir, tokenizer)
    stops = () if is_reward(spec.config) else stops
    ends = generation.with_stops(origin, spec.config, stops)
    if ends is not None and ends != generation.with_stops(origin, spec.config, ()):
        atomic_write(out_dir / generation.NAME, ends)
    model = skeleton.build(spec.config)
    config = adapters.exported_config(model, skeleton.find_layers(model)[0], spec.adapter, base_name(base))
    atomic_write(out_dir / CONFIG_NAME, json.dumps(config, indent=2, sort_keys=True) + "\n")


def base_name(path: str | None) -> str | None:
    """What a base model is called: its name on the hub where `path` is a snapshot in the hub's cache."""
    match = None if path is None else _SNAPSHOT.search(path)
    return path if match is None else f"{match[1]}/{match[2]}"


@dataclass(frozen=True)
class StoredAdapter:
    """What an adapter folder says of itself."""

    folder: Path
    config: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> StoredAdapter:
        """UserError where there is no readable adapter_config.json of a LoRA."""
        if not has_model_file(folder, CONFIG_NAME) or not has_model_file(folder, WEIGHTS_NAME):
            missing = CONFIG_NAME if not has_model_file(folder, CONFIG_NAME) else WEIGHTS_NAME
            raise UserError(f"{folder}: has no {missing}; give an adapter folder as written by peft")
        try:
            config = parse_object(read_model_file(folder, CONFIG_NAME, _CONFIG_BYTES))
        except ValueError as error:
            raise UserError(f"{folder / CONFIG_NAME}: not readable ({error}); copy or download it again") from error
        if config.get("peft_type") != "LORA":
            kind = one_line(config.get("peft_type"), 40)
            raise UserError(f"{folder / CONFIG_NAME}: an adapter of type {kind}; only LoRA is supported")
        return cls(folder, config)

    @property
    def base(self) -> str | None:
        result = self.config.get("base_model_name_or_path")
        return result if isinstance(result, str) and result else None

    @property
    def is_reward(self) -> bool:
        """Whether it is of a reward model, whose `score` is beside it. peft also names what other models may have."""
        saved = self.config.get("modules_to_save")
        return saved in ([SCORE_MODULE], ["classifier", SCORE_MODULE], [SCORE_MODULE, "classifier"])

    @property
    def section(self) -> AdapterConfig:
        """As a recipe says it, without its targets' short forms. UserError where Penstock knows no such LoRA."""
        config = self.config
        where = self.folder / CONFIG_NAME
        for name in ("rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication", "lora_bias"):
            if config.get(name) and not (name == "modules_to_save" and self.is_reward):
                raise UserError(f"{where}: {name} is set, which is not supported; merge the adapter with peft first")
        if config.get("bias", "none") != "none":
            raise UserError(
                f"{where}: bias is {one_line(config['bias'], 20)}; only adapters with bias none are supported"
            )
        method = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
        if config.get("use_dora") and config.get("use_rslora"):
            raise UserError(f"{where}: use_dora and use_rslora together are not supported")
        rank, alpha = config.get("r"), config.get("lora_alpha")
        if not isinstance(rank, int) or isinstance(alpha, bool) or not isinstance(alpha, int | float):
            raise UserError(f"{where}: r and lora_alpha are not numbers; copy or download it again")
        modules, parameters = config.get("target_modules") or [], config.get("target_parameters") or []
        if isinstance(modules, str):  # a regular expression: what it fits is in the file
            reader = CheckpointReader(self.folder, single=WEIGHTS_NAME)
            modules = sorted({_module(key) for key in reader.tensors if adapters.is_adapter(key)})
        targets = [*modules]
        targets += [str(name).removesuffix(".weight") for name in parameters]
        return AdapterConfig(
            method=method,  # type: ignore[arg-type]
            rank=rank,
            alpha=float(alpha),
            targets=targets or [adapters.ALL_LINEAR],
        )


@dataclass(frozen=True)
class Start:
    """An adapter to go on from, found to be the recipe's."""

    reader: CheckpointReader
    keys: dict[str, str]
    """Parameter -> its key in the file."""
    said: list[str]
    """What is to be said of it."""

    def values(self) -> dict[str, Tensor]:
        """All of them, float32. UserError where one is not finite."""
        result = {name: self.reader.read(key).float() for name, key in self.keys.items()}
        for name, tensor in result.items():
            if not tensor.isfinite().all():
                raise UserError(
                    f"{self.reader.folder}: '{self.keys[name]}' has a value that is not finite; use another adapter"
                )
        return result


def open_start(folder: Path, spec: ModelSpec, model_path: str | None) -> Start:
    """The adapter folder that a recipe goes on from, of which no value is read yet.

    Raises UserError where the folder is broken, its adapter is another than the recipe's, or belongs to another base.
    """
    adapter = spec.adapter
    assert adapter is not None
    stored = StoredAdapter.open(folder)
    section = stored.section
    for name in ("method", "rank", "alpha"):
        theirs, ours = getattr(section, name), getattr(adapter, name)
        if theirs != ours:
            raise UserError(
                f"adapter.{name}: {ours} in the recipe, {theirs} in {folder}; set adapter.{name}={theirs}, or start a "
                "new adapter without adapter.start"
            )
    said = _require_same_base(stored, model_path)
    reader = CheckpointReader(folder, single=WEIGHTS_NAME)
    wanted = {peft_key(p.name): p for buffer in spec.buffers.values() if not buffer.frozen for p in buffer.params}
    for key, (dtype, shape) in reader.tensors.items():
        if key == peft_key(SCORE) and key not in wanted:
            raise UserError(f"{folder}: the adapter of a reward model; it goes on with train.objective=reward alone")
        if key not in wanted:
            raise UserError(
                f"adapter.targets: {folder} also adapts '{_module(key)}', which the recipe does not; use the targets "
                f"of that adapter: {', '.join(_shown(section.targets))}"
            )
        if shape != wanted[key].shape:
            raise UserError(
                f"{folder}: '{key}' has shape {list(shape)} instead of the recipe's {list(wanted[key].shape)}: the "
                "adapter was trained on another base model"
                f"{'' if stored.base is None else f', {one_line(stored.base, 80)}'}"
            )
        if dtype not in _FLOATS:
            raise UserError(f"{folder}: tensor '{key}' is {dtype}; convert it to one of {', '.join(_FLOATS)}")
    missing = next((key for key in wanted if key not in reader.tensors), None)
    if missing == peft_key(SCORE):
        raise UserError(f"{folder}: the adapter of a language model, without '{SCORE}'; start a new one")
    if missing is not None:
        raise UserError(
            f"adapter.targets: {folder} has no adapter for '{_module(missing)}', which the recipe adapts; use the "
            f"targets of that adapter: {', '.join(_shown(section.targets))}"
        )
    return Start(reader, {param.name: key for key, param in wanted.items()}, said)


def _require_same_base(stored: StoredAdapter, model_path: str | None) -> list[str]:
    """What is to be said of the base's name. UserError where two names on the hub differ."""
    theirs, ours = base_name(stored.base), base_name(model_path)
    if theirs is None or ours is None or theirs == ours:
        return []
    both = all(_HUB_NAME.fullmatch(name) and not Path(name).expanduser().exists() for name in (theirs, ours))
    if both and theirs.partition("@")[0] != ours.partition("@")[0]:
        raise UserError(
            f"adapter.start: the adapter in {stored.folder} was trained on {one_line(theirs, 80)}, but model.path is "
            f"{ours}; use the base model that it was trained on"
        )
    if Path(theirs).name == Path(ours).name:
        return []
    return [f"adapter.start: the adapter was trained on {one_line(theirs, 80)}; this run continues it on {ours}"]


def _module(key: str) -> str:
    return adapters.adapted_module(key.removeprefix(_PREFIX)) if adapters.is_adapter(key) else one_line(key, 80)


def _shown(targets: list[str]) -> list[str]:
    return [one_line(target, 60) for target in sorted(targets)[:8]] + ["..."] * (len(targets) > 8)
