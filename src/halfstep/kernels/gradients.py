"""The gradient of a parameter, wherever it is kept.

torch keeps it in ``p.grad``, in the parameter's dtype. bf16 has 8 bits: a sum of micro-batches stops growing at 256
times one of them. So a window of several micro-batches sums 16-bit gradients in fp32, in the attribute ``p.fp32_grad``,
and frees each 16-bit one as soon as it is added: 4 bytes per parameter, and 2 for the largest gradient in flight.

Not torch's ``grad_dtype``, which deepcopy and pickle drop and FSDP2 refuses.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from halfstep.kernels.choose import TORCH, Executor


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The sum in fp32 if there is one, else ``.grad``."""
    summed: Tensor | None = getattr(parameter, "fp32_grad", None)
    return parameter.grad if summed is None else summed


def add_to_fp32_sums(parameters: Iterable[Tensor], executor: Executor = TORCH) -> None:
    """Move each ``.grad`` into its sum: one read of the 16-bit gradient, one read and write of the sum.

    Args:
        parameters: those without a gradient are left out.
        executor: adds.
    """
    sums, gradients = [], []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        summed: Tensor | None = getattr(parameter, "fp32_grad", None)
        if summed is None:
            parameter.fp32_grad = gradient.detach().float()  # type: ignore[attr-defined]
        else:
            if summed.is_sparse and not gradient.is_sparse:
                parameter.fp32_grad = gradient.detach().float().add_(summed)  # type: ignore[attr-defined]
            else:
                sums.append(summed)
                gradients.append(gradient.detach())
        parameter.grad = None
    if sums:
        executor.module.add(sums, gradients)


def drop_gradient(parameter: Tensor) -> None:
    """Free both."""
    parameter.grad = None
    drop_sum(parameter)


def drop_sum(parameter: Tensor) -> None:
    """Free the sum."""
    if getattr(parameter, "fp32_grad", None) is not None:
        del parameter.fp32_grad  # type: ignore[attr-defined]
