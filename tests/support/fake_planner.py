"""A plan server that answers at once, for tests of what asks it: `python fake_planner.py HOW LOG`.

HOW: `well` with forecasts of three values, `sample` with whole ones, `dies`, `dies once`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

how, log = sys.argv[1], Path(sys.argv[2])
starts = len(log.read_text().splitlines()) if log.exists() else 0
with log.open("a") as file:
    file.write("started\n")
if how == "dies" or (how == "dies once" and starts == 0):
    print("Traceback", file=sys.stderr)
    print("MemoryError: no room", file=sys.stderr)
    sys.exit(1)


def send(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def sample(request: dict[str, Any]) -> dict[str, Any]:
    """Chunks beyond 4,096 tokens do not fit; twice the steps take twice the time."""
    from sample_forecast import fitting, refused

    recipe = request["recipe"]
    made = refused() if (recipe["train"]["chunk_tokens"] or 0) > 4096 else fitting()
    machine = request["machine"] or recipe["machine"] or "generic"
    made |= {"recipe": recipe["name"], "steps": recipe["train"]["steps"]}
    made["machine"] |= {"name": machine}
    if made["fits"]:
        made["run"] |= {"seconds": recipe["train"]["steps"] * made["step_s"]}
        made["best_change"]["set"] = ["train.gradient_dtype=bfloat16"]
    return made


send({"ready": True})
print("chatter that is no JSON", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    identity, recipe = request["id"], request["recipe"]
    with log.with_suffix(".requests").open("a") as file:
        file.write(
            json.dumps([recipe["train"]["steps"], request["machine"], request.get("from_scratch", False)]) + "\n"
        )
    if recipe["train"]["steps"] == 666:
        os._exit(3)
    if recipe["train"]["steps"] == 13:
        send({"id": identity, "error": "train.steps: 13 is unlucky"})
        continue
    forecast: dict[str, Any] = {"fits": True, "recipe": recipe["name"], "steps": recipe["train"]["steps"]}
    advice: dict[str, Any] = {"best_change": None}
    if how == "sample":
        forecast, advice = sample(request), {}
    extra = {}
    if request.get("from_scratch", False):
        extra["recipe"] = recipe | {"model": recipe["model"] | {"path": None}}
    send({"id": identity - 1, "forecast": {"fits": False}, "done": True})
    send({"id": identity, "forecast": forecast, "done": False} | extra)
    send({"id": identity, "forecast": forecast | advice, "done": True} | extra)
