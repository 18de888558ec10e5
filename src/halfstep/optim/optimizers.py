"""AdamW, Adam, SGD and Lion: torch's constructors, and a step in fp32 whose state takes 5 to 14 bytes per parameter.

    16-bit weights, and what is kept       bytes   (weight, gradient, master, moments of Adam)
    fp32 masters                            16     2 + 2 + 4 + 8
    split                                   14     2 + 2 + 2 + 8
    split, bf16 moments                     10     2 + 2 + 2 + 4
    split8, int8 moments                     7.13  2 + 2 + 1 + 2.13
    stochastic, int8 moments                 6.13  2 + 2 + 0 + 2.13

What all of them have in common is in packed.py, the arithmetic in kernels/rules.py, the storages in kernels/storage.py.

Sources: see kernels/rules.py for the rules, kernels/storage.py for the storages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from halfstep._compat import is_host
from halfstep.kernels import rules
from halfstep.optim import packed_refusals as refusals
from halfstep.optim.packed import PackedOptimizer, TorchClass
from halfstep.policy import Policy

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class Adam(PackedOptimizer):
    """Adam, with the decay in the gradient; everything else is as in :class:`AdamW`.

    Source: Kingma and Ba, *Adam*, ICLR 2015, Algorithm 1.
    """

    rule = rules.ADAM
    torch_class: TorchClass | None = torch.optim.Adam

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        policy: str | Policy | None = None,
        master: str | None = None,
        moments: str | None = None,
        executor: str = "auto",
        clip_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        self.check_group(defaults)
        super().__init__(
            params,
            defaults,
            policy=policy,
            master=master,
            moments=moments,
            executor=executor,
            clip_norm=clip_norm,
            seed=seed,
        )

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raise if a hyperparameter is out of range."""
        _check_common(self, group)
        _check_betas(self, group["betas"])
        if not _is_from_0_on(group["eps"]):
            raise refusals.bad_number(self, "eps", group["eps"], "it is added to a root, and is at least 0")
        if group["amsgrad"]:
            raise refusals.amsgrad(self)


class AdamW(Adam):
    """AdamW for fp32, bf16 and fp16 weights: stepped in fp32, kept in few bytes.

    Args:
        params: parameters, groups, or named parameters, as in torch.
        lr: learning rate; a number, or a 0-dim tensor, which is not read on the host if it is on the device.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: share of a weight that is taken off in a step, times ``lr``.
        amsgrad: refused; in its place for torch's sake.
        maximize: whether to climb.
        foreach: without effect, as are ``capturable`` and ``fused``: ``executor`` says how a step runs, and no step is
            read on the host. They are kept for :meth:`to_torch`.
        capturable: see ``foreach``.
        differentiable: refused.
        fused: see ``foreach``.
        policy: ``"bf16-master"`` or ``"fp16-master"`` casts the trainable fp32 weights in place, on the same Parameter
            objects, and keeps what they lose; options in its text count: ``"bf16-master,master=split8,moments=int8"``.
            None: the weights stay as they are.
        master: what is kept beside a 16-bit weight: ``"fp32"`` (4 bytes), ``"split"`` (2; bf16: every bit of an fp32
            master; the default), ``"split8"`` (1; 24 bits), ``"stochastic"`` (0; rounded by chance) or ``"none"`` (0;
            small updates are lost, so it warns). A group may have its own.
        moments: ``"fp32"`` (4 bytes each; the default), ``"bf16"`` (2) or ``"int8"`` (1.06; matrices only, other
            parameters keep bf16). A group may have its own.
        executor: ``"auto"``, ``"numba"`` (CPU), ``"triton"`` (CUDA) or ``"torch"``; they differ in speed.
        clip_norm: largest norm of the true gradient of a step. (A Stepper has its own.)
        seed: of the bits by which values are rounded by chance.

    It is a ``torch.optim.Optimizer``: groups, schedulers, hooks and closures work as ever. Under a GradScaler or
    Stepper the division by the scale is part of the step; alone it looks at the gradients first, clips, and skips a
    step with inf or NaN in it. What others write into a weight holds.

    Raises:
        ArgumentError: a value is out of range, or names contradict each other.
        UnsupportedError: sharded parameters, parameters that overlap or have gaps in memory; an executor that cannot
            run here; sparse gradients (in ``step``).

    Sources: Loshchilov and Hutter, *Decoupled Weight Decay Regularization*, ICLR 2019, Algorithm 2; for the storages
    see ``halfstep/kernels/storage.py``.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = AdamW([weight], lr=1e-4, weight_decay=0.0, policy="bf16-master")
        >>> for _ in range(8):
        ...     weight.sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> weight.dtype, weight.item(), round(optimizer.full_weight(weight).item(), 6)
        (torch.bfloat16, 1.0, 0.9992)
    """

    torch_class: TorchClass | None = torch.optim.AdamW
    fixed_options: Mapping[str, Any] = {"decoupled_weight_decay": True}  # as in torch: Adam's state makes no Adam of it

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        policy: str | Policy | None = None,
        master: str | None = None,
        moments: str | None = None,
        executor: str = "auto",
        clip_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            policy=policy,
            master=master,
            moments=moments,
            executor=executor,
            clip_norm=clip_norm,
            seed=seed,
        )


class SGD(PackedOptimizer):
    """Gradient descent with momentum, dampening and Nesterov's step, as torch has them; the rest as :class:`AdamW`.

    Source: Sutskever et al., *On the importance of initialization and momentum in deep learning*, ICML 2013.
    """

    rule = rules.SGD
    torch_class: TorchClass | None = torch.optim.SGD

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        policy: str | Policy | None = None,
        master: str | None = None,
        moments: str | None = None,
        executor: str = "auto",
        clip_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": differentiable,
            "fused": fused,
        }
        self.check_group(defaults)
        super().__init__(
            params,
            defaults,
            policy=policy,
            master=master,
            moments=moments,
            executor=executor,
            clip_norm=clip_norm,
            seed=seed,
        )

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raise if a hyperparameter is out of range."""
        _check_common(self, group)
        if not _is_from_0_on(group["momentum"]):
            raise refusals.bad_number(self, "momentum", group["momentum"], "it is the share of the past, at least 0")
        if not _is_number(group["dampening"]):
            raise refusals.bad_number(self, "dampening", group["dampening"], "it is a finite number")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise refusals.bad_number(self, "nesterov", True, "it needs momentum, and no dampening")


class Lion(PackedOptimizer):
    """Lion: one moment, and a step of the same size for every weight; the storages as in :class:`AdamW`.

    Args:
        params: as in torch.
        lr: learning rate; about a tenth of what AdamW would have.
        betas: share of the past in the direction, and in what is kept, each in [0, 1).
        weight_decay: decoupled; about ten times what AdamW would have.
        maximize: whether to climb.
        policy: this and the others as in :class:`AdamW`.
        master: see there.
        moments: see there.
        executor: see there.
        clip_norm: see there.
        seed: see there.

    Source: Chen et al., *Symbolic Discovery of Optimization Algorithms*, NeurIPS 2023, Algorithm 2.
    """

    rule = rules.LION

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        policy: str | Policy | None = None,
        master: str | None = None,
        moments: str | None = None,
        executor: str = "auto",
        clip_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        self.check_group(defaults)
        super().__init__(
            params,
            defaults,
            policy=policy,
            master=master,
            moments=moments,
            executor=executor,
            clip_norm=clip_norm,
            seed=seed,
        )

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raise if a hyperparameter is out of range."""
        _check_common(self, group)
        _check_betas(self, group["betas"])


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _is_from_0_on(value: Any) -> bool:
    return _is_number(value) and value >= 0.0


def _check_common(optimizer: PackedOptimizer, group: Mapping[str, Any]) -> None:
    lr, decay = group["lr"], group["weight_decay"]
    if isinstance(lr, Tensor) and (lr.numel() != 1 or not lr.is_floating_point()):
        raise refusals.bad_number(optimizer, "lr", lr, "as a tensor it has one floating element")
    is_on_host = type(lr) is Tensor and is_host(lr.device)
    lr = lr.item() if is_on_host else lr  # elsewhere its value may be on its way
    if not isinstance(lr, Tensor) and not _is_from_0_on(lr):
        raise refusals.bad_number(optimizer, "lr", lr, "a learning rate is finite and not negative")
    if not _is_from_0_on(decay):
        raise refusals.bad_number(optimizer, "weight_decay", decay, "it is a share of the weight, and not negative")
    if group.get("differentiable"):
        raise refusals.differentiable(optimizer)


def _check_betas(optimizer: PackedOptimizer, betas: Any) -> None:
    is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not is_pair or not all(_is_from_0_on(beta) and beta < 1.0 for beta in betas):
        raise refusals.bad_number(optimizer, "betas", betas, "they are two numbers in [0, 1)")
