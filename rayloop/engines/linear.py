"""Linear layers on CPUs in float32: PyTorch's own products (MKL on x86) or oneDNN's, whichever is faster on this machine.

Neither is always: MKL took twice as long on an AMD processor, oneDNN twice as long for gradients of weights on an Intel one
(docs/performance.md). So both are timed, in a fraction of a second, when a process loads its first model. In bfloat16 PyTorch
itself goes to oneDNN.
"""

from __future__ import annotations

import time
from collections import Counter
from functools import cache, partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rayloop.engines.timing import GAIN, timed

Library = Literal["torch", "onednn"]

FEW = 256
"""Rows up to which a product counts as one of few: decoding has one per sequence, training thousands."""
WORK = 5e8
"""FLOP of a timed product of many rows: 4 ms at 125 GFLOP/s."""
SECONDS = 0.3
"""For all timings together, begun ones not counted."""


class Products(NamedTuple):
    """Who computes a layer of few rows, one of many, and the gradients of its rows and of its weight."""

    few: Library = "torch"
    many: Library = "torch"
    rows: Library = "torch"
    weight: Library = "torch"

    def __str__(self) -> str:
        names = {"torch": "mkl" if torch.backends.mkl.is_available() else "torch", "onednn": "onednn"}
        kinds = ("forward, few rows", "forward", "gradient of rows", "gradient of weights")
        by = {library: [kind for kind, of in zip(kinds, self, strict=True) if of == library] for library in names}
        if not all(by.values()):
            return next(names[library] for library, found in by.items() if found)
        return ", ".join(f"{names[library]} ({'; '.join(found)})" for library, found in by.items())


_chosen: list[Products] = []


def chosen() -> str:
    """Who computes this process's float32 products, for people; "" where nothing was chosen: on GPUs, or without a model."""
    return str(_chosen[-1]) if _chosen else ""


def use_fastest(model: nn.Module, kernels: Literal["auto", "torch", "onednn"]) -> None:
    """Let the model's linear layers compute float32 on a CPU with ``kernels``; auto: with what is faster here."""
    if torch.cuda.is_available() or not torch.backends.mkldnn.is_available():
        return
    products = Products(*[kernels] * 4) if kernels != "auto" else _measured(usual(model), torch.get_num_threads())
    _chosen.append(products)
    use(model, products)


def use(model: nn.Module, products: Products) -> None:
    """Let the model's linear layers compute float32 with ``products``, whatever they computed with before."""
    for module in model.modules():
        if type(module) is nn.Linear:
            vars(module).pop("forward", None)
            if products != Products():
                module.forward = partial(_linear, module, products)


def _linear(module: nn.Linear, products: Products, rows: Tensor) -> Tensor:
    """``rows`` [..., in] to [..., out]."""
    weight, bias = module.weight, module.bias
    if rows.dtype != torch.float32 or weight.dtype != torch.float32 or not rows.numel():
        return nn.functional.linear(rows, weight, bias)
    if not torch.is_grad_enabled():
        return _forward(products, rows, weight, bias)
    product: Tensor = _Linear.apply(products, rows, weight, bias)
    return product


def _forward(products: Products, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    few = rows.numel() <= FEW * rows.shape[-1]
    return _product(products.few if few else products.many, rows, weight, bias)


def _product(library: Library, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``rows weightᵀ + bias``, [..., in] and [out, in] to [..., out]."""
    if library == "torch":
        return nn.functional.linear(rows, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Products, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.products = products
        return _forward(products, rows, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        _, needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        flat = gradient.flatten(0, -2)
        return (
            None,
            _product(ctx.products.rows, gradient, weight.t()) if needs_rows else None,
            _product(ctx.products.weight, flat.t(), rows.flatten(0, -2).t()) if needs_weight else None,
            flat.sum(0) if needs_bias else None,
        )


def usual(model: nn.Module) -> tuple[int, int]:
    """(out, in) of the linear layers that a token costs most in, together."""
    work = Counter[tuple[int, int]]()
    for module in model.modules():
        if type(module) is nn.Linear:
            work[module.out_features, module.in_features] += module.weight.numel()
    return max(work, key=lambda shape: (work[shape], shape), default=(64, 64))


@cache
def _measured(shape: tuple[int, int], threads: int) -> Products:
    """The faster library for each product of a layer of this shape. Once in a process: models that it loads later compute alike."""
    out, into = (min(side, 4096) for side in shape)
    drawn = torch.Generator().manual_seed(0)  # its own: what the process draws must not depend on what was measured
    number = max(2 * FEW, int(WORK / (2 * out * into)))
    sizes = ((out, into), (FEW // 4, into), (number, into), (number, out))
    weight, few, many, gradient = (torch.randn(size, generator=drawn) for size in sizes)
    until = time.perf_counter() + SECONDS
    return Products(*(
        _faster(rows, other, until - SECONDS * (3 - number) / 4)
        for number, (rows, other) in enumerate(
            ((few, weight), (many, weight), (gradient, weight.t()), (gradient.t(), many.t()))
        )
    ))  # fmt: skip


@torch.no_grad()
def _faster(rows: Tensor, weight: Tensor, until: float) -> Library:
    """Both in turn, until this moment."""
    best = timed({library: partial(_product, library, rows, weight) for library in get_args(Library)}, until)
    return "onednn" if best["onednn"] < GAIN * best["torch"] else "torch"
