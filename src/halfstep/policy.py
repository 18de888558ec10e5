"""Which dtype each part of a run uses, how masters and moments are kept, and how the loss is scaled.

A policy is a value: frozen, comparable, printable, and ``Policy.parse(str(policy)) == policy``. It comes from a preset,
from the name that another library gives to the same thing, or from ``"auto"``, which asks the hardware.

    preset        weights  products  masters   loss scale
    fp32, tf32    fp32     fp32      -         none
    fp16-mixed    fp32     fp16      -         dynamic     *mixed*: fp32 weights, torch.autocast
    bf16-mixed    fp32     bf16      -         none
    fp16-master   fp16     fp16      fp32      dynamic     *master*: 16-bit weights, the optimizer holds the rest
    bf16-master   bf16     bf16      fp32      none
    fp16-true     fp16     fp16      none      dynamic     no masters: by name only, with a warning
    bf16-true     bf16     bf16      none      none

An option that cannot take effect is refused when the policy is made. A policy whose machinery this version does not
have parses and prints; ``require_runnable`` then says what is missing. It never runs as something else.

Not here: casting a model, the loss scales themselves (``halfstep.scaling``), sharding.

Sources: Micikevicius et al., "Mixed Precision Training" (arXiv 1710.03740), section 3; the names used by FSDP2,
Lightning, Accelerate, Composer, Keras, Apex and jmp.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from halfstep import __version__
from halfstep.errors import ArgumentError, CallOrderError, PrecisionWarning, UnsupportedError, warn
from halfstep.formats import dtype_of, format_of
from halfstep.hardware import Hardware, as_device, check_dtype, choose_dtype, count_devices, probe

T = TypeVar("T")


class Master(enum.Enum):
    """How the full-precision value of a 16-bit weight is held."""

    NONE = "none"
    FP32 = "fp32"
    SPLIT = "split"
    SPLIT8 = "split8"
    STOCHASTIC = "stochastic"


class Moments(enum.Enum):
    """How an optimizer's moments are held."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"


class Scaling(enum.Enum):
    """How the loss is scaled; the scales themselves are in ``halfstep.scaling``."""

    NONE = "none"
    STATIC = "static"
    DYNAMIC = "dynamic"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which dtype each part of a run uses, how masters and moments are kept, how the loss is scaled.

    Dtypes may be given by name (``"bf16"``, ``"half"``), the other choices by their value (``"split"``). Fields that
    FSDP2 has too mean the same, except ``param_dtype``: here it is the dtype of the weights that the optimizer updates,
    and what FSDP2 calls ``param_dtype`` is our ``compute_dtype``.

    Args:
        param_dtype: dtype of the model's weights.
        compute_dtype: dtype of matrix products and convolutions. With fp32 weights torch.autocast casts to it; with
            16-bit weights it is theirs.
        tf32: whether fp32 products read their inputs as tf32. (Without it torch still lets cuDNN's convolutions do so,
            unless ``torch.backends.cudnn.conv.fp32_precision`` is ``"ieee"``.)
        output_dtype: dtype that ``cast_output`` gives to the model's outputs; None leaves them.
        reduce_dtype: dtype in which gradients are summed across ranks; None is the gradients' own.
        grad_dtype: dtype in which gradients of 16-bit weights are accumulated; None is the weights' own.
        buffer_dtype: dtype of floating-point buffers; None leaves them.
        cast_forward_inputs: whether ``cast_inputs`` casts the model's inputs to ``param_dtype``.
        master: how masters are held.
        moments: how moments are held.
        scaling: how the loss is scaled.
        reason: why it is this policy; not part of its identity.

    Raises:
        ArgumentError: a dtype or value is unknown, or an option could not take effect under this policy.

    Example:
        >>> policy = Policy.parse("fp16-mixed")
        >>> policy.autocast_dtype, policy.needs_scaling, str(policy)
        (torch.float16, True, 'fp16-mixed')
        >>> str(Policy.parse("bf16-master,moments=int8,master=split"))
        'bf16-master,master=split,moments=int8'
    """

    param_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    tf32: bool = False
    output_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    master: Master = Master.NONE
    moments: Moments = Moments.FP32
    scaling: Scaling = Scaling.NONE
    reason: str = field(default="made by hand", compare=False)

    def __post_init__(self) -> None:
        """Turn names into values, then refuse what cannot take effect."""
        for name in ("param_dtype", "compute_dtype", "tf32", *_OPTIONS.values()):
            object.__setattr__(self, name, _read_option(name, getattr(self, name)))
        if self.grad_dtype == self.param_dtype:
            object.__setattr__(self, "grad_dtype", None)  # one spelling for one thing
        _refuse_contradictions(self)

    @classmethod
    def parse(cls, text: str | torch.dtype | Policy, *, hardware: Hardware | None = None) -> Policy:
        """Read a policy from a preset's name, another library's name for it, a dtype, or a list of options.

        Args:
            text: a preset, alone or with options (``"bf16-master,master=split"``); an alias (``"16-mixed"``, ``"no"``,
                ``"amp_bf16"``, ``"mixed_float16"``, ``"O2"``); jmp's form (``"p=f32,c=bf16,o=f32"``); ``"auto"``; a
                dtype, which means the mixed policy with it (fp16 and bf16 as names mean the same, as in Accelerate);
                or a policy, which is returned as it is. Case does not matter.
            hardware: the facts that ``"auto"`` chooses by (default: ``probe()``). A dtype chosen by name wins over
                them, with a warning where it does not pay; without facts it is not checked.

        Returns:
            The policy, with its reason.

        Raises:
            ArgumentError: the name or an option is unknown, malformed, or cannot take effect.
            UnsupportedError: the name is known and halfstep has no such policy (fp8, fp64).

        Warns:
            PrecisionWarning: 16-bit weights without masters; or a dtype that does not pay on this hardware.

        Example:
            >>> Policy.parse("auto", hardware=Hardware("cuda", capability=(9, 0))).reason
            'bf16: sm_90 multiplies bf16 natively; no loss scaling needed'
            >>> Policy.parse("O1") == Policy.parse("16-mixed") == Policy.parse(torch.float16)
            True
        """
        if isinstance(text, Policy):
            return text
        policy = _parse(text, hardware)
        if policy.param_dtype != torch.float32 and policy.master is Master.NONE:
            warn(_no_masters_text(policy), PrecisionWarning)
        return policy

    def __str__(self) -> str:
        """The nearest preset and what differs from it; ``Policy.parse`` reads it back."""
        name = _nearest_preset(self.param_dtype, self.compute_dtype, self.tf32, self.master)
        preset = Policy(**_PRESETS[name])
        pairs = [(key, getattr(self, option), getattr(preset, option)) for key, option in _OPTIONS.items()]
        return ",".join([name, *(f"{key}={_spell(ours)}" for key, ours, theirs in pairs if ours != theirs)])

    @property
    def is_mixed(self) -> bool:
        """Whether weights are fp32 and products 16-bit."""
        return self.param_dtype == torch.float32 != self.compute_dtype

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype that torch.autocast casts to, or None where there is nothing to cast."""
        return self.compute_dtype if self.is_mixed else None

    @property
    def needs_scaling(self) -> bool:
        """Whether the loss is to be scaled."""
        return self.scaling is not Scaling.NONE

    def autocast(self, device: str | torch.device = "cuda") -> torch.autocast:
        """The torch.autocast context of this policy; for a policy that casts nothing, one that is switched off.

        Args:
            device: the device that the forward pass runs on.

        Returns:
            A context manager for the forward pass and the loss; leave it before the backward pass.

        Raises:
            ArgumentError: ``device`` is no device in torch.
            UnsupportedError: the machine has no such device (torch would warn and run in fp32), it has no TF32, or the
                policy is not runnable.
            CallOrderError: the policy is tf32 and torch's process-wide switch is off.

        Example:
            >>> with Policy.parse("bf16-mixed").autocast("cpu"):
            ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
            torch.bfloat16
        """
        self.require_runnable()
        device_type = as_device(device).type
        if self.tf32:
            _require_tf32(device_type)
        if self.autocast_dtype is None:
            return torch.autocast(device_type, enabled=False)
        if count_devices(device_type) == 0:
            raise UnsupportedError(
                asked=f"autocast({device_type!r}) under {self}",
                true=f"torch {torch.__version__} sees no {device_type} device on this machine",
                why="torch would warn, switch autocast off and run in fp32",
                fix='pass the device that the model is on, such as "cpu"',
            )
        return torch.autocast(device_type, dtype=self.autocast_dtype)

    def cast_inputs(self, value: T) -> T:
        """Cast every floating tensor among a model's inputs to ``param_dtype``, unless ``cast_forward_inputs`` is off.

        Args:
            value: a tensor, or tuples, lists and dicts of tensors, nested at will. Other things are passed through.

        Returns:
            The same structure.
        """
        cast: T = cast_floating(value, self.param_dtype if self.cast_forward_inputs else None)
        return cast

    def cast_output(self, value: T) -> T:
        """Cast every floating tensor among a model's outputs to ``output_dtype``, if there is one.

        Args:
            value: as for ``cast_inputs``.

        Returns:
            The same structure.
        """
        cast: T = cast_floating(value, self.output_dtype)
        return cast

    def require_runnable(self, *, with_stepper: bool = False) -> None:
        """Do nothing if this version can carry the policy out; else say what is missing.

        Args:
            with_stepper: whether a Stepper is to carry it out, around weights that are cast already, and an optimizer
                that keeps their masters; autocast alone can do less.

        Raises:
            UnsupportedError: a part of the policy has no machinery yet.
        """
        missing = _missing_machinery(self, with_stepper=with_stepper)
        if missing:
            nearest = "bf16-mixed" if self.compute_dtype == torch.bfloat16 else "fp16-mixed"
            raise UnsupportedError(
                asked=f"to run under the policy {self}",
                true=f"halfstep {__version__} has {' and '.join(missing)} yet",
                why="without it the run would be another one than the policy says",
                fix=f'use "{"fp32" if self.compute_dtype == torch.float32 else nearest}" until a version that has it',
            )


# --- options: reading, spelling, and what cannot take effect

# How an option is spelled in a string -> its field. The order is that of ``str(policy)``.
_OPTIONS = {
    "output": "output_dtype",
    "reduce": "reduce_dtype",
    "grad": "grad_dtype",
    "buffer": "buffer_dtype",
    "cast_inputs": "cast_forward_inputs",
    "master": "master",
    "moments": "moments",
    "scaling": "scaling",
}
_ON_OR_OFF = {"true": True, "false": False}
_KNOWN: dict[str, dict[str, Any]] = {
    "tf32": _ON_OR_OFF,
    "cast_forward_inputs": _ON_OR_OFF,
    "master": {kind.value: kind for kind in Master},
    "moments": {kind.value: kind for kind in Moments},
    "scaling": {kind.value: kind for kind in Scaling},
}
_MAY_BE_NONE = ("output_dtype", "reduce_dtype", "grad_dtype", "buffer_dtype")


def _read_option(name: str, value: Any) -> Any:
    spelled = str(value).strip().lower()
    if name in _KNOWN:
        known = _KNOWN[name]
        if isinstance(value, (bool, enum.Enum)) and value in known.values():
            return value
        if spelled in known:
            return known[spelled]
        true = f"{name} is one of {', '.join(known)}"
    elif name in _MAY_BE_NONE and spelled == "none":
        return None
    else:
        dtype = dtype_of(value)
        if dtype in (torch.float32, torch.float16, torch.bfloat16):
            return dtype
        true = f"{name} is one of fp32, fp16, bf16{' or none' if name in _MAY_BE_NONE else ''}"
    raise ArgumentError(
        asked=f"{name}={value!r} in a policy",
        true=true,
        why="no part of a run could follow it",
        fix="pass one of these",
    )


def _spell(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return format_of(value).name
    return str(value.value if isinstance(value, enum.Enum) else value).lower()


def _refuse_contradictions(policy: Policy) -> None:
    weights, products = _spell(policy.param_dtype), _spell(policy.compute_dtype)
    is_half = policy.param_dtype != torch.float32
    contradictions = [
        (
            is_half and policy.compute_dtype != policy.param_dtype,
            f"compute_dtype={products} with param_dtype={weights}",
            "autocast lowers fp32 weights to a 16-bit dtype; it changes nothing about 16-bit ones",
            f"leave compute_dtype at {weights}, or use param_dtype=fp32",
        ),
        (
            policy.tf32 and policy.compute_dtype != torch.float32,
            f"tf32 with compute_dtype={products}",
            "TF32 is a way to multiply fp32 numbers, and here there are none to multiply",
            "leave tf32 out, or use compute_dtype=fp32",
        ),
        (
            not is_half and policy.master is not Master.NONE,
            f"master={_spell(policy.master)} with fp32 weights",
            "a master is the full-precision value of a 16-bit weight, and fp32 weights are their own",
            'leave master out, or use the preset "fp16-master" or "bf16-master"',
        ),
        (
            policy.needs_scaling and policy.compute_dtype != torch.float16,
            f"scaling={_spell(policy.scaling)} with compute_dtype={products}",
            f"{products} has the exponents of fp32, so that a power of two on the loss comes off again unchanged",
            "leave scaling out (a GradScaler with NoScale still checks for inf and NaN), or use fp16",
        ),
        (
            policy.grad_dtype not in (None, torch.float32),
            f"grad_dtype={_spell(policy.grad_dtype)} with param_dtype={weights}",
            "gradients have the dtype of their weights, and accumulate in it or in fp32",
            "leave grad_dtype out, or use fp32 with 16-bit weights",
        ),
    ]
    for is_refused, asked, why, fix in contradictions:
        if is_refused:
            raise ArgumentError(asked=asked, true="an option that cannot take effect is refused", why=why, fix=fix)


def _missing_machinery(policy: Policy, *, with_stepper: bool) -> list[str]:
    """Parts of the policy that this version cannot carry out, each as "no ..."."""
    is_half = policy.param_dtype != torch.float32
    has_masters, has_moments = policy.master is not Master.NONE, policy.moments is not Moments.FP32
    parts = [
        (has_masters and not with_stepper, f"no {_spell(policy.master)} masters (halfstep.optim, MasterWeights)"),
        (is_half and policy.master is Master.NONE and not with_stepper, "no casting of a model to 16-bit weights"),
        (has_moments and not with_stepper, f"no {_spell(policy.moments)} moments (halfstep.optim)"),
        (policy.grad_dtype is not None and not with_stepper, "no fp32 accumulation outside halfstep.Stepper"),
        (policy.buffer_dtype is not None and not with_stepper, "no casting of buffers but by halfstep.cast_model"),
        (policy.reduce_dtype is not None, "no choice of dtype for reduction across ranks (halfstep.distributed)"),
    ]
    return [text for is_asked, text in parts if is_asked]


# --- names

_DYNAMIC_FP16: dict[str, Any] = {"compute_dtype": torch.float16, "scaling": Scaling.DYNAMIC}
_PRESETS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "tf32": {"tf32": True},
    "fp16-mixed": _DYNAMIC_FP16,
    "bf16-mixed": {"compute_dtype": torch.bfloat16},
    "fp16-master": {"param_dtype": torch.float16, "master": Master.FP32, **_DYNAMIC_FP16},
    "bf16-master": {"param_dtype": torch.bfloat16, "compute_dtype": torch.bfloat16, "master": Master.FP32},
    "fp16-true": {"param_dtype": torch.float16, **_DYNAMIC_FP16},
    "bf16-true": {"param_dtype": torch.bfloat16, "compute_dtype": torch.bfloat16},
}
_ALIASES = {
    "no": "fp32", "32": "fp32", "32-true": "fp32", "float32": "fp32", "amp_fp32": "fp32", "o0": "fp32",
    "fp16": "fp16-mixed", "16": "fp16-mixed", "16-mixed": "fp16-mixed", "float16": "fp16-mixed", "half": "fp16-mixed",
    "amp_fp16": "fp16-mixed", "mixed_float16": "fp16-mixed", "o1": "fp16-mixed",
    "bf16": "bf16-mixed", "bfloat16": "bf16-mixed", "amp_bf16": "bf16-mixed", "mixed_bfloat16": "bf16-mixed",
    "o2": "fp16-master",
    "16-true": "fp16-true", "o3": "fp16-true",
}  # fmt: skip
# Other libraries' names for what halfstep does not do.
_FP8_NAMES = ("fp8", "amp_fp8", "transformer-engine", "transformer-engine-float16")
_FP64_NAMES = ("64", "64-true", "float64", "fp64", "double")
# jmp's three letters, its long names, and ours.
_DTYPE_KEYS = {
    "p": "param_dtype", "params": "param_dtype", "param": "param_dtype",
    "c": "compute_dtype", "compute": "compute_dtype",
    "o": "output_dtype",
}  # fmt: skip


def _parse(text: str | torch.dtype, hardware: Hardware | None) -> Policy:
    if isinstance(text, torch.dtype):
        text = format_of(text).name
    if not isinstance(text, str) or not text.strip():
        raise _unknown_name(text)
    words = [word.strip() for word in text.lower().removeprefix("torch.").split(",")]
    name, pairs = ("", words) if "=" in words[0] else (words[0], words[1:])
    options = _read_pairs(text, pairs, is_dtype_open=not name)
    if name == "auto":
        choice = choose_dtype(probe() if hardware is None else hardware)
        preset, reason = _ALIASES.get(format_of(choice.dtype).name, "fp32"), choice.reason
    else:
        preset = _find_preset(name, text) if name else _preset_of_options(options)
        reason = f"{preset}: chosen by name" if preset == text else f"{preset}: chosen by name, as {text!r}"
    policy = Policy(**{**_PRESETS[preset], **options, "reason": reason})
    if hardware is not None and name != "auto":
        return dataclasses.replace(policy, reason=_check_hardware(policy, hardware))
    return policy


def _find_preset(name: str, text: str) -> str:
    if name in (*_FP8_NAMES, *_FP64_NAMES):
        is_fp8 = name in _FP8_NAMES
        raise UnsupportedError(
            asked=f"the policy {text!r}",
            true="halfstep trains in fp32, tf32, fp16 and bf16",
            why="fp8 needs layers that keep a scale per tensor" if is_fp8 else "fp64 is more than full precision",
            fix='use "bf16-mixed", or Transformer Engine or torchao directly' if is_fp8 else 'use "fp32"',
        )
    preset = _ALIASES.get(name, name)
    if preset not in _PRESETS:
        raise _unknown_name(text)
    return preset


def _unknown_name(text: Any) -> ArgumentError:
    return ArgumentError(
        asked=f"the policy {text!r}",
        true=f"presets are {', '.join(_PRESETS)} and auto; aliases are {', '.join(_ALIASES)}",
        why="the name says nothing about dtypes",
        fix='use one of these, with options if needed: "bf16-master,master=split"; or "p=fp32,c=bf16,o=fp32"',
    )


def _read_pairs(text: str, pairs: list[str], *, is_dtype_open: bool) -> dict[str, Any]:
    """Options by field name; ``is_dtype_open`` allows p and c, which a preset already fixes."""
    known = {**_OPTIONS, **_DTYPE_KEYS} if is_dtype_open else {**_OPTIONS, "o": "output_dtype"}
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        name = known.get(key)
        if not equals or name is None or name in options:
            raise ArgumentError(
                asked=f"{pair!r} in the policy {text!r}",
                true=f"options are written key=value, each key once; keys here: {', '.join(known)}",
                why="a preset fixes the dtypes of weights and products" if key in _DTYPE_KEYS else "it names no option",
                fix='write, for example, "fp16-mixed,scaling=static" or "p=fp32,c=bf16,o=fp32"',
            )
        options[name] = _read_option(name, value)
    return options


def _nearest_preset(param_dtype: torch.dtype, compute_dtype: torch.dtype, tf32: bool, master: Master) -> str:
    """Weights, products and masters decide; every legal policy has exactly one."""
    if param_dtype == torch.float32:
        products = _spell(compute_dtype)
        return ("tf32" if tf32 else "fp32") if products == "fp32" else f"{products}-mixed"
    return f"{_spell(param_dtype)}-{'true' if master is Master.NONE else 'master'}"


def _preset_of_options(options: dict[str, Any]) -> str:
    """For jmp's form, which names no preset. A missing dtype is fp32 for weights, and theirs for products."""
    param_dtype = options.get("param_dtype", torch.float32)
    compute_dtype = options.get("compute_dtype", param_dtype)
    return _nearest_preset(param_dtype, compute_dtype, False, options.get("master", Master.NONE))


# --- facts that a policy meets


def _check_hardware(policy: Policy, hardware: Hardware) -> str:
    """Warn where the policy's dtype does not pay; the reason, with what the hardware says."""
    if policy.tf32 and "tf32" not in hardware.native_formats:
        raise _no_tf32(hardware)
    found = check_dtype(policy.compute_dtype, hardware).reason
    return f"{policy}: {found.partition(': ')[2]}"


def _require_tf32(device_type: str) -> None:
    hardware = probe(device_type)
    if "tf32" not in hardware.native_formats:
        raise _no_tf32(hardware)
    # torch.set_float32_matmul_precision sets this one for every kind of device.
    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        raise CallOrderError(
            asked="autocast under the policy tf32",
            true="torch's switch for TF32 products is off, and it is one for the whole process",
            why="products would be plain fp32; halfstep changes no process-wide setting by itself",
            fix=(
                "call halfstep.enable_tf32() once, before training"
                if device_type == "cuda"
                else 'call torch.set_float32_matmul_precision("high") once, before training'
            ),
        )


def _no_tf32(hardware: Hardware) -> UnsupportedError:
    return UnsupportedError(
        asked=f"the policy tf32 on {hardware.label} ({hardware.name or hardware.device_type})",
        true=f"it multiplies {', '.join(hardware.native_formats)} natively",
        why="products would be plain fp32",
        fix='use the policy "fp32"',
    )


def _no_masters_text(policy: Policy) -> str:
    fmt = format_of(policy.param_dtype)
    return (
        f"{policy} keeps no masters: an update smaller than {fmt.epsilon / 4:.2g} to {fmt.epsilon / 2:.2g} of its "
        f"{fmt} weight rounds to nothing, and training stalls. Use {fmt}-mixed or {fmt}-master unless you mean it."
    )


def cast_floating(value: Any, dtype: torch.dtype | None) -> Any:
    """Floating tensors in tuples, lists and dicts in another dtype, everything else as it is; None casts nothing."""
    if dtype is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)((key, cast_floating(one, dtype)) for key, one in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a namedtuple takes its fields one by one
        return type(value)(*(cast_floating(one, dtype) for one in value))
    if isinstance(value, (list, tuple)):
        return type(value)(cast_floating(one, dtype) for one in value)
    return value
