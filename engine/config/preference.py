"""The preference section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.config.values import require, require_kinds

LOSS_TYPES: dict[str, tuple[str, ...]] = {
    "dpo": ("sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "apo_zero", "apo_down"),
    "cpo": ("sigmoid", "hinge", "ipo"),
    "kto": ("kto", "apo_zero_unpaired"),
}
"""train.objective -> the values of preference.loss_type, the usual one first."""
PREFERENCES = frozenset({*LOSS_TYPES, "simpo", "orpo"})
"""Values of train.objective that compare answers."""


@dataclass(kw_only=True, slots=True)
class PreferenceConfig:
    """Options of preference training (train.objective), named as in TRL."""

    beta: float = 0.1
    """How closely the model is held to its reference: a larger beta allows less deviation. For objectives without a
    reference, the factor on log-probabilities; SimPO is usually trained with 2."""
    loss_type: str | None = None
    """Form of the loss. dpo: sigmoid, hinge, ipo, sigmoid_norm (log-probabilities divided by length), robust, apo_zero,
    apo_down. cpo: sigmoid, hinge, ipo. kto: kto, apo_zero_unpaired. none takes the first of these."""
    label_smoothing: float = 0.0
    """Share of pairs that are assumed to be labelled the wrong way round (sigmoid, robust)."""
    simpo_gamma: float = 0.5
    """SimPO's target margin between chosen and rejected answers."""
    cpo_alpha: float = 1.0
    """CPO: weight of the chosen answers' negative log-likelihood beside the preference loss."""
    desirable_weight: float = 1.0
    """KTO: weight of wanted answers."""
    undesirable_weight: float = 1.0
    """KTO: weight of answers that are not wanted."""
    center_rewards_coefficient: float | None = None
    """Reward models: weight of the mean square of a pair's summed rewards beside the loss, which keeps rewards around
    zero. TRL's documentation recommends 0.01. none leaves it out."""

    def __post_init__(self) -> None:
        require_kinds("preference", self)
        require(self.beta > 0, f"preference.beta: {self.beta} must be above 0")
        most = self.label_smoothing
        require(0 <= most < 0.5, f"preference.label_smoothing: {most} must be at least 0 and below 0.5")
        for name in ("simpo_gamma", "cpo_alpha", "desirable_weight", "undesirable_weight"):
            value = getattr(self, name)
            require(value >= 0, f"preference.{name}: {value} must not be negative")
        centre = self.center_rewards_coefficient
        require(centre is None or centre > 0, f"preference.center_rewards_coefficient: {centre} must be above 0")
