"""docker/cluster/: each launch file's command, and what its scheduler puts around it, on this machine alone."""

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cli_process import REPOSITORY

FOLDER = REPOSITORY / "docker" / "cluster"
FILES = sorted(FOLDER.iterdir())
RANKS = 2


def contents(name: str) -> Any:
    """A YAML file of the folder."""
    return yaml.safe_load((FOLDER / name).read_text())


def job_container() -> dict[str, Any]:
    """The one container of the JobSet's pods."""
    (job,) = contents("jobset.yaml")["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return dict(container)


def trainer() -> dict[str, Any]:
    """What the TrainJob says of its nodes."""
    return dict(contents("trainjob.yaml")["spec"]["trainer"])


def named(entries: list[dict[str, Any]]) -> dict[str, str]:
    """A container's `env`, without what comes from secrets."""
    assert len({entry["name"] for entry in entries}) == len(entries)
    return {entry["name"]: entry["value"] for entry in entries if "value" in entry}


def snippets() -> dict[str, str]:
    """Where it stands -> a shell script inside a YAML file."""
    sky = contents("sky.yaml")
    return {
        "sky.yaml, setup": sky["setup"],
        "sky.yaml, run": sky["run"],
        "jobset.yaml": job_container()["command"][-1],
        "trainjob.yaml": trainer()["command"][-1],
    }


# ---------------------------------------------------------------------- what is started


@dataclass(frozen=True, slots=True)
class Launch:
    """A file's command as its scheduler starts it on the first node, with the variables that the scheduler sets."""

    command: list[str]
    environment: dict[str, str]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _given(
    file: Mapping[str, Any], what: str, run_dir: Path, settings: Mapping[str, Any], **more: str
) -> dict[str, str]:
    """Variables of a YAML file, set to these; there is one of each name."""
    text = "".join(f"{key}={value}\n" for key, value in settings.items())
    changes = {"RECIPE": what, "RUN_DIR": str(run_dir), "SETTINGS": text} | more
    assert changes.keys() <= file.keys()
    return {name: str(value) for name, value in (file | changes).items()}


def slurm(what: str, run_dir: Path, settings: Mapping[str, Any]) -> Launch:
    arguments = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    environment = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "penstock-cluster",
        "SLURM_JOB_NODELIST": "node[1-1]",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": str(RANKS),
        "SLURM_CPUS_PER_TASK": str(RANKS),
        "PENSTOCK_RUN": str(run_dir),
        "MASTER_PORT": str(free_port()),
    }
    return Launch(["bash", str(FOLDER / "cluster.sbatch"), what, *arguments], environment)


def sky(what: str, run_dir: Path, settings: Mapping[str, Any]) -> Launch:
    environment = _given(contents("sky.yaml")["envs"], what, run_dir, settings) | {
        "SKYPILOT_NODE_IPS": "127.0.0.1",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": str(RANKS),
        "SKYPILOT_TASK_ID": "sky-managed-2026-01-01-12-00-00-000000_penstock-cluster_1-0",
        "MASTER_PORT": str(free_port()),
    }
    return Launch(["bash", "-c", contents("sky.yaml")["run"]], environment)


def jobset(what: str, run_dir: Path, settings: Mapping[str, Any]) -> Launch:
    container, here = job_container(), {"NODES": "1", "GPUS": str(RANKS), "HOST": "localhost"}
    environment = _given(named(container["env"]), what, run_dir, settings, **here)
    return Launch(container["command"], environment | {"MASTER_PORT": str(free_port())})


def trainjob(what: str, run_dir: Path, settings: Mapping[str, Any]) -> Launch:
    """With the variables that Trainer's plugin for torch sets (pkg/runtime/framework/plugins/torch/torch.go)."""
    found = trainer()
    environment = _given(named(found["env"]), what, run_dir, settings) | {
        "PET_NNODES": "1",
        "PET_NPROC_PER_NODE": str(RANKS),
        "PET_NODE_RANK": "0",
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": str(free_port()),
    }
    return Launch(found["command"], environment)


LAUNCHES = {"cluster.sbatch": slurm, "sky.yaml": sky, "jobset.yaml": jobset, "trainjob.yaml": trainjob}
"""File -> what starts it for a recipe or a run, with a run directory and settings."""


def scheduler(folder: Path, **commands: str) -> dict[str, str]:
    """An environment in which srun runs what it is given, scontrol knows one node and notes what it is told in `notes`,
    and this interpreter's torchrun is found; `commands`: others, by what their scripts do."""
    scripts = {
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
        "scontrol": 'if [ "$1" = show ]; then echo localhost; else echo "$@" >> "$SLURM_NOTES"; fi',
    }
    for name, text in (scripts | commands).items():
        file = folder / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)
    paths = [str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "SLURM_", "PET_"))}
    return ours | {
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(REPOSITORY / "src")])),
        "SLURM_NOTES": str(folder / "notes"),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
