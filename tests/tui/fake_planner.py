"""A plan server that answers at once, for tests of what asks it: `python fake_planner.py HOW LOG`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

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


send({"ready": True})
print("chatter that is no JSON", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    identity, recipe = request["id"], request["recipe"]
    with log.with_suffix(".requests").open("a") as file:
        file.write(json.dumps([recipe["train"]["steps"], request["machine"], request["from_scratch"]]) + "\n")
    if recipe["train"]["steps"] == 666:
        os._exit(3)
    if recipe["train"]["steps"] == 13:
        send({"id": identity, "error": "train.steps: 13 is unlucky"})
        continue
    forecast = {"fits": True, "recipe": recipe["name"], "steps": recipe["train"]["steps"]}
    send({"id": identity - 1, "forecast": {"fits": False}, "done": True})
    send({"id": identity, "forecast": forecast, "done": False})
    send({"id": identity, "forecast": forecast | {"best_change": None}, "done": True})
