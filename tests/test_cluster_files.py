"""docker/cluster/: launch files for several nodes, linted, held against their schedulers' fields, their commands run.

No scheduler is here: a file's command is started as its scheduler would start it on one node, with two ranks.
docs/cluster.md: its plan is the plan's, and what it says of checkpoints and files is so.
"""

import contextlib
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli_process import PATIENCE_S, REPOSITORY, default_signals, done, wait_until
from cluster_files import (
    FILES,
    FOLDER,
    LAUNCHES,
    RANKS,
    Launch,
    contents,
    job_container,
    named,
    scheduler,
    slurm,
    snippets,
    trainer,
)
from recipe_texts import recipe_text
from safetensors.torch import load_file

from penstock.app.cli.main import main
from penstock.app.recipes.recipe import apply_overrides, load_recipe
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
    model={"vocab_size": 200},
    data={"source": "random", "path": None},
    train={"steps": 2, "global_batch_size": RANKS, "compute_dtype": "float32"},
    storage={"checkpoint_every": 1},
)
NOTE_COMMAND = 'printf "%s\\n" "$OMP_NUM_THREADS" "$@" > command'
"""A torchrun that writes down how it was called."""


def test_files_are_clean(tmp_path: Path) -> None:
    assert [file.name for file in FILES] == sorted(LAUNCHES)
    yaml = [file for file in FILES if file.suffix == ".yaml"]
    scripts = list((REPOSITORY / "docker").rglob("*.sbatch"))
    assert (len(yaml), len(scripts)) == (3, 2)
    for place, text in snippets().items():
        scripts.append(tmp_path / place)
        scripts[-1].write_text(f"#!/bin/bash\n{text}")
    for command in (["yamllint", "--strict", "-d", YAMLLINT, *yaml], ["shellcheck", *scripts]):
        found = shutil.which(command[0], path=str(Path(sys.executable).parent)) or shutil.which(command[0])
        assert found is not None, f"{command[0]} is in the dev extra"
        lint = subprocess.run([found, *command[1:]], capture_output=True, text=True)
        assert lint.returncode == 0, lint.stdout


NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""Of a Kubernetes object whose pods have it as their host's name."""
JOB = "spec.replicatedJobs.0"
PATCH = "spec.runtimePatches.0"
PATCHED = f"{PATCH}.trainingRuntimeSpec.template.spec.replicatedJobs.0"
POD = "template.spec.template.spec"
FIELDS = {
    # jobset.x-k8s.io/v1alpha2 (github.com/kubernetes-sigs/jobset, api/jobset/v1alpha2/jobset_types.go) and Kubernetes.
    "jobset.yaml": {
        "": "apiVersion kind metadata spec",
        "spec": "replicatedJobs failurePolicy",
        "spec.failurePolicy": "maxRestarts",
        JOB: "name template replicas",
        f"{JOB}.template": "spec",
        f"{JOB}.template.spec": "template parallelism completions backoffLimit",
        f"{JOB}.{POD}": "containers restartPolicy volumes securityContext",
        f"{JOB}.{POD}.containers.0": "name image command env envFrom ports resources volumeMounts",
    },
    # trainer.kubeflow.org/v1alpha1 (github.com/kubeflow/trainer, manifests/base/crds, 2.3).
    "trainjob.yaml": {
        "": "apiVersion kind metadata spec",
        "spec": "runtimeRef trainer runtimePatches",
        "spec.runtimeRef": "name apiGroup kind",
        "spec.trainer": "image command env numNodes numProcPerNode resourcesPerNode",
        "spec.trainer.resourcesPerNode": "limits",
        PATCH: "manager trainingRuntimeSpec",
        PATCHED: "name template",
        f"{PATCHED}.{POD}.containers.0": "name volumeMounts",  # of the node's container no more may be patched
    },
    # docs.skypilot.co: YAML reference, volumes.
    "sky.yaml": {
        "": "name num_nodes resources envs run workdir setup volumes",
        "resources": "accelerators disk_size network_tier job_recovery",
        "resources.job_recovery": "max_restarts_on_errors",
    },
}
"""File -> place in it -> the fields there, all of which the system knows."""


def known(found: dict[str, Any], fields: str) -> None:
    """Fails for fields that are missing, and for unknown ones; those with a question mark may be missing."""
    names = fields.split()
    assert {name for name in names if name[-1] != "?"} <= found.keys() <= {name.rstrip("?") for name in names}


def at(found: Any, place: str) -> Any:
    for part in filter(None, place.split(".")):
        found = found[int(part) if part.isdigit() else part]
    return found


def checked(name: str) -> dict[str, Any]:
    """A YAML file, whose fields are those of its system."""
    for place, fields in FIELDS[name].items():
        known(at(contents(name), place), fields)
    return dict(contents(name))


def require_container(container: dict[str, Any], pod: dict[str, Any], variables: list[dict[str, Any]]) -> None:
    assert sorted(mount["name"] for mount in container["volumeMounts"]) == sorted(v["name"] for v in pod["volumes"])
    for volume in pod["volumes"]:
        known(volume, "name persistentVolumeClaim? emptyDir?")
        assert len(volume) == 2
    for mount in container["volumeMounts"]:
        known(mount, "name mountPath")
        assert mount["mountPath"].startswith("/")
    for entry in variables:
        known(entry, "name value? valueFrom?")
        assert ("value" in entry) != ("valueFrom" in entry)
        assert re.fullmatch(r"[A-Z_]+", entry["name"])
        assert isinstance(entry.get("value", ""), str), "a number has to be quoted"
    assert "SECRET" not in "".join(named(variables)), "secrets are the cluster's"


def test_a_jobset() -> None:
    found = checked("jobset.yaml")
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    job, container = at(found, JOB), job_container()
    spec, pod = job["template"]["spec"], at(job, POD)
    assert spec["backoffLimit"] == 0, "the JobSet restarts, not its job"
    assert pod["restartPolicy"] == "Never"
    require_container(container, pod, container["env"])
    values = named(container["env"])
    assert int(values["NODES"]) == spec["parallelism"] == spec["completions"] == NODES
    assert values["GPUS"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    name = found["metadata"]["name"]
    assert NAME.fullmatch(name)
    assert NAME.fullmatch(job["name"])
    assert values["HOST"] == f"{name}-{job['name']}-0-0.{name}"
    assert job.get("replicas", 1) == 1


def test_a_trainjob() -> None:
    found, wanted = checked("trainjob.yaml"), trainer()
    assert (found["apiVersion"], found["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert NAME.fullmatch(found["metadata"]["name"])
    assert found["spec"]["runtimeRef"]["name"] == "torch-distributed"
    assert wanted["numNodes"] == NODES
    assert wanted["numProcPerNode"] == wanted["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert not [name for name in named(wanted["env"]) if name.startswith("PET_")], "these are Trainer's to set"
    assert len(found["spec"]["runtimePatches"]) == 1
    job = at(found, PATCHED)
    pod = at(job, POD)
    (container,) = pod["containers"]
    assert job["name"] == container["name"] == "node"
    require_container(container, pod, wanted["env"])


def test_a_skypilot_task() -> None:
    """Its variables too are those of docs.skypilot.co."""
    found = checked("sky.yaml")
    assert found["num_nodes"] == NODES
    assert re.fullmatch(r"[A-Z0-9]+:\d+", found["resources"]["accelerators"])
    for path, volume in found["volumes"].items():
        assert path.startswith("/")
        assert NAME.fullmatch(volume)
    used = set(re.findall(r"SKYPILOT_(\w+)", found["run"] + found["setup"]))
    needed = {"NODE_IPS", "NUM_NODES", "NUM_GPUS_PER_NODE"}
    assert needed <= used <= needed | {"NODE_RANK", "TASK_ID", "CLUSTER_INFO", "USER"}
    assert (REPOSITORY / "constraints.txt").exists(), "setup installs by it, in the workdir"


def test_a_slurm_job() -> None:
    text = (FOLDER / "cluster.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert len(asked) == text.count("#SBATCH")
    needed = "job-name nodes ntasks-per-node gpus-per-node cpus-per-task time signal requeue open-mode"
    known(asked, f"{needed} mem exclusive")
    wanted = {"nodes": str(NODES), "ntasks-per-node": "1", "signal": "B:TERM@300", "open-mode": "append"}
    assert asked.items() >= wanted.items()  # torchrun starts the ranks


def test_they_train_a_recipe_that_these_nodes_can() -> None:
    """As the files stand: the recipe is there, its fields too, and its micro-batches divide by the GPUs."""
    for values in (contents("sky.yaml")["envs"], named(job_container()["env"]), named(trainer()["env"])):
        recipe = apply_overrides(load_recipe(Path(values["RECIPE"])), values["SETTINGS"].split())
        assert require_cluster(recipe, parse_cluster(f"{NODES}x8")) == 2, values


@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.parametrize("what", ["recipe", "run", "no settings"])
def test_the_command_line(name: str, what: str, tmp_path: Path) -> None:
    """A recipe's run directory is named; a run has its own."""
    (tmp_path / "an old run").mkdir()
    (tmp_path / "an old run" / "recipe.json").write_text("{}")
    given = "an old run" if what == "run" else "tiny.py"
    settings = {} if what == "no settings" else {"train.steps": 3, "storage.nvme": '["/mnt/a", "/mnt/b c"]'}
    done(begun(LAUNCHES[name](given, tmp_path / "out", settings), tmp_path, torchrun=NOTE_COMMAND))
    threads, *words = (tmp_path / "command").read_text().splitlines()
    assert int(threads) >= 1
    options, command = words[: words.index("-m")], words[words.index("-m") :]
    pairs = dict(zip(options[::2], options[1::2], strict=True))
    assert re.fullmatch(r"(localhost|127\.0\.0\.1):\d+", pairs.pop("--rdzv-endpoint"))
    assert pairs.pop("--rdzv-id")
    assert pairs == {"--nnodes": "1", "--nproc-per-node": "2", "--rdzv-backend": "c10d", "--max-restarts": "3"}
    where = [] if what == "run" else ["--run-dir", str(tmp_path / "out")]
    fields = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    assert command == ["-m", "penstock", "cluster", given, *where, *fields]


def begun(launch: Launch, folder: Path, **commands: str) -> subprocess.Popen[str]:
    """A file's command as its scheduler starts it in a folder."""
    environment = scheduler(folder, **commands) | launch.environment
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(launch.command, cwd=folder, env=environment, preexec_fn=default_signals, **pipes)


def test_a_slurm_job_is_queued_again_where_its_time_is_over(tmp_path: Path) -> None:
    """Around a torchrun that ends by itself, and one that ends when it is told."""
    launch = slurm("tiny.py", tmp_path / "out", {})
    for code in (0, 2):
        done(begun(launch, tmp_path, torchrun=f"exit {code}"), code)
        assert not (tmp_path / "notes").exists()
    job = begun(launch, tmp_path, torchrun="trap 'exit 3' TERM\ntouch begun\nwhile :; do sleep 0.05; done")
    wait_until(lambda: (tmp_path / "begun").exists())
    job.send_signal(signal.SIGTERM)  # to the batch script alone, as --signal=B: does
    done(job, 3)
    assert (tmp_path / "notes").read_text() == "requeue 7\n"


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a file's own command on the tiny recipe, by two ranks; nothing of it outlives the test."""
    processes: list[subprocess.Popen[str]] = []
    (tmp_path / "tiny.py").write_text(TINY)

    def start(name: str, **settings: Any) -> subprocess.Popen[str]:
        launch = LAUNCHES[name]("tiny.py", tmp_path / "out", {"train.device": "cpu", **settings})
        processes.append(begun(launch, tmp_path))
        return processes[-1]

    yield start
    for process in processes:
        if process.poll() is None:
            kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """As a node that is lost: nothing of it says a word."""
    for one in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.kill()
    process.communicate()


def checkpoint(folder: Path, step: int) -> Path:
    """A file that a whole checkpoint has."""
    return folder / "out" / "dcp" / f"step-{step:06d}" / ".metadata"


@pytest.mark.long
@pytest.mark.parametrize("name", LAUNCHES)
def test_two_ranks_train(name: str, tmp_path: Path, start: Start) -> None:
    said = done(start(name)).stdout
    assert "OMP_NUM_THREADS" not in said, "torchrun was told how many threads"
    assert checkpoint(tmp_path, 2).exists()


STEPS = 20
MORE = {"train.steps": STEPS, "storage.keep_last": STEPS}


@pytest.mark.long
@pytest.mark.parametrize("lost", ["a rank", "the node"])
def test_what_was_checkpointed_is_not_trained_again(lost: str, tmp_path: Path, start: Start) -> None:
    """torchrun starts all ranks once more where one is killed; the same command goes on after a node is lost."""
    process = start("cluster.sbatch", **MORE)
    wait_until(lambda: checkpoint(tmp_path, 2).exists())
    if lost == "a rank":
        below = psutil.Process(process.pid).children(recursive=True)
        [one for one in below if "LOCAL_RANK" in one.environ()][-1].kill()
    else:
        kill(process)
    written = checkpoint(tmp_path, 1).stat().st_mtime_ns
    assert not checkpoint(tmp_path, STEPS).exists()
    done(process if lost == "a rank" else start("cluster.sbatch", **MORE))
    assert checkpoint(tmp_path, STEPS).exists()
    assert checkpoint(tmp_path, 1).stat().st_mtime_ns == written


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


PAGE = (REPOSITORY / "docs" / "cluster.md").read_text()
BLOCKS = PAGE.split("```")[1::2]


def test_pages_lead_to_it_and_every_launch_file_is_on_it() -> None:
    table = PAGE.partition("## Launch files")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+\.\w+)` \|", table, re.M)) == [file.name for file in FILES]
    for name in ("guide.md", "guide/100b.md"):
        assert "cluster.md" in (REPOSITORY / "docs" / name).read_text(), "a page leads to it"
    assert "`OMP_NUM_THREADS`" in PAGE
    for file in FILES:
        assert "export OMP_NUM_THREADS=" in file.read_text(), file.name
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=" in (FOLDER / "cluster.sbatch").read_text()


@pytest.mark.long
def test_the_plan_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in BLOCKS if "$ penstock plan" in block]
    command, *printed = block.strip().splitlines()
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(REPOSITORY)
    assert main(command.split()[2:]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-len(printed) :] == printed


STAND_IN = """
from types import SimpleNamespace
import torch
from safetensors.torch import load_file

EXPORTED = load_file("hf/model.safetensors")


class Adapter:
    def __init__(self, config, assets):
        pass

    def to_hf(self, native):
        return {name.removeprefix("titan."): rows.clone() for name, rows in native.items()}

    def from_hf(self, weights):
        assert weights.keys() == EXPORTED.keys()
        return {f"titan.{name}": rows for name, rows in weights.items()}


class ModelWrapper:
    def __init__(self, model):
        pass

    def _get_state_dict(self):
        return {f"titan.{name}": torch.zeros_like(rows) for name, rows in EXPORTED.items()}


def model_registry(flavor):
    return SimpleNamespace(model=SimpleNamespace(build=lambda: None), state_dict_adapter=Adapter)
"""


def test_torchtitans_adapter_takes_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of the page on a stand-in with names of its own, as torchtitan has."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(TINY)
    for command in ("train tiny.py --run-dir run", "export run ours --format dcp", "export run hf"):
        assert main(command.split()) == 0
    (script,) = [block.removeprefix("python\n") for block in BLOCKS if "torchtitan" in block and "import" in block]
    (tmp_path / "script.py").write_text(script)
    for name in ("components/checkpointer.py", "models/llama3.py"):
        path = tmp_path / "torchtitan" / name
        path.parent.mkdir(parents=True)
        path.write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py", "ours", "theirs", "8B"])
    runpy.run_path("script.py")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    found = {f"titan.{name}": torch.zeros_like(rows) for name, rows in exported.items()}
    dcp.load(found, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert all(torch.equal(found[f"titan.{name}"], rows) for name, rows in exported.items())
