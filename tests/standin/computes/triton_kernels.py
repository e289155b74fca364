"""Triton's kernels in the order of their streams: each launch enqueues its program for Triton's interpreter.

The launch itself stays real. What is enqueued holds addresses and plain values, and no tensor. The interpreter runs on
a copy of Triton's Python modules (`interpreted_triton`), so it changes nothing that the compiler uses meanwhile.
"""

from __future__ import annotations

import ast
import atexit
import ctypes
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import math
import operator
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

COPY = "interpreted_triton"
WIDENED = {"Grid1D": ("XBLOCK",), "Grid2D": ("XBLOCK", "YBLOCK"), "Grid3D": ("XBLOCK", "YBLOCK", "ZBLOCK")}
"""Inductor's grids -> blocks of which several may be computed as one: its kernels give the same for any size."""
MAX_ELEMENTS = 1 << 20
"""Of a widened block: Triton's own limit."""

_pending: dict[int, tuple[Kernel, tuple[int, ...], dict[str, Any]]] = {}
_numbers = itertools.count(1)
_lock = threading.RLock()
_thread = threading.local()  # .autotuner: whose launchers are being made; .timing: launches compute nothing


# ---------------------------------------------------------------- a copy of Triton that interprets


class _CopyLoader(importlib.machinery.SourceFileLoader):
    """Loads a module of Triton under another name; what it imports of Triton is of the copy, too."""

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        text = self.get_data(path).decode()
        if fullname == f"{COPY}.language.extra":
            text = ""  # would load all backends' libraries past this loader
        text = text.replace("= _discover_backends()", "= {}")
        text = re.sub(r"^(\s*)from triton\b", rf"\1from {COPY}", text, flags=re.M)
        text = re.sub(r"^(\s*)import triton\.(\S+) as", rf"\1import {COPY}.\2 as", text, flags=re.M)
        text = re.sub(r"^(\s*)import triton$", rf"\1import {COPY} as triton", text, flags=re.M)
        return compile(text, path, "exec", dont_inherit=True)


class _CopyFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != COPY and not name.startswith(f"{COPY}."):
            return None
        real = importlib.util.find_spec("triton" + name[len(COPY) :])
        if real is None or real.origin is None:
            return None
        folders = real.submodule_search_locations
        loader = _CopyLoader(name, real.origin)
        return importlib.util.spec_from_file_location(
            name, real.origin, loader=loader, submodule_search_locations=folders
        )


@functools.cache
def _copy() -> SimpleNamespace:
    """The interpreter with everything mended that a kernel on a card does otherwise."""
    importlib.import_module("triton")
    for name in [name for name in sys.modules if name.startswith("triton._C")]:
        sys.modules[COPY + name[len("triton") :]] = sys.modules[name]
    sys.meta_path.insert(0, _CopyFinder())
    core, standard, semantic, tl, jit, interpreter, libdevice = (
        importlib.import_module(f"{COPY}.{name}")
        for name in (
            *("language.core", "language.standard", "language.semantic", "language", "runtime.jit"),
            *("runtime.interpreter", "language.extra.cuda.libdevice"),
        )
    )
    found = SimpleNamespace(core=core, tl=tl, jit=jit, semantic=semantic, interpreter=interpreter, libdevice=libdevice)
    found.builder = interpreter.interpreter_builder
    found.builder.options = replace(found.builder.options, sanitize_overflow=False, debug=True)
    from computes import triton_arithmetic

    triton_arithmetic.mend(found)
    with_tl = FunctionType((lambda: None).__code__, {"tl": tl, "core": core})
    scope = interpreter._patch_lang(with_tl)
    interpreter._patch_builtin(libdevice, found.builder, scope)
    core.tensor.__index__ = lambda self: int(self.handle.data.item())
    for module in [module for name, module in sys.modules.items() if name.startswith(f"{COPY}.language")]:
        for name, value in list(vars(module).items()):
            if isinstance(value, jit.JITFunction):
                setattr(module, name, _translated(value, found))
    for name, value in list(vars(core.tensor).items()):
        if isinstance(value, jit.JITFunction):
            setattr(core.tensor, name, _method(_translated(value, found)))
    assert standard.sum is tl.sum
    return found


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **named: function(self, *args, **named)


# ---------------------------------------------------------------- kernels' Python, on the copy


class _Assignments(ast.NodeTransformer):
    """Numbers that a kernel assigns become tensors, as the compiler makes them."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        convert = ast.Name(id="_to_tensor", ctx=ast.Load())
        node.value = ast.Call(func=convert, args=[node.value, ast.Constant(value=False)], keywords=[])
        return node


class _Interpreted:
    """A @triton.jit function whose globals are those of the copy."""

    def __init__(self, function: Any, copy: SimpleNamespace) -> None:
        self.__name__ = function.__name__
        self._function, self._copy = function, copy

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.python(*args, **named)

    @functools.cached_property
    def python(self) -> Callable[..., Any]:
        tree = ast.fix_missing_locations(_Assignments().visit(ast.parse(self._function.src)))
        decorators = itertools.takewhile(lambda line: not line.lstrip().startswith("def "), self._function.raw_src)
        ast.increment_lineno(tree, self._function.starting_line_number - 1 + len(list(decorators)))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        found = {"_to_tensor": self._copy.interpreter.interpreter_semantic.to_tensor}
        scope = self._function.get_capture_scope()
        found |= {name: _translated(scope[name], self._copy) for name in names if name in scope}
        exec(compile(tree, self._function.fn.__code__.co_filename, "exec"), found)
        return found[self._function.fn.__name__]


class _Module:
    """A module whose members are translated when asked for."""

    def __init__(self, module: ModuleType, copy: SimpleNamespace) -> None:
        self._module, self._copy = module, copy

    def __getattr__(self, name: str) -> Any:
        return _translated(getattr(self._module, name), self._copy)


_interpreted: dict[int, _Interpreted] = {}


def _translated(value: Any, copy: SimpleNamespace) -> Any:
    """What takes the place of a kernel's global: Triton's are those of the copy."""
    real_jit, real_core = sys.modules["triton.runtime.jit"], sys.modules["triton.language.core"]
    if isinstance(value, real_jit.JITFunction | copy.jit.JITFunction):
        if id(value) not in _interpreted:
            _interpreted[id(value)] = _Interpreted(value, copy)  # which holds it, so that the id stays its own
        return _interpreted[id(value)]
    if isinstance(value, ModuleType):
        if value.__name__ in ("triton.language.extra.libdevice", "triton.language.extra.cuda.libdevice"):
            return copy.libdevice
        if value.__name__.partition(".")[0] == "triton":
            return importlib.import_module(COPY + value.__name__[len("triton") :])
        return _Module(value, copy) if value.__name__.startswith("torch._inductor") else value
    if isinstance(value, real_core.constexpr):
        return copy.core.constexpr(_translated(value.value, copy))
    if isinstance(value, real_core.dtype):
        return copy.tl.str_to_ty(str(value), None)
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if isinstance(module, str) and module.partition(".")[0] == "triton" and name:
        return operator.attrgetter(name)(importlib.import_module(COPY + module[len("triton") :]))
    if module == "torch._inductor.runtime.triton_helpers" and name in _HELPERS:
        return _HELPERS[name]
    return value


def _unwrapped(value: Any) -> Any:
    return getattr(value, "value", value)


_HELPERS: dict[str, Callable[..., Any]] = {
    "if_mask": lambda mask, value: None if _unwrapped(mask) is None else value,
    "constexpr_next_power_of_2": lambda n: 1 << (_unwrapped(n) - 1).bit_length(),
}
"""Inductor's own builtins, of which the code generator passes arguments that are not there here."""


# ---------------------------------------------------------------- a launch


class _Range(ctypes.Structure):
    """As in ../src/standin.h."""

    _fields_ = (("start", ctypes.c_void_p), ("nbytes", ctypes.c_size_t), ("written", ctypes.c_size_t))


_INDUCTORS = re.compile(r"(in|out|in_out)_ptr\d+$")


@dataclass(slots=True)
class Kernel:
    """What is known of a kernel before it is launched."""

    name: str
    function: Callable[[], Any]
    """Its JITFunction."""
    types: dict[str, Any]
    """Triton's types of its arguments."""
    constants: dict[str, Any]
    grid_type: str = ""
    """Inductor's, where it is Inductor's."""

    def enqueue(self, grid: Sequence[int], stream: int, arguments: dict[str, Any]) -> None:
        """After what is on the stream, compute what the launch asked for."""
        if getattr(_thread, "timing", False) or not math.prod(grid):
            return
        values: dict[str, Any] = {}
        for name, value in arguments.items():
            kind = self.types[name]
            if name in self.constants or kind == "constexpr":
                continue
            if not isinstance(kind, str) or kind.startswith(("tensordesc", "nvTma")):
                _fail(f"kernel {self.name}: its argument {name} is a {kind}, which is not interpreted")
            values[name] = value.data_ptr() if hasattr(value, "data_ptr") else value
        if _cudart().standin_watches_races():
            self._tell_accesses(stream, arguments)
        number = next(_numbers)
        _pending[number] = (self, tuple(grid), values)
        if error := _cudart().cudaLaunchHostFunc(ctypes.c_void_p(stream), _RUN, ctypes.c_void_p(number)):
            raise RuntimeError(f"cudaLaunchHostFunc: error {error}")

    def _tell_accesses(self, stream: int, arguments: dict[str, Any]) -> None:
        """Inductor names what a kernel only reads `in_ptr`; of other kernels that is not known, and nothing is told."""
        given = {
            name: value for name, value in arguments.items() if _INDUCTORS.match(name) and hasattr(value, "stride")
        }
        ranges = (_Range * len(given))()
        for place, (name, value) in zip(ranges, given.items(), strict=True):
            last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            nbytes = (last + 1) * value.element_size() if value.numel() else 0
            place.start, place.nbytes, place.written = value.data_ptr(), nbytes, not name.startswith("in_ptr")
        _cudart().standin_access(ctypes.c_void_p(stream), self.name.encode(), ranges, ctypes.c_size_t(len(given)))

    def run(self, grid: tuple[int, ...], values: dict[str, Any]) -> None:
        """All its programs, one after the other."""
        copy = _copy()
        if self.grid_type == "CooperativeReductionGrid":
            raise NotImplementedError("its programs wait for one another")
        function = _translated(self.function(), copy)
        constants, grid = self.widened(self.function().src, grid)
        tensors = {name: _tensor(copy, value, self.types[name]) for name, value in values.items()}
        copy.builder.set_grid_dim(*grid)
        for z, y, x in itertools.product(*map(range, reversed(grid))):
            copy.builder.set_grid_idx(x, y, z)
            function(**constants, **tensors)

    def widened(self, source: str, grid: tuple[int, ...]) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Constants and grid with as many programs as fit computed as one: an op costs the same for all of them."""
        found, sizes = dict(self.constants), list(grid)
        blocks = [name for name in WIDENED.get(self.grid_type, ()) if isinstance(found.get(name), int)]
        inner = re.findall(r"(R\d_BLOCK): tl.constexpr = (\d+)", source)
        taken = math.prod(int(size) for _, size in inner) * math.prod(
            found[name] for name in (*blocks, "R0_BLOCK", "R1_BLOCK") if isinstance(found.get(name), int)
        )
        for axis, name in enumerate(blocks):
            divisors = (n for n in range(sizes[axis], 0, -1) if not sizes[axis] % n)
            count = next(n for n in divisors if n == 1 or n * taken <= MAX_ELEMENTS)
            found[name], sizes[axis] = found[name] * count, sizes[axis] // count
            taken *= count
        return found, tuple(sizes)


def _tensor(copy: SimpleNamespace, value: Any, kind: str) -> Any:
    import numpy

    dtype = copy.tl.str_to_ty(kind, None)
    if dtype.is_ptr():
        data = numpy.array([value or 0], numpy.uint64)
    else:
        data = numpy.array([value]).astype(copy.interpreter._get_np_dtype(dtype))
    return copy.core.tensor(copy.interpreter.TensorHandle(data, dtype), dtype)


@functools.cache
def _cudart() -> Any:
    library = ctypes.CDLL(None)  # the stand-in is preloaded
    atexit.register(library.cudaDeviceSynchronize)  # nothing may come to a stream's turn in an interpreter that ends
    return library


def _fail(text: str) -> None:
    """End the process: a card's kernel that is wrong is no exception of Python either."""
    print(f"[computes] {text}", file=sys.stderr, flush=True)
    os.abort()


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _RUN(number: int) -> None:
    import numpy

    kernel, grid, values = _pending.pop(number)
    try:
        with _lock, numpy.errstate(all="ignore"):
            kernel.run(grid, values)
    except BaseException:
        traceback.print_exc()
        _fail(f"kernel {kernel.name} of grid {grid} failed in Triton's interpreter (see above)")


# ---------------------------------------------------------------- where launches are made


def _wrap_inductor(module: Any) -> None:
    """torch._inductor.runtime.triton_heuristics: launchers of Inductor's own, and timings."""
    autotuner, result = module.CachingAutotuner, module.CompileResult
    make, generate, bench = autotuner._make_launchers, result._gen_launcher_code, autotuner.bench

    def making(self: Any) -> None:
        before, _thread.autotuner = getattr(_thread, "autotuner", None), self
        try:
            make(self)
        finally:
            _thread.autotuner = before

    def generating(self: Any, scope: dict[str, Any], def_args: list[str], runner_args: list[str]) -> Any:
        if isinstance(self, module.StaticTritonCompileResult):
            run, names = scope["runner"], runner_args[4:]
            kernel = _of_inductor(self.compile_meta["signature"], self.compile_meta["constants"])

            def runner(x: int, y: int, z: int, stream: int, *args: Any) -> None:
                run(x, y, z, stream, *args)
                kernel.enqueue((x, y, z), stream, dict(zip(names, args, strict=True)))

            scope["runner"] = runner
        return generate(self, scope, def_args, runner_args)

    def timed(self: Any, *args: Any, **named: Any) -> Any:
        """Timed launches write to copies, and before the one that counts."""
        _thread.timing = True
        try:
            return bench(self, *args, **named)
        finally:
            _thread.timing = False

    autotuner._make_launchers, result._gen_launcher_code, autotuner.bench = making, generating, timed


def _of_inductor(types: dict[str, Any], constants: dict[str, Any]) -> Kernel:
    tuner = _thread.autotuner

    def function() -> Any:
        if tuner.fn.fn is None:  # compiled in another process
            tuner.fn = tuner._reload_kernel().fn
        return tuner.fn

    return Kernel(tuner.fn.__name__, function, types, dict(constants), tuner.inductor_meta.get("grid_type", ""))


def _wrap_driver(module: Any) -> None:
    """triton.backends.nvidia.driver: all other launches, a person's own kernels among them."""
    launcher = module.CudaLauncher
    make, call = launcher.__init__, launcher.__call__

    def making(self: Any, src: Any, metadata: Any) -> None:
        make(self, src, metadata)
        names = list(src.signature)
        given = {key if isinstance(key, str) else names[key[0]]: value for key, value in src.constants.items()}
        if getattr(_thread, "autotuner", None) is not None:
            self.computed = _of_inductor(dict(src.signature), given)
        else:
            self.computed = Kernel(src.fn.__name__, lambda: src.fn, dict(src.signature), given)

    def calling(self: Any, x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
        call(self, x, y, z, stream, function, *args)
        self.computed.enqueue((x, y, z), stream, dict(zip(self.computed.types, args[4:], strict=True)))

    launcher.__init__, launcher.__call__ = making, calling


def _wrap_timings(module: Any) -> None:
    """torch._inductor.runtime.benchmarking: what is timed is computed, so few times are enough."""
    few = {"estimation_iters": 1, "memory_warmup_iters": 1, "benchmark_iters": 2}
    benchmarker = module.InductorBenchmarker
    time = benchmarker.benchmark_gpu
    benchmarker.benchmark_gpu = lambda self, function, **named: time(self, function, **(named | few))


_WRAPPERS = {
    "torch._inductor.runtime.benchmarking": _wrap_timings,
    "torch._inductor.runtime.triton_heuristics": _wrap_inductor,
    "triton.backends.nvidia.driver": _wrap_driver,
}


class _Wrapping(importlib.abc.MetaPathFinder):
    """Wraps the modules above when they are first imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in _WRAPPERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_wrap(module: ModuleType) -> None:
                execute(module)
                _WRAPPERS[name](module)

            spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def install() -> None:
    """At the end of torch's import: costs nothing until Triton is imported."""
    for name, wrap in _WRAPPERS.items():
        if name in sys.modules:
            wrap(sys.modules[name])
    sys.meta_path.insert(0, _Wrapping())
