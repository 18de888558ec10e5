"""Which dtype each operation runs in under a policy, found by running it on this device.

torch documents lists of what autocast casts. They differ between devices and versions, and what is on no list follows
its inputs. So every operation is run here under the policy's autocast, three times: with its activations in fp32, in
the policy's 16-bit dtype, and, where it takes several, one in 16 bits and the others in fp32. A ``TorchDispatchMode``
lies below autocast and sees the kernels with the dtypes that they are really given.

    runs in 16 bits         with whatever it takes: autocast casts it down, or it fails with fp32 (weights in 16 bits)
    runs in fp32            with whatever it takes: autocast or torch itself casts it up, or it fails with 16 bits
    widest input            16 bits with 16 bits; fp32 as soon as one tensor is fp32
    follows its input       16 bits with 16 bits, fp32 with fp32; mixed inputs are an error, or there is but one input
    refused                 it does not run: torch forbids it under autocast, or has no kernel for it on this device

The dtype of a kernel is what it reads and writes, not what it adds in: torch's 16-bit sum adds in fp32. What reaches
the result is measured beside it, as the error of the 16-bit run against fp64 in ulp of the 16-bit format; up to 0.5 is
one rounding, and nothing was lost on the way.

Not here: the backward pass (autograd runs each backward in the dtypes of its forward), speed (``halfstep.bench``),
products that read fp32 as tf32 (the policy tf32 shows as fp32, which is what it stores).

Source: "Automatic Mixed Precision package - torch.amp", op-specific behavior, in torch's documentation.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.autocast_cases import ALL_CASES, OpCase
from halfstep.errors import UnsupportedError
from halfstep.formats import format_of
from halfstep.hardware import as_device, probe
from halfstep.policy import Policy


class OpKind(enum.Enum):
    """What decides the dtype that an operation runs in."""

    HALF = "runs in 16 bits"
    FP32 = "runs in fp32"
    WIDEST = "widest input"
    FOLLOWS = "follows its input"
    REFUSED = "refused"


@dataclass(frozen=True)
class OpRun:
    """What was seen when an operation ran once.

    Args:
        given: dtype of its activations: ``"fp32"``, ``"bf16"``, or ``"bf16+fp32"`` for one of each.
        kernels: dtypes that its kernels ran in, in order of use; casts and views do not count.
        outputs: dtypes of its floating results.
        error: the first line of torch's error; empty if it ran.
    """

    given: str
    kernels: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    error: str = ""

    @property
    def dtype(self) -> str:
        """The dtype of the first kernel, which is the one that the operation is named after."""
        return (*self.kernels, *self.outputs, "")[0]


@dataclass(frozen=True)
class OpDtypes:
    """One operation under one policy.

    Args:
        name: of the operation.
        family: what it belongs to, such as ``"products"``; ``"halfstep.ops"`` for halfstep's own functions.
        runs: with fp32 activations; then, if the policy has a 16-bit dtype, with those; then with one of each.
        error_ulp: worst error of the 16-bit run against fp64, in ulp of the 16-bit format; None where nothing is
            rounded to 16 bits in this policy, or where the result is random or no floating-point number.

    Example:
        >>> from halfstep.policy import Policy
        >>> table = {op.name: op for op in ops_table(Policy.parse("bf16-mixed"), "cpu")}
        >>> table["matmul"].kind.value, table["mse_loss"].kind.value, table["add"].kind.value
        ('runs in 16 bits', 'runs in fp32', 'widest input')
    """

    name: str
    family: str
    runs: tuple[OpRun, ...]
    error_ulp: float | None = None

    @property
    def kind(self) -> OpKind:
        """What decides the dtype that it runs in."""
        pure = [run for run in self.runs if "+" not in run.given and not run.error]
        dtypes = {run.dtype for run in pure}
        if not pure:
            return OpKind.REFUSED
        if len(dtypes) == 1:
            return OpKind.FP32 if dtypes == {"fp32"} else OpKind.HALF
        mixed = [run for run in self.runs if "+" in run.given]
        is_widest = any("fp32" in run.kernels for run in mixed)
        return OpKind.WIDEST if is_widest else OpKind.FOLLOWS

    @property
    def rounds_once(self) -> bool | None:
        """Whether the 16-bit run is the exact result, rounded once; None where ``error_ulp`` is."""
        return None if self.error_ulp is None else self.error_ulp <= ONE_ROUNDING_ULP

    @property
    def notes(self) -> tuple[str, ...]:
        """What the kind does not say: errors, and results in another dtype than the first kernel's."""
        found = [f"{run.given}: {run.error}" for run in self.runs if run.error]
        for run in self.runs:
            others = [dtype for dtype in run.outputs if dtype != run.dtype]
            if others and not run.error:
                found.append(f"{run.given}: gives {', '.join(others)}")
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        runs = [
            {"given": run.given, "kernels": list(run.kernels), "outputs": list(run.outputs), "error": run.error or None}
            for run in self.runs
        ]
        return {
            "name": self.name,
            "family": self.family,
            "kind": self.kind.value,
            "runs": runs,
            "error_ulp": self.error_ulp,
        }


# Half an ulp is one rounding. An operation in fp32 before it adds up to 2**-13 ulp of fp16; 0.01 leaves room for 80.
ONE_ROUNDING_ULP = 0.51


def ops_table(
    policy: Policy | str,
    device: str | torch.device | None = None,
    *,
    cases: Sequence[OpCase] = ALL_CASES,
) -> tuple[OpDtypes, ...]:
    """Run every operation under a policy and say which dtype it ran in.

    Args:
        policy: whose autocast is on, and whose ``param_dtype`` the weights have. Without autocast operations run in
            the dtype of their tensors.
        device: where to run; None is the current accelerator, or the CPU if there is none.
        cases: the operations.

    Returns:
        One entry per case, in their order. An operation that fails is an entry too. Inputs hold 4096 numbers at
        most; the random state is left as it was.

    Raises:
        ArgumentError: the policy or device is unknown.
        UnsupportedError: this machine has no such device, or autocast or the policy cannot run there.
        CallOrderError: the policy is tf32 and torch's switch for it is off.

    Example:
        >>> [op] = [op for op in ops_table("bf16-mixed", "cpu") if op.name == "add"]
        >>> [(run.given, run.dtype) for run in op.runs]
        [('fp32', 'fp32'), ('bf16', 'bf16'), ('bf16+fp32', 'fp32')]
    """
    policy = Policy.parse(policy)
    hardware = probe(device)  # says what is wrong with a device that is not there
    place = as_device(hardware.device_type if device is None else device)
    if policy.tf32:
        Policy.parse(str(policy), hardware=hardware)  # refuses it where there is no tf32
    context = _context(policy, place)
    with _random_state_kept(place), warnings.catch_warnings(), torch.enable_grad(), context:
        warnings.simplefilter("ignore")  # torch's hints about slow paths; the table is about dtypes
        return tuple(_find(case, policy, place) for case in cases)


def _random_state_kept(place: torch.device) -> AbstractContextManager[Any]:
    if place.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[place], device_type=place.type)


def _context(policy: Policy, place: torch.device) -> AbstractContextManager[Any]:
    if not torch.amp.is_autocast_available(place.type):
        raise UnsupportedError(
            asked=f"the dtypes of operations on {place.type!r}",
            true=f"torch {torch.__version__} has no autocast for {place.type}",
            why="there are no casts to find",
            fix='pass the device that the model trains on, such as "cpu"',
        )
    if policy.is_mixed:
        return policy.autocast(place)
    # Nothing of any other policy matters here but the weights' dtype: options for optimizers refuse nothing.
    return torch.autocast(place.type, enabled=False)


def _find(case: OpCase, policy: Policy, place: torch.device) -> OpDtypes:
    wide, half = (torch.float32,) * len(case.inputs), policy.compute_dtype
    if half == torch.float32:
        return OpDtypes(case.name, case.family, (_run(case, wide, policy, place)[0],))
    narrow = (half,) * len(case.inputs)
    run, error_ulp = _run(case, narrow, policy, place)
    runs = [_run(case, wide, policy, place)[0], run]
    if len(case.inputs) > 1:
        runs.append(_run(case, (half, *wide[1:]), policy, place)[0])
    return OpDtypes(case.name, case.family, tuple(runs), error_ulp)


def _run(
    case: OpCase, dtypes: Sequence[torch.dtype], policy: Policy, place: torch.device
) -> tuple[OpRun, float | None]:
    """What was seen, and the error against fp64 in ulp of the policy's 16-bit format, if it has one."""
    given = "+".join(dict.fromkeys(_name(dtype) for dtype in dtypes))
    tensors = _tensors(case, dtypes, policy, place)
    with _Kernels() as kernels:
        try:
            result = case.call(*tensors)
        # Whatever an operation raises is an answer about it, and no reason to lose the others.
        except Exception as error:
            return OpRun(given, error=_first_line(error)), None
    run = OpRun(given, tuple(dict.fromkeys(kernels.dtypes)), tuple(dict.fromkeys(_dtypes_of(result))))
    if set(dtypes) != {policy.compute_dtype} or policy.compute_dtype == torch.float32 or case.is_random:
        return run, None
    return run, _error_ulp(result, _exact(case, tensors), policy.compute_dtype)


def _tensors(case: OpCase, dtypes: Sequence[torch.dtype], policy: Policy, place: torch.device) -> list[Tensor]:
    """The same values in every run: numbers that the 16-bit format has, so that a cast of the inputs changes none."""
    generator = torch.Generator().manual_seed(0)
    shapes = (*case.inputs, *case.weights)
    wanted = (*dtypes, *(policy.param_dtype for _ in case.weights))
    values = [(torch.rand(shape, generator=generator) * 0.75 + 0.125).to(policy.compute_dtype) for shape in shapes]
    return [value.to(place, dtype).requires_grad_() for value, dtype in zip(values, wanted, strict=True)]


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is
    """Notes the dtype of every kernel that computes with floating-point numbers."""

    # They move numbers or make room for some, and compute nothing.
    _MOVES = ("_to_copy", "copy_", "clone", "zeros_like", "ones_like", "empty_like", "full_like", "fill_", "zero_")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        read = _dtypes_of((args, kwargs))
        if read and not func.is_view and func.overloadpacket.__name__ not in self._MOVES:
            # A kernel that reads several dtypes promotes them, or keeps statistics in fp32: its result tells.
            self.dtypes.append(read[0] if len(set(read)) == 1 else (_dtypes_of(out) or read)[0])
        return out


def _dtypes_of(tree: Any) -> list[str]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return [_name(tensor.dtype) for tensor in tensors if tensor.is_floating_point()]


def _name(dtype: torch.dtype) -> str:
    return "fp64" if dtype == torch.float64 else format_of(dtype).name


def _exact(case: OpCase, tensors: Sequence[Tensor]) -> Any:
    """The result in fp64 on the CPU, where every machine has it; None if the operation has none."""
    wide = [tensor.detach().cpu().double() for tensor in tensors]
    with torch.autocast("cpu", enabled=False):
        try:
            return case.call(*wide)
        except Exception:  # then there is no exact value to compare with, and the dtypes stand all the same
            return None


def _error_ulp(result: Any, exact: Any, half: torch.dtype) -> float | None:
    """Worst error, in the spacing of the 16-bit numbers at the exact value, or at the mean where values are smaller.

    (A value near zero that is a difference of larger ones is not held to its own, tiny spacing.)
    """
    worst: float | None = None
    for got, true in zip(tree_leaves(result), tree_leaves(exact), strict=False):
        if isinstance(got, Tensor) and got.is_floating_point() and isinstance(true, Tensor):
            size = true.abs().maximum(true.abs().mean())
            errors = (got.detach().cpu().double() - true).abs() / format_of(half).ulp(size)
            worst = max(worst or 0.0, float(errors.max()))
    return worst
