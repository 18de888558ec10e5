"""Run the products of fp16 or bf16 on a CPU that has no arithmetic for them.

A Tensor Core multiplies 16-bit numbers, adds the products up in fp32 and rounds the sum once, to 16 bits. On a CPU
without such instructions torch's own 16-bit products are 26 to 62 times slower than fp32 (measured on two of them).
``emulate`` gives the Tensor Core's result at about the speed of fp32: tensors of the format are read as fp32, which is
exact, torch's fp32 kernel runs, and its result is rounded once. Sums may pass the format's largest value on the way;
only a result that ends beyond it becomes inf.

It is a ``TorchDispatchMode``, below autograd and autocast. So it sees forward and backward, autocast's casts, double
backward and recomputation alike, and knows every operation by name:

    products      mm bmm addmm addmv addbmm baddbmm mv dot vdot and what torch builds of them (linear, matmul, einsum,
                  tensordot, RNN, GRU, most LSTMs), in-place and ``out=`` forms; bilinear; grouped_mm
    convolutions  1d, 2d, 3d, transposed, conv_tbc, forward and backward
    attention     torch's CPU flash attention, forward and backward, with the roundings of a GPU's flash kernel: scores,
                  softmax and running sums stay in fp32; the probabilities, and in the backward pass the gradients of
                  the scores, are rounded, because the next product reads them; every output is rounded once
    refused       with ``UnsupportedError``: the fused inference kernels of TransformerEncoderLayer and
                  MultiheadAttention, oneDNN's fused LSTM, and higher-order operations (flex_attention, cond)

Everything else runs as it is: torch itself rounds element-wise operations, softmax and normalisation to 16 bits. So do
products of other dtypes, of mixed ones, of sparse or nested tensors, or on other devices, with torch's own errors.

What differs from a GPU: the order of the fp32 additions (it differs between GPUs too); a GPU may add a convolution's
bias with a second rounding, here there is one; a GPU's flash kernel scales the probabilities by the largest score so
far before it rounds them, here by the row's largest. What differs from torch without emulation: under
``torch.inference_mode`` torch hides autocast from any dispatch mode, so that operations which autocast does not list
(einsum, GRU) keep the dtype of their tensors; use ``torch.no_grad``. Time under emulation says nothing about a GPU.

Sources: Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740), section 3.3, for products with fp32
accumulation; Dao, "FlashAttention-2" (arXiv 2307.08691), algorithms 1 and 2, and flash_fwd_kernel.h and
flash_bwd_kernel.h of Dao-AILab/flash-attention for what is rounded where.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep._compat import HigherOrderOperator, autocast_depth, is_composite
from halfstep.emulated_attention import Attention
from halfstep.errors import ArgumentError, UnsupportedError
from halfstep.formats import BF16, FP16, FP32, FloatFormat, format_of
from halfstep.hardware import Hardware, probe

aten = torch.ops.aten

# An operation of torch, overload and all, such as torch.ops.aten.mm.default.
_Op: TypeAlias = Any
# How an operation is emulated. NotImplemented: these tensors are not ours, let torch have them.
_Rule: TypeAlias = "Callable[[Emulation, _Op, tuple[Any, ...], dict[str, Any]], Any]"


def emulate(format: str | torch.dtype | FloatFormat = "fp16") -> Emulation:
    """Run products of a 16-bit format as fp32 products that are rounded once, as a Tensor Core does.

    Use it around forward *and* backward. A backward outside it computes the same quantities with torch's own CPU
    kernels: slow, and rounded where those round.

    Args:
        format: ``"fp16"`` or ``"bf16"``, by name, dtype or as a FloatFormat.

    Returns:
        A context manager that is also a decorator. It can be entered again, and nested, also for both formats at once.

    Raises:
        ArgumentError: another format.
        UnsupportedError: inside the context, when an operation on tensors of the format fuses several products into
            one kernel, whose roundings cannot be emulated from outside.

    Example:
        >>> import torch
        >>> row, column = torch.full((1, 2), 300.0).half(), torch.tensor([[300.0], [-300.0]]).half()
        >>> with emulate("fp16"):
        ...     print(row @ column, row @ column.abs())   # 90000 - 90000, and 90000 + 90000
        tensor([[0.]], dtype=torch.float16) tensor([[inf]], dtype=torch.float16)

        With autocast, the usual way to train::

            with halfstep.emulate("fp16"):
                with torch.autocast("cpu", torch.float16):
                    loss = loss_of(model(x), y)
                scaler.scale(loss).backward()
    """
    fmt = format_of(format)
    if fmt not in (FP16, BF16):
        raise ArgumentError(
            asked=f"emulate({fmt.name!r})",
            true="emulation is for products of fp16 and bf16 tensors",
            why=f"products of {fmt.name} are not what a CPU lacks: there is nothing to replace",
            fix='pass "fp16" or "bf16"; to round values to any format use halfstep.formats.round_to',
        )
    return Emulation(fmt)


def needs_emulation(dtype: str | torch.dtype | FloatFormat) -> bool:
    """Whether this machine's CPU lacks instructions for products of a dtype, so that ``emulate`` makes them faster.

    Args:
        dtype: fp32, fp16 or bf16, by name, dtype or as a FloatFormat.

    Returns:
        False for fp32 and wherever ``halfstep.probe("cpu")`` calls the format native. Nothing is timed.

    Raises:
        ArgumentError: another format.

    Example:
        >>> needs_emulation(torch.float32)
        False
    """
    fmt = format_of(dtype)
    if fmt not in (FP32, FP16, BF16):
        raise ArgumentError(
            asked=f"needs_emulation({fmt.name!r})",
            true="emulation is for products of fp16 and bf16 tensors",
            why=f"no CPU multiplies {fmt.name} tensors, with or without emulation",
            fix="ask for fp16, bf16 or fp32",
        )
    return fmt.name not in _this_cpu().native_formats


@functools.cache
def _this_cpu() -> Hardware:
    return probe("cpu")


class Emulation(TorchDispatchMode, contextlib.ContextDecorator):  # type: ignore[no-untyped-call]  # torch's is
    """What ``emulate`` returns: a dispatch mode that replaces the products of one format.

    Args:
        format: FP16 or BF16.

    Example:
        >>> Emulation(FP16).format.name
        'fp16'
    """

    # torch then asks us about higher-order operations, and we can refuse them by name.
    supports_higher_order_operators = True

    def __init__(self, format: FloatFormat) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert format in (FP16, BF16), format
        self.format = format
        self.dtype = torch.float16 if format == FP16 else torch.bfloat16
        # Tensor.half() takes half the time of Tensor.to(torch.float16) on small tensors: parsing the arguments of `to`
        # costs more than the cast.
        self.round: Callable[[Tensor], Tensor] = Tensor.half if format == FP16 else Tensor.bfloat16

    def __torch_dispatch__(
        self, func: _Op, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operation inside the context, below autograd and autocast."""
        rule = _RULES[func]
        if rule is not None:
            result = rule(self, func, args, kwargs or {})
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs) if kwargs else func(*args)

    def covers(self, tensors: Iterable[Tensor]) -> bool:
        """Whether the floating tensors among these are dense CPU tensors of the format, all of them, and at least one.

        Args:
            tensors: the tensors of one operation.

        Returns:
            False also where there is no floating tensor at all.
        """
        found = False
        for tensor in tensors:
            if tensor.dtype is self.dtype:
                if not _is_dense_cpu(tensor):
                    return False
                found = True
            elif tensor.is_floating_point() or tensor.is_complex():
                return False
        return found


def _is_dense_cpu(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_nested


def _tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors of a call, those in lists included."""
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))


def _widen(value: Any, dtype: torch.dtype) -> Any:
    """The fp32 copy of a tensor of this dtype, also in lists; anything else as it is."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype is dtype else value
    if isinstance(value, (list, tuple)):
        return [_widen(item, dtype) for item in value]
    return value


# ----------------------------------------------------------------------------------------------------------------------
# Rules: products and convolutions
# ----------------------------------------------------------------------------------------------------------------------


def _product(mode: Emulation, op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums of products: fp32 in, torch's fp32 kernel, one rounding out."""
    if not mode.covers(_tensors_in(args, kwargs)):
        return NotImplemented
    wide = {name: _widen(value, mode.dtype) for name, value in kwargs.items()}
    result = op(*[_widen(value, mode.dtype) for value in args], **wide)
    if isinstance(result, Tensor):
        return mode.round(result)
    # convolution_backward leaves out the gradients that nobody asked for; _foreach_mm returns a list.
    return type(result)(None if part is None else mode.round(part) for part in result)


def _in_place(functional: _Op) -> _Rule:
    """``x.addmm_(a, b)``: x takes part in fp32 and is written once."""

    def rule(mode: Emulation, _op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = _product(mode, functional, args, kwargs)
        if result is NotImplemented or result.shape != args[0].shape:
            return NotImplemented  # x cannot grow: torch says so
        return args[0].copy_(result)

    return rule


def _into_out(functional: _Op) -> _Rule:
    """``torch.mm(a, b, out=c)``: like any ``out=`` of torch, c is resized where it must be."""

    def rule(mode: Emulation, _op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not mode.covers(_tensors_in(args, kwargs)):
            return NotImplemented
        inputs = {name: value for name, value in kwargs.items() if name != "out"}
        return aten.clone.out(_product(mode, functional, args, inputs), out=kwargs["out"])

    return rule


def _grouped_mm(mode: Emulation, op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One product per group of rows, as mixtures of experts use it; its out_dtype can only name the tensors' own."""
    inputs = dict(zip(("offs", "bias", "out_dtype"), args[2:], strict=False)) | kwargs
    if inputs.pop("out_dtype", None) not in (None, mode.dtype):
        return NotImplemented
    return _product(mode, op, args[:2], inputs)


def _by_its_parts(mode: Emulation, op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation that torch builds from others, such as linear: emulate those.

    Autograd takes such operations apart before they get here, except where it is not asked: in inference mode.
    """
    if not all(_is_dense_cpu(tensor) for tensor in _tensors_in(args, kwargs)):
        return NotImplemented
    with mode:
        return op.decompose(*args, **kwargs)


# ----------------------------------------------------------------------------------------------------------------------
# Rules: attention
# ----------------------------------------------------------------------------------------------------------------------


def _flash_forward(mode: Emulation, _op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    attention = Attention(*args, **kwargs)
    return attention.forward(mode.round) if attention.is_covered(mode.covers, mode.dtype) else NotImplemented


def _flash_backward(mode: Emulation, _op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad_out, query, key, value, out, logsumexp, *options = args
    attention = Attention(query, key, value, *options, **kwargs)
    if not (attention.is_covered(mode.covers, mode.dtype) and mode.covers((grad_out, out))):
        return NotImplemented
    return attention.backward(grad_out, out, logsumexp, mode.round)


# ----------------------------------------------------------------------------------------------------------------------
# Rules: refusals
# ----------------------------------------------------------------------------------------------------------------------


def _refuse(why: str, fix: str, *, under_autocast: bool = False) -> _Rule:
    """A rule that raises where tensors of the format are given, or fp32 ones that autocast would cast within."""

    def rule(mode: Emulation, op: _Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_concerned = any(tensor.dtype is mode.dtype and tensor.is_cpu for tensor in _tensors_in(args, kwargs))
        if not is_concerned and not (under_autocast and autocast_depth() > 0):
            return NotImplemented
        raise UnsupportedError(
            asked=f"{op} in {mode.format.name} under halfstep.emulate({mode.format.name!r})",
            true="emulation replaces single products, convolutions and attention",
            why=why,
            fix=fix,
        )

    return rule


_FAST_PATH_FIX = "call torch.backends.mha.set_fastpath_enabled(False) first, or keep the module in training mode"
_PLAIN_FIX = "call the functions directly (for flex_attention: torch.nn.functional.scaled_dot_product_attention)"
_REFUSALS = {
    "_transformer_encoder_layer_fwd": _refuse(
        "the inference kernel of torch.nn.TransformerEncoderLayer fuses several products and rounds in between",
        _FAST_PATH_FIX,
        under_autocast=True,  # which it does not heed below a dispatch mode: it would run in fp32
    ),
    "_native_multi_head_attention": _refuse(
        "the inference kernel of torch.nn.MultiheadAttention fuses several products and rounds in between",
        _FAST_PATH_FIX,
    ),
    "mkldnn_rnn_layer": _refuse(
        "oneDNN's LSTM fuses all time steps into one kernel, and has none for this format on such a CPU",
        "run it in fp32 under torch.autocast('cpu', enabled=False), or set torch.backends.mkldnn.enabled = False: then "
        "torch takes it apart into products that are emulated",
    ),
}

# ----------------------------------------------------------------------------------------------------------------------
# Which rule for which operation
# ----------------------------------------------------------------------------------------------------------------------

_SUMS_OF_PRODUCTS = (
    "mm", "bmm", "addmm", "addmv", "addbmm", "baddbmm", "mv", "dot", "vdot", "_addmm_activation", "_foreach_mm",
    "_trilinear", "convolution", "convolution_backward", "conv_tbc",
)  # fmt: skip
_ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu": _flash_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_backward,
}


class _RuleOf(dict[_Op, "_Rule | None"]):
    """Operation -> its rule, or None: one dictionary look-up for each operation that torch runs."""

    def __missing__(self, op: _Op) -> _Rule | None:
        rule: _Rule | None = None
        if isinstance(op, HigherOrderOperator):
            rule = _refuse("it runs functions of yours as one operation, below where emulation looks", _PLAIN_FIX)
        elif is_composite(op):
            rule = _by_its_parts
        self[op] = rule
        return rule


def _overload(name: str, overload: str) -> _Op | None:
    """An overload that this version of torch may lack."""
    return getattr(getattr(aten, name, None), overload, None)


def _build_rules() -> Iterator[tuple[_Op | None, _Rule]]:
    for name in _SUMS_OF_PRODUCTS:
        functional = _overload(name, "default")
        yield functional, _product
        yield _overload(f"{name}_", "default"), _in_place(functional)
        if name != "convolution_backward":  # has three outputs
            yield _overload(name, "out"), _into_out(functional)
    yield _overload("_grouped_mm", "default"), _grouped_mm
    for name, rule in (_ATTENTION | _REFUSALS).items():
        yield _overload(name, "default"), rule


_RULES = _RuleOf({op: rule for op, rule in _build_rules() if op is not None})
