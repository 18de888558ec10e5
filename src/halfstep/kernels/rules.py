"""The arithmetic of the optimizers, as their papers have it: fp32 in, fp32 out, nothing about memory.

The same function serves fp32 tensors, numba's scalars and Triton's blocks. That is why

* every constant is an argument, an fp32 value that the host has computed in fp64: ``1 - beta2`` in here would be fp64
  on one executor and fp32 on another;
* roots, divisions and signs are arguments too: each executor has its own, and Triton's default ones are approximate;
* there is no branch: what is switched off is multiplied by 0 or 1;
* annotations are quoted: Triton reads them, and knows no names of this module.

``*_numbers`` computes the constants of one step from a parameter group, in the order in which the rule takes them.
``step`` counts from 1. It and the learning rate are Python numbers where the host knows them, and fp64 tensors where
only the device does, since it decides which steps are taken.

Sources: D. Kingma, J. Ba, *Adam*, ICLR 2015, Algorithm 1; I. Loshchilov, F. Hutter, *Decoupled Weight Decay
Regularization*, ICLR 2019, Algorithm 2; I. Sutskever et al., *On the importance of initialization and momentum in deep
learning*, ICML 2013; X. Chen et al., *Symbolic Discovery of Optimization Algorithms* (Lion), NeurIPS 2023, Algorithm 2.
"""

# ruff: noqa: UP037
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

N = Any  # a Python number, or an fp64 tensor with one for each parameter
V = Any  # an fp32 tensor, a scalar of numba's or a block of Triton's; `numbers`: a tuple of fp32 scalars


def adam(weight: "V", gradient: "V", first: "V", second: "V", numbers: "V", sqrt: "V", divide: "V") -> "V":
    """Kingma and Ba; the decay enters the gradient (Adam) or shrinks the weight (AdamW)."""
    coupled_decay, kept, first_kept, first_share, second_kept, second_share, step_size, root_scale, eps = numbers
    gradient = gradient + coupled_decay * weight
    first = first_kept * first + first_share * gradient
    second = second_kept * second + second_share * (gradient * gradient)
    weight = kept * weight - step_size * divide(first, sqrt(second) * root_scale + eps)
    return weight, first, second


def sgd(weight: "V", gradient: "V", first: "V", numbers: "V") -> "V":
    """Sutskever et al., as torch writes it; without momentum ``first`` is the gradient."""
    coupled_decay, momentum, share, own, ahead, lr = numbers
    gradient = gradient + coupled_decay * weight
    first = momentum * first + share * gradient
    weight = weight - lr * (own * gradient + ahead * first)
    return weight, first


def lion(weight: "V", gradient: "V", first: "V", numbers: "V", sign: "V") -> "V":
    """Chen et al.: the sign of what is ahead, and a memory that is longer than it."""
    kept, first_kept, first_share, ahead_kept, ahead_share, lr = numbers
    weight = kept * weight - lr * sign(ahead_kept * first + ahead_share * gradient)
    first = first_kept * first + first_share * gradient
    return weight, first


_SMALLEST_EPS = 2.0**-126  # fp32's smallest normal: 0/0 would be NaN for a weight that never had a gradient


def adam_numbers(group: Mapping[str, Any], step: "N") -> tuple["N", ...]:
    """For Adam (decay in the gradient) and AdamW (decay of the weight)."""
    lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
    is_decoupled = group["decoupled_weight_decay"]
    return (
        0.0 if is_decoupled else decay,
        1.0 - lr * decay if is_decoupled else 1.0,
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        lr / (1.0 - beta1**step),
        (1.0 - beta2**step) ** -0.5,
        max(group["eps"], _SMALLEST_EPS),
    )


def sgd_numbers(group: Mapping[str, Any], step: "N") -> tuple["N", ...]:
    """As in torch: the first gradient enters the momentum whole, and dampening acts from the second on."""
    momentum = group["momentum"]
    dampening = group["dampening"] if momentum else 0.0
    own, ahead = (1.0, momentum) if group["nesterov"] else (0.0, 1.0)
    return group["weight_decay"], momentum, 1.0 - dampening * (step > 1), own, ahead, group["lr"]


def lion_numbers(group: Mapping[str, Any], step: "N") -> tuple["N", ...]:  # noqa: ARG001 - Lion corrects no bias
    """The paper's beta1 is the share of the past in the direction, its beta2 that in what is kept."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    return 1.0 - lr * group["weight_decay"], beta2, 1.0 - beta2, beta1, 1.0 - beta1, lr


@dataclass(frozen=True)
class Rule:
    """A rule and what surrounds it.

    Args:
        name: of the function.
        function: the arithmetic.
        numbers: its constants of one step.
        moments: torch's names of the state that it keeps, in the order of the arguments.
    """

    name: str
    function: Callable[..., Any]
    numbers: Callable[[Mapping[str, Any], Any], tuple[Any, ...]]
    moments: tuple[str, ...]


ADAM = Rule("adam", adam, adam_numbers, ("exp_avg", "exp_avg_sq"))
SGD = Rule("sgd", sgd, sgd_numbers, ("momentum_buffer",))
LION = Rule("lion", lion, lion_numbers, ("exp_avg",))
