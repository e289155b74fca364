"""What a run makes of the card that STANDIN_CARD names: card.py FOLDER DTYPE prints it as JSON."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
from computes import emulator
from torch import Tensor

from penstock.engine.attention import flash_attn
from penstock.engine.attention.select import Attends, attention_report, chosen, forget, installed, prepare
from penstock.engine.config import TrainConfig
from penstock.engine.kernels import faster_kernel
from penstock.engine.machine.architectures import peak_of
from penstock.engine.machine.device import resolve_device
from penstock.engine.machine.peaks import utilisation
from penstock.engine.machine.precision import usual_dtype
from penstock.engine.train import train_step
from penstock.storage.files.errors import UserError

CUDA = torch.device("cuda", 0)


def kernels() -> dict[str, Any]:
    """What can compute each kind of problem, and which kernel a message would name as the faster one."""
    flash_attn._module.cache_clear()
    found: dict[str, Any] = {"absent": {name: reason for name, reason in installed(CUDA).items() if reason}}
    for kind, softcap in (("plain", None), ("soft-cap", 20.0)):
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            prepare(CUDA, torch.bfloat16, [Attends(4, 2, 128, 128, chunk=32, total=64, softcap=softcap)])
            if kind == "plain" and not deterministic:
                faster = faster_kernel(torch.cuda.get_device_name(CUDA), attention_report())
                found["faster"] = list(faster.kernels) if faster is not None else []
            for entry in attention_report():
                name = f"{kind}{', deterministic' if deterministic else ''}, {entry['direction']}"
                names = {strategy.partition(",")[0] for strategy in entry["ranking"][:-1]}
                found[name] = sorted(names | set(found.get(name, ())))
    torch.use_deterministic_algorithms(False)
    return found


def steps(folder: Path, dtype: str, device: torch.device) -> dict[str, Any]:
    """Losses and gradient norms of two steps, and the attention kernels that computed them."""
    forget()
    t = tiny.training(steps=2, compute_dtype=dtype)
    with tiny.session(folder, t=t, gpu=tiny.FLOOR, device=device) as session:
        metrics = [train_step(session) for _ in range(2)]
        session.finish()
    computed = {name for names in chosen(device.type).values() for name in names}
    return {"losses": [m.loss for m in metrics], "norms": [m.grad_norm for m in metrics], "kernels": sorted(computed)}


def experts_wait(folder: Path, dtype: str) -> bool:
    """Whether a compute op of a model with experts waits for the GPU: torch reads their tokens' counts on the host."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    m, t = tiny.model(model_type="qwen3_moe", overrides=experts), tiny.training(steps=1, compute_dtype=dtype)
    with tiny.session(folder, m=m, t=t, gpu=tiny.FLOOR, device=CUDA) as session:
        train_step(session)
        tiny.refuse_waits(session)
        try:
            train_step(session)
        except RuntimeError as error:
            if "synchronizing CUDA operation" in str(error):
                return True
            raise
    return False


def targets(cache: Path) -> list[str]:
    """What Triton's code was compiled for."""

    @torch.compile
    def normed(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)

    x = torch.randn(16, 64, device=CUDA)
    torch.testing.assert_close(normed(x).cpu(), torch.nn.functional.rms_norm(x.cpu(), (64,), eps=1e-6))
    return sorted(
        {match[1] for path in cache.rglob("*.ptx") if (match := re.search(r"\.target (\w+)", path.read_text()))}
    )


def refusal(dtype: str) -> str | None:
    try:
        resolve_device(TrainConfig(device="cuda", compute_dtype=dtype))
    except UserError as error:
        return str(error)
    return None


def main(folder: Path, dtype: str) -> None:
    found: dict[str, Any] = {
        "capability": list(torch.cuda.get_device_capability()),
        "auto": usual_dtype(CUDA),
        "refusals": {each: refusal(each) for each in ("auto", "bfloat16", "float32")},
        "alone": kernels(),
        "steps": [steps(folder / "cuda", dtype, CUDA)],
        "experts wait": experts_wait(folder / "experts", dtype),
        "cpu": steps(folder / "cpu", "float32", torch.device("cpu")),
        "mfu": utilisation(1e12, 1.0, peak_of(torch.cuda.get_device_name())),
        "targets": targets(folder / "triton"),
    }
    with emulator.packages():
        found["packages"] = kernels()
        found["steps"].append(steps(folder / "packages", dtype, CUDA))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
