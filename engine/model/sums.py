"""Sums of gradients, and products that add to them.

The gradient of a linear module's weight is the product of two tensors that its backward has at hand. `SummedLinear`
hands both on, so that one kernel can multiply them and add the product to the float32 sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.engine.attention.backends import emulated
from penstock.engine.clock import clock
from penstock.engine.model.adapters import BASE, adapted_module, is_adapter
from penstock.engine.model.joined import inputs_of, sharing_copy, side_by_side


class GradientSums(dict[str, Tensor]):
    """Parameter -> the sum of its gradients, float32 [shape of the parameter] (float64 for float64). The first gradient
    of those in `fresh` takes the place of whatever the memory holds."""

    def __init__(self, sums: Mapping[str, Tensor], fresh: Iterable[str] = ()) -> None:
        super().__init__(sums)
        self.fresh = set(fresh)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a gradient of the parameter's shape, in any dtype."""
        if name in self.fresh:
            self.fresh.discard(name)
            self[name].copy_(gradient)
        else:
            self[name].add_(gradient)

    def add_product(self, names: Sequence[str], dy: Tensor, x: Tensor) -> None:
        """Add dy^T x to matrices that lie one behind the other, for dy [n, sum of their rows] and x [n, in] of the
        compute dtype."""
        new = self.fresh.issuperset(names)
        assert new or self.fresh.isdisjoint(names), names
        self.fresh.difference_update(names)
        totals = [self[name] for name in names]
        add_product(side_by_side(totals), dy, x, new=new, most_rows=max(total.shape[0] for total in totals))

    def add_rows(self, names: Sequence[str], dy: Tensor) -> None:
        """Add the sum of dy's rows, dy [n, sum of their lengths], to vectors."""
        if names:
            gradients = dy.sum(dim=0).split([self[name].shape[0] for name in names])
            for name, gradient in zip(names, gradients, strict=True):
                self.add(name, gradient)

    def settle(self) -> None:
        """Zero what has got no gradient."""
        for name in self.fresh:
            self[name].zero_()
        self.fresh.clear()


def add_product(total: Tensor, dy: Tensor, x: Tensor, *, new: bool, most_rows: int) -> None:
    """Add dy^T x to `total` [out, in], or put it there if that is `new`; dy [n, out] and x [n, in] of one dtype.

    In one kernel where the dtypes are or are made the same, or where `prepare` has found one; else in products of at
    most `most_rows` rows on a GPU, whose memory is planned for one matrix's.
    """
    if emulated(dy) and total.dtype == torch.float32:
        dy, x = dy.float(), x.float()
    if total.dtype == dy.dtype:
        torch.addmm(total, dy.t(), x, beta=0 if new else 1, out=total)
    elif _into_float32.get(_label(total.shape, dy.dtype)):
        _add_into(total, dy, x, beta=0 if new else 1)
    else:
        piece = most_rows if total.device.type == "cuda" else total.shape[0]
        for rows, columns in zip(total.split(piece), dy.split(piece, dim=1), strict=True):
            if new:
                rows.copy_(columns.t() @ x)
            else:
                rows.add_(columns.t() @ x)


_into_float32: dict[str, bool] = {}
"""Products -> whether one kernel multiplies them and adds them to a float32 sum; not, where that is not known."""


def _label(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{shape[0]} x {shape[1]} {str(dtype).removeprefix('torch.')}"


def prepare(
    shapes: Iterable[tuple[int, int]],
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
    recorded: Mapping[str, bool] | None = None,
) -> list[str]:
    """Find out which sums of these shapes take products of `rows` rows in one kernel, which rounds once less: where it
    is right and not slower than two, or as `recorded`, or, untimed, where determinism is asked for. What was known
    before is forgotten. Returns which of the recorded are not right any more."""
    _into_float32.clear()
    lost = []
    for shape in dict.fromkeys(shapes):
        label = _label(shape, dtype)
        known = None if recorded is None else recorded.get(label)
        timed = known is None and not torch.are_deterministic_algorithms_enabled()
        right, fast = _tried(shape, rows, device, dtype, timed=timed)
        if known and not right:
            lost.append(f"a product into float32 ({label}): computes something else, or fails")
        _into_float32[label] = right and fast and known is not False
    return lost


def choices() -> dict[str, bool]:
    """What `prepare` takes as recorded."""
    return dict(_into_float32)


def _tried(
    shape: tuple[int, int], rows: int, device: torch.device, dtype: torch.dtype, *, timed: bool
) -> tuple[bool, bool]:
    """Whether one kernel is right, and, where that is `timed`, not slower than two; by some rows of a float32 sum, for
    which no more memory is taken than the gradient that is planned for."""
    out = min(shape[0], max(_LEAST_ROWS, shape[0] // _TRIED_SHARE))
    dy, x = (torch.randn(rows, width, dtype=dtype, device=device) for width in (out, shape[1]))
    total = torch.ones(out, shape[1], device=device)

    def in_one() -> None:
        _add_into(total, dy, x, beta=1)

    def in_two() -> None:
        total.add_(dy.t() @ x)

    expected = total.clone()
    try:
        in_one()
    except (RuntimeError, NotImplementedError, AttributeError):
        return False, False
    expected.add_(dy.t() @ x)
    largest = torch.linalg.vector_norm(expected, torch.inf)
    right = bool(torch.linalg.vector_norm(expected.sub_(total), torch.inf) <= _CLOSE * largest)
    timed = timed and right
    return right, not timed or clock(in_one, device, _TIMED_S) <= clock(in_two, device, _TIMED_S)


def _add_into(total: Tensor, dy: Tensor, x: Tensor, *, beta: int) -> None:
    torch.ops.aten.addmm.dtype_out(total, dy.t(), x, total.dtype, beta=beta, out=total)


_CLOSE = 2.0**-7
"""Two roundings to bfloat16, of the largest element."""
_TIMED_S = 5e-3
_LEAST_ROWS = 256
_TRIED_SHARE = 16
"""One in so many rows is tried: its two sums in float32 and its product, ten bytes an element of it, are less than the
two bytes an element of a whole gradient, also where that is one of two matrices in one."""


class _Linear(torch.autograd.Function):
    """y = x W^T + b, or zero where that is `unread`; backward what the gradient of W is the product of, as gradients of
    `into` and `onto`, or without these the gradients themselves."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, into: Tensor | None, onto: Tensor | None, unread: bool
    ) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.summed = into is not None
        if unread:
            return x.new_zeros((*x.shape[:-1], weight.shape[0]))
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        if ctx.summed:
            dx = _input_gradient(dy, weight) if ctx.needs_input_grad[0] else None
            return dx, None, None, x.detach().reshape(-1, x.shape[-1]), rows, None
        dweight = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        dbias = rows.sum(dim=0) if ctx.needs_input_grad[2] else None
        return dy @ weight, dweight, dbias, None, None, None


def _input_gradient(dy: Tensor, weight: Tensor) -> Tensor:
    """dy W, in dy's dtype."""
    return (dy.float() @ weight.float()).to(dy.dtype) if emulated(dy) else dy @ weight


class SummedLinear(nn.Module):
    """Shares the parameters of an nn.Linear; leaves its gradients to be computed from `into` and `onto`, if given."""

    def __init__(self, linear: nn.Linear, *, unread: bool) -> None:
        """`unread`: its output is zero, as nobody reads it (`unread_linear`)."""
        super().__init__()
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.unread = unread
        self.into: Tensor | None = None
        """[n, in]: its gradient is the module's input."""
        self.onto: Tensor | None = None
        """[n, out]: its gradient is that of the module's output."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        y: Tensor = _Linear.apply(x, self.weight, self.bias, self.into, self.onto, self.unread)  # type: ignore[no-untyped-call]
        return y


class Product(NamedTuple):
    """A product that is to be added to the gradients of `weights`, and its rows to those of `biases` (maybe none), by
    name; several where these lie one behind the other (engine/model/joined.py)."""

    weights: tuple[str, ...]
    biases: tuple[str, ...]
    into: Tensor
    onto: Tensor


class SummedTwin:
    """A layer some of whose linear modules are SummedLinear, with the parameters and buffers of `layer`."""

    def __init__(self, layer: nn.Module, names: Mapping[str, Sequence[str]], unread: str | None) -> None:
        """`names`: the linear modules -> those that have their weights, several where one is made of them. `unread`:
        the one whose output is left out; if it is none of `names`, it has gradients as usual."""
        self.module = sharing_copy(layer)
        self._linears: list[tuple[Sequence[str], SummedLinear]] = []
        for name, members in (names if unread is None else {**names, unread: names.get(unread, ())}).items():
            linear = self.module.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            summed = SummedLinear(linear, unread=name == unread)
            self.module.set_submodule(name, summed)
            if members:
                self._linears.append((members, summed))

    def products(self, x: Tensor) -> list[Product]:
        """What a run on x [1, n, hidden] has as gradients of the weights in place of gradients."""
        result = []
        for members, linear in self._linears:
            out_features, in_features = linear.weight.shape
            into, onto = linear.into, linear.onto = self._tap(x, in_features), self._tap(x, out_features)
            weights = tuple(f"{member}.weight" for member in members)
            biases = () if linear.bias is None else tuple(f"{member}.bias" for member in members)
            result.append(Product(weights, biases, into, onto))
        return result

    def _tap(self, x: Tensor, width: int) -> Tensor:
        """[n, width] that takes no memory and wants a gradient; each time another one."""
        return x.new_zeros(1).expand(x.shape[1], width).requires_grad_()


def summed_linears(layer: nn.Module, run: Callable[[nn.Module], Tensor], x: Tensor) -> tuple[str, ...]:
    """The layer's linear modules whose gradients are products of what they see of x [1, n, hidden], all of it, once;
    none where the gradients are not the same. `run(layer)` is the layer's output for x, a leaf that requires grad."""
    linears = [n for n, module in layer.named_modules() if type(module) is nn.Linear and module.weight.requires_grad]
    rows: dict[str, list[int]] = {}
    for name, seen in inputs_of(layer, linears, run):
        rows.setdefault(name, []).append(seen.numel() // seen.shape[-1])
    names = tuple(name for name, counts in rows.items() if counts == [x.shape[1]])
    if not names:
        return ()
    twin = SummedTwin(layer, {name: (name,) for name in names}, None)
    products = twin.products(x)
    own = dict(layer.named_parameters())
    covered = {name for product in products for name in (*product.weights, *product.biases)}
    if len({id(own[name]) for name in covered}) < len(covered):
        return ()
    y = run(twin.module)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
    taps = [tap for product in products for tap in (product.into, product.onto)]
    result = torch.autograd.grad(y, taps, dy, allow_unused=True)
    expected = torch.autograd.grad(run(layer), [own[p.weights[0]] for p in products], dy, allow_unused=True)
    for i, weight in enumerate(expected):
        into, onto = result[2 * i : 2 * i + 2]
        if weight is None or into is None or onto is None or not torch.allclose(onto.t() @ into, weight, rtol=1e-4):
            return ()
    return names


def unread_linear(layer: nn.Module, run: Callable[[nn.Module], Tensor], x: Tensor) -> str | None:
    """The layer's last linear module if no gradient depends on what it returns, else None; where that is an adapter's,
    the base's that it stands beside. `run(layer)` is the layer's output for x, a leaf that requires grad."""
    # Nobody reads the layer's output when backward recomputes it. In most architectures it ends with `residual +
    # projection(...)`, a sixteenth of a layer's work where the MLP is three times as wide as the hidden state.
    linears = [name for name, module in layer.named_modules() if type(module) is nn.Linear]
    order = [name for name, _ in inputs_of(layer, linears, run)]
    last = _of_base(order[-1]) if order else ""
    if order.count(last) != 1:
        return None
    # Copied before any run under grad: a layer may keep what it computed last, which then could not be copied.
    twin = SummedTwin(layer, {}, last).module

    def gradients(module: nn.Module) -> list[Tensor]:
        y, wanted = run(module), [x, *module.parameters()]
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
        grads = torch.autograd.grad(y, wanted, dy, allow_unused=True)
        return [torch.zeros_like(w) if g is None else g for w, g in zip(wanted, grads, strict=True)]

    expected, computed = gradients(layer), gradients(twin)
    same = all(
        functional.mse_loss(a, b).sqrt() <= 1e-5 * b.square().mean().sqrt()
        for a, b in zip(computed, expected, strict=True)
    )
    return last if same else None


def _of_base(linear: str) -> str:
    """The module of the base where the linear module `linear` is an adapter's."""
    return f"{adapted_module(linear)}.{BASE}" if is_adapter(linear) else linear
