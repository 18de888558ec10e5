"""What `halfstep bench --matmul` is to measure, checked before anything is allocated.

Purpose: names become formats, sizes and a device here, once. Not here: measuring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from halfstep.bench.checks import MEMORY_SHARE, checked_device, checked_seconds, checked_threads
from halfstep.bench.products import Product
from halfstep.errors import ArgumentError, UnsupportedError
from halfstep.formats import BF16, FP16, FP32, TF32, FloatFormat, format_of
from halfstep.hardware import Hardware

FORMATS = (FP32, TF32, FP16, BF16)
DEFAULT_SECONDS = 25.0
_SIZES = {"cpu": (128, 256, 512, 1024, 2048)}
_SIZES_OF_A_GPU = (256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Settings:
    """What to measure; made by `choose`, which checks every value.

    Args:
        formats: fp32 first, which the others are compared with.
        sizes: n of the n x n products, ascending.
        device: where.
        hardware: the facts about it.
        num_threads: of the CPU's products.
        seconds: time that all of it may take.
    """

    formats: tuple[FloatFormat, ...]
    sizes: tuple[int, ...]
    device: torch.device
    hardware: Hardware
    num_threads: int
    seconds: float


def choose(
    formats: Sequence[str] = (),
    sizes: Sequence[int] = (),
    *,
    device: str | None = None,
    num_threads: int | None = None,
    seconds: float = DEFAULT_SECONDS,
) -> Settings:
    """Check what was asked for.

    Args:
        formats: among fp32, tf32, fp16 and bf16, by any name that halfstep reads; empty means all that the device
            runs. fp32 is added where it is missing.
        sizes: n of the n x n products, positive; empty means 128 to 2048 on a CPU, 256 to 8192 elsewhere.
        device: ``"cpu"``, ``"cuda:1"``, ...; None is the current accelerator, or the CPU if there is none.
        num_threads: of a CPU's products, 1 to its number of cores; None is what torch uses now.
        seconds: time that all of it may take.

    Returns:
        Settings for `measure`.

    Raises:
        ArgumentError: a value cannot work, or the largest product does not fit into memory.
        UnsupportedError: the device is not there, or has no tf32.

    Example:
        >>> settings = choose(["bf16"], [256, 64], device="cpu", num_threads=1)
        >>> [str(fmt) for fmt in settings.formats], settings.sizes
        (['fp32', 'bf16'], (64, 256))
    """
    place, hardware = checked_device(device)
    chosen = _formats(formats, hardware)
    settings = Settings(
        formats=chosen,
        sizes=tuple(sorted(set(map(_positive_size, sizes)))) or _SIZES.get(place.type, _SIZES_OF_A_GPU),
        device=place,
        hardware=hardware,
        num_threads=checked_threads(num_threads, place),
        seconds=checked_seconds(seconds, DEFAULT_SECONDS),
    )
    _check_memory(settings)
    return settings


def read_sizes(text: str) -> tuple[int, ...]:
    """Sizes from ``"256,512,1024"``.

    Raises:
        ArgumentError: something between the commas is no whole number.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentError(
            asked=f"sizes={text!r}",
            true="sizes are whole numbers with commas between them",
            why="a product has a whole number of rows",
            fix="pass, for example, --sizes 256,512,1024",
        ) from None


def _formats(names: Sequence[str], hardware: Hardware) -> tuple[FloatFormat, ...]:
    has_tf32 = "tf32" in hardware.native_formats
    if not names:
        return tuple(fmt for fmt in FORMATS if fmt is not TF32 or has_tf32)
    wanted = {_format(name) for name in names}
    if TF32 in wanted and not has_tf32:
        raise UnsupportedError(
            asked=f"products in tf32 on {hardware.name or hardware.device_type}",
            true=f"it multiplies {', '.join(hardware.native_formats)} natively",
            why="products would be plain fp32 under another name",
            fix="leave tf32 out",
        )
    return tuple(fmt for fmt in FORMATS if fmt in wanted or fmt is FP32)


def _format(name: str) -> FloatFormat:
    known = ", ".join(map(str, FORMATS))
    try:
        fmt = format_of(name)
    except ArgumentError:
        fmt = None
    if fmt not in FORMATS or fmt is None:
        raise ArgumentError(
            asked=f"the dtype {name!r}",
            true=f"bench measures products in {known}",
            why="other formats need a scale per tensor, are no dtype for training, or do not exist",
            fix="choose one of these, or leave --dtype out to measure all",
        )
    return fmt


def _positive_size(size: int) -> int:
    if size < 1:
        raise ArgumentError(
            asked=f"size={size}",
            true="a size is the number of rows and columns, 1 or more",
            why="there is nothing to multiply",
            fix="pass, for example, --sizes 256,512,1024",
        )
    return size


def _check_memory(settings: Settings) -> None:
    memory = settings.hardware.memory_bytes
    largest = settings.sizes[-1]
    # Products of one size in all dtypes are timed in turn, so their operands are there at the same time.
    needed = sum(Product(fmt, largest).num_bytes for fmt in settings.formats)
    if memory is not None and needed > memory * MEMORY_SHARE:
        raise ArgumentError(
            asked=f"products of {largest} x {largest} matrices in {', '.join(map(str, settings.formats))}",
            true=f"they take {needed / 2**30:.1f} GiB; the device has {memory / 2**30:.1f} GiB, of which bench takes "
            f"at most {MEMORY_SHARE:.0%}",
            why="the operands would not fit",
            fix=f"pass --sizes up to {_largest_that_fits(settings, memory)}",
        )


def _largest_that_fits(settings: Settings, memory: int) -> int:
    bytes_per_square = sum(Product(fmt, 1).num_bytes for fmt in settings.formats)
    return math.isqrt(int(memory * MEMORY_SHARE) // bytes_per_square)


# Sizes that the alignment is measured at, at most: large enough to keep a device busy, small enough to be quick.
_ALIGNMENT_SIZE = {"cpu": 1024}
_ALIGNMENT_SIZE_OF_A_GPU = 4096


def alignment_sizes(settings: Settings) -> tuple[int, ...]:
    """Sizes that alignment and layout may be measured at, the best first: multiples of 8.

    Which of them it is depends on what the dtype's products cost; see `measure`.
    """
    most = _ALIGNMENT_SIZE.get(settings.device.type, _ALIGNMENT_SIZE_OF_A_GPU)
    rounded = {max(size // 8 * 8, 8) for size in settings.sizes}
    return tuple(sorted((size for size in rounded if size <= most), reverse=True)) or (min(rounded),)
