"""Which layers of a model miss the sizes that Tensor Cores are fed in, and what it costs to hit them.

A Tensor Core multiplies small tiles, and the rows of a matrix reach it in pieces of 16 bytes: 8 numbers of 16 bits, 16
of fp8, 4 of tf32. Where a size that enters a product is no multiple of that, rows begin between pieces, and libraries
take kernels that load in smaller ones. From A100 on the best kernels want 128 bytes. Nothing is measured here: sizes
are compared with those multiples, and costs are counted.

Vocabularies come first, then attention, then what has most weights, which is most multiplications per row of input; a
convolution repeats its own at every position, which this does not know. What is no loss, or cannot be helped, is last.

Not here: products that a ``forward`` writes by hand, batch and sequence length (multiples of 8 help there too), timing.

Sources: NVIDIA, "Matrix Multiplication Background", section 2.2, table 1 (fp8 has the sizes of int8, as both are one
byte); "Convolutional Layers", sections 1 and 2.3; "Optimizing Convolutional Layers", tensor layouts in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from halfstep.errors import ArgumentError
from halfstep.formats import FORMATS, FloatFormat, format_of
from halfstep.tensor_cores import layout, wording
from halfstep.tensor_cores.checks import check_model
from halfstep.tensor_cores.layers import Layer, layers_of
from halfstep.tensor_cores.layout import ChannelsLast
from halfstep.tensor_cores.padding import names_of, round_up

if TYPE_CHECKING:
    from halfstep.hardware import Hardware

BEST_BYTES = 128  # what A100 and newer want
_BEST_FROM = (8, 0)
_WITHOUT_ACTION = ("lookup", "depthwise")
# What comes first; then by weights.
_ORDER = {"vocabulary": 0, "attention": 1, "lookup": 3, "depthwise": 3}


@dataclass(frozen=True)
class Finding:
    """One size of one layer that misses its multiple.

    Args:
        names: dotted names of the layer; several where modules share a weight.
        kind: what the layer is: ``"vocabulary"``, ``"linear"``, ``"bilinear"``, ``"convolution"``,
            ``"first convolution"``, ``"depthwise"``, ``"attention"``, ``"recurrent"``, ``"lookup"``, ``"parameter"``.
        size: which size, by torch's name for it.
        before: what it is.
        after: the next multiple.
        added_bytes: what the layer's weights grow by in this format if this size alone is padded.
        added_percent: the same in per cent of all of the model's weights.
        why: what missing it means.
        fix: what to do.
    """

    names: tuple[str, ...]
    kind: str
    size: str
    before: int
    after: int
    added_bytes: int
    added_percent: float
    why: str
    fix: str

    @property
    def needs_action(self) -> bool:
        """False where nothing is lost, or nothing can be done."""
        return self.kind not in _WITHOUT_ACTION

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "names": list(self.names), "needs_action": self.needs_action}

    @property
    def columns(self) -> tuple[str, ...]:
        """The row of a table: names, size, before and after, bytes, per cent of the weights."""
        percent = f"{self.added_percent:.2g}" if self.added_percent < 10 else f"{self.added_percent:.0f}"
        cost = (f"+{self.added_bytes} bytes", f"{percent} %") if self.added_bytes else ("", "")
        change = f"{self.before} -> {self.after}" if self.before != self.after else f"{self.before}"
        return (", ".join(self.names), self.size, change, *cost)

    def __str__(self) -> str:
        return f"{' '.join(filter(None, self.columns))}: {self.why}; {self.fix}"


@dataclass(frozen=True)
class Advice:
    """What :func:`tensor_core_advice` found; ``print`` it for a text, ``as_dict()`` for data.

    Args:
        format: name of the format that the products are in.
        multiple: what sizes were compared with.
        best_multiple: what newer cards like better still.
        model_bytes: all floating-point weights in this format.
        findings: sizes that miss, vocabularies first.
        channels_last: the layout of convolutions; None for a model without Conv2d and Conv3d.
        notes: what else is to be known.
    """

    format: str
    multiple: int
    best_multiple: int
    model_bytes: int
    findings: tuple[Finding, ...]
    channels_last: ChannelsLast | None
    notes: tuple[str, ...]

    @property
    def nothing_to_do(self) -> bool:
        """Whether every product has its multiples and every convolution its layout."""
        layout = self.channels_last
        return not any(f.needs_action for f in self.findings) and (layout is None or not layout.helps or layout.is_set)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            **asdict(self),
            "findings": [finding.as_dict() for finding in self.findings],
            "channels_last": None if self.channels_last is None else self.channels_last.as_dict(),
            "notes": list(self.notes),
            "nothing_to_do": self.nothing_to_do,
        }

    def __str__(self) -> str:
        best = f" ({self.best_multiple} from A100 on)" if self.best_multiple > self.multiple else ""
        lines = [f"{self.format}: sizes in products should be multiples of {self.multiple}{best}", *self._table()]
        lines += [str(self.channels_last)] if self.channels_last is not None and self.channels_last.helps else []
        return "\n".join([*lines, *self.notes, *(["nothing to do"] if self.nothing_to_do else [])])

    def _table(self) -> Iterator[str]:
        rows = [finding.columns for finding in self.findings]
        widths = [max(len(row[i]) for row in rows) for i in range(5)] if rows else []
        last_why = ""
        for row, finding in zip(rows, self.findings, strict=True):
            if finding.why != last_why:  # said once for all that follow
                yield f"{finding.why}:"
                last_why = finding.why
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            yield f"  {'  '.join(cells)}  {finding.fix}"


def tensor_core_advice(
    model: nn.Module,
    dtype: str | torch.dtype | FloatFormat,
    *,
    multiple: int | None = None,
    hardware: Hardware | None = None,
) -> Advice:
    """List the layers whose sizes Tensor Cores do not like, what padding them costs, and where ``channels_last`` helps.

    Args:
        model: any module; on the meta device too. It is read and not changed.
        dtype: what its products are in: tf32, fp16, bf16 or an fp8 format, by name, dtype or as a FloatFormat.
        multiple: compare sizes with this instead of the format's 16 bytes; 64 for 16-bit products on an A100, say.
        hardware: facts from ``halfstep.probe()`` or made by hand; only for notes on whether they apply to this card.

    Returns:
        The advice. Tied weights and shared modules are one entry with all their names.

    Raises:
        ArgumentError: ``model`` is no module with floating-point parameters, no Tensor Core multiplies this dtype, or
            ``multiple`` is no whole number from 2 on.
        UnsupportedError: the model is sharded, quantized or lazy.

    Example:
        >>> model = nn.Sequential(nn.Embedding(50257, 768), nn.Linear(768, 50257, bias=False))
        >>> model[1].weight = model[0].weight
        >>> finding = tensor_core_advice(model, "bf16").findings[0]
        >>> finding.names, finding.before, finding.after, finding.added_bytes
        (('0', '1'), 50257, 50264, 10752)
    """
    check_model(model, "tensor_core_advice()")
    fmt = _check_format(dtype)
    _check_hardware(hardware)
    item_bytes = 4 if fmt.dtype is None else fmt.dtype.itemsize  # tf32 is stored as fp32
    wanted = _check_multiple(multiple) or wording.PIECE_BYTES // item_bytes
    is_newer = hardware is None or hardware.capability is None or hardware.capability >= _BEST_FROM
    model_bytes = item_bytes * sum(p.numel() for p in model.parameters() if p.is_floating_point())
    named = names_of(model)
    layers = sorted(layers_of(named), key=lambda layer: (_ORDER.get(layer.kind, 2), -layer.num_weights))
    return Advice(
        format=fmt.name,
        multiple=wanted,
        best_multiple=max(wanted, BEST_BYTES // item_bytes) if is_newer else wanted,
        model_bytes=model_bytes,
        findings=tuple(f for layer in layers for f in _findings(layer, wanted, item_bytes, model_bytes)),
        channels_last=layout.channels_last(named),
        notes=tuple(_notes(layers, fmt, hardware)),
    )


# --- what is asked


def _check_format(dtype: str | torch.dtype | FloatFormat) -> FloatFormat:
    multiplied = [fmt.name for fmt in FORMATS if fmt.name != "fp32"]
    try:
        fmt = format_of(dtype)
        if fmt.name in multiplied:
            return fmt
        asked = fmt.name
    except ArgumentError:
        asked = repr(dtype)
    raise ArgumentError(
        asked=f"tensor_core_advice() for {asked}",
        true=f"Tensor Cores multiply {', '.join(multiplied)} in training",
        why="fp32 products run on ordinary units unless they are read as tf32"
        if asked == "fp32"
        else "products in this dtype run on other units, or with alignment of their own",
        fix='pass "tf32" for fp32 weights under halfstep.enable_tf32, or the dtype that autocast casts to',
    )


def _check_multiple(multiple: int | None) -> int | None:
    if multiple is None or (isinstance(multiple, int) and not isinstance(multiple, bool) and multiple >= 2):
        return multiple
    raise ArgumentError(
        asked=f"tensor_core_advice() with multiple={multiple!r}",
        true="multiple is a whole number from 2 on",
        why="no size can miss that",
        fix="leave it out for the format's own, or pass 64 for 16-bit products on an A100",
    )


def _check_hardware(hardware: object) -> None:
    if hardware is not None and not hasattr(hardware, "native_formats"):
        raise ArgumentError(
            asked=f"tensor_core_advice() with hardware={hardware!r}",
            true="hardware is a halfstep.hardware.Hardware",
            why="a name or a device says nothing about Tensor Cores by itself",
            fix="pass halfstep.probe(device), or leave it out",
        )


# --- what is found


def _findings(layer: Layer, multiple: int, item_bytes: int, model_bytes: int) -> Iterator[Finding]:
    if layer.kind == "depthwise":
        why, fix = wording.of(layer, "", 1, multiple, item_bytes)
        yield Finding(layer.names, layer.kind, "in_channels / groups", 1, 1, 0, 0.0, why, fix)
        return
    for size, before in layer.sizes.items():
        after = round_up(before, multiple)
        if after != before:
            added = layer.added(size, after) * item_bytes
            why, fix = wording.of(layer, size, before, multiple, item_bytes)
            yield Finding(layer.names, layer.kind, size, before, after, added, 100 * added / model_bytes, why, fix)


def _notes(layers: list[Layer], fmt: FloatFormat, hardware: Hardware | None) -> Iterator[str]:
    if not any(layer.kind != "lookup" for layer in layers):
        yield "no layer here is known to multiply matrices"
    if fmt.name.startswith("fp8"):
        yield "torch's fp8 product refuses sizes that are no multiples of 16, where 16-bit products only slow down"
    if hardware is None:
        return
    if not hardware.has_tensor_cores:
        yield f"{hardware.label} has no matrix units: sizes make little difference here"
    elif fmt.name not in hardware.native_formats:
        yield f"{hardware.label} does not multiply {fmt.name} natively, only {', '.join(hardware.native_formats)}"
