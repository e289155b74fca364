"""Arithmetic of Triton's interpreter as a card does it: half precision, reductions as trees, CUDA's math library."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]


def _of_torch(function: Callable[..., torch.Tensor]) -> Callable[..., Array]:
    return lambda *arrays: function(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays)).numpy()


_LIBDEVICE: dict[str, Callable[..., Array]] = {
    **{name: getattr(np, name) for name in ("abs", "fabs", "ceil", "floor", "trunc", "rint", "sqrt", "cbrt", "fmod")},
    **{name: getattr(np, name) for name in ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "hypot", "ldexp")},
    **{name: getattr(np, name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "isnan", "isinf", "signbit")},
    **{name: getattr(np, name) for name in ("copysign", "nextafter")},
    **{"a" + name: getattr(np, "arc" + name) for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "tan2")},
    **{name: _of_torch(getattr(torch, name)) for name in ("erf", "erfc", "erfinv", "lgamma")},
    **{f"cyl_bessel_{name}": _of_torch(getattr(torch.special, name)) for name in ("i0", "i1")},
    **{f"{kind}{name}_rn": getattr(np, op) for kind in "fd" for name, op in (("add", "add"), ("sub", "subtract"))},
    **{f"{kind}{name}_rn": getattr(np, op) for kind in "fd" for name, op in (("mul", "multiply"), ("div", "divide"))},
    "fsqrt_rn": np.sqrt,
    "dsqrt_rn": np.sqrt,
    "llabs": np.abs,
    "isfinite": np.isfinite,
    "finite": np.isfinite,
    "pow": np.power,
    "powi": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "nearbyint": np.rint,
    "llrint": np.rint,
    "round": lambda x: np.trunc(x + np.copysign(x.dtype.type(0.5), x)),
    "fma": lambda x, y, z: _fma(x, y, z),
    "normcdf": _of_torch(torch.special.ndtr),
    "fdividef": np.divide,
}
"""CUDA's functions without __nv_, "fast_" and the letter of their type."""


def _fma(x: Array, y: Array, z: Array) -> Array:
    return (x.astype(np.float64) * y + z).astype(z.dtype)  # rounded once, as fused


def _to_bfloat16(values: Array) -> Array:
    """Round to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1)).astype(np.uint32)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def _from_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_float8(dtype: torch.dtype) -> Callable[[Array], Array]:
    most = torch.finfo(dtype).max

    def convert(values: Array) -> Array:
        clipped = np.clip(np.ascontiguousarray(values, np.float32), -most, most)  # a card's conversion saturates
        return torch.from_numpy(clipped).to(dtype).view(torch.uint8).numpy()

    return convert


def _from_float8(dtype: torch.dtype) -> Callable[[Array], Array]:
    return lambda bits: torch.from_numpy(np.ascontiguousarray(bits)).view(dtype).float().numpy()


def mend(copy: SimpleNamespace) -> None:
    """Replace what the interpreter in `copy` computes otherwise than a card, or element by element in Python."""
    tl, interpreter = copy.core, copy.interpreter
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    scalar_type = functools.cache(interpreter._get_np_dtype)

    def numpy_type(dtype: Any) -> Any:
        return np.dtype(np.uint64) if dtype.scalar.is_ptr() else scalar_type(dtype.scalar)

    interpreter._get_np_dtype = numpy_type
    small = {  # held as bits
        "bf16": (_from_bfloat16, _to_bfloat16),
        "fp8e4nv": (_from_float8(torch.float8_e4m3fn), _to_float8(torch.float8_e4m3fn)),
        "fp8e5": (_from_float8(torch.float8_e5m2), _to_float8(torch.float8_e5m2)),
    }

    def values(given: Any) -> Array:
        name = str(given.dtype.scalar)
        return small[name][0](given.data) if name in small else given.data

    def made(result: Array, dtype: Any) -> Any:
        name = str(dtype.scalar)
        if result.dtype == np.bool_ and name in small:
            return handle(result, tl.int1)
        if name in small:
            return handle(small[name][1](result), dtype.scalar)
        return handle(result.astype(numpy_type(dtype), copy=False), dtype.scalar)

    def binary_op(self: Any, left: Any, right: Any, op: Callable[..., Array]) -> Any:
        result = op(values(left), values(right))
        return handle(result, tl.int1) if result.dtype == np.bool_ else made(result, left.dtype)

    def fp_to_fp(self: Any, given: Any, dtype: Any, rounding: Any) -> Any:
        if rounding not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
            raise NotImplementedError(f"rounding {rounding}")
        return made(values(given), dtype)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        return made(np.matmul(values(a), values(b), dtype=d.data.dtype) + d.data, d.dtype)

    def extern(self: Any, library: str, path: str, symbol: str, given: list[Any], dtype: Any, pure: bool) -> Any:
        name = symbol.removeprefix("__nv_").removeprefix("fast_")
        for known in (name, name.removesuffix("f"), name.removesuffix("d")):
            if known in _LIBDEVICE:
                return made(_LIBDEVICE[known](*(value.data for value in given)), dtype)
        raise NotImplementedError(f"libdevice's {symbol}")

    rmw = builder.create_atomic_rmw

    def atomic_rmw(self: Any, op: Any, pointer: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        name = str(value.dtype.scalar)
        if name not in ("bf16", "fp16"):
            return rmw(self, op, pointer, value, mask, sem, scope)
        before = np.zeros_like(value.data)
        for index in zip(*np.nonzero(np.broadcast_to(mask.data, value.data.shape)), strict=True):
            one = [handle(array[index].reshape(1), given.dtype) for array, given in _both(pointer, value)]
            old = self.create_load(one[0], None, None, False)
            self.create_store(one[0], made(values(old).astype(np.float32) + values(one[1]), value.dtype), None, None)
            before[index] = old.data[0]
        return handle(before, value.dtype.scalar)

    builder.binary_op, builder.create_fp_to_fp, builder.create_dot = binary_op, fp_to_fp, dot
    builder.create_atomic_rmw, builder.create_extern_elementwise = atomic_rmw, extern
    builder.cast_impl = lambda self, given, dtype: made(values(given), dtype)
    builder.unary_op = lambda self, given, op: made(op(values(given)), given.dtype)
    # Its stores want memory of their own.
    builder.create_broadcast = lambda self, given, shape: handle(
        np.broadcast_to(given.data, [int(n) for n in shape]).copy(), given.dtype.scalar
    )
    builder.create_fma = lambda self, x, y, z: made(_fma(values(x), values(y), values(z)), z.dtype)
    builder.create_erf = lambda self, given: made(_LIBDEVICE["erf"](values(given)), given.dtype)
    builder.create_minnumf = lambda self, left, right: self.binary_op(left, right, np.fmin)
    builder.create_maxnumf = lambda self, left, right: self.binary_op(left, right, np.fmax)
    _mend_reductions(copy)
    _mend_shapes(copy)


def _both(pointer: Any, value: Any) -> list[tuple[Array, Any]]:
    return [(np.broadcast_to(given.data, value.data.shape), given) for given in (pointer, value)]


def _mend_reductions(copy: SimpleNamespace) -> None:
    def combined(self: Any, left: tuple[Any, ...], right: tuple[Any, ...]) -> tuple[Any, ...]:
        result = self.combine_fn(*left, *right)
        return result if isinstance(result, tuple) else (result,)

    def part(self: Any, given: tuple[Any, ...], index: slice | int) -> tuple[Any, ...]:
        """Of each tensor, along the axis."""
        where = (slice(None),) * self.axis + (index,)
        return tuple(self.to_tensor(tensor.handle.data[where], tensor.dtype) for tensor in given)

    def joined(self: Any, parts: list[tuple[Any, ...]], join: Callable[..., Array]) -> tuple[Any, ...]:
        tensors = zip(*parts, strict=True)
        return tuple(self.to_tensor(join([t.handle.data for t in many], self.axis), many[0].dtype) for many in tensors)

    def reduce(self: Any, given: tuple[Any, ...]) -> Any:
        """Neighbours are combined until one is left."""
        dims = len(given[0].shape)
        if self.axis is None:
            given, self.axis = tuple(self.to_tensor(t.handle.data.reshape(-1), t.dtype) for t in given), 0
            kept: Any = tuple(range(dims))
        else:
            self.axis %= dims
            kept = self.axis
        if self.combine_fn is copy.tl.standard._sum_combine:
            found: Any = (self.to_tensor(np.sum(given[0].handle.data, axis=self.axis), given[0].dtype),)
        else:
            while (length := given[0].handle.data.shape[self.axis]) > 1:
                even = length - length % 2
                halves = [part(self, given, slice(start, even, 2)) for start in (0, 1)]
                done = combined(self, *halves)
                rest = part(self, given, slice(even, length))
                given = joined(self, [done, rest], np.concatenate) if length % 2 else done
            found = part(self, given, 0)
        if not self.keep_dims:
            return found
        return [self.to_tensor(np.expand_dims(t.handle.data.reshape(given_shape(t)), kept), t.dtype) for t in found]

    def given_shape(tensor: Any) -> tuple[int, ...]:
        return tuple(int(n) for n in tensor.shape)

    def scan(self: Any, given: tuple[Any, ...]) -> Any:
        """One after the other along the axis, all rows at once."""
        self.axis %= len(given[0].shape)
        parts = [part(self, given, 0)]
        for index in range(1, given[0].handle.data.shape[self.axis]):
            parts.append(combined(self, parts[-1], part(self, given, index)))
        if len(given[0].shape) > 1:
            return joined(self, parts, np.stack)
        return joined(self, parts, lambda arrays, axis: np.concatenate(arrays))

    copy.interpreter.ReduceOps.apply_impl, copy.interpreter.ScanOps.generic_scan = reduce, scan


def _mend_shapes(copy: SimpleNamespace) -> None:
    """Blocks of any size, without the interpreter's Python for each dimension of each intermediate value."""
    tl, handle = copy.core, copy.interpreter.TensorHandle
    plain = functools.cache(lambda *sizes: tl.tuple(sizes))
    constant = functools.cache(
        lambda *sizes: (tl.tuple([tl.constexpr(n) for n in sizes]), tl.constexpr(math.prod(sizes)))
    )

    def block(self: Any, element: Any, shape: Sequence[Any]) -> None:
        sizes = tuple(int(tl._unwrap_if_constexpr(n)) for n in shape)
        self.element_ty, self.sizes, self.shape, self.numel = element, sizes, plain(*sizes), math.prod(sizes)

    def tensor(self: Any, value: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = value, kind, kind.scalar
        self.shape, self.numel = constant(*_sizes(kind))

    def broadcast(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if _sizes(left.type) == _sizes(right.type):
            return left, right
        shape = np.broadcast_shapes(_sizes(left.type), _sizes(right.type))
        return to_shape(left, shape), to_shape(right, shape)

    def to_shape(given: Any, shape: tuple[int, ...]) -> Any:
        data = copy.builder.create_broadcast(given.handle, shape)
        return tl.tensor(data, tl.block_type(given.dtype, shape))

    def arange(self: Any, start: int, end: int, *, ret_ty: Any = None) -> Any:
        return tl.tensor(
            handle(np.arange(start, end, dtype=np.int32), tl.int32), tl.block_type(tl.int32, [end - start])
        )

    tl.block_type.__init__, tl.tensor.__init__ = block, tensor
    tl.validate_block_shape = math.prod  # a block may have any size here: see `Kernel.widened`
    tl.block_type.name = property(lambda self: f"<{self.sizes}, {self.element_ty}>")
    copy.semantic.TritonSemantic.broadcast_impl_value, copy.semantic.TritonSemantic.arange = broadcast, arange


def _sizes(kind: Any) -> tuple[int, ...]:
    return kind.sizes if kind.is_block() else ()
