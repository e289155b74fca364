"""Forecasts as `penstock plan --json` prints them, made by hand."""

from typing import Any

GIB = 2**30
LAYERS = 88


def _block(name: str, index: int) -> dict[str, Any]:
    everything = 4 if index < 11 else 0
    return {
        "name": name, "weights": "ram" if index < 40 else "nvme", "state": "nvme", "gradient": "ram", "bytes": 19 * GIB,
        "activation_checkpointing": {"none": everything, "selective": 32 - everything, "full": 0},
        "spilled": 0 if index < 70 else 8, "saved_on_gpu": 2 if index == 0 else 0,
    }  # fmt: skip


def fitting() -> dict[str, Any]:
    """A dense model of 88 layers on a preset with two drives."""
    edges = {"weights": "gpu", "state": "ram", "gradient": "ram", "bytes": 5 * GIB, "activation_checkpointing": {}}
    edges |= {"spilled": 0, "saved_on_gpu": 0}
    blocks = [{"name": "embed"} | edges, *(_block(f"layers.{i}", i) for i in range(LAYERS)), {"name": "head"} | edges]
    gpu = {"weight slots": 11 * GIB, "gradient slots": 8 * GIB, "K/V window": 12 * GIB, "kept activations": 30 * GIB}
    gpu |= {"activation slots": 6 * GIB, "workspace": 5 * GIB}
    ram = {"resident blocks": 200 * GIB, "activations": 180 * GIB, "stages": 20 * GIB}
    source = "data sheets of NVIDIA GH200 and Samsung PM1743, not measured"
    known = {"endurance_bytes": 14_000_000 * GIB, "endurance_share": 0.1143}
    unknown = {"endurance_bytes": None, "endurance_share": None}
    return {
        "recipe": "120b-gh200",
        "machine": {"name": "gh200-480", "source": source, "gpu": "NVIDIA GH200 480GB"},
        "fits": True,
        "model": {"type": "mistral", "params": 122_610_069_504, "active_params": 122_610_069_504, "layers": LAYERS},
        "tokens_per_step": 262_144, "steps": 2000, "context": 32_768,
        "tiers": {
            "gpu": {"budget_bytes": 90 * GIB, "peak_bytes": 72 * GIB, "parts": gpu},
            "ram": {"budget_bytes": 440 * GIB, "peak_bytes": 400 * GIB, "parts": ram},
            "nvme": {"budget_bytes": 7000 * GIB, "peak_bytes": 3200 * GIB, "parts": {"state": 3200 * GIB}},
        },
        "blocks": blocks, "chunks": 32, "chunk_tokens": 8192, "kv_window": "whole",
        "weight_slots": {"layer": 2, "embedding and head": 1}, "gradient_slots": {"layer": 2, "embedding and head": 1},
        "state_stages": 6, "part_stages": 4, "activation_stages": 3,
        "step_s": 671.4, "tokens_per_s": 390.4, "bound_by": "nvme_read",
        "lanes": {
            "nvme_read": {"busy_s": 612.3, "bytes": 1_700 * GIB, "share": 0.912},
            "h2d": {"busy_s": 8.04, "bytes": 680 * GIB, "share": 0.012},
            "compute": {"busy_s": 523.7, "bytes": 0, "share": 0.78},
            "d2h": {"busy_s": 5.5, "bytes": 410 * GIB, "share": 0.0082},
            "optimizer": {"busy_s": 41.0, "bytes": 0, "share": 0.061},
            "nvme_write": {"busy_s": 571.0, "bytes": 1_600 * GIB, "share": 0.85},
        },
        "mfu": 0.301, "hfu": 0.3725, "model_flops": 193 * 10**15, "executed_flops": 240 * 10**15,
        "run": {"seconds": 1_342_800.0, "drives": [
            {"path": None, "bytes_written": 1_600_000 * GIB, "bytes_written_per_step": 800 * GIB} | known,
            {"path": "/mnt/b", "bytes_written": 1_500_000 * GIB, "bytes_written_per_step": 750 * GIB} | unknown,
        ]},
        "compute_bound_tokens": 306_500,
        "best_change": {
            "set": ["train.global_batch_size=16", "train.gradient_dtype=bfloat16"],
            "text": "twice as many sequences in a step", "step_s": 1065.0, "tokens_per_s": 492.3, "gain": 0.26,
        },
        "reasons": {
            "chunk_tokens": "8,192: 4,096 takes 3 % longer at the layers' products, 16,384 leaves no room for two "
            "weight slots",
            "save": "attention's output everywhere; everything in the first 11 layers, 4 chunks each, with the memory "
            "that was left over",
            "placement": "weights of 40 layers stay in RAM: each saves 5.5 GiB of reads a pass",
            "spill": "activations of the last 18 layers go to NVMe, as the drive is idle in forward",
            "kv_window": "whole: 12.0 GiB fit",
        },
    }  # fmt: skip


def refused() -> dict[str, Any]:
    """The same on a machine whose GPU is too small."""
    chunks = {"set": ["train.chunk_tokens=1024", "train.kv_window=streamed"], "text": "shorter chunks, streamed window"}
    parts = {"weight slots": 20 * GIB, "workspace": 13 * GIB}
    return {
        "recipe": "120b-gh200",
        "machine": {"name": "rtx3090-64", "source": "data sheets", "gpu": "NVIDIA GeForce RTX 3090"},
        "fits": False,
        "tiers": {
            "gpu": {"budget_bytes": 22 * GIB, "peak_bytes": 33 * GIB, "parts": parts},
            "ram": {"budget_bytes": 56 * GIB, "peak_bytes": None, "parts": {}},
        },
        "refusal": {
            "tier": "gpu",
            "short_bytes": 11 * GIB,
            "message": "the GPU tier needs 33.00 GiB for two blocks' weights and gradients, one block's keys and "
            "values of 32,768 tokens and the temporaries of a chunk of 8,192 tokens, and its budget is 22.00 GiB",
            "changes": [
                chunks,
                {"set": ["budgets.gpu=33GiB"], "text": "a GPU budget of 33 GiB"},
                {"set": ['storage.nvme=["/mnt/a", "/mnt/b"]'], "text": "two drives"},
            ],
        },
    }
