"""How far off the sum of a window's gradients is.

Purpose: show what the format of a sum costs, apart from that of its terms. Method: a hook on each parameter sees every
micro-batch's gradient before autograd adds it to the others, and adds it to a sum of its own in fp64. That sum's
rounding is below 2**-50 of its terms, so what differs from it is the error of the sum that the optimizer gets.

Not here: the error of the terms themselves, which are taken as they are, rounded to 16 bits or not.

Source: N. J. Higham, The Accuracy of Floating Point Summation, SIAM J. Sci. Comput. 14 (1993), section 2: the error of
a recursive sum grows with its number of terms and with the unit roundoff of the partial sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from halfstep.kernels.gradients import gradient_of


class ExactSums:
    """Sums in fp64 of the gradients that arrive at some parameters.

    Args:
        parameters: leaves that require gradients.

    Example:
        >>> weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
        >>> sums = ExactSums([weight])
        >>> for _ in range(1024):
        ...     weight.sum().backward()
        >>> weight.grad.item(), sums.error()
        (256.0, 0.75)
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._sums = {p: torch.zeros_like(p, dtype=torch.float64) for p in parameters if p.requires_grad}
        for parameter in self._sums:
            parameter.register_hook(partial(self._add, parameter))  # type: ignore[no-untyped-call]

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        self._sums[parameter].add_(gradient)  # type: ignore[index]

    def clear(self) -> None:
        """A window begins."""
        for exact in self._sums.values():
            exact.zero_()

    def error(self) -> float:
        """The distance of the parameters' present gradients from the exact sums, relative to the exact sums' norm.

        Returns:
            0 or more; 1 where there is no gradient; NaN before the first one.
        """
        distances, lengths = [], []
        for parameter, exact in self._sums.items():
            gradient = gradient_of(parameter)
            distances.append((exact if gradient is None else gradient.double() - exact).norm())
            lengths.append(exact.norm())
        return float(torch.stack(distances).norm() / torch.stack(lengths).norm())
