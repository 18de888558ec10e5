"""What this machine multiplies natively; which dtype to train in, and why.

``probe`` reads the facts, ``choose_dtype`` is a pure function of them, so that the choice for any card can be tested on
any machine. A 16-bit dtype is chosen only where its matrix products pay: where the hardware multiplies it faster than
fp32 and sums in fp32 (NVIDIA Tensor Cores, AMD matrix cores, Intel XMX, CPU bf16 instructions).

``torch.cuda.is_bf16_supported()`` is not asked: it counts emulation as support, so that a V100 or T4 says yes. It is
capability 8.0 that brings bf16; a V100 has none.

Not here: timing (nothing is run), several devices at once, fp8 training.

Sources: CUDA C++ Programming Guide, throughput of native arithmetic instructions; NVIDIA Volta, Turing and Ampere
whitepapers; AMD Instinct MI200 ISA and MIOpen notes on MFMA; pytorch/pytorch#148322, #124996, #58123, #77955.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from halfstep import _compat
from halfstep.errors import ArgumentError, PrecisionWarning, UnsupportedError, warn
from halfstep.formats import BF16, FP8_E4M3FN, FP8_E5M2, FP16, FP32, TF32, FloatFormat, dtype_of, format_of


@dataclass(frozen=True)
class Hardware:
    """The facts about one device that decide which dtype to train in.

    Args:
        device_type: torch's word: ``"cuda"`` (NVIDIA and AMD), ``"cpu"``, ``"mps"``, ``"xpu"``, or any other.
        name: the product's name, as the driver gives it.
        capability: NVIDIA's compute capability, such as ``(9, 0)``; None elsewhere.
        architecture: AMD's ``"gfx90a"``, or the CPU's ``"x86_64"`` or ``"aarch64"``.
        features: for a CPU the instruction sets that both it and torch's kernels have, under the names of
            ``CPU_FEATURES``; for an Intel GPU ``"xmx"`` if it has matrix engines.
        memory_bytes: memory of the device, or None where it cannot be read.

    Example:
        >>> v100 = Hardware("cuda", "Tesla V100-SXM2-16GB", capability=(7, 0))
        >>> v100.has_tensor_cores, v100.native_formats
        (True, ('fp32', 'fp16'))
    """

    device_type: str
    name: str = ""
    capability: tuple[int, int] | None = None
    architecture: str = ""
    features: tuple[str, ...] = ()
    memory_bytes: int | None = None

    @property
    def native_formats(self) -> tuple[str, ...]:
        """Formats with instructions of their own, at fp32's rate or better (emulation does not count)."""
        return tuple(fmt.name for fmt in _arithmetic(self).native)

    @property
    def has_tensor_cores(self) -> bool:
        """Whether it has matrix units: NVIDIA Tensor Cores, AMD MFMA or WMMA, Intel XMX or AMX."""
        return _arithmetic(self).matrix_units

    @property
    def notes(self) -> tuple[str, ...]:
        """What a number or a yes would not tell about this device."""
        arithmetic = _arithmetic(self)
        return tuple(dict.fromkeys(note for note in (arithmetic.no_fp16, arithmetic.no_bf16, arithmetic.note) if note))

    @property
    def label(self) -> str:
        """The short name that reasons use: ``sm_90``, ``gfx90a``, or the device type."""
        if self.architecture.startswith("gfx"):
            return self.architecture
        if self.capability is not None:
            return f"sm_{self.capability[0]}{self.capability[1]}"
        return {"cpu": "this CPU", "mps": "Apple's GPU"}.get(self.device_type, f"this {self.device_type} device")

    def as_dict(self) -> dict[str, Any]:
        """Facts and what follows from them, as plain data for JSON."""
        return {
            "device_type": self.device_type,
            "name": self.name,
            "capability": None if self.capability is None else list(self.capability),
            "architecture": self.architecture,
            "features": list(self.features),
            "native_formats": list(self.native_formats),
            "tensor_cores": self.has_tensor_cores,
            "memory_bytes": self.memory_bytes,
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Choice:
    """A dtype to train in, whether it needs a loss scale, and why it is this one.

    Args:
        dtype: ``torch.float32``, ``torch.float16`` or ``torch.bfloat16``.
        needs_scaling: whether gradients in it need loss scaling.
        reason: one sentence for a person to read.
    """

    dtype: torch.dtype
    needs_scaling: bool
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"dtype": format_of(self.dtype).name, "needs_scaling": self.needs_scaling, "reason": self.reason}


def choose_dtype(hardware: Hardware) -> Choice:
    """The dtype to train in on this hardware: bf16 where it pays, else fp16 with scaling where that pays, else fp32.

    Args:
        hardware: the facts, from ``probe()`` or made by hand.

    Returns:
        The choice with its reason. Nothing is measured and no device is touched.

    Example:
        >>> choose_dtype(Hardware("cuda", "NVIDIA H200", capability=(9, 0))).reason
        'bf16: sm_90 multiplies bf16 natively; no loss scaling needed'
        >>> choose_dtype(Hardware("cuda", "Tesla V100-SXM2-16GB", capability=(7, 0))).dtype
        torch.float16
    """
    arithmetic, label = _arithmetic(hardware), hardware.label
    if not arithmetic.no_bf16:
        reason = f"bf16: {label} multiplies bf16 natively; no loss scaling needed"
        return Choice(torch.bfloat16, needs_scaling=False, reason=reason)
    if not arithmetic.no_fp16:
        reason = f"fp16: {label} multiplies fp16 natively but not bf16; gradients need loss scaling"
        return Choice(torch.float16, needs_scaling=True, reason=reason)
    excuses = "; ".join(dict.fromkeys((arithmetic.no_fp16, arithmetic.no_bf16)))
    return Choice(torch.float32, needs_scaling=False, reason=f"fp32: {excuses}")


def check_dtype(dtype: str | torch.dtype, hardware: Hardware) -> Choice:
    """Take the user's own choice of dtype; warn if it does not pay on this hardware.

    Args:
        dtype: fp32, fp16 or bf16, as a torch dtype or by name. It is never replaced by another.
        hardware: the facts, from ``probe()`` or made by hand.

    Returns:
        The user's dtype as a Choice.

    Raises:
        ArgumentError: the dtype is none of the three.

    Warns:
        PrecisionWarning: the hardware emulates the dtype, or multiplies it no faster than fp32.

    Example:
        >>> check_dtype("fp16", Hardware("cuda", capability=(7, 5)))
        Choice(dtype=torch.float16, needs_scaling=True, reason='fp16: chosen by name; sm_75 multiplies it natively')
    """
    fmt = format_of(dtype)
    if fmt not in (FP32, FP16, BF16):
        raise ArgumentError(
            asked=f"to train in {fmt.name}",
            true="halfstep trains in fp32, fp16 or bf16",
            why="other formats need a scale per tensor, or are no dtype of their own",
            fix='choose one of the three; for TF32 products use the policy "tf32"',
        )
    excuse = {"fp16": _arithmetic(hardware).no_fp16, "bf16": _arithmetic(hardware).no_bf16}.get(fmt.name)
    if excuse:
        advice = choose_dtype(hardware)
        warn(
            f"{fmt.name} was chosen by name and is used, but {excuse}. By itself halfstep chooses {advice.reason}.",
            PrecisionWarning,
        )
    found = f"but {excuse}" if excuse else f"{hardware.label} multiplies it natively"
    return Choice(dtype_of(fmt), needs_scaling=fmt is FP16, reason=f"{fmt.name}: chosen by name; {found}")


# --- what each kind of hardware can do


@dataclass(frozen=True)
class _Arithmetic:
    """What follows from the facts: where a 16-bit format does not pay, the sentence that says why."""

    native: tuple[FloatFormat, ...] = (FP32,)
    matrix_units: bool = False
    no_fp16: str = ""
    no_bf16: str = ""
    note: str = ""


def _arithmetic(hardware: Hardware) -> _Arithmetic:
    if hardware.device_type == "cuda" and hardware.architecture.startswith("gfx"):
        return _amd(hardware)
    if hardware.device_type == "cuda" and hardware.capability is not None:
        return _nvidia(hardware)
    by_type = {"cpu": _cpu, "mps": _apple, "xpu": _intel}
    return by_type.get(hardware.device_type, _unknown)(hardware)


def _no_half(excuse: str, native: tuple[FloatFormat, ...] = (FP32,)) -> _Arithmetic:
    return _Arithmetic(native, no_fp16=excuse, no_bf16=excuse)


_FP8 = (FP8_E4M3FN, FP8_E5M2)
# Turing without Tensor Cores (chips TU116 and TU117) reports 7.5 like a T4. Only the product's name tells them apart.
_TURING_MINOR = re.compile(r"GTX 16\d\d|\bMX ?[45]50\b|\bT(400|500|550|600|1000|1200|2000)\b")


def _nvidia(hardware: Hardware) -> _Arithmetic:
    capability, label = hardware.capability or (0, 0), hardware.label
    if capability >= (8, 0):
        return _Arithmetic((FP32, TF32, FP16, BF16, *(_FP8 if capability >= (8, 9) else ())), matrix_units=True)
    no_bf16 = f"{label} has no bf16: torch emulates it, and torch.cuda.is_bf16_supported() counts that as support"
    if capability == (7, 5) and _TURING_MINOR.search(hardware.name):
        no_fp16 = (
            f"{hardware.name} reports {label} like a T4 but has no Tensor Cores, and its fp16 convolutions are known "
            "to give NaN (pytorch/pytorch#58123)"
        )
        return _Arithmetic((FP32, FP16), no_fp16=no_fp16, no_bf16=no_bf16)
    if capability >= (7, 0):
        return _Arithmetic((FP32, FP16), matrix_units=True, no_bf16=no_bf16)
    if capability in ((5, 3), (6, 0), (6, 2)):
        no_fp16 = (
            f"{label} has fast fp16 arithmetic but no Tensor Cores, and torch sums fp16 matrix products in fp32, which "
            "leaves that arithmetic idle: fp16 would save memory, not time"
        )
        return _Arithmetic((FP32, FP16), no_fp16=no_fp16, no_bf16=no_bf16)
    rate = "1/64 of fp32's rate" if capability == (6, 1) else "no fp16 arithmetic, only conversions"
    return _Arithmetic(no_fp16=f"fp16 is slower here: {label} has {rate}", no_bf16=no_bf16)


_AMD_MATRIX_CORES = re.compile(r"gfx(908|90a|94\w|95\w|11\w\w|12\w\w)$")


def _amd(hardware: Hardware) -> _Arithmetic:
    arch = hardware.architecture
    if not _AMD_MATRIX_CORES.match(arch):
        excuse = f"{arch} has no matrix cores (MFMA or WMMA), so half precision would save memory more than time"
        return _no_half(excuse, (FP32, FP16))
    tf32 = (TF32,) if arch.startswith(("gfx94", "gfx95")) else ()
    # gfx94x has fp8 in another encoding (fnuz), which is not torch's float8_e4m3fn.
    fp8 = _FP8 if arch.startswith(("gfx95", "gfx12")) else ()
    note = "fp16 matrix products flush subnormals to zero on MI200: prefer bf16" if arch == "gfx90a" else ""
    return _Arithmetic((FP32, *tf32, FP16, BF16, *fp8), matrix_units=True, note=note)


_APPLE_EXCUSE = (
    "on Apple GPUs half precision saves memory, not time (reported on an M4 Max: bf16 26 % less memory, 17 % slower, "
    "karpathy/nanochat#685); if memory is short, choose bf16-mixed or fp16-mixed by name"
)


def _apple(_: Hardware) -> _Arithmetic:
    return _no_half(_APPLE_EXCUSE, (FP32, FP16))


def _intel(hardware: Hardware) -> _Arithmetic:
    if "xmx" in hardware.features:
        return _Arithmetic((FP32, TF32, FP16, BF16), matrix_units=True)
    return _no_half("this Intel GPU has no XMX matrix engines, so half precision would not be faster")


_CPU_BF16 = ("avx512_bf16", "amx_bf16", "arm_bf16", "sve_bf16")
_CPU_FP16 = ("avx512_fp16", "amx_fp16", "arm_fp16")
# Measured with torch 2.13, GF/s for 4096x512x512 and 1024x256x256. AVX2 CPU, one thread: fp32 65 and 84, bf16 1.27 and
# 1.35, fp16 1.25 and 1.35. CPU with AVX512-BF16 but no AVX512-FP16, two threads, the first shape: fp32 62, fp16 2.4.
_NO_CPU_BF16 = (
    "this CPU has no bf16 instructions that torch uses (AVX512-BF16, AMX-BF16, Arm bf16): bf16 matrix products were "
    "measured 51 to 62 times slower than fp32 on such a CPU"
)
_NO_CPU_FP16 = (
    "this CPU has no fp16 instructions that torch uses (AVX512-FP16, AMX-FP16, Arm fp16): fp16 matrix products were "
    "measured 26 to 62 times slower than fp32 on such CPUs; halfstep.emulate runs them as fp32 products of fp16 values"
)
_UNMEASURED_CPU_FP16 = "fp16 training on a CPU with fp16 instructions has not been measured"


def _cpu(hardware: Hardware) -> _Arithmetic:
    has_bf16, has_fp16 = (bool(set(names) & set(hardware.features)) for names in (_CPU_BF16, _CPU_FP16))
    return _Arithmetic(
        (FP32, *([FP16] if has_fp16 else []), *([BF16] if has_bf16 else [])),
        matrix_units=any(name.startswith("amx") for name in hardware.features),
        no_fp16=_UNMEASURED_CPU_FP16 if has_fp16 else _NO_CPU_FP16,
        no_bf16="" if has_bf16 else _NO_CPU_BF16,
    )


def _unknown(hardware: Hardware) -> _Arithmetic:
    label = hardware.label
    return _no_half(f"halfstep does not know what {label} multiplies natively; choose fp16 or bf16 by name if it does")


# --- reading the facts


def probe(device: str | torch.device | int | None = None) -> Hardware:
    """Read the facts about a device.

    Args:
        device: such as ``"cuda:1"``; an int is an index of the current accelerator; None is the current accelerator, or
            the CPU if there is none.

    Returns:
        The facts. A kind of device that halfstep does not know gives its type and no facts; it is no error.

    Raises:
        ArgumentError: ``device`` is no device in torch.
        UnsupportedError: this machine has no such device.

    Example:
        >>> probe("cpu").device_type
        'cpu'
    """
    target = _resolve(device)
    readers = {"cpu": _read_cpu, "cuda": _read_cuda, "mps": _read_mps, "xpu": _read_xpu}
    return readers.get(target.type, _read_other)(target)


def as_device(device: str | torch.device | int) -> torch.device:
    """The torch.device that a string or index means, with halfstep's error where it means none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            asked=f"the device {device!r}",
            true=f"torch knows no such device ({str(error).splitlines()[0]})",
            why="there is nothing to run on or to read facts from",
            fix='pass "cpu", "cuda", "cuda:1", "mps" or "xpu"',
        ) from None


def count_devices(device_type: str) -> int | None:
    """How many devices of a type this machine has; None where torch has no module that could say."""
    if device_type == "cpu":
        return 1
    module = getattr(torch, device_type, None)
    if module is None or not hasattr(module, "is_available") or not hasattr(module, "device_count"):
        return None
    return int(module.device_count()) if module.is_available() else 0


def _resolve(device: str | torch.device | int | None) -> torch.device:
    if device is None:
        current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device("cpu") if current is None else current
    target = as_device(device)
    count = count_devices(target.type)
    if count is not None and (target.index or 0) >= count:
        raise UnsupportedError(
            asked=f"to probe the device {device!r}",
            true=f"torch {torch.__version__} sees {count} devices of type {target.type!r} on this machine",
            why="the facts of a device that is not there cannot be read",
            fix="pass a device that is there, or describe the absent one by hand with halfstep.hardware.Hardware",
        )
    return target


def _read_cuda(device: torch.device) -> Hardware:
    properties = torch.cuda.get_device_properties(device)
    # AMD cards report capability numbers too (gfx90a says 9.0); they do not mean what NVIDIA's mean.
    is_amd = torch.version.hip is not None
    return Hardware(
        "cuda",
        properties.name,
        capability=None if is_amd else (properties.major, properties.minor),
        architecture=properties.gcnArchName.split(":")[0] if is_amd else "",
        memory_bytes=properties.total_memory,
    )


def _read_xpu(device: torch.device) -> Hardware:
    properties = torch.xpu.get_device_properties(device)
    has_xmx = getattr(properties, "has_subgroup_matrix_multiply_accumulate", False)
    return Hardware("xpu", properties.name, features=("xmx",) if has_xmx else (), memory_bytes=properties.total_memory)


def _read_mps(_: torch.device) -> Hardware:
    return Hardware("mps", platform.processor() or "Apple GPU", memory_bytes=torch.mps.recommended_max_memory())


def _read_other(device: torch.device) -> Hardware:
    return Hardware(device.type)


# Our name -> (its name in torch.cpu.get_capabilities(), its name in Linux's /proc/cpuinfo).
CPU_FEATURES = {
    "avx2": ("avx2", "avx2"),
    "avx512": ("avx512_f", "avx512f"),
    "avx512_bf16": ("avx512_bf16", "avx512_bf16"),
    "avx512_fp16": ("avx512_fp16", "avx512_fp16"),
    "amx_bf16": ("amx_bf16", "amx_bf16"),
    "amx_fp16": ("amx_fp16", "amx_fp16"),
    "neon": ("neon", "asimd"),
    "arm_bf16": ("bf16", "bf16"),
    "arm_fp16": ("fp16_arith", "asimdhp"),
    "sve": ("sve", "sve"),
    "sve_bf16": ("sve_bf16", "svebf16"),
}
_CPUINFO = Path("/proc/cpuinfo")


def _read_cpu(_: torch.device) -> Hardware:
    capabilities, cpuinfo = _compat.cpu_capabilities(), _read_cpuinfo(_CPUINFO)
    features = [
        name
        for name, (in_torch, in_linux) in CPU_FEATURES.items()
        if (capabilities.get(in_torch) if capabilities else in_linux in cpuinfo.get("flags", "").split())
    ]
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        # Only oneDNN's kernels multiply with these instructions; torch for macOS is built without it.
        features = [name for name in features if name not in (*_CPU_BF16, *_CPU_FP16)]
    name = cpuinfo.get("model name") or str(capabilities.get("cpu_name") or platform.processor() or "CPU")
    return Hardware("cpu", name, None, platform.machine(), tuple(features), _host_memory_bytes())


def _read_cpuinfo(path: Path) -> dict[str, str]:
    """The first value of each field (x86 says "flags" where Arm says "Features"); empty where there is no such file."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return {}
    fields: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        key = key.strip()
        fields.setdefault("flags" if key == "Features" else key, value.strip())
    return fields


def _host_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None
