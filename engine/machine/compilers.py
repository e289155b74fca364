"""Whether torch.compile finds the compilers that it needs, found out by compiling something small.

On a CPU, Inductor writes C++ with OpenMP and Python bindings. For CUDA, Triton brings its own compiler for kernels, but
builds the module that launches them with the machine's. Both need Python's headers, which many machines lack.
"""

from __future__ import annotations

import fcntl
import getpass
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from penstock.engine.config import TrainConfig
from penstock.storage.files.errors import UserError


class Verdict(NamedTuple):
    """What was found."""

    ok: bool
    reason: str
    """Why not, on one line for people; empty where it can."""


def layers_compile(device: torch.device) -> Verdict:
    """Whether layers on `device` can be compiled: through Triton on CUDA, as C++ on a CPU. Asked for real only once."""
    return _through_triton() if device.type == "cuda" else optimizer_compiles()


def compile_headers() -> None:
    """Begin, in a thread, what torch.compile's first C++ on a machine waits for: compiling torch's headers, for seconds
    of a core. Call it before anything loads Inductor. What goes wrong will again where layers are compiled."""
    if not optimizer_compiles().ok:
        return
    if platform.machine() == "x86_64":
        # That the compiler knows this CPU has just been tried; Inductor would try again, for seconds.
        os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    try:
        from torch._inductor.codecache import CppPythonBindingsCodeCache
    except ImportError:  # it is torch's own, and no promise
        return

    def work() -> None:
        with suppress(Exception):
            _remove_cut_off_headers()
            # The kernel itself is never compiled.
            CppPythonBindingsCodeCache.load_pybinding_async([], _KERNEL, submit_fn=lambda _: None)

    threading.Thread(target=work, name="headers").start()


_KERNEL = 'extern "C" void kernel() {}'


class Compilation(NamedTuple):
    """What of a run is compiled."""

    layers: bool
    optimizer: bool


def find_compilation(train: TrainConfig, device: torch.device, report: Callable[[str], None]) -> Compilation:
    """What train.compile asks for and can be had; what cannot is reported, or a UserError if it is on."""
    if train.compile == "off":
        return Compilation(layers=False, optimizer=False)
    layers, optimizer = layers_compile(device), optimizer_compiles()
    if train.compile == "on" and not (layers.ok and optimizer.ok):
        raise UserError(f"train.compile: {layers.reason or optimizer.reason}; fix that, or use auto")
    if not layers.ok:
        report(f"layers run eagerly, which is slower: {layers.reason}")
    if not optimizer.ok:
        report(f"AdamW uses torch's fused kernel: {optimizer.reason}")
    compilation = Compilation(layers.ok, optimizer.ok)
    if any(compilation) and (removed := remove_cut_off()):
        report(f"{removed} compiled files, which a process that was killed had left cut off, are compiled again")
    return compilation


def remove_cut_off() -> int:
    """Remove what is cut off in Inductor's cache, and say how many files that were; not those being written now.

    The compiler writes a file under its last name. Where it was killed, Inductor would load the library that is there,
    which ends every process that tries with SIGBUS, or have the compiler read the header, which fails.
    """
    # It would take seconds to ask Inductor for its folder.
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or _default_folder())
    removed = _remove_cut_off_headers()
    for file in [*folder.glob("*/*.so"), *folder.glob("*/*.o")]:
        with suppress(OSError):
            if _is_whole(file):
                continue
            with _not_written(folder / "locks" / f"{file.name.partition('.')[0]}.lock"):
                if not _is_whole(file):
                    file.unlink()
                    removed += 1
    return removed


def _remove_cut_off_headers() -> int:
    """As `remove_cut_off`, for compiled headers: while the compiler writes one, it works in a folder beside it."""
    folder, removed = _default_folder() / "precompiled_headers", 0
    for beside in folder.glob("*.h_CxxBuild"):
        key = beside.name.partition(".")[0]
        with suppress(OSError), _not_written(folder / "locks" / f"{key}.lock"):
            if beside.exists():
                (folder / f"{key}.h.gch").unlink(missing_ok=True)
                shutil.rmtree(beside)
                removed += 1
    return removed


@contextmanager
def _not_written(lock: Path) -> Iterator[None]:
    """Holds a lock that Inductor holds while it writes a file; OSError where it does."""
    lock.parent.mkdir(exist_ok=True)
    with open(lock, "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _default_folder() -> Path:
    """Where Inductor keeps what it compiles if nothing else is said, and compiled headers in any case."""
    try:
        user = getpass.getuser()
    except (KeyError, ImportError, OSError):
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir(), "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user))


def _is_whole(file: Path) -> bool:
    """Whether a 64-bit ELF file reaches to the end of its table of sections, which linkers write last."""
    with open(file, "rb") as stream:
        head = stream.read(64)
        size = os.fstat(stream.fileno()).st_size
    if len(head) < 64 or not head.startswith(b"\x7fELF"):
        return False
    table = int.from_bytes(head[40:48], sys.byteorder)
    entry_bytes, entries = (int.from_bytes(head[at : at + 2], sys.byteorder) for at in (58, 60))
    return 0 < table <= size - entry_bytes * entries


@cache
def optimizer_compiles() -> Verdict:
    """Whether the optimizer's update of state in host memory can be compiled, which takes a C++ compiler."""
    names = [name for name in _inductor_choice() if name is not None]
    for name in names:
        # As Inductor: the first that starts is taken, whether it works or not.
        try:
            subprocess.run([name, "--version"], capture_output=True, check=True, timeout=_LIMIT_S)
        except (OSError, subprocess.SubprocessError):
            continue
        return _compiles(name, "probe.cpp", _CPP, ["-std=c++17", "-fopenmp", *_NATIVE], sysconfig.get_path("include"))
    return Verdict(False, f"no C++ compiler: {' or '.join(names)} could not be started (set CXX to use another)")


@cache
def _through_triton() -> Verdict:
    if importlib.util.find_spec("triton") is None:
        return Verdict(False, "triton is not installed")
    compiler = os.environ.get("CC", shutil.which("gcc") or shutil.which("clang"))
    if compiler is None:
        return Verdict(
            False, "no C compiler, which Triton needs: neither gcc nor clang is on PATH (set CC to use another)"
        )
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme has a path for headers under which Python's are not; Triton does the same.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    return _compiles(compiler, "probe.c", _C, ["-O3"], sysconfig.get_path("include", scheme))


_LIMIT_S = 20.0

_NATIVE = ["-march=native"] if platform.machine() == "x86_64" else []

_C = """\
#include <Python.h>
PyObject *probe(void) { return PyLong_FromLong(0); }
"""

# Looks for headers where reading them would take long.
_CPP = """\
#if !__has_include(<Python.h>)
#error Python.h is not found
#endif
#if !__has_include(<omp.h>)
#error omp.h is not found
#endif
#include <cmath>
extern "C" double probe(double x) {
    double sum = 0;
    #pragma omp parallel for reduction(+ : sum)
    for (int i = 0; i < 8; i++) sum += std::sqrt(x + i);
    return sum;
}
"""


def _inductor_choice() -> Sequence[str | None]:
    """The C++ compilers that Inductor tries, in order; its settings are read where something has loaded them."""
    config = sys.modules.get("torch._inductor.config")
    choice = os.environ.get("CXX", "g++") if config is None else config.cpp.cxx
    return choice if isinstance(choice, (list, tuple)) else (choice,)


def _compiles(compiler: str, name: str, source: str, options: Sequence[str], include: str) -> Verdict:
    """Whether `compiler` makes a shared library of `source` with Python's headers in the folder `include`."""
    with tempfile.TemporaryDirectory(prefix="penstock-compiler-") as folder:
        made = Path(folder, "probe.so")
        Path(folder, name).write_text(source)
        command = [compiler, name, *options, "-shared", "-fPIC", f"-I{include}", "-o", str(made)]
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=os.environ | {"LC_ALL": "C"},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_LIMIT_S,
            )
        except OSError as error:
            return Verdict(False, f"the compiler {compiler} cannot be started ({error.strerror})")
        except subprocess.TimeoutExpired:
            return Verdict(False, f"the compiler {compiler} took more than {_LIMIT_S:.0f} s for a few lines")
        if done.returncode == 0 and made.exists():
            return Verdict(True, "")
    if "Python.h" in done.stderr:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return Verdict(False, f"Python.h is missing: install Python's headers (package python{version}-dev or -devel)")
    if any(name in done.stderr for name in ("omp.h", "lomp", "lgomp")):
        return Verdict(False, f"{compiler} has no OpenMP (package libomp-dev for clang)")
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    complaint = next(iter([*errors, *lines]), f"it exited with {done.returncode} and no message")
    return Verdict(False, f"{compiler} cannot compile a few lines: {complaint}")
