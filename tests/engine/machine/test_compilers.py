"""Machines that lack a part of what torch.compile needs, made of folders of small scripts."""

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.engine.machine import compilers
from penstock.engine.machine.compilers import Verdict, layers_compile, optimizer_compiles

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PATH = os.environ["PATH"]
HAS_HEADERS = Path(sysconfig.get_path("include"), "Python.h").exists()
STARTS = '[ "$1" = --version ] && exit 0;'
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None or shutil.which("g++") is None, reason="needs gcc and g++")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing remembered, no compiler named, Inductor's settings not loaded, Triton there."""
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    real = importlib.util.find_spec
    there = {"triton": object()}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: there.get(name) or real(name, *rest))
    _forget()
    yield
    _forget()


def _forget() -> None:
    compilers.optimizer_compiles.cache_clear()
    compilers._through_triton.cache_clear()


def _path_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> Path:
    """PATH is `folder`, with these shell scripts for commands."""
    folder.mkdir(exist_ok=True)
    for name, text in scripts.items():
        command = folder / name
        command.write_text(f"#!/bin/sh\n{text}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return folder


@needs_gcc
def test_this_machine_and_without_its_cpp_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gcc and without g++, layers are compiled and the optimizer is not: one answer for both would be wrong."""
    assert layers_compile(CPU) == optimizer_compiles()
    here = layers_compile(CUDA)
    assert here.ok == optimizer_compiles().ok == HAS_HEADERS
    _forget()
    _path_of(tmp_path / "bin", monkeypatch, gcc=f'PATH="{PATH}" exec {shutil.which("gcc")} "$@"')
    assert layers_compile(CUDA) == here
    assert not optimizer_compiles().ok


def test_without_compilers_each_names_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _path_of(tmp_path / "bin", monkeypatch)
    no_cpp = Verdict(False, "no C++ compiler: g++ could not be started (set CXX to use another)")
    assert optimizer_compiles() == layers_compile(CPU) == no_cpp
    reason = "no C compiler, which Triton needs: neither gcc nor clang is on PATH (set CC to use another)"
    assert layers_compile(CUDA) == Verdict(False, reason)
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", lambda **_: pytest.fail("a thread was made"))
        compilers.compile_headers()
    _forget()
    monkeypatch.setenv("CC", "/nowhere/gcc")  # named wrongly
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert layers_compile(CUDA).reason == "the compiler /nowhere/gcc cannot be started (No such file or directory)"
    assert "/nowhere/g++ could not be started" in optimizer_compiles().reason
    _forget()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    assert layers_compile(CUDA) == Verdict(False, "triton is not installed")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo 'cc1: error: cannot execute cc1plus' >&2; exit 1", "cc1: error: cannot execute cc1plus"),
        ("echo 'In file a:' >&2; echo 'b:1: fatal ERROR: no space' >&2; exit 1", "b:1: fatal ERROR: no space"),
        ("echo 'error: compilation of common code' >&2; exit 1", "error: compilation of common code"),
        ("exit 3", "it exited with 3 and no message"),
        ("exit 0", "it exited with 0 and no message"),  # and left no library behind
    ],
)
def test_a_compiler_that_fails_says_why(tmp_path: Path, monkeypatch: Any, text: str, reason: str) -> None:
    script = f"{STARTS} {text}"
    folder = _path_of(tmp_path / "bin", monkeypatch, gcc=script, **{"g++": script})
    assert optimizer_compiles() == Verdict(False, f"g++ cannot compile a few lines: {reason}")
    assert layers_compile(CUDA) == Verdict(False, f"{folder / 'gcc'} cannot compile a few lines: {reason}")


@needs_gcc
def test_without_pythons_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, moved = sysconfig.get_path, {"include": str(tmp_path)}
    monkeypatch.setattr(sysconfig, "get_path", lambda name, *rest: moved.get(name) or real(name, *rest))
    for name in ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    for verdict in (optimizer_compiles(), layers_compile(CUDA)):
        assert not verdict.ok
        assert verdict.reason.startswith("Python.h is missing: install Python's headers (package python3.")


@needs_gcc
def test_compilers_named_by_the_environment_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not HAS_HEADERS:
        pytest.skip("needs Python.h")
    asked = tmp_path / "queried"
    real = {"cc": shutil.which("gcc"), "cxx": shutil.which("g++")}
    scripts = {f"my{name}": f'echo {name} >> {asked}; PATH="{PATH}" exec {path} "$@"' for name, path in real.items()}
    folder = _path_of(tmp_path / "named", monkeypatch, **scripts)
    monkeypatch.setenv("CC", str(folder / "mycc"))
    monkeypatch.setenv("CXX", "mycxx")
    for _ in range(2):  # the second time nothing is asked
        assert (optimizer_compiles().ok, layers_compile(CUDA).ok) == (True, True)
        assert asked.read_text().split() == ["cxx", "cxx", "cc"]


@pytest.mark.parametrize("choice", [(None, "theirs"), "theirs"])
def test_inductors_own_choice_is_honoured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: Any) -> None:
    no_openmp = f"{STARTS} echo 'probe.cpp:5:2: error: omp.h is not found' >&2; exit 1"  # as clang without libomp
    _path_of(tmp_path / "bin", monkeypatch, theirs=f"{STARTS} echo 'error: mine' >&2; exit 1", clang=no_openmp)
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "clang")
        assert optimizer_compiles() == Verdict(False, "clang has no OpenMP (package libomp-dev for clang)")
    _forget()
    loaded = SimpleNamespace(cpp=SimpleNamespace(cxx=choice))
    monkeypatch.setitem(sys.modules, "torch._inductor.config", loaded)
    assert optimizer_compiles() == Verdict(False, "theirs cannot compile a few lines: error: mine")


@needs_gcc
def test_compiled_files_that_are_cut_off_are_removed_unless_they_are_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folder = Path(cache_dir()) / "ab"
    folder.mkdir()
    subprocess.run(["g++", "-shared", "-x", "c++", "-", "-o", tmp_path / "whole"], input=b"int x;", check=True)
    whole = (tmp_path / "whole").read_bytes()
    lengths = [0, 1, 63, 64, 4096, len(whole) // 2, len(whole) - 1, len(whole)]
    for length in lengths:
        (folder / f"c{length}.main.so").write_bytes(whole[:length])
    (folder / "czeros.main.o").write_bytes(bytes(len(whole)))
    (folder / "cwriting.main.so").write_bytes(whole[:64])
    (folder / "ctext.main.cpp").write_text("int x;")
    headers = folder.parent / "precompiled_headers"
    for name in ("whole", "cut", "writing"):  # Inductor works in a folder beside a header until that is written
        (headers / f"{name}.h_CxxBuild").mkdir(parents=True)
        (headers / f"{name}.h.gch").write_bytes(b"gpch")
    (headers / "whole.h_CxxBuild").rmdir()
    locks = folder.parent / "locks", headers / "locks"
    for each in locks:
        each.mkdir()
    with open(locks[0] / "cwriting.lock", "w") as lock, open(locks[1] / "writing.lock", "w") as other:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX)
        assert compilers.remove_cut_off() == len(lengths) + 1
    left = {file.name for file in folder.iterdir()}
    assert left == {f"c{len(whole)}.main.so", "cwriting.main.so", "ctext.main.cpp"}
    left = {file.name for file in headers.iterdir()}
    assert left == {"whole.h.gch", "writing.h.gch", "writing.h_CxxBuild", "locks"}
    assert compilers.remove_cut_off() == 2


_AHEAD = """
import pathlib, sys, tempfile, threading
from penstock.engine.machine.compilers import compile_headers
compile_headers()
[thread.join() for thread in threading.enumerate() if thread.name == "headers"]
def compiled():
    return sorted(str(file) for file in pathlib.Path(tempfile.gettempdir()).rglob("*.[gp]ch"))
ahead = compiled()
import torch
torch.compile(lambda x: x.exp().sum(-1), dynamic=True)(torch.zeros(64))
print(len(ahead), ahead == compiled())
"""


@needs_gcc
@pytest.mark.long
def test_headers_compiled_ahead_are_those_that_kernels_take_and_one_that_is_cut_off_is_compiled_again(
    tmp_path: Path,
) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", _AHEAD], env=environment, capture_output=True, text=True)
        assert done.stdout.split() == ["1", "True"], done.stderr[-4000:]
        (header,) = tmp_path.glob("*/precompiled_headers/*.gch")
        assert header.stat().st_size > 1 << 20
        os.truncate(header, 1 << 20)
        header.with_name(header.stem + "_CxxBuild").mkdir()  # as where Python was killed while the compiler worked
        for library in tmp_path.glob("*/*/*.so"):
            library.unlink()


@needs_gcc
def test_headers_that_cannot_be_compiled_ahead_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    asked = threading.Event()

    def fail(*_: Any, **__: Any) -> None:
        asked.set()
        raise OSError("no space left")

    raised: list[Any] = []
    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding_async", fail)
    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    compilers.compile_headers()
    assert asked.wait(60)
    for thread in threading.enumerate():
        if thread.name == "headers":
            thread.join()
    assert not raised
