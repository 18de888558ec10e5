"""How a row's numbers are written, for the terminal's table and the report alike.

Purpose: one number looks the same everywhere. Method: each cell is a function of the row. Not here: colours and
layout.
"""

from __future__ import annotations

import math

from halfstep.compare.rows import Row, deviation
from halfstep.compare.verdict import Thresholds, Verdict
from halfstep.compare.words import Words
from halfstep.formats import FP32


def verdict(row: Row, words: Words) -> str:
    """The verdict's word; fp32 that matches itself is called the reference."""
    return words("reference" if is_plain_reference(row) else row.verdict.value)


def is_plain_reference(row: Row) -> bool:
    """Whether this is fp32's row, and fp32 trained."""
    return row.regime == "fp32" and row.verdict is Verdict.MATCHES


def number(value: float) -> str:
    """Four decimals; two digits where the number is small, with an exponent where it is tiny.

    Example:
        >>> [number(value) for value in (0.04372, 0.00148, 1.234e-14, 0.0, float("nan"))]
        ['0.0437', '0.0015', '1.2e-14', '0', 'nan']
    """
    if math.isfinite(value) and 0.01 <= abs(value) < 1e4:
        return f"{value:.4f}"
    return f"{value:.2g}"


def percent(share: float) -> str:
    """A share as percent; 0 and 100 only where they are exact.

    Example:
        >>> [percent(share).replace("\N{NO-BREAK SPACE}", " ") for share in (1.0, 0.9999, 0.125, 0.0, 0.0001)]
        ['100 %', '>99.9 %', '12.5 %', '0 %', '<0.1 %']
    """
    text = f"{100 * share:.3g}"
    if 0 < share < 0.001:
        text = "<0.1"
    if 0.999 < share < 1:
        text = ">99.9"
    return f"{text}\N{NO-BREAK SPACE}%"


def signed(text: str) -> str:
    """With its sign; a real minus, and none for zero.

    Example:
        >>> signed("0.5"), signed("-0.5"), signed("0")
        ('+0.5', '−0.5', '0')
    """
    if text in ("0", "nan"):
        return text
    return text.replace("-", "−", 1) if text.startswith("-") else f"+{text}"


def error(row: Row) -> str:
    """The task's metric; with several seeds, mean and standard deviation."""
    if row.seeds == 1 or not math.isfinite(row.metric):
        return number(row.metric)
    return f"{number(row.metric)} ± {number(deviation(seed['metric'] for seed in row.per_seed))}"


def difference(row: Row) -> str:
    """The metric minus fp32's of the same seed; zero where it is below what rounding the metric to fp32 leaves."""
    if row.regime == "fp32":
        return "–"
    change = row.metric_difference_from_fp32
    return "0" if abs(change) < FP32.epsilon * abs(row.metric) else signed(number(change))


def skipped(row: Row) -> str:
    """Skipped of all steps."""
    return f"{row.skipped_steps} / {row.num_steps}" if row.skipped_steps else "0"


def zeros(row: Row) -> str:
    """Share of zero gradients at the first and the last step."""
    return f"{percent(row.zero_gradient_share_start)} → {percent(row.zero_gradient_share_end)}"


def zeros_short(row: Row) -> str:
    """The same in whole percent, for the terminal."""
    return f"{row.zero_gradient_share_start:.0%} → {row.zero_gradient_share_end:.0%}"


def extra_zeros(row: Row) -> str:
    """How many more than fp32 at the first and the last step, in percentage points."""
    if row.regime == "fp32":
        return "–"
    return " → ".join(
        signed(f"{100 * share:.1f}") if abs(share) >= 0.0005 else "0"
        for share in (row.extra_zero_share_start, row.extra_zero_share_end)
    )


def tolerance(limits: Thresholds, words: Words) -> str:
    """How far above fp32's error a run may end and still match it."""
    relative, absolute = percent(limits.same_relative), f"{limits.same_absolute:.2g}"
    if limits.same_relative == 0:
        return absolute
    if limits.same_absolute == 0:
        return words("relative", relative=relative)
    return words("relative_and_absolute", relative=relative, absolute=absolute)


def kib(num_bytes: int) -> str:
    """Bytes as KiB.

    Example:
        >>> kib(0), kib(1796), kib(2005192)
        ('0', '1.8 KiB', '1,958 KiB')
    """
    if num_bytes == 0:
        return "0"
    return f"{num_bytes / 1024:,.0f} KiB" if num_bytes >= 10240 else f"{num_bytes / 1024:.1f} KiB"


def bytes_per_parameter(row: Row) -> str:
    """Of weights, gradients and optimizer state."""
    return f"{row.bytes_per_parameter:.2f}"


def time_ratio(row: Row, words: Words) -> str:
    """Time per step relative to fp32, or why there is none."""
    if row.is_emulated:
        return words("emulated")
    return words("not_measured") if row.step_time_ratio is None else f"× {row.step_time_ratio:.2f}"


def scale(value: float) -> str:
    """A power of two as such, else as a number.

    Example:
        >>> scale(8.0), scale(2.0**23), scale(1000.0)
        ('8', '2²³', '1e+03')
    """
    log2 = math.log2(value)
    if value < 2048 and value == int(value) and log2 == int(log2):
        return str(int(value))
    return f"2{superscript(int(log2))}" if log2 == int(log2) else f"{value:.3g}"


def superscript(exponent: int) -> str:
    """Raised digits, as in 2⁻²⁴."""
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
