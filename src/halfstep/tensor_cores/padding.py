"""Pad the products of a vocabulary, not its weights: faster products, the same numbers, the same checkpoints.

A vocabulary of 50257 makes an output matrix whose rows begin at odd addresses, and Tensor Cores are fed 16 bytes at a
time. The usual remedy makes the weight itself taller, and everything that knows the vocabulary's size must learn of it:
checkpoints, optimizer state, ids beyond the end that now read zeros, fused losses that read ``head.weight`` and count
the new rows as words. Here the Parameter stays as it is and the head multiplies by a padded copy:

    logits = F.linear(x, pad(weight), pad(bias))[..., :vocabulary]     # a view: the logits are not copied

Padding is zeros that autograd cuts off again, so logits, gradients, optimizer state and state_dicts have the sizes they
had, and no padding row exists that could be trained, decayed or win an argmax. The one thing that can differ is the
order in which a product sums, as between any two kernels. An embedding is not touched: its rows are looked up.

Not here: sizes between layers (those are the model's to choose), convolutions, products written out in a ``forward``.

Sources: NVIDIA, "Matrix Multiplication Background", section 2.2; torch's Inductor pads compiled products the same way
(pytorch/pytorch#88709).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.errors import ArgumentError
from halfstep.tensor_cores.checks import check_model

# Rows of x from which on a product waits for arithmetic and not for memory. It does two operations for each 2-byte
# weight and row, one per byte; in the time of a byte cards do 139 (V100: 125e12 / 0.9e12) to 295 (H100: 989e12 /
# 3.35e12). Below, as when text is generated word by word, the padded copy would cost more than the product.
MIN_ROWS = 256


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is not smaller.

    Example:
        >>> round_up(50257, 8), round_up(50264, 8)
        (50264, 50264)
    """
    return -(-size // multiple) * multiple


class PaddedLinear(nn.Linear):
    """A linear layer that multiplies by a zero-padded copy of its weight; :func:`pad_to_multiple` makes it.

    Parameters, ``out_features`` and the output's shape are those of the ``nn.Linear`` that it was. The output is a view
    whose rows lie further apart: ``view(-1, out_features)`` works, ``view(-1)`` needs ``reshape(-1)``.
    """

    multiple: int
    min_rows: int

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias``, of shape ``[..., out_features]``."""
        num_out, num_in = self.weight.shape  # not out_features: a weight that was tied afterwards may have other rows
        if input.numel() < self.min_rows * num_in:
            return super().forward(input)
        more_in, more_out = -num_in % self.multiple, -num_out % self.multiple
        if more_in:
            input = F.pad(input, (0, more_in))
        weight = F.pad(self.weight, (0, more_in, 0, more_out))
        bias = None if self.bias is None else F.pad(self.bias, (0, more_out))
        return F.linear(input, weight, bias)[..., :num_out]

    def extra_repr(self) -> str:
        """torch's, and what the product is padded to."""
        return f"{super().extra_repr()}, products padded to multiples of {self.multiple}"


@dataclass(frozen=True)
class Padded:
    """What :func:`pad_to_multiple` or :func:`unpad` did with one layer.

    Args:
        names: its dotted names; several where a module is shared.
        size: which of its sizes: ``"out_features"``, or ``"num_embeddings"`` of a layer that was left.
        before: the size that its products had.
        after: the size that they have now.
        copied_bytes: size of the padded copy of weight and bias that each product makes and training keeps until the
            backward pass, in the weight's present dtype. 0 if nothing is padded.
        reason: why it was padded, or why it was left.
    """

    names: tuple[str, ...]
    size: str
    before: int
    after: int
    copied_bytes: int
    reason: str

    @property
    def is_changed(self) -> bool:
        """Whether the product has another size now."""
        return self.before != self.after

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "names": list(self.names)}

    def __str__(self) -> str:
        change = f"{self.before} -> {self.after}" if self.is_changed else f"{self.after}"
        copied = f", a copy of {self.copied_bytes} bytes" if self.copied_bytes else ""
        return f"{', '.join(self.names)}: {self.size} {change}{copied} ({self.reason})"


def pad_to_multiple(
    model: nn.Module, multiple: int, *, modules: str | Sequence[str] = (), min_rows: int = MIN_ROWS
) -> tuple[Padded, ...]:
    """Make the products of a model's vocabulary a multiple of some size, and leave every result as it is.

    Output layers become :class:`PaddedLinear` in place: the same module objects with the same Parameters, so that ties,
    hooks, optimizers and checkpoints made before or after stay valid. It can be called at any time, again with another
    multiple, and taken back with :func:`unpad`.

    Under ``torch.compile`` it is seldom needed: Inductor pads by itself where it measures that padding pays.

    Args:
        model: the model; changed in place.
        multiple: 8 for 16-bit products, 64 from A100 on (see :func:`tensor_core_advice`); any whole number from 2 on.
        modules: patterns (``fnmatch``) of dotted names of the ``nn.Linear`` to pad. Default: the output layers of
            vocabularies, which are those whose weight is an embedding's too, or that are as wide as one is tall.
        min_rows: products of fewer rows than this (batch times sequence) are not padded: they wait for memory, and
            copying the weight would cost more than it brings. 0 pads all.

    Returns:
        A record for each output layer, padded or not, and for each embedding, which is left.

    Raises:
        ArgumentError: ``multiple`` or ``min_rows`` is no such number, ``model`` no model with parameters, a pattern
            names no linear layer that can be padded, or none is given and there is no embedding.
        UnsupportedError: the model is sharded, quantized or lazy.

    Example:
        >>> model = nn.Sequential(nn.Embedding(50257, 8), nn.Linear(8, 50257, bias=False))
        >>> for record in pad_to_multiple(model, 8):
        ...     print(record)
        0: num_embeddings 50257 (its rows are looked up, not multiplied)
        1: out_features 50257 -> 50264, a copy of 1608448 bytes (as wide as 0 is tall)
        >>> type(model[1]).__name__, model[1].weight.shape
        ('PaddedLinear', torch.Size([50257, 8]))
    """
    check_model(model, "pad_to_multiple()")
    _check_number("multiple", multiple, smallest=2, fix="pass 8 for fp16 and bf16, 16 for fp8, 4 for tf32")
    _check_number("min_rows", min_rows, smallest=0, fix="pass a number of rows, or 0 to pad every product")
    named = names_of(model)
    patterns = (modules,) if isinstance(modules, str) else tuple(modules)
    chosen = _chosen(named, patterns) if patterns else _heads(named)
    if not chosen and not any(isinstance(module, _LOOKUPS) for module in named):
        raise _no_vocabulary(named)
    records = []
    for module, names in named.items():
        if module in chosen and isinstance(module, nn.Linear):
            records.append(_pad(module, names, chosen[module], multiple, min_rows))
        elif isinstance(module, _LOOKUPS) and not patterns:
            reason = "its rows are looked up, not multiplied"
            records.append(Padded(names, "num_embeddings", module.num_embeddings, module.num_embeddings, 0, reason))
    return tuple(records)


def unpad(model: nn.Module) -> tuple[Padded, ...]:
    """Take :func:`pad_to_multiple` back: every :class:`PaddedLinear` is the ``nn.Linear`` again that it was.

    Args:
        model: the model; changed in place.

    Returns:
        A record for each layer that was padded; empty if there was none.

    Raises:
        ArgumentError: ``model`` is no module with parameters.

    Example:
        >>> model = nn.Sequential(nn.Embedding(13, 4), nn.Linear(4, 13))
        >>> records = pad_to_multiple(model, 8)
        >>> [str(record) for record in unpad(model)], type(model[1]).__name__
        (['1: out_features 16 -> 13 (padding taken back)'], 'Linear')
    """
    check_model(model, "unpad()")
    records = []
    for module, names in names_of(model).items():
        if type(module) is PaddedLinear:
            before = round_up(module.out_features, module.multiple)
            module.__class__ = nn.Linear  # type: ignore[assignment]
            del module.multiple, module.min_rows
            records.append(Padded(names, "out_features", before, module.out_features, 0, "padding taken back"))
    return tuple(records)


def names_of(model: nn.Module) -> dict[nn.Module, tuple[str, ...]]:
    """Every module once, in the model's order, with all of its dotted names; the model itself is ``"the model"``."""
    names: dict[nn.Module, tuple[str, ...]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names[module] = (*names.get(module, ()), name or "the model")
    return names


def vocabularies(named: Mapping[nn.Module, tuple[str, ...]]) -> Iterator[tuple[nn.Linear, nn.Module, bool]]:
    """Output layers of vocabularies, each with an embedding that it belongs to and whether their weight is one."""
    embeddings = [module for module in named if isinstance(module, _LOOKUPS)]
    for module in named:
        if isinstance(module, nn.Linear):
            ties = [embedding for embedding in embeddings if embedding.weight is module.weight]
            equals = [embedding for embedding in embeddings if embedding.num_embeddings == module.out_features]
            if ties or equals:
                yield module, (ties or equals)[0], bool(ties)


# --- choosing and padding


_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)
_CAN_PAD = (nn.Linear, PaddedLinear)  # their very types: a derived class may multiply in another way


def _heads(named: dict[nn.Module, tuple[str, ...]]) -> dict[nn.Module, str]:
    """Output layer -> why it is one."""
    found: dict[nn.Module, str] = {}
    for head, embedding, is_tied in vocabularies(named):
        if type(head) in _CAN_PAD:
            other = ", ".join(named[embedding])
            found[head] = f"its weight is {other}'s too" if is_tied else f"as wide as {other} is tall"
    return found


def _chosen(named: dict[nn.Module, tuple[str, ...]], patterns: Sequence[str]) -> dict[nn.Module, str]:
    chosen: dict[nn.Module, str] = {}
    linears = {module: names for module, names in named.items() if type(module) in _CAN_PAD}
    for pattern in patterns:
        found = [m for m, names in linears.items() if any(fnmatchcase(name, pattern) for name in names)]
        if not found:
            others = [m for m, names in named.items() if any(fnmatchcase(name, pattern) for name in names)]
            kinds = f"only {type(others[0]).__name__}" if others else "nothing"
            raise ArgumentError(
                asked=f"pad_to_multiple() with modules={pattern!r}",
                true=f"it names {kinds}; nn.Linear here: {', '.join(n[0] for n in linears.values()) or 'none'}",
                why="only a plain nn.Linear is known to do nothing with its weight but multiply by it",
                fix="match the dotted names of linear layers, as named_modules() gives them",
            )
        chosen |= dict.fromkeys(found, f"named by {pattern!r}")
    return chosen


def _no_vocabulary(named: Mapping[nn.Module, tuple[str, ...]]) -> ArgumentError:
    linears = [names[0] for module, names in named.items() if type(module) in _CAN_PAD]
    return ArgumentError(
        asked="pad_to_multiple() without modules",
        true=f"the model has no embedding, so no vocabulary; its nn.Linear: {', '.join(linears[:8]) or 'none'}",
        why="nothing says which layers are meant",
        fix='name them, such as modules="lm_head" or modules="*"',
    )


def _pad(module: nn.Linear, names: tuple[str, ...], why: str, multiple: int, min_rows: int) -> Padded:
    rows, columns = module.out_features, module.in_features
    before = round_up(rows, module.multiple) if isinstance(module, PaddedLinear) else rows
    after, inner = round_up(rows, multiple), round_up(columns, multiple)
    if (rows, columns) == (after, inner):
        if isinstance(module, PaddedLinear):
            unpad(module)
        return Padded(names, "out_features", before, after, 0, f"{why}; a multiple of {multiple} as it is")
    # Ours adds two numbers and no tensor, so that the object can change its class and stay the same to all who hold it.
    module.__class__ = PaddedLinear
    module.multiple, module.min_rows = multiple, min_rows  # type: ignore[assignment]
    if columns != inner:
        why = f"{why}; its in_features are padded too, {columns} -> {inner}, and with them a copy of its input"
    num_copied = after * (inner + (module.bias is not None))
    return Padded(names, "out_features", before, after, num_copied * module.weight.element_size(), why)


def _check_number(name: str, value: object, *, smallest: int, fix: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ArgumentError(
            asked=f"pad_to_multiple() with {name}={value!r}",
            true=f"{name} is a whole number from {smallest} on",
            why="a size cannot be rounded up to that" if name == "multiple" else "a batch cannot have so many rows",
            fix=fix,
        )
