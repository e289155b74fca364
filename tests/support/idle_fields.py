"""Every field of a recipe that does not always count: where it has no effect, and where it has one.

`python tests/support/idle_fields.py` prints docs/results/fields-without-effect.md."""

from __future__ import annotations

from typing import NamedTuple

from penstock.app.recipes.recipe import apply_overrides
from penstock.engine.config import Recipe
from penstock.engine.config.effects import idle_fields

_SECTIONS_THAT_COUNT = {
    "": ("name", "machine", "trackers"),
    # Beside a folder, what is said of the shape must agree with it.
    "model": (
        *("path", "model_type", "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads"),
        *("head_dim", "vocab_size", "max_position", "tie_embeddings", "overrides"),
    ),
    "adapter": ("method",),
    "data": ("mixture", "packing", "long_documents", "order", "sequence_length"),
    "train": (
        *("steps", "global_batch_size", "micro_batch_size", "chunk_tokens", "activation_checkpointing", "kv_window"),
        *(
            "objective",
            "optimizer",
            "split_layers",
            "lr",
            "warmup_steps",
            "lr_schedule",
            "lr_groups",
            "layer_lr_decay",
            "beta1",
            "beta2",
            "eps",
        ),
        *("weight_decay", "clip_norm", "compute_dtype", "gradient_dtype", "compile"),
        *("device", "gpus", "replicas", "parallel", "calibrate", "deterministic"),
    ),
    "budgets": ("gpu", "ram", "nvme"),
    "storage": ("nvme", "reader", "part_bytes", "checkpoint_every", "keep_last", "keep_good", "offsite"),
    "grpo": ("reward_weights",),  # which are those of grpo.reward
    "after": ("export", "export_dtype", "export_shard"),  # the last two for `penstock export` as well
}
ALWAYS = frozenset(f"{section}.{name}".lstrip(".") for section, names in _SECTIONS_THAT_COUNT.items() for name in names)
"""Fields that count whatever the others say."""


class Case(NamedTuple):
    setting: str
    """key=value, the value another than the default."""
    without: tuple[str, ...]
    """Settings beside which it has no effect."""
    within: tuple[str, ...]
    """Settings beside which it has one."""

    @property
    def key(self) -> str:
        return self.setting.partition("=")[0]


_VALIDATED = ("train.validate_every=4", "data.validation_documents=4")
_SAMPLED = ("samples.every=4", 'samples.prompts=["one"]')
_TEXT = ("data.source=text", "data.path=notes")
_CHATS = ("data.source=messages", "data.path=chats.jsonl")
_PAIRS = ("data.source=preference", "data.path=pairs.jsonl")
_EACH = 'data.mixture=[{"path": "a", "source": "jsonl", "split": "x", "columns": {"text": "t"}, "max_documents": 9}]'
_SOME = 'data.mixture=[{"path": "a", "source": "jsonl"}]'
_PROMPTS = ("data.source=prompts", "data.path=prompts.jsonl")
_FOLDER = ("model.path=model",)
_GRPO = ("train.objective=grpo", "train.global_batch_size=8", 'grpo.reward=["rewards.py:right"]')
_RLOO = ("train.objective=rloo", *_GRPO[1:])
_REWARD = ("train.objective=reward",)
_OF_REWARDS = (
    *("reward_timeout_s=5", "num_generations=4", "max_completion_length=32", "temperature=0.9", "top_p=0.5"),
    *("num_iterations=2", "steps_per_generation=2", "epsilon=0.1", "epsilon_high=0.28"),
    *("loss_type=grpo", "scale_rewards=none", "importance_sampling_level=sequence", "mask_truncated_completions=true"),
)

CASES = (
    Case("model.embedding_std=1", _FOLDER, ()),
    Case('model.added_tokens=["<new>"]', ("adapter.method=lora",), ()),
    Case('model.added_tokens=["<new>"]', ("data.source=random",), _TEXT),
    Case("model.frozen_format=nf4", (), ("adapter.method=lora",)),
    Case("model.train_vision=all", ("adapter.method=lora", *_FOLDER), _FOLDER),
    Case("model.train_vision=projector", (), _FOLDER),
    Case("train.expert_groups=2", (), ("train.split_layers=experts",)),
    Case(
        "train.skip_idle_experts=true",
        ("train.split_layers=experts", "train.expert_groups=1"),
        ("train.split_layers=experts", "train.expert_groups=2"),
    ),
    Case(
        "train.spread_experts=true",
        ("train.split_layers=experts", "train.expert_groups=1"),
        ("train.split_layers=experts", "train.expert_groups=2"),
    ),
    Case("adapter.rank=8", (), ("adapter.method=lora",)),
    Case("adapter.alpha=8", (), ("adapter.method=dora",)),
    Case('adapter.targets=["q_proj"]', (), ("adapter.method=rslora",)),
    Case("adapter.start=folder", (), ("adapter.method=lora",)),
    Case("data.source=jsonl", (_EACH,), ('data.mixture=[{"path": "a"}]',)),
    Case("data.path=rows.jsonl", ("data.source=python_stdlib",), ("data.source=auto",)),
    Case("data.path=rows.jsonl", ("data.source=random",), ("data.source=jsonl",)),
    Case("data.path=rows.jsonl", ("data.source=needles",), ()),
    Case("data.split=train", (_EACH,), (_SOME,)),
    Case("data.split=train", _TEXT, _CHATS),
    Case('data.columns={"text": "body"}', (_EACH,), (_SOME,)),
    Case('data.columns={"text": "body"}', _TEXT, _CHATS),
    Case("data.max_documents=5", (_EACH,), (_SOME,)),
    Case("data.chat_template=chat.jinja", _TEXT, (*_TEXT, *_SAMPLED, "samples.chat=true")),
    Case("data.chat_template=chat.jinja", ("data.source=jsonl", "data.path=rows.jsonl"), _CHATS),
    Case("data.trained_tokens=last", _TEXT, _CHATS),
    Case("data.trained_tokens=all", _PAIRS, _CHATS),
    Case("data.trained_tokens=last", _PROMPTS, ("data.source=preference", "data.path=pairs.jsonl")),
    Case("data.bad_rows=skip", _TEXT, _CHATS),
    Case("data.bos=on", _CHATS, _TEXT),
    Case("data.bos=on", _CHATS, _PROMPTS),
    Case("data.bos=off", ("data.source=tokens", "data.path=ids.jsonl"), ("data.source=python_stdlib",)),
    Case("data.tokenizer=tokenizer.json", ("data.source=random",), _TEXT),
    Case("data.tokenizer_vocab_size=300", (*_TEXT, *_FOLDER), _TEXT),
    Case("data.seed=1", ("data.order=kept", *_TEXT), _TEXT),
    Case("data.validation_documents=4", _TEXT, (*_TEXT, "train.validate_every=4")),
    Case("train.min_lr_ratio=0.5", ("train.lr_schedule=constant",), ("train.lr_schedule=wsd",)),
    Case("train.min_lr_ratio=0.5", ("train.steps=8", "train.warmup_steps=7"), ("train.warmup_steps=7",)),
    Case("train.decay_steps=5", (), ("train.lr_schedule=wsd",)),
    Case('train.freeze=["*norm*"]', ("adapter.method=lora",), ()),
    Case("preference.beta=0.5", (), ("train.objective=orpo",)),
    Case("preference.loss_type=hinge", ("train.objective=simpo",), ("train.objective=dpo",)),
    Case("preference.label_smoothing=0.1", ("train.objective=kto",), ("train.objective=simpo",)),
    Case(
        "preference.label_smoothing=0.1",
        ("train.objective=dpo", "preference.loss_type=ipo"),
        ("train.objective=dpo", "preference.loss_type=robust"),
    ),
    Case("preference.simpo_gamma=1", ("train.objective=dpo",), ("train.objective=simpo",)),
    Case("preference.cpo_alpha=0", ("train.objective=dpo",), ("train.objective=cpo",)),
    Case("preference.desirable_weight=2", ("train.objective=dpo",), ("train.objective=kto",)),
    Case("preference.undesirable_weight=2", ("train.objective=dpo",), ("train.objective=kto",)),
    Case("preference.center_rewards_coefficient=0.01", ("train.objective=dpo",), _REWARD),
    Case("train.z_loss=0.0001", _REWARD, ()),
    Case("train.router_aux_loss=0.01", _REWARD, ()),
    Case("samples.every=4", (*_REWARD, _SAMPLED[1]), _SAMPLED[1:]),
    Case('grpo.reward=["rewards.py:right"]', (), _GRPO[:2]),
    *(Case(f"grpo.{setting}", (), _GRPO) for setting in _OF_REWARDS),
    Case("grpo.beta=0.1", (), _GRPO),
    *(
        Case("grpo.use_bias_correction_kl=false", idle, (*_GRPO, "grpo.beta=0.1"))
        for idle in ((), (*_RLOO, "grpo.beta=0.1"), _GRPO)
    ),
    *(Case("grpo.num_generations_eval=2", idle, (*_GRPO, *_VALIDATED)) for idle in (_VALIDATED, _GRPO)),
    *(Case(f"grpo.{setting}", _RLOO, _GRPO) for setting in _OF_REWARDS[-4:-1]),
    Case("train.validate_every=4", (), ("data.validation_documents=4",)),
    Case("train.validate_first=true", (), _VALIDATED),
    Case("train.validation_sequences=4", (), _VALIDATED),
    Case("train.early_stopping_patience=4", (), _VALIDATED),
    Case("train.early_stopping_patience=24", _VALIDATED, (*_VALIDATED, "train.validate_first=true")),
    Case("train.seed=1", _FOLDER, (*_FOLDER, "adapter.method=lora")),
    Case("storage.keep_every=150", (), ("train.steps=150",)),
    Case("storage.keep_best=true", (), _VALIDATED),
    Case("storage.offsite_every=5", (), ("storage.offsite=/backup",)),
    Case("storage.offsite_bandwidth=1MB", (), ("storage.offsite=/backup",)),
    Case("storage.offsite_keep=3", (), ("storage.offsite=/backup",)),
    Case('samples.prompts=["one"]', (), ("samples.every=4",)),
    Case("samples.chat=true", (), _SAMPLED),
    Case("samples.tokens=5", (), _SAMPLED),
    Case("samples.temperature=1", (), _SAMPLED),
    Case("samples.top_p=0.5", (), (*_SAMPLED, "samples.temperature=1")),
    Case("samples.top_p=0.5", _SAMPLED, (*_SAMPLED, "samples.temperature=1")),
    Case("samples.seed=1", (), (*_SAMPLED, "samples.temperature=1")),
    Case("samples.seed=1", _SAMPLED, (*_SAMPLED, "samples.temperature=1")),
    Case("after.export_merged=true", ("adapter.method=lora",), ("adapter.method=lora", "after.export=true")),
    Case("after.export_merged=true", ("after.export=true",), ("adapter.method=lora", "after.export=true")),
    Case("after.push=owner/name", (), ("after.export=true",)),
    Case("after.sample_prompt=one", (), ("after.export=true",)),
    Case("after.sample_prompt=one", ("after.export=true", *_REWARD), ("after.export=true",)),
    Case("after.sample_tokens=5", ("after.export=true",), ("after.export=true", "after.sample_prompt=one")),
)


def made(*settings: str) -> Recipe:
    """The recipe with these settings, whether they count or not."""
    return apply_overrides(Recipe(name="x"), settings, is_run=True)


def page() -> str:
    """The table of the docs: fields that have no effect for one reason, the reason, and whether that is an error."""
    rows: dict[tuple[str, str], list[str]] = {}
    for case in CASES:
        (idle,) = [idle for idle in idle_fields(made(*case.without, case.setting)) if idle.key == case.key]
        reason = idle.said.partition("has no effect, as ")[2].partition(";")[0]
        keys = rows.setdefault((reason, "refused" if idle.refused else "reported"), [])
        keys += [key for key in (f"`{case.key}`",) if key not in keys]
    head = [
        "# Fields without effect",
        "",
        "A field that is changed from its default where it has no effect is refused or reported. Refused: `penstock "
        "train`, `plan`, `finetune` and",
        "`data`, the form and the Python API end with one line, which says what would give the field an effect. "
        "Reported: the line is part of the plan",
        "and of the run's log. Fields that are not in the table always have an effect.",
        "",
        "| field | has no effect, as | |",
        "|---|---|---|",
    ]
    table = [f"| {', '.join(keys)} | {reason} | {what} |" for (reason, what), keys in rows.items()]
    made_by = "Made by `python tests/support/idle_fields.py` from the rules in `engine/config/effects.py`."
    return "\n".join([*head, *table, "", made_by, ""])


if __name__ == "__main__":
    print(page(), end="")
