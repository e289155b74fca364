"""docker/cluster/: launch files for several nodes, linted, held against their schedulers' fields, their commands run.

No scheduler is here: a file's command is started as its scheduler would start it on one node, with two ranks.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli_process import PATIENCE_S, REPOSITORY, default_signals, done, wait_until
from cluster_files import (
    FILES,
    FOLDER,
    LAUNCHES,
    RANKS,
    contents,
    job_container,
    named,
    scheduler,
    slurm,
    snippets,
    trainer,
)
from recipe_texts import recipe_text

from penstock.app.recipe import apply_overrides, load_recipe
from penstock.engine.forecast.cluster import require_cluster
from penstock.engine.machine.clusters import parse_cluster

YAMLLINT = """
extends: default
rules:
  line-length: {max: 120}
"""
NODES = 2
"""Of every file as it stands."""
TINY = recipe_text(
    model={"vocab_size": 300},
    data={"source": "random"},
    train={"steps": 2, "global_batch_size": RANKS, "compute_dtype": "float32"},
    storage={"checkpoint_every": 1},
)
NOTE_COMMAND = 'printf "%s\\n" "$OMP_NUM_THREADS" "$@" > command'
"""A torchrun that writes down how it was called."""


def test_there_are_four() -> None:
    assert [file.name for file in FILES] == sorted(LAUNCHES)


# ---------------------------------------------------------------------- lint


def tool(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found is not None, f"{name} is in the dev extra"
    return found


def test_yaml_is_clean() -> None:
    files = [str(file) for file in FILES if file.suffix == ".yaml"]
    assert len(files) == 3
    lint = subprocess.run([tool("yamllint"), "--strict", "-d", YAMLLINT, *files], capture_output=True, text=True)
    assert lint.returncode == 0, lint.stdout


@pytest.mark.parametrize("script", sorted((REPOSITORY / "docker").rglob("*.sbatch")), ids=lambda path: path.name)
def test_batch_scripts_are_clean(script: Path) -> None:
    lint = subprocess.run([tool("shellcheck"), str(script)], capture_output=True, text=True)
    assert lint.returncode == 0, lint.stdout


@pytest.mark.parametrize("place", snippets())
def test_snippets_are_clean(place: str, tmp_path: Path) -> None:
    file = tmp_path / "snippet.sh"
    file.write_text(f"#!/bin/bash\n{snippets()[place]}")
    lint = subprocess.run([tool("shellcheck"), str(file)], capture_output=True, text=True)
    assert lint.returncode == 0, lint.stdout


# ---------------------------------------------------------------------- what each system wants

NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""Of a Kubernetes object whose pods have it as their host's name."""


def known(found: dict[str, Any], required: str, optional: str = "") -> None:
    """Fails for fields that are missing, and for unknown ones."""
    assert set(required.split()) <= found.keys() <= {*required.split(), *optional.split()}


def require_container(container: dict[str, Any], volumes: list[dict[str, Any]]) -> None:
    mounted = [mount["name"] for mount in container["volumeMounts"]]
    assert sorted(mounted) == sorted(volume["name"] for volume in volumes)
    for volume in volumes:
        known(volume, "name", "persistentVolumeClaim emptyDir")
        assert len(volume) == 2
    for mount in container["volumeMounts"]:
        known(mount, "name mountPath")
        assert mount["mountPath"].startswith("/")


def require_variables(entries: list[dict[str, Any]]) -> None:
    for entry in entries:
        known(entry, "name", "value valueFrom")
        assert ("value" in entry) != ("valueFrom" in entry)
        assert re.fullmatch(r"[A-Z_]+", entry["name"])
        assert isinstance(entry.get("value", ""), str), "a number has to be quoted"
    assert "SECRET" not in "".join(named(entries)), "secrets are the cluster's"


def test_a_jobset() -> None:
    """Fields of jobset.x-k8s.io/v1alpha2 (github.com/kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go) and
    of Kubernetes' Job and pod."""
    found = contents("jobset.yaml")
    known(found, "apiVersion kind metadata spec")
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    spec = found["spec"]
    optional = "failurePolicy network successPolicy startupPolicy suspend coordinator managedBy ttlSecondsAfterFinished"
    known(spec, "replicatedJobs", f"{optional} volumeClaimPolicies")
    known(spec["failurePolicy"], "maxRestarts", "restartStrategy rules")
    (job,) = spec["replicatedJobs"]
    known(job, "name template", "replicas groupName dependsOn")
    known(job["template"], "spec", "metadata")
    known(job["template"]["spec"], "template parallelism completions backoffLimit", "completionMode")
    assert job["template"]["spec"]["backoffLimit"] == 0, "the JobSet restarts, not its job"
    pod = job["template"]["spec"]["template"]["spec"]
    known(pod, "containers restartPolicy", "volumes securityContext nodeSelector tolerations hostNetwork")
    assert pod["restartPolicy"] == "Never"
    container = job_container()
    known(container, "name image command env", "envFrom ports resources volumeMounts")
    require_container(container, pod["volumes"])
    require_variables(container["env"])
    values = named(container["env"])
    assert values["NODES"] == str(NODES)
    assert job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"] == NODES
    assert values["GPUS"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    name, replicas = found["metadata"]["name"], job.get("replicas", 1)
    assert NAME.fullmatch(name)
    assert NAME.fullmatch(job["name"])
    assert values["HOST"] == f"{name}-{job['name']}-0-0.{name}"
    assert replicas == 1


def test_a_trainjob() -> None:
    """Fields of trainer.kubeflow.org/v1alpha1 (github.com/kubeflow/trainer, manifests/base/crds, 2.3)."""
    found = contents("trainjob.yaml")
    known(found, "apiVersion kind metadata spec")
    assert (found["apiVersion"], found["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert NAME.fullmatch(found["metadata"]["name"])
    known(found["spec"], "runtimeRef trainer", "activeDeadlineSeconds initializer managedBy runtimePatches suspend")
    known(found["spec"]["runtimeRef"], "name", "apiGroup kind")
    assert found["spec"]["runtimeRef"]["name"] == "torch-distributed"
    wanted = trainer()
    known(wanted, "image command env numNodes numProcPerNode resourcesPerNode", "args")
    assert wanted["numNodes"] == NODES
    known(wanted["resourcesPerNode"], "limits", "requests claims")
    assert wanted["numProcPerNode"] == wanted["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    require_variables(wanted["env"])
    assert not [name for name in named(wanted["env"]) if name.startswith("PET_")], "these are Trainer's to set"
    (patch,) = found["spec"]["runtimePatches"]
    known(patch, "manager trainingRuntimeSpec")
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    known(job, "name template")
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    known(container, "name volumeMounts")  # of the node's container no more may be patched
    assert job["name"] == container["name"] == "node"
    require_container(container, pod["volumes"])


def test_a_skypilot_task() -> None:
    """Fields and variables of docs.skypilot.co: YAML reference, volumes, environment variables."""
    found = contents("sky.yaml")
    known(found, "name num_nodes resources envs run", "workdir setup volumes file_mounts secrets config service pool")
    hardware = "infra accelerators cpus memory instance_type use_spot disk_size disk_tier network_tier"
    known(found["resources"], "accelerators", f"{hardware} image_id ports labels autostop any_of ordered job_recovery")
    assert found["num_nodes"] == NODES
    assert re.fullmatch(r"[A-Z0-9]+:\d+", found["resources"]["accelerators"])
    known(found["resources"]["job_recovery"], "", "strategy max_restarts_on_errors recover_on_exit_codes")
    for path, volume in found["volumes"].items():
        assert path.startswith("/")
        assert NAME.fullmatch(volume)
    used = set(re.findall(r"SKYPILOT_\w+", found["run"] + found["setup"]))
    ours = "NODE_RANK NODE_IPS NUM_NODES NUM_GPUS_PER_NODE TASK_ID CLUSTER_INFO USER"
    assert used <= {f"SKYPILOT_{name}" for name in ours.split()}
    assert {"SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_NUM_GPUS_PER_NODE"} <= used
    assert (REPOSITORY / "constraints.txt").exists(), "setup installs by it, in the workdir"


def test_a_slurm_job() -> None:
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", (FOLDER / "cluster.sbatch").read_text(), re.MULTILINE)
    asked = dict(lines)
    assert len(asked) == len(lines) == (FOLDER / "cluster.sbatch").read_text().count("#SBATCH")
    known(
        asked,
        "job-name nodes ntasks-per-node gpus-per-node cpus-per-task time signal requeue open-mode",
        "mem exclusive partition account output",
    )
    assert asked["nodes"] == str(NODES)
    assert asked["ntasks-per-node"] == "1", "torchrun starts the ranks"
    assert (asked["signal"], asked["open-mode"]) == ("B:TERM@300", "append")


def test_they_train_a_recipe_that_these_nodes_can() -> None:
    """As the files stand: the recipe is there, its fields too, and its micro-batches divide by the GPUs."""
    for file, values in {
        "sky.yaml": contents("sky.yaml")["envs"],
        "jobset.yaml": named(job_container()["env"]),
        "trainjob.yaml": named(trainer()["env"]),
    }.items():
        recipe = apply_overrides(load_recipe(Path(values["RECIPE"])), values["SETTINGS"].split())
        assert require_cluster(recipe, parse_cluster(f"{NODES}x8")) == 2, file


# ---------------------------------------------------------------------- what is typed


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("what", ["recipe", "run", "no settings"])
def test_the_command_line(name: str, what: str, tmp_path: Path) -> None:
    """A recipe's run directory is named; a run has its own."""
    (tmp_path / "an old run").mkdir()
    (tmp_path / "an old run" / "recipe.json").write_text("{}")
    given = "an old run" if what == "run" else "tiny.py"
    settings = {} if what == "no settings" else {"train.steps": 3, "storage.nvme": '["/mnt/a", "/mnt/b c"]'}
    launch = LAUNCHES[name](given, tmp_path / "out", settings)
    environment = scheduler(tmp_path, torchrun=NOTE_COMMAND) | launch.environment
    subprocess.run(launch.command, cwd=tmp_path, env=environment, check=True, timeout=PATIENCE_S)
    threads, *words = (tmp_path / "command").read_text().splitlines()
    assert int(threads) >= 1
    options, command = words[: words.index("-m")], words[words.index("-m") :]
    pairs = dict(zip(options[::2], options[1::2], strict=True))
    endpoint = re.fullmatch(r"(localhost|127\.0\.0\.1):\d+", pairs.pop("--rdzv-endpoint"))
    assert endpoint is not None
    assert pairs.pop("--rdzv-id")
    assert pairs == {"--nnodes": "1", "--nproc-per-node": "2", "--rdzv-backend": "c10d", "--max-restarts": "3"}
    where = [] if what == "run" else ["--run-dir", str(tmp_path / "out")]
    fields = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    assert command == ["-m", "penstock", "cluster", given, *where, *fields]


def batch(folder: Path, torchrun: str) -> subprocess.Popen[str]:
    """The Slurm job around a torchrun that does this."""
    launch = slurm("tiny.py", folder / "out", {})
    return subprocess.Popen(
        launch.command,
        cwd=folder,
        env=scheduler(folder, torchrun=torchrun) | launch.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
    )


def test_a_slurm_job_whose_time_is_over_is_queued_again(tmp_path: Path) -> None:
    job = batch(tmp_path, "trap 'exit 3' TERM\ntouch begun\nwhile :; do sleep 0.05; done")
    wait_until(lambda: (tmp_path / "begun").exists())
    job.send_signal(signal.SIGTERM)  # to the batch script alone, as --signal=B: does
    done(job, 3)
    assert (tmp_path / "notes").read_text() == "requeue 7\n"


@pytest.mark.parametrize("code", [0, 2])
def test_a_slurm_job_that_ends_by_itself_is_not(code: int, tmp_path: Path) -> None:
    done(batch(tmp_path, f"exit {code}"), code)
    assert not (tmp_path / "notes").exists()


# ---------------------------------------------------------------------- what it does


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a file's own command on the tiny recipe, by two ranks; nothing of it outlives the test."""
    begun: list[subprocess.Popen[str]] = []
    (tmp_path / "tiny.py").write_text(TINY)

    def start(name: str, **settings: Any) -> subprocess.Popen[str]:
        launch = LAUNCHES[name]("tiny.py", tmp_path / "out", {"train.device": "cpu", **settings})
        process = subprocess.Popen(
            launch.command,
            cwd=tmp_path,
            env=scheduler(tmp_path) | launch.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=default_signals,
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        if process.poll() is None:
            kill(process)


def below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that a command has started, those that they have started too; none of one that has ended."""
    if process.poll() is not None:
        return []
    return psutil.Process(process.pid).children(recursive=True)


def kill(process: subprocess.Popen[str]) -> None:
    """As a node that is lost: nothing of it says a word."""
    for one in below(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.kill()
    process.communicate()


def ended(process: subprocess.Popen[str]) -> str:
    """What a command that succeeds has said."""
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said[-4000:]
    return said


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "out" / "dcp" / f"step-{step:06d}"


def is_whole(folder: Path, step: int) -> bool:
    return (checkpoint(folder, step) / ".metadata").exists()


@pytest.mark.long
@pytest.mark.parametrize("name", LAUNCHES)
def test_two_ranks_train(name: str, tmp_path: Path, start: Start) -> None:
    said = ended(start(name))
    assert "OMP_NUM_THREADS" not in said, "torchrun was told how many threads"
    assert is_whole(tmp_path, 2)


STEPS = 20
MORE = {"train.steps": STEPS, "storage.keep_last": STEPS}


@pytest.mark.long
def test_a_rank_that_is_killed_starts_again_with_the_others(tmp_path: Path, start: Start) -> None:
    """torchrun starts all ranks once more, from the last checkpoint."""
    process = start("cluster.sbatch", **MORE)
    wait_until(lambda: is_whole(tmp_path, 2))
    ranks = [one for one in below(process) if "LOCAL_RANK" in one.environ()]
    ranks[-1].kill()
    written = (checkpoint(tmp_path, 1) / ".metadata").stat().st_mtime_ns
    assert not is_whole(tmp_path, STEPS)
    ended(process)
    assert is_whole(tmp_path, STEPS)
    assert (checkpoint(tmp_path, 1) / ".metadata").stat().st_mtime_ns == written


@pytest.mark.long
def test_a_job_whose_time_is_over_writes_a_checkpoint(tmp_path: Path, start: Start) -> None:
    process = start("cluster.sbatch", **{"train.steps": 10_000, "storage.checkpoint_every": 10_000})
    wait_until(lambda: (tmp_path / "out" / "metrics.jsonl").exists())
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0, said[-4000:]
    (stopped,) = (tmp_path / "out" / "dcp").iterdir()
    assert re.fullmatch(r"step-\d{6}", stopped.name)
    assert (tmp_path / "notes").read_text() == "requeue 7\n"


@pytest.mark.long
def test_the_same_command_goes_on_after_a_node_is_lost(tmp_path: Path, start: Start) -> None:
    """As Slurm starts a job once more: what was checkpointed is not trained again."""
    process = start("cluster.sbatch", **MORE)
    wait_until(lambda: is_whole(tmp_path, 2))
    kill(process)
    assert not is_whole(tmp_path, STEPS)
    written = (checkpoint(tmp_path, 1) / ".metadata").stat().st_mtime_ns
    ended(start("cluster.sbatch", **MORE))
    assert is_whole(tmp_path, STEPS)
    assert (checkpoint(tmp_path, 1) / ".metadata").stat().st_mtime_ns == written
