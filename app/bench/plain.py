"""What Penstock is compared with: the same training step in plain PyTorch, everything in memory."""

from __future__ import annotations

import time
import warnings

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig


def plain_step_times(
    config: PretrainedConfig,
    *,
    rows: int,
    row_tokens: int,
    steps: int,
    device: torch.device,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip_norm: float,
) -> list[float]:
    """Seconds of each of `steps` optimizer steps on `rows` random sequences of `row_tokens` tokens.

    bf16 weights and gradients, gradient checkpointing of every layer, fp32 master weights and moments in torch's
    fused AdamW, exact clipping by the global norm. A bf16 gradient dies as soon as
    its fp32 copy exists, so the peak holds no parameter's gradient twice.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").to(device)
    model.config.use_cache = False
    with warnings.catch_warnings():  # the older name of activation checkpointing, which every transformers 5 has
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    weights = list(model.parameters())
    masters = [weight.detach().float() for weight in weights]
    decayed = [master for master in masters if master.ndim > 1]
    undecayed = [master for master in masters if master.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    times = []
    for _ in range(steps):
        ids = torch.randint(0, config.vocab_size, (rows, row_tokens), device=device)
        start = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        for weight, master in zip(weights, masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters, clip_norm, foreach=True)
        adamw.step()
        adamw.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return times
