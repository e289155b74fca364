"""A tiny model's training session on any mix of tiers, and everything it holds, for the engine's tests."""

import hashlib
import itertools
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from penstock.engine.config import AdapterConfig as AdapterConfig
from penstock.engine.config import BudgetConfig as BudgetConfig
from penstock.engine.config import (
    DataConfig,
    ModelConfig,
    PreferenceConfig,
    Recipe,
    SamplesConfig,
    StorageConfig,
    TrainConfig,
    parse_bytes,
)
from penstock.engine.data.corpus.prepare import prepare_data
from penstock.engine.data.loading import make_loader, make_validation
from penstock.engine.events import Preparing, Progress, SampleMetrics, Span, Spike, StepMetrics, ValidationMetrics, Want
from penstock.engine.forecast.choices import dimensions
from penstock.engine.forecast.problem import DTYPE_BYTES
from penstock.engine.forecast.request import PlanRequest
from penstock.engine.generate.prompts import prepare_prompts
from penstock.engine.hf.config import make_config, model_config
from penstock.engine.hf.constants import CONSTANTS_FILE, write_constants
from penstock.engine.machine.budgets import Budgets
from penstock.engine.machine.device import compute_dtype
from penstock.engine.model.adapter_values import with_adapter
from penstock.engine.model.anatomy import Initializer, take_apart
from penstock.engine.model.graph_size import find_graph_bytes
from penstock.engine.model.groups import cut
from penstock.engine.model.spec import ModelSpec, layouts
from penstock.engine.plan.plan import Plan
from penstock.engine.plan.problem import PlanOptions
from penstock.engine.ranks.ranks import ALONE, Ranks
from penstock.engine.runtime.compute import Compute
from penstock.engine.runtime.lanes import Lanes
from penstock.engine.runtime.past import StateReader
from penstock.engine.runtime.state import fill_store, read_parameters, state_arrays
from penstock.engine.schedule.action import LANES
from penstock.engine.schedule.ops import Op
from penstock.engine.session import Session, run_identity, run_meta
from penstock.engine.train import train, train_step
from penstock.storage.files.errors import BudgetError
from penstock.storage.generations.checkpoints import list_checkpoints
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.manifest import ArraySpec
from penstock.storage.tier.readers import select_readers

CPU = torch.device("cpu")
FLOOR = "floor"
"""As a budget: the least that the planner accepts."""
TIERS = [("1GiB", "1GiB"), (FLOOR, "1GiB"), (FLOOR, FLOOR), (1_100_000, 750_000)]
"""Budgets of GPU and RAM: all state on the GPU, in RAM, on NVMe, some of it on each."""
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
"""Fields of a small qwen3_moe."""
GROUPS: dict[str, Any] = {"split_layers": "experts", "expert_groups": 2}
"""Settings that train its experts in blocks of two."""
HYBRID: dict[str, Any] = EXPERTS | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
HYBRID |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
HYBRID["shared_expert_intermediate_size"] = 16
"""Fields of a small qwen3_next, whose layers carry state from token to token but for one."""
FALCON: dict[str, Any] = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
FALCON["mamba_chunk_size"] = 8
"""Fields of a small falcon_h1, whose layers attend and carry a state at once."""


def _kept(name: str) -> Callable[[Any, Any], None]:
    return lambda self, item: getattr(self, name).append(item)


class Silent:
    """An observer that keeps what it is told; `asks`: step after which it asks for a checkpoint -> the name of that."""

    def __init__(self, stop_after: int | None = None, asks: dict[int, str] | None = None) -> None:
        self.metrics: list[StepMetrics] = []
        self.validations: list[ValidationMetrics] = []
        self.samples: list[SampleMetrics] = []
        self.spikes: list[Spike] = []
        self.spans: list[Span] = []
        self.plan: dict[str, Any] = {}
        self.prepared: list[Preparing] = []
        self.messages: list[str] = []
        self.checkpoints: list[tuple[str, int, str | None]] = []
        self._stop_after, self._asks = stop_after, asks or {}

    on_prepare, on_step = _kept("prepared"), _kept("metrics")
    on_validation, on_sample, on_spike = _kept("validations"), _kept("samples"), _kept("spikes")

    def on_plan(self, plan: dict[str, Any], predicted: list[Span]) -> None:
        self.plan = plan

    def on_progress(self, progress: Progress) -> None:
        self.spans += progress.spans

    def on_message(self, text: str, *, detail: bool = False) -> None:
        self.messages.append(text)

    def checkpoint_requests(self) -> list[str]:
        step = self.metrics[-1].step if self.metrics else 0
        return [self._asks[step]] if step in self._asks else []

    def on_checkpoint(self, name: str, step: int, error: str | None) -> None:
        self.checkpoints.append((name, step, error))

    def wanted(self) -> Want:
        return "stop" if self._stop_after is not None and len(self.metrics) >= self._stop_after else "run"

    def on_pause(self, paused: bool) -> None:
        pass


def model(**changes: Any) -> ModelConfig:
    """A Qwen3-shaped model of some 50,000 parameters."""
    shape: dict[str, Any] = {"num_layers": 3, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 300}
    shape |= {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return ModelConfig(**(shape | changes))


def data(**changes: Any) -> DataConfig:
    """Random tokens in short sequences."""
    return DataConfig(**({"source": "random", "sequence_length": 48, "max_documents": 40} | changes))


def training(**changes: Any) -> TrainConfig:
    """Eager float32 steps with one way to save activations, so that every difference counts."""
    settings: dict[str, Any] = {"steps": 4, "global_batch_size": 2, "chunk_tokens": 16, "lr": 1e-2, "device": "cpu"}
    settings |= {"compute_dtype": "float32", "compile": "off", "calibrate": False}
    settings |= {"activation_checkpointing": "selective", "kv_window": "whole"}
    return TrainConfig(**(settings | changes))


def storage(**changes: Any) -> StorageConfig:
    """Parts of two pages, so that even a tiny buffer has several."""
    return StorageConfig(**({"part_bytes": "16KiB", "checkpoint_every": 1000} | changes))


def recipe(**changes: Any) -> Recipe:
    """A tiny run of all these, in budgets that hold it, unless `changes` of its sections say otherwise."""
    sections: dict[str, Any] = {"model": model(), "data": data(), "train": training(), "storage": storage()}
    sections["budgets"] = BudgetConfig(gpu="1GiB", ram="1GiB")
    return Recipe(name="tiny", **(sections | changes))


def train_run(
    run_dir: Path,
    observer: Silent,
    *,
    resume: bool = False,
    checkpoint: str | None = None,
    ranks: Ranks = ALONE,
    **changes: Any,
) -> Any:
    """Train a tiny run, six steps with a generation each unless `changes` of its sections say otherwise."""
    sections: dict[str, Any] = {"train": training(steps=6), "storage": storage(checkpoint_every=1)}
    asked = recipe(**(sections | changes))
    return train(asked, run_dir=run_dir, observer=observer, resume=resume, checkpoint=checkpoint, ranks=ranks)


@cache
def _spec(
    config_json: str,
    freeze: tuple[str, ...],
    adapter_json: str | None,
    split_layers: str | None,
    frozen_format: str,
    expert_groups: int,
) -> ModelSpec:
    adapter = None if adapter_json is None else AdapterConfig(**json.loads(adapter_json))
    config = make_config(json.loads(config_json), "test")
    spec = take_apart(config, freeze, adapter, split_layers=split_layers, frozen_format=frozen_format)
    for dtype in DTYPE_BYTES:
        find_graph_bytes(spec, dtype)
    return cut(spec, expert_groups)


def spec_of(
    config: PretrainedConfig,
    freeze: Sequence[str] = (),
    adapter: AdapterConfig | None = None,
    split_layers: str | None = None,
    frozen_format: str = "compute",
    expert_groups: int = 1,
) -> ModelSpec:
    """The model taken apart, once per config, what is frozen and adapter."""
    used = json.dumps(asdict(adapter)) if adapter is not None and adapter.is_used else None
    return _spec(config.to_json_string(use_diff=False), tuple(freeze), used, split_layers, frozen_format, expert_groups)


def plan_of(
    spec: ModelSpec,
    recipe: Recipe,
    gpu: str | int,
    ram: str | int,
    *,
    device_reads: bool = True,
    prompt_tokens: tuple[int, ...] | None = None,
    graph_bytes: Mapping[str, int] | None = None,
    ranks: int = 1,
    **chosen: Any,
) -> Plan:
    """The plan within budgets, of which FLOOR takes the least that is accepted; `chosen`: of PlanOptions."""
    sizes = {tier: 1 if size == FLOOR else parse_bytes(size, tier) for tier, size in (("gpu", gpu), ("ram", ram))}
    asked: dict[str, Any] = {"spec": spec, "recipe": recipe, "device_type": "cpu", "device_reads": device_reads}
    asked |= {"prompt_tokens": prompt_tokens, "graph_bytes": graph_bytes, "ranks": ranks}
    for _ in range(5):
        task = PlanRequest(budgets=Budgets(sizes["gpu"], sizes["ram"], None, {}), **asked)
        chunk = task.chunks[-1]
        window_chunks = -(-recipe.train.micro_batch_size * recipe.data.sequence_length // chunk)
        values = dimensions(task.problem(chunk), window_chunks)
        options = PlanOptions(recompute=values["recompute"][0], **chosen)
        refusals: list[BudgetError] = []
        firsts = (chosen["ram_first"],) if "ram_first" in chosen else ("activations", "weights")
        ways = itertools.product(values["streamed"], firsts, (4, 2))
        for streamed, ram_first, stages in ways:
            try:
                return task.plan(replace(options, streamed=streamed, ram_first=ram_first, stages=stages))
            except BudgetError as refusal:
                refusals.append(refusal)
        least = min(refusals, key=lambda refusal: refusal.need_bytes)
        assert least.tier is not None
        if (gpu if least.tier == "gpu" else ram) != FLOOR:
            raise least
        sizes[least.tier] = least.need_bytes
    raise AssertionError("refused what the refusal asked for")


def session(
    folder: Path,
    *,
    m: ModelConfig | None = None,
    d: DataConfig | None = None,
    t: TrainConfig | None = None,
    s: StorageConfig | None = None,
    gpu: str | int = "1GiB",
    ram: str | int = "1GiB",
    device: torch.device = CPU,
    device_reads: bool = True,
    drives: list[Path] | None = None,
    samples: SamplesConfig | None = None,
    adapter: AdapterConfig | None = None,
    preference: PreferenceConfig | None = None,
    ranks: Ranks = ALONE,
    **planned: Any,
) -> Session:
    """A session at the last generation in `folder`, or at a new first one; `planned`: of `plan_of`. Each of `ranks`
    makes one, in a thread or a process of its own."""
    sections = {"model": m or model(), "data": d or data(), "train": t or training(), "storage": s or storage()}
    run = recipe(**sections, samples=samples or SamplesConfig(), adapter=adapter or AdapterConfig())
    run.preference = preference or PreferenceConfig()
    train = run.train
    if not ranks.first:
        ranks.hear()  # that the data are there
    prepared = prepare_data(run, folder / "data")
    if ranks.first:
        ranks.tell(None)
    corpus = prepared.corpus
    vocabulary = run.model.vocab_size if prepared.tokenizer is None else prepared.tokenizer.vocab_size
    config = model_config(run, vocabulary)
    spec = spec_of(config, train.freeze, adapter, train.split_layers, run.model.frozen_format, train.expert_groups or 1)
    prompts = prepare_prompts(run, prepared.tokenizer, spec)
    lengths = None if prompts is None else tuple(map(len, prompts.ids))
    readers = select_readers("auto", device, drives or [folder])
    reads = device_reads and readers.device is not None
    planned |= {"device_reads": reads, "prompt_tokens": lengths, "ranks": ranks.count}
    plan = plan_of(spec, run, gpu, ram, **planned)
    identity = run_identity(run)
    loader = make_loader(corpus, spec, run)
    root = folder / "state"
    if not ranks.first:
        store = NvmeStore.join(root, *ranks.hear(), ranks.rank, readers=readers)
        identity["constants"] = None
    elif (root / "manifest.json").exists():
        store = NvmeStore.open(root, drives=drives, readers=readers)
        identity["constants"] = store.meta["constants"]
    else:
        store = NvmeStore.create(root, state_arrays(plan), budget_bytes=None, drives=drives, readers=readers)
        identity["constants"] = write_constants(root / CONSTANTS_FILE, {})
        buffers = Initializer(spec, train.seed).buffers()
        if spec.adapter is not None:
            buffers = with_adapter(spec, buffers, seed=train.seed, dtype=compute_dtype(train))
        fill_store(store, buffers, spec.buffers, run_meta(0, 0, loader.cursor, identity))
    if ranks.first:
        ranks.tell(store.drives_by_id)
    return Session(
        spec=spec,
        plan=plan,
        store=store,
        loader=loader,
        compute=Compute.make(spec, train, device, {}),
        recipe=run,
        device=device,
        identity=identity,
        lanes=Lanes.open(
            device, plan.tiers["gpu"].budget_bytes, compiled=train.compile == "on", deterministic=train.deterministic
        ),
        validation=make_validation(corpus, spec, run),
        prompts=prompts,
        ranks=ranks,
    )


def steps(session: Session, count: int | None = None) -> list[StepMetrics]:
    """So many steps, or all that are left, and the commit."""
    left = session.recipe.train.steps - session.step if count is None else count
    metrics = [train_step(session) for _ in range(left)]
    session.finish()
    return metrics


def settle(session: Session) -> None:
    """Apply the last update without committing it."""
    session.executor.submit(session.builder.finish(commit=False))
    session.executor.drain()


def before_ops(session: Session, act: Callable[[Op], None]) -> None:
    """Call `act` with every op from now on, on its lane, right before it is carried out."""
    perform = session.executor._perform

    def acted(op: Op) -> Any:
        act(op)
        return perform(op)

    session.executor.attach(acted)


def delay(session: Session, chance: random.Random) -> None:
    """Delay the ops of every lane at random, those of one lane more often."""
    slow_lane = chance.choice(LANES)

    def wait(op: Op) -> None:
        if chance.random() < (0.3 if op.lane == slow_lane else 0.03):
            time.sleep(chance.random() * 2e-3)

    before_ops(session, wait)


def refuse_waits(session: Session) -> None:
    """From now on torch itself refuses what synchronises while a compute op is issued.

    Its check counts for all threads, so nothing may be fetched ahead: that waits for a stream that is no lane's.
    """
    torch.cuda.synchronize()
    perform = session.runtime.perform

    def strict(op: Op) -> Any:
        if op.lane != "compute":
            return perform(op)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return perform(op)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    session.executor.attach(strict)


def parameters(store: NvmeStore, spec: ModelSpec) -> dict[str, Tensor]:
    """All master weights of the committed generation, by name."""
    found: dict[str, Tensor] = {}
    state = StateReader(store, spec, training())
    for name, buffer in spec.buffers.items():
        found |= read_parameters(state, name, buffer)
    return found


def first_moments(store: NvmeStore, spec: ModelSpec) -> dict[str, Tensor]:
    """Adam's first moments in the committed generation, by the parameters' names."""
    found: dict[str, Tensor] = {}
    flat = layouts(spec)
    for array in store.arrays():
        if array.kind == "exp_avg":
            found |= flat[array.buffer].views(stored(store, array))
    return found


def digest(store: NvmeStore) -> str:
    """A hash of every byte of the committed generation."""
    total = hashlib.sha256()
    for array in sorted(store.arrays(), key=lambda array: (array.buffer, array.kind)):
        total.update(stored(store, array).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def kept(run_dir: Path) -> list[str]:
    """Names of a run's checkpoints."""
    return list(list_checkpoints(run_dir / "state"))


def digest_of(run_dir: Path) -> str:
    """`digest` of what a run has committed."""
    with closing(NvmeStore.open(run_dir / "state", read_only=True)) as store:
        return digest(store)


def live_digest(session: Session) -> str:
    """A hash of the state as training left it, on whatever tier, committed or not."""
    total = hashlib.sha256()
    for array in sorted(session.store.arrays(), key=lambda array: (array.buffer, array.kind)):
        buffer = session.plan.buffers[array.buffer]
        tier = buffer.weights if buffer.state is None else buffer.state
        memory = {"gpu": session.gpu.buffers, "ram": session.ram.buffers, "nvme": {}}[tier].get(array.buffer)
        whole = stored(session.store, array) if memory is None else memory[array.kind][: array.numel]
        total.update(whole.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def stored(store: NvmeStore, array: ArraySpec) -> Tensor:
    """An array of the committed generation."""
    whole = torch.empty(array.numel, dtype=getattr(torch, array.dtype))
    for part, (start, end) in enumerate(array.parts()):
        store.read(array.buffer, array.kind, part, whole[start:end]).result()
    return whole
