"""A made-up run that looks like a real one to its readers: to measure the terminal application without a GPU for days.

The ops of each step go over six lanes, each when its lane is free and what it depends on is done, with lengths that
scatter by a fifth. Nothing is computed.
"""

from __future__ import annotations

import heapq
import json
import math
import os
import random
import socket
from pathlib import Path
from typing import Any

from penstock.app.runs.lanes import LANES
from penstock.app.runs.speed import WARMUP_STEPS

TOKENS = 65_536
"""Of a step."""
GIB = 2**30

Line = dict[str, Any]


class Steps:
    """Steps of a model of `num_layers` layers, one after the other, at about `spans_per_s`."""

    def __init__(self, num_layers: int = 24, spans_per_s: float = 300.0, first_step: int = 1) -> None:
        self.num_layers = num_layers
        self.step_s = (12 * num_layers + 2) / spans_per_s
        """A step's length, nearly."""
        self.step = first_step - 1
        """The last one made."""
        self._random = random.Random(0)
        self._unit_s = self.step_s / (3.55 * num_layers)
        self.end_s = 0.0
        """When the last one made ended; what comes next ends later."""
        self._free_at = dict.fromkeys(LANES, 0.0)
        self._ends: dict[int, float] = {}
        self._next_id = 0
        self._lines: list[Line] = []
        self._updated: list[int] = []
        """Per layer the op after which its weights may be read."""

    def next(self) -> list[Line]:
        """Spans of the next step, as lines of spans.jsonl in order of their ends; its update ends within the one after.

        The end of its `clip` is the step's end.
        """
        self.step += 1
        layers = range(self.num_layers)
        updated = self._updated or [-1] * self.num_layers
        for layer in layers:
            weights = self._fetch(layer, updated[layer])
            forward = self._op("compute", "layer_forward", layer, 1.0, [weights])
            self._op("d2h", "store_saved", layer, 0.5, [forward], GIB // 16)
        gradients = []
        for layer in reversed(layers):
            weights = self._fetch(layer, -1)
            saved = self._op("h2d", "load_saved", layer, 0.4, [weights], GIB // 16)
            backward = self._op("compute", "layer_backward", layer, 2.0, [weights, saved])
            gradients.append(self._op("d2h", "store_gradient", layer, 0.6, [backward], GIB // 2))
        clip = self._op("compute", "clip", -1, 0.1, gradients)
        self.end_s = self._ends[clip]
        self._updated = []
        for layer in layers:
            state = self._op("nvme_read", "read_state", layer, 0.5, [clip], 3 * GIB)
            update = self._op("optimizer", "update", layer, 0.8, [state, clip])
            self._updated.append(self._op("nvme_write", "write_state", layer, 0.6, [update], 3 * GIB))
        self._op("nvme_write", "commit", -1, 0.2, self._updated)
        self._ends = {id: end for id, end in self._ends.items() if id >= self._next_id - 40 * self.num_layers}
        lines, self._lines = sorted(self._lines, key=lambda line: float(line["end_s"])), []
        return lines

    def _fetch(self, layer: int, after: int) -> int:
        read = self._op("nvme_read", "read_weights", layer, 0.6, [after], GIB)
        return self._op("h2d", "load_weights_part", layer, 0.5, [read], GIB)

    def _op(self, lane: str, op: str, layer: int, units: float, deps: list[int], num_bytes: int = 0) -> int:
        lane_free = self._free_at[lane]
        ends = {dep: self._ends[dep] for dep in deps if dep in self._ends}
        start = max([lane_free, *ends.values()])
        end = start + units * self._unit_s * self._random.uniform(0.8, 1.2)
        self._free_at[lane] = end + 1e-5
        id, self._next_id = self._next_id, self._next_id + 1
        self._ends[id] = end
        self._lines.append(
            {
                "lane": lane,
                "op": op,
                "block": "all" if layer < 0 else f"layers.{layer}",
                "chunk": -1,
                "start_s": round(start, 7),
                "end_s": round(end, 7),
                "bytes": num_bytes,
                "step": self.step,
                "id": id,
                "waited": [dep for dep, at in ends.items() if at > lane_free],
            }
        )
        return id


def metrics_line(step: int, step_s: float, at: float) -> Line:
    """A step's line of metrics.jsonl: a loss that falls, scatters and now and then jumps."""
    chance = random.Random(step)
    loss = 2.0 + 8.0 / math.sqrt(1.0 + step / 50) + chance.gauss(0.0, 0.05) + (3.0 if step % 20_011 == 0 else 0.0)
    return {
        "step": step,
        "loss": round(loss, 6),
        "grad_norm": round(1.0 + chance.random(), 6),
        "lr": 3e-4,
        "tokens": TOKENS,
        "step_s": step_s,
        "tokens_per_s": TOKENS / step_s,
        "warmup": step <= WARMUP_STEPS,
        "mean_tokens_per_s": TOKENS / step_s if step > WARMUP_STEPS else None,
        "mean_step_s": step_s if step > WARMUP_STEPS else None,
        "mean_model_tflops_per_s": 1e3 / step_s if step > WARMUP_STEPS else None,
        "model_flops": 10**15,
        "nvme_read_bytes": {"/mnt/nvme0/synthetic": 4 * GIB},
        "nvme_written_bytes": {"/mnt/nvme0/synthetic": 3 * GIB},
        "time": round(at, 3),
        "tier_bytes": {"gpu": 60 * GIB, "ram": 90 * GIB, "nvme": 1400 * GIB},
    }


def forecast(steps: Steps, spans: list[Line]) -> Line:
    """What is read of plan.json of such a run, whose step has these spans."""
    blocks = [
        {
            "name": f"layers.{layer}",
            "weights": "nvme" if layer % 3 else "ram",
            "state": "nvme",
            "gradient": "ram",
            "bytes": 9 * GIB,
        }
        for layer in range(steps.num_layers)
    ]
    lanes = {}
    for lane in LANES:
        mine = [span for span in spans if span["lane"] == lane]
        busy_s = sum(span["end_s"] - span["start_s"] for span in mine)
        lanes[lane] = {"share": min(1.0, busy_s / steps.step_s)}
    tier = {"gpu": (80, 62), "ram": (128, 96), "nvme": (3600, 1420)}
    return {
        "model": {"params": 10**9, "layers": steps.num_layers},
        "steps": 10_000_000,
        "tiers": {
            name: {"budget_bytes": budget * GIB, "peak_bytes": peak * GIB} for name, (budget, peak) in tier.items()
        },
        "blocks": blocks,
        "weight_slots": {"layer": 2, "embedding and head": 1},
        "step_s": steps.step_s,
        "tokens_per_s": TOKENS / steps.step_s,
        "bound_by": "compute",
        "lanes": lanes,
        "model_flops": 10**15,
        "mfu": 0.4,
    }


class Writer:
    """Writes the run's directory: `begin` what has been, `advance` what comes next, by the clocks that it is given."""

    def __init__(self, path: Path, *, spans_per_s: float = 300.0, num_spans: int, num_steps: int) -> None:
        self.path = path
        self.clock_s = 0.0
        """The spans' clock."""
        self.step = num_steps
        self._spans_per_s = spans_per_s
        before = min(num_steps, num_spans // int(spans_per_s * Steps(spans_per_s=spans_per_s).step_s))
        self._steps = Steps(spans_per_s=spans_per_s, first_step=num_steps - before + 1)
        self._coming: list[tuple[float, int, Line]] = []
        """A heap of the spans that have not ended, by end and id."""

    def begin(self, now: float) -> None:
        """Everything up to Unix time `now`."""
        from penstock.app.recipes.recipe import Recipe, to_json

        self.path.mkdir(parents=True)
        (self.path / "recipe.json").write_text(to_json(Recipe(name="synthetic")))
        planned = Steps(spans_per_s=self._spans_per_s)
        lines = planned.next()
        (self.path / "predicted.jsonl").write_text(_text(lines))
        (self.path / "plan.json").write_text(json.dumps(forecast(planned, lines)))
        step_s, last = self._steps.step_s, self.step
        with (self.path / "metrics.jsonl").open("w") as metrics:
            for step in range(1, last + 1):
                metrics.write(json.dumps(metrics_line(step, step_s, now + (step - last) * step_s)) + "\n")
        with (self.path / "spans.jsonl").open("w") as spans:
            while self._steps.step < last:
                self._prepare()
                self.clock_s = self._steps.end_s
                spans.write(_text(self._ended()))
        self.say(now, "the run begins")
        self._write_status(now)

    def advance(self, seconds: float, now: float) -> int:
        """What ends within the next `seconds`, at Unix time `now`; the number of spans."""
        self.clock_s += seconds
        while self._steps.end_s <= self.clock_s:
            self._prepare()
        spans = self._ended()
        with (self.path / "spans.jsonl").open("a") as file:
            file.write(_text(spans))
        for step in [line["step"] for line in spans if line["op"] == "clip"]:
            self.step = step
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics_line(step, self._steps.step_s, now)) + "\n")
            if step % 20 == 0:
                self.say(now, f"checkpoint step-{step:06}: step {step}")
        self._write_status(now)
        return len(spans)

    def _prepare(self) -> None:
        for line in self._steps.next():
            heapq.heappush(self._coming, (line["end_s"], line["id"], line))

    def _ended(self) -> list[Line]:
        ended = []
        while self._coming and self._coming[0][0] <= self.clock_s:
            ended.append(heapq.heappop(self._coming)[2])
        return ended

    def say(self, now: float, text: str) -> None:
        with (self.path / "log.jsonl").open("a") as file:
            file.write(json.dumps({"time": now, "level": "info", "text": text, "step": self.step}) + "\n")

    def _write_status(self, now: float) -> None:
        under_way: dict[str, list[Line]] = {}
        for _, _, line in self._coming:
            if line["start_s"] <= self.clock_s < line["end_s"]:
                op = {name: line[name] for name in ("op", "block", "chunk", "step", "start_s")}
                under_way.setdefault(line["lane"], []).append(op)
        status = {
            "state": "running",
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": now - self.clock_s,
            "step": self.step,
            "total_steps": 10_000_000,
            "clock_s": self.clock_s,
            "now": under_way,
            "drives": {"/mnt/nvme0/synthetic": {"temperature_c": 41.5}},
            "heartbeat": now,
        }
        temporary = self.path / "status.json.tmp"
        temporary.write_text(json.dumps(status) + "\n")
        os.replace(temporary, self.path / "status.json")


def _text(lines: list[Line]) -> str:
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
