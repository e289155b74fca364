"""The load-balancing loss of a mixture of experts, for models of which transformers defines one.

transformers' `load_balancing_loss_func` (Switch Transformer, arXiv 2101.03961, equations 4 to 6) is, over N rows, the
tokens of a batch in every layer that routes them,

    loss = E * sum over experts e of (C_e / N) * (P_e / N)

where C_e counts the rows that chose e among their best and P_e sums their probabilities of it. Nothing flows back
through C. So the gradient of a row's probabilities is the same in every layer, E * C / N^2, and is known once all
layers have run forward: in backward it is added, at each router, to the gradient of what the router hands on.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from penstock.engine.model.reward import is_reward
from penstock.storage.files.errors import UserError

FUNCTION = "load_balancing_loss_func"
"""What a modeling module that defines such a loss calls it."""


@dataclass(frozen=True, slots=True)
class Router:
    module: type[nn.Module]
    index: int
    """Which of that module's outputs are its logits, [rows, experts]."""
    num_experts: int
    top_k: int


def own_coefficient(config: PretrainedConfig) -> float:
    """The weight that `config` itself gives the loss; 0 where it does not switch it on, and of a reward model, of which
    transformers defines none."""
    if is_reward(config):
        return 0.0
    text = config.get_text_config(decoder=True)
    return float(text.router_aux_loss_coef) if getattr(text, "output_router_logits", False) else 0.0


def router_coefficient(config: PretrainedConfig, wanted: float | None, *, whole_documents: bool = False) -> float:
    """Weight of the load-balancing loss: what is `wanted`, else the config's where that switches the loss on; 0: none.
    Raises UserError where the model defines none, or is trained on whole documents, each a padded row."""
    if wanted is None:
        wanted = own_coefficient(config)
    if not wanted:
        return 0.0
    kind = config.model_type
    if _recorder(AutoModelForCausalLM._model_mapping.get(type(config), None)) is None:
        raise UserError(
            f"train.router_aux_loss: {wanted:g}, but model type '{kind}' defines no such loss; leave it out"
        )
    if whole_documents:
        raise UserError(
            f"train.router_aux_loss: {wanted:g}, but model type '{kind}' pads every row, and this loss would count "
            "the padding; set it to 0"
        )
    return float(wanted)


def _recorder(model: Any) -> OutputRecorder | None:
    """What transformers looks at for the router's logits, of a class of models with such a loss over one kind of
    router."""
    if not isinstance(model, type) or not hasattr(sys.modules[model.__module__], FUNCTION):
        return None
    result = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    return result if isinstance(result, OutputRecorder) else None


def find_router(model: PreTrainedModel) -> Router:
    """The router of a model that has such a loss. Raises UserError where it is not known."""
    recorder, experts = _recorder(type(model)), getattr(model, "num_experts", None)
    top_k = getattr(model, "num_experts_per_tok", None)
    if recorder is None or not isinstance(experts, int) or not isinstance(top_k, int):
        kind = model.config.model_type
        raise UserError(f"train.router_aux_loss: the routers of model type '{kind}' are not known; set it to 0")
    return Router(recorder.target_class, recorder.index, experts, top_k)


def balancing_loss(model: PreTrainedModel, logits: list[tuple[Tensor, ...]]) -> Tensor:
    """transformers' own loss of several forwards, each with a tensor of router logits per layer, as of one."""
    rows = tuple(torch.cat([each.flatten(0, -2) for each in layer]) for layer in zip(*logits, strict=True))
    router = find_router(model)
    loss: Tensor = getattr(sys.modules[type(model).__module__], FUNCTION)(rows, router.num_experts, router.top_k)
    return loss


class RouterBalance:
    """Counts where the routers of a step's layers send its tokens, and adds the loss's gradient in backward. All on the
    lane that computes: `watch` says what is run next, first all of a step's forward; then `settle`, and backward."""

    def __init__(self, router: Router, coefficient: float, num_layers: int, device: torch.device) -> None:
        """`num_layers`: those that route."""
        self._router, self._coefficient, self._layers = router, coefficient, num_layers
        self.counts = torch.zeros(router.num_experts, dtype=torch.float64, device=device)
        self.slope = torch.zeros(router.num_experts, dtype=torch.float64, device=device)
        """[experts]: gradient of the loss by a row's probability of each."""
        self._counting, self.num_rows = False, 0

    def listen(self, layer: nn.Module) -> None:
        """Look at the routers of a layer from now on."""
        for part in layer.modules():
            if isinstance(part, self._router.module):
                part.register_forward_hook(self._hook)

    def begin(self) -> None:
        self.counts.zero_()

    def watch(self, num_rows: int, *, counting: bool) -> None:
        """A chunk is run next, of which the first `num_rows` tokens are no padding; forward counts them."""
        self._counting, self.num_rows = counting, num_rows

    def part(self, num_rows: int, start: int, end: int) -> None:
        """Of that chunk, of which `num_rows` tokens are no padding, those from `start` to `end` are."""
        self.num_rows = max(0, min(num_rows, end) - start)

    def settle(self, num_tokens: int) -> None:
        """All layers have run forward on the step's `num_tokens` tokens."""
        rows = max(1, self._layers * num_tokens)
        self.slope.copy_(self.counts * (self._coefficient * self._router.num_experts / rows**2))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        logits = output[self._router.index]
        if self._counting:
            with torch.no_grad():
                p = torch.softmax(logits.detach()[: self.num_rows], dim=-1)
                marks = torch.zeros(p.shape, dtype=torch.float64, device=p.device)
                self.counts += marks.scatter_(1, p.topk(self._router.top_k, dim=-1).indices, 1.0).sum(dim=0)
        if not torch.is_grad_enabled() or not logits.requires_grad:
            return output
        carriers = [i for i, part in enumerate(output) if isinstance(part, Tensor) and part.requires_grad]
        # What the layer goes on with: the scores of the chosen, made of the logits, which nobody may read again.
        carrier = next((i for i in carriers if i != self._router.index), self._router.index)
        carried = _Balanced.apply(output[carrier], logits, self, self.num_rows)  # type: ignore[no-untyped-call]
        return (*output[:carrier], carried, *output[carrier + 1 :])


class _Balanced(torch.autograd.Function):
    """What a router hands on, unchanged; its way back adds the loss's gradient to that of the router's logits."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, logits: Tensor, balance: RouterBalance, num_rows: int) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.balance, ctx.num_rows = balance, num_rows
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (logits,) = ctx.saved_tensors
        dtype = torch.promote_types(logits.dtype, torch.float32)
        p, slope = torch.softmax(logits, dim=-1).to(dtype), ctx.balance.slope.to(dtype)
        gradient = p * (slope - (p * slope).sum(dim=-1, keepdim=True))
        gradient[ctx.num_rows :] = 0
        return grads[0], gradient.to(logits.dtype), None, None
