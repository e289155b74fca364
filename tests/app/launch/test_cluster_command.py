"""penstock cluster, export --format dcp and import-dcp: there and back, a rank that dies, and what is refused."""

import json
import os
import pickle
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny
import torch
import torch.distributed.checkpoint as dcp
from cli_process import PATIENCE_S, REAL, Cli, json_lines, refusal, steps, wait_until
from cluster_ranks import torchrun
from recipe_texts import recipe_text
from torch.distributed.checkpoint import FileSystemReader

from penstock.app.cli.main import main
from penstock.app.runs import control, log
from penstock.engine.cluster.layout import checksums_of
from penstock.engine.cluster.train import require_even
from penstock.storage.files import sealed
from penstock.storage.files.errors import UserError

RECIPE = recipe_text(
    model={"intermediate_size": 48, "vocab_size": 200},
    data={"source": "random", "path": None, "sequence_length": 32, "max_documents": 60},
    train={
        **{"steps": 20, "global_batch_size": 4, "compute_dtype": "float32", "lr": 5e-3, "lr_schedule": "constant"},
        **{"chunk_tokens": None, "activation_checkpointing": "auto", "kv_window": "auto"},
    },
    budgets={"gpu": "1GiB", "ram": "1GiB", "nvme": None},
    storage={"part_bytes": "16KiB", "checkpoint_every": 5},
)
CLUSTER = ("-m", "penstock", "cluster")
QLORA = ("--set", "adapter.method=lora", "--set", "model.frozen_format=nf4")
Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path, RECIPE, REAL)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in json_lines(run / "metrics.jsonl")]


def on_ranks(cli: Cli, *arguments: str, code: int = 0) -> str:
    """What `penstock cluster` prints on two ranks, of which torchrun ends with that exit code."""
    process = torchrun(*CLUSTER, *arguments, folder=cli.folder)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code, output
    return output


@pytest.mark.long
def test_a_run_goes_on_several_machines_and_comes_back(cli: Cli, capsys: Captured) -> None:
    """Seven steps on one machine, six on two ranks, the rest on one again: as if nothing had happened."""
    folder = cli.folder
    cli.run("train", "tiny.py", "--run-dir", "whole")
    cli.run("train", "tiny.py", "--run-dir", "run", "--set", "train.steps=7")
    output = on_ranks(cli, "run", "--set", "train.steps=13")
    assert "finished after step 13" in output
    assert steps(folder / "run") == list(range(1, 14))
    assert [path.name for path in sorted((folder / "run" / "dcp").iterdir())] == ["step-000010", "step-000013"]

    refused = refusal(capsys, "resume", str(folder / "run"), "--set", "train.steps=20")
    assert "step 13" in refused
    assert "import-dcp" in refused

    back, copy, again = (str(folder / name) for name in ("back", "copy", "again"))
    assert main(["import-dcp", str(folder / "run"), "--run-dir", back]) == 0
    assert "step 13; continue with: penstock resume" in capsys.readouterr().out
    assert steps(folder / "back") == list(range(1, 14))
    assert main(["resume", back, "--set", "train.steps=20"]) == 0
    assert losses(folder / "back") == pytest.approx(losses(folder / "whole"), abs=1e-4)

    # Straight through a checkpoint file, the state is the same to the bit.
    assert main(["export", back, copy, "--format", "dcp"]) == 0
    assert main(["import-dcp", copy, "--run-dir", again]) == 0
    assert master(folder / "again") == master(folder / "back")


def master(run: Path) -> dict[str, list[int]]:
    """The checksums of a run's committed state."""
    content = json.loads((run / "state" / "manifest.json").read_text())
    return {f"{array['buffer']}/{array['kind']}": array["crcs"] for array in content["arrays"]}


@pytest.mark.long
def test_a_rank_that_is_killed_costs_the_steps_since_the_last_checkpoint(cli: Cli) -> None:
    folder, longer = cli.folder, ("--set", "train.steps=60")
    cli.run("train", "tiny.py", "--run-dir", "whole", *longer)
    launch = ("--max-restarts", "2")
    process = torchrun(*CLUSTER, "tiny.py", "--run-dir", "run", *longer, folder=folder, launch=launch)
    wait_until((folder / "run" / "dcp" / "step-000015").exists)
    children = psutil.Process(process.pid).children(recursive=True)
    next(child for child in children if child.environ().get("RANK") == "1").send_signal(signal.SIGKILL)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    assert "continues from step" in output
    assert steps(folder / "run") == list(range(1, 61))
    assert losses(folder / "run") == pytest.approx(losses(folder / "whole"), abs=1e-4)


def test_a_stop_leaves_the_step_under_way(one_rank: Path, capsys: Captured) -> None:
    run = one_rank / "run"

    def stop() -> None:
        wait_until(lambda: (run / "metrics.jsonl").exists() and len(steps(run)) > 6)
        control.pause_or_stop(run, "stop")

    thread = threading.Thread(target=stop)
    thread.start()
    assert main(["cluster", "tiny.py", "--run-dir", "run", "--set", "train.steps=100000"]) == 0
    thread.join()
    last = steps(run)[-1]
    assert f"stopped after step {last:,}" in capsys.readouterr().out
    assert (run / "dcp" / f"step-{last:06}" / ".metadata").exists()


def test_it_begins_with_a_checkpoint(one_rank: Path, checkpoint: Path, capsys: Captured) -> None:
    """Whose run directory is not here; it goes on with no other model."""
    run = one_rank / "there"
    arguments = ["cluster", str(checkpoint), "--run-dir", "there", "--set"]
    assert main([*arguments, "train.steps=3"]) == 0
    assert main([*arguments, "train.steps=4"]) == 0, "the same again goes on where it is"
    wider = ("--set", "model.intermediate_size=64", "--set", "train.steps=5")
    error = refusal(capsys, "cluster", "tiny.py", "--run-dir", "there", *wider)
    assert "a model other than" in error
    assert "48 x 32" in error
    assert steps(run) == [3, 4]
    assert sorted(path.name for path in (run / "dcp").iterdir()) == ["step-000003", "step-000004"]


@pytest.fixture
def one_rank(monkeypatch: Patch, cli: Cli) -> Path:
    """This process is the only one that torchrun has started, in a folder that holds tiny.py."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.chdir(cli.folder)
    return cli.folder


@pytest.mark.long
def test_what_is_wrong_everywhere_is_said_once(cli: Cli) -> None:
    output = on_ranks(cli, "tiny.py", "--run-dir", "a", "--set", "train.global_batch_size=3", code=1)
    (error,) = (line for line in output.splitlines() if line.startswith("error: "))
    assert "which 2 ranks cannot share evenly" in error
    assert "Traceback" not in output.partition("failed (exitcode")[0]


def test_bad_input_is_one_line_and_torchrun_is_named(one_rank: Path, capsys: Captured, monkeypatch: Patch) -> None:
    run = ("tiny.py", "--run-dir", "a")
    for arguments, expected in (
        (("nowhere", "--run-dir", "a"), "nowhere"),
        (("tiny.py",), "--run-dir DIR"),
        ((*run, "--set", "data.source=text", "--set", "data.path=gone.txt"), "gone.txt"),
        ((*run, "--context-parallel", "2"), "1 ranks cannot be divided by it"),
        ((*run, *QLORA), "model.frozen_format: nf4 runs on one machine only; set it to compute in a new run"),
    ):
        assert expected in refusal(capsys, "cluster", *arguments)
    monkeypatch.delenv("RANK")
    assert "torchrun --nnodes" in refusal(capsys, "cluster", "tiny.py", "--run-dir", "run")
    assert not (one_rank / "run").exists()


def test_every_group_of_ranks_gets_as_much() -> None:
    recipe = tiny.recipe(train=tiny.training(global_batch_size=12, micro_batch_size=2))
    for ranks, spread in ((1, 1), (2, 1), (3, 1), (6, 1), (4, 2), (6, 2), (12, 2)):
        require_even(recipe, ranks, spread)
    for ranks, spread, expected in (
        (4, 1, "set train.micro_batch_size to 3"),
        (12, 1, "set train.micro_batch_size to 1"),
        (5, 1, "set train.global_batch_size to a multiple of 5"),
        (8, 2, "4 groups of 2 ranks"),
        (6, 4, "6 ranks cannot be divided by it"),
    ):
        with pytest.raises(UserError, match=expected):
            require_even(recipe, ranks, spread)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP checkpoint of a run of two steps, beside that run."""
    cli = Cli(tmp_path_factory.mktemp("dcp"), RECIPE, REAL)
    cli.run("train", "tiny.py", "--run-dir", "run", "--set", "train.steps=2")
    cli.run("export", "run", "out", "--format", "dcp")
    return cli.folder / "out"


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, ("touch owned",)


def _write_index(folder: Path, content: bytes) -> None:
    """Of somebody who makes the checksums match."""
    (folder / ".metadata").write_bytes(content)
    files = {name: list(found) for name, found in checksums_of(folder).items()}
    (folder / "checksums.json").write_text(json.dumps(sealed.seal({"files": files})))


def _other_folder(folder: Path) -> None:
    index = FileSystemReader(folder).read_metadata()
    for info in index.storage_data.values():
        info.relative_path = f"../{folder.name}/{info.relative_path}"
    _write_index(folder, pickle.dumps(index))


def _edited(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


LAST = "__0_1.distcp"
DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: _write_index(folder, pickle.dumps(Evil())), "not an index of a DCP checkpoint"),
    (lambda folder: _write_index(folder, b"\x80\x02K\x01r\xff\xff\xff\x7f."), "numbers more values than it has"),
    (_other_folder, "files elsewhere"),
    (lambda folder: (folder / "penstock.json").unlink(), "is missing"),
    (_edited("penstock.json", lambda text: text.replace(b'"step": 2', b'"step": 3')), "CRC"),
    (lambda folder: (folder / ".metadata").unlink(), "not a complete DCP checkpoint"),
    (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp"),
    (_edited(LAST, lambda text: text[:5000] + bytes([text[5000] ^ 1]) + text[5001:]), f"{LAST}: differs from what was"),
    (_edited(LAST, lambda text: text[:5000]), f"{LAST}: differs from what was written"),
]


def test_a_damaged_checkpoint_is_refused_and_nothing_is_left(
    checkpoint: Path, tmp_path: Path, capsys: Captured, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(log, "HEARTBEAT_S", 1e-4)  # nobody may write to the run's directory while it is removed
    for damage, expected in DAMAGES:
        copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
        damage(copy)
        assert expected in refusal(capsys, "import-dcp", "copy", "--run-dir", "run")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["copy"], expected
        shutil.rmtree(copy)

    # Any program reads it by torch: names of transformers, float32, AdamW's moments and steps as torchtitan calls them.
    held = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    name = "model.layers.1.self_attn.q_proj.weight"
    assert {name, f"optimizer.state.{name}.exp_avg", f"optimizer.state.{name}.exp_avg_sq"} <= held.keys()
    found = {key: torch.zeros(32, 32) for key in (name, f"optimizer.state.{name}.exp_avg")}
    found[f"optimizer.state.{name}.step"] = torch.zeros(())
    dcp.load(found, checkpoint_id=checkpoint, no_dist=True)
    assert found[name].abs().sum() > 0
    assert found[f"optimizer.state.{name}.exp_avg"].abs().sum() > 0
    assert found[f"optimizer.state.{name}.step"] == 2

    # Options of the other format are refused, and a folder that holds something.
    run = str(checkpoint.parent / "run")
    for option in (("--dtype", "bf16"), ("--merged",), ("--push", "me/it")):
        assert "leave out" in refusal(capsys, "export", run, "out", "--format", "dcp", *option)
    assert "not empty" in refusal(capsys, "export", run, run, "--format", "dcp")
