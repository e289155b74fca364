"""The bookkeeping of the benchmarks of a step and of storage, whose figures come from running them."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from bad_model_files import CONFIG
from cli_process import PATIENCE_S, started, wait_until
from transformers import AutoConfig, AutoModelForCausalLM

import penstock.app.console.working
from penstock.app.bench import process, storage
from penstock.app.bench import step as bench
from penstock.app.bench.kernels import step_kernels
from penstock.app.bench.plain import PlainBatch, compiled_steps, plain_steps
from penstock.app.bench.raw_io import RawFiles, Timed, move_files
from penstock.engine.config import BudgetConfig, TrainConfig, parse_bytes
from penstock.engine.hf.config import model_config
from penstock.engine.model.anatomy import model_spec
from penstock.storage.files.errors import UserError
from penstock.storage.generations.store import NvmeStore
from penstock.storage.tier.arena import HostArena
from penstock.storage.tier.chunk import ChunkFormat

CPU = torch.device("cpu")
STEPS_S = {"plain": 4.0, "eager": 3.5, "compiled": 3.0, "ram": 2.5, "ram_plain": 3.0, "nvme": 5.0, "kernels": 1.0}
PEAKS = {"plain": 1000, "eager": 2000, "compiled": 900, "ram": 800, "ram_plain": 950, "nvme": 400, "kernels": 1}


@pytest.fixture
def outcomes(monkeypatch):
    """Workers that report step times and peaks without running anything; returns what they were given, in order."""
    order = []

    def run_case(case, steps, scratch, batch, memory_bytes):
        assert Path(scratch).is_dir()
        order.append((case, batch, memory_bytes))
        turn = sum(name == case for name, *_ in order)
        times = [99.0] * bench.WARMUP_STEPS + [STEPS_S[case] + turn] * steps
        outcome = {"dtype": "float32", "step_times_s": times, "peak_rss_bytes": PEAKS[case] + turn}
        return outcome | ({"parts_s": [{"adamw": seconds} for seconds in times]} if case == "kernels" else {})

    monkeypatch.setattr(bench, "_run_case", run_case)
    monkeypatch.setattr(bench, "_compiles", lambda: True)
    return order


def test_ratios_are_medians_without_warm_up_and_highest_peaks(tmp_path, outcomes, monkeypatch, capsys):
    """Every measurement is said without a terminal. Penstock is given the memory that plain PyTorch took, the least of
    all rounds so far; on NVMe half of it."""
    for name, value in {"FIRST_S": 0.0, "EVERY_S": 0.0, "EVERY_SHARE": 0.0, "_TICK_S": 1e6}.items():
        monkeypatch.setattr(penstock.app.console.working, name, value)
    figures = bench.bench_step(json=True, rounds=3, steps=2, folder=tmp_path, batch=(1, 64))
    assert [case for case, *_ in outcomes] == list(STEPS_S) * 3
    given = {case: memory for case, batch, memory in outcomes if batch == (1, 64)}
    assert given == dict.fromkeys(STEPS_S) | {"ram": 901, "ram_plain": 1001, "nvme": 450}
    printed = capsys.readouterr()
    said = [line for line in printed.err.splitlines() if line.startswith("measurement")]
    words = list(bench.WORDS.values()) * 3
    assert said == [f"measurement {number} of 21: {word}" for number, word in enumerate(words, start=1)]
    assert json.loads(printed.out) == figures
    assert figures["plain_step_s"] == 6.0
    assert figures["plain_step_range_s"] == [5.0, 7.0]
    assert figures["best_plain"] == "compiled"
    assert figures["kernels_parts_s"] == {"adamw": 3.0}
    expected = {"ram_ratio": 4.5 / 6, "ram_plain_ratio": 5 / 6, "nvme_ratio": 7 / 6, "best_plain_ratio": 4.5 / 5}
    expected |= {"nvme_best_plain_ratio": 7 / 5, "kernels_ratio": 4.5 / 3, "ram_rss_ratio": 803 / 903}
    expected |= {"nvme_rss_ratio": 403 / 903, "ram_plain_rss_ratio": 953 / 1003}
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
    assert list(tmp_path.iterdir()) == []


def test_the_table_states_every_case_that_runs(tmp_path, outcomes, monkeypatch, capsys):
    bench.bench_step(rounds=1, steps=1, folder=tmp_path)
    title, _, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("2 x 512 tokens, float32")
    assert [row[:58].strip() for row in rows] == list(bench.WORDS.values())
    assert rows[3].split()[-5:] == ["3.50", "0.88", "1.75", "0", "0.89"]
    assert rows[-1].split()[-3:] == ["2.00", "0.50", "1.00"]
    monkeypatch.setattr(bench, "_compiles", lambda: False)
    figures = bench.bench_step(rounds=1, steps=1, folder=tmp_path)
    assert figures["best_plain"] == "eager"
    assert "compiled_step_s" not in figures
    assert bench.WORDS["compiled"] not in capsys.readouterr().out


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_budgets_add_up_to_the_memory_given(dtype):
    memory = 4 << 30
    for case in ("ram", "nvme"):
        found = bench.budgets(case, memory, dtype, 1024)
        sizes = [parse_bytes(size, "budgets") for size in (found.gpu, found.ram)]
        assert sum(sizes) == pytest.approx(memory - bench.PROCESS_BYTES, abs=2 * bench.MIB)
        assert sizes[0] >= bench.GPU_BYTES[dtype]
    of_graphs = [parse_bytes(bench.budgets("ram", memory, dtype, tokens).gpu, "budgets") for tokens in (1024, 4096)]
    assert of_graphs[1] - of_graphs[0] == pytest.approx(3 * (of_graphs[0] - bench.GPU_BYTES[dtype]), abs=4 * bench.MIB)


def test_batches():
    """Others that are refused are in the catalogue of bad inputs."""
    assert [bench.parse_batch(text) for text in ("2x512", "1x4096", "8x512")] == [(2, 512), (1, 4096), (8, 512)]
    for text in ("", "x512", "-1x512", "٢x512", "2X512", "9" * 40):
        with pytest.raises(UserError, match="write ROWSxTOKENS, as in 2x512"):
            bench.parse_batch(text)


def test_the_kernels_alone_are_of_every_kind():
    recipe = bench._recipe(1, (2, 64), BudgetConfig())
    small = {"num_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 1}
    recipe = replace(recipe, model=replace(recipe.model, **small, head_dim=16, vocab_size=96))
    parts = step_kernels(model_spec(model_config(recipe, None), recipe), 2, 64, CPU, recipe.train, compiled=False)
    assert set(parts) == {"layer_products", "head_products", "attention_forward", "attention_backward", "adamw"}
    assert min(parts.values()) > 0


def small_model():
    """Its config and weights, and micro-batches of two rows and of one."""
    config = AutoConfig.for_model(**CONFIG | {"vocab_size": 50})
    torch.manual_seed(0)
    batches = [PlainBatch(torch.randint(0, 50, (rows, 24))) for rows in (2, 1)]
    model = AutoModelForCausalLM.from_config(config)
    return config, {name: param.detach().clone() for name, param in model.named_parameters()}, batches


def test_plain_pytorch_learns_the_same_in_float32_and_bfloat16():
    """In float32 the weights are their own master weights."""
    config, weights, batches = small_model()
    found = {
        dtype: list(plain_steps(config, [batches] * 5, TrainConfig(lr=1e-2, compute_dtype=dtype), CPU, weights))
        for dtype in ("float32", "bfloat16")
    }
    losses = [loss for loss, *_ in found["float32"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.2
    for (loss, norm, _), (rounded_loss, rounded_norm, _) in zip(*found.values(), strict=True):
        assert loss == pytest.approx(rounded_loss, rel=0.01)
        assert norm == pytest.approx(rounded_norm, rel=0.1)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_plain_pytorch_learns_what_plain_pytorch_does(dtype, compiled, monkeypatch):
    """Of one micro-batch and of two; in bfloat16 its gradients are not rounded once more. As it is, and compiled."""
    if not compiled:
        monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    config, weights, (batch, half) = small_model()
    train = TrainConfig(lr=1e-2, weight_decay=0.1, clip_norm=1.0, compute_dtype=dtype)
    loss_error, norm_error = {"float32": (1e-4, 1e-4), "bfloat16": (0.01, 0.1)}[dtype]
    for step in ([batch], [batch, half]):
        ways = [steps(config, [step] * 3, train, CPU, weights) for steps in (plain_steps, compiled_steps)]
        for (loss, norm, _), (other_loss, other_norm, _) in zip(*ways, strict=True):
            assert other_loss == pytest.approx(loss, rel=loss_error)
            assert other_norm == pytest.approx(norm, rel=norm_error)


def test_a_case_that_fails_shows_its_error(tmp_path, monkeypatch):
    monkeypatch.setattr(process.sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="bench case plain: exit 1"):
        bench.bench_step(rounds=1, steps=1, folder=tmp_path)


CHUNK = 1 << 20
SIZE = 8 * CHUNK
Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Three."""
    for number in range(3):
        (tmp_path / f"drive{number}").mkdir()
    return sorted(tmp_path.iterdir())


def test_one_drive(folders: list[Path], capsys: Captured) -> None:
    folder = folders[0]
    figures = storage.bench_storage([folder], json=True, size_bytes=SIZE, part_bytes=CHUNK, rounds=2)
    assert json.loads(capsys.readouterr().out) == figures
    (case,) = figures["cases"]
    assert case["moved_bytes"] == SIZE
    # Two generations of eight chunk files, each padded by one block.
    assert case["file_bytes_on_drive"] == {str(folder): 2 * 8 * (CHUNK + 4096)}
    expected = {"raw_write", "raw_read", "store_write", "direct_read"}
    assert expected <= set(case["measured"])
    for row in case["measured"].values():
        assert len(row["gbps_rounds"]) == 2
        assert min(row["gbps_rounds"]) <= row["gbps"] <= max(row["gbps_rounds"])
        assert row["cpu_s_per_gb"] >= 0
    assert figures["read_ratio"] == case["ratios"]["direct_read"] > 0
    assert figures["write_ratio"] == case["ratios"]["store_write"] > 0
    assert figures["write_ratio_raw_synced"] > 0
    if not torch.cuda.is_available():
        assert figures["skipped_readers"] == {"kvikio": "no CUDA device"}
    assert list(folder.iterdir()) == []


def test_several_drives_share_evenly(folders: list[Path], capsys: Captured) -> None:
    figures = storage.bench_storage(folders, size_bytes=15 * CHUNK, part_bytes=CHUNK, rounds=1)
    *single, together = figures["cases"]
    assert [case["drives"] for case in single] == [[str(folder)] for folder in folders]
    assert together["name"] == "all drives"
    assert together["moved_bytes"] == 15 * CHUNK
    assert set(together["file_bytes_on_drive"].values()) == {2 * 5 * (CHUNK + 4096)}
    assert {"raw_write", "raw_read", "store_write", "direct_read"} <= set(figures["sum_of_drives"])
    out, err = capsys.readouterr()
    assert out.startswith(f"all drives: reads {figures['read_ratio']:.2f} of raw direct I/O (")
    assert out.count("\n") == 1
    assert "note: several of the folders lie on one drive" in err
    assert all(list(folder.iterdir()) == [] for folder in folders)


def test_ratios_are_medians_of_pairs() -> None:
    def runs(*speeds: float) -> list[Timed]:
        return [Timed(10**9, 1 / speed, 0.0) for speed in speeds]

    measured = {"raw_write": runs(1, 2, 4), "raw_write_synced": runs(1, 1, 1), "raw_read": runs(2, 2, 2)}
    measured |= {"store_write": runs(1, 1, 3), "direct_read": runs(1, 2, 4)}
    ratios = storage._ratios(measured, ["direct"])
    assert ratios == pytest.approx({"store_write": 0.75, "store_write_raw_synced": 1.0, "direct_read": 1.0})


def test_folders_and_sizes_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "sub").mkdir()
    for folders, message in (
        ([], "at least one folder"),
        ([tmp_path / "missing"], "missing: no such folder"),
        ([tmp_path / "file"], "file: no such folder"),
        ([tmp_path, tmp_path / "sub" / ".."], "given twice"),
    ):
        with pytest.raises(UserError, match=message):
            storage.bench_storage(folders, size_bytes=SIZE, part_bytes=CHUNK)
    with pytest.raises(UserError, match=r"chunk size 1,000: give a multiple of 8,192 bytes"):
        storage.bench_storage([tmp_path], part_bytes=1000)
    with pytest.raises(UserError, match="rounds 0"):
        storage.bench_storage([tmp_path], rounds=0)


def test_little_room_moves_less_and_too_little_nothing(
    folders: list[Path], monkeypatch: Patch, capsys: Captured
) -> None:
    usage = shutil.disk_usage(folders[0])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10 * CHUNK))
    with pytest.raises(UserError, match=r"needs 13,841,203 bytes .* and 10,485,760 are free"):
        storage.bench_storage(folders[:1], size_bytes=SIZE, part_bytes=CHUNK)
    assert list(folders[0].iterdir()) == []
    # Two folders on one disk: 6 chunks each.
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=40 * CHUNK))
    figures = storage.bench_storage(folders[:2], size_bytes=64 * CHUNK, part_bytes=CHUNK, rounds=1)
    assert [case["moved_bytes"] for case in figures["cases"]] == [6 * CHUNK, 6 * CHUNK, 12 * CHUNK]
    assert "little space is free, so 12.0 MiB are moved per measurement" in capsys.readouterr().err


def test_nothing_is_left_after_a_failure(folders: list[Path], monkeypatch: Patch) -> None:
    monkeypatch.setattr(NvmeStore, "commit", Mock(side_effect=UserError("the disk failed")))
    with pytest.raises(UserError, match="the disk failed"):
        storage.bench_storage(folders[:1], size_bytes=SIZE, part_bytes=CHUNK)
    assert list(folders[0].iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_after_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    script = (
        "from pathlib import Path; from penstock.app.bench.storage import bench_storage\n"
        f"bench_storage([Path({str(tmp_path)!r})], size_bytes={SIZE}, part_bytes={CHUNK}, rounds=10**6)"
    )
    process = started(tmp_path, sys.executable, "-c", script, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: any(tmp_path.glob("*/store/*/*/*/c.7.0")))
        process.send_signal(number)
        assert process.wait(PATIENCE_S) != 0
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[tuple[RawFiles, list[torch.Tensor]]]:
    """Files, and slots that hold their numbers, of which the first one was written."""
    arena = HostArena(32 * CHUNK, budget_bytes=32 * CHUNK)
    files = RawFiles(tmp_path / "raw", 5, ChunkFormat(CHUNK).file_bytes)
    slots = [arena.slot(str(index), files.file_bytes).fill_(index + 1) for index in range(storage.LOOP_THREADS)]
    files.create(slots[0])
    yield files, slots
    arena.close()


def test_own_loop_moves_every_byte(raw: tuple[RawFiles, list[torch.Tensor]]) -> None:
    files, slots = raw
    slots[0].fill_(99)
    written = move_files([files], slots, write=True)
    assert written.num_bytes == 5 * (CHUNK + 4096)
    assert all(path.stat().st_size == files.file_bytes for path in files.paths())
    assert files.paths()[0].read_bytes() == bytes([99]) * files.file_bytes
    for path in files.paths():
        path.write_bytes(bytes([7]) * files.file_bytes)
    move_files([files], slots, write=False)
    assert set(slots[0].tolist()) == {7}
