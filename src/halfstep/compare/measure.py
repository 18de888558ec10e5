"""What one training step looks like from inside: gradients that vanished, and bytes that are held.

Purpose: the numbers behind a row. Method: gradients are read once at the first and once at the last step, as they came
out of the backward pass and *before* unscaling, because that is what the 16-bit format had to hold. Bytes are those of
live storages, each counted once. What a forward pass keeps for the backward pass is seen by saved-tensor hooks during
one step.

Not here: any estimate; temporary tensors inside one operation, which no autograd hook can see.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class GradientStats:
    """Gradients of one step: how many elements are exactly zero, and the exponents of the others.

    Args:
        num_elements: all elements.
        num_zeros: elements that are exactly zero.
        exponents: (floor(log2 |g|), count) for the finite non-zero elements, in rising order.
    """

    num_elements: int
    num_zeros: int
    exponents: tuple[tuple[int, int], ...]

    @property
    def zero_share(self) -> float:
        """Share of the elements that are exactly zero; 0 to 1."""
        return self.num_zeros / max(self.num_elements, 1)


def gradient_stats(gradients: Iterable[Tensor]) -> GradientStats:
    """Read gradients once.

    Args:
        gradients: dense tensors of any shape.

    Returns:
        Their statistics together.

    Example:
        >>> stats = gradient_stats([torch.tensor([0.0, 1.0, 1.5, -0.25])])
        >>> stats.zero_share, stats.exponents
        (0.25, ((-2, 1), (0, 2)))
    """
    flat = torch.cat([gradient.detach().float().flatten() for gradient in gradients] or [torch.empty(0)])
    finite = flat[flat.isfinite() & (flat != 0)]
    # frexp gives a mantissa in [1/2, 1), so its exponent is one above floor(log2).
    values, counts = torch.unique(torch.frexp(finite).exponent - 1, return_counts=True)
    exponents = tuple(zip(values.tolist(), counts.tolist(), strict=True))
    return GradientStats(flat.numel(), int((flat == 0).sum()), exponents)


@dataclass(frozen=True)
class Footprint:
    """Bytes that one run holds.

    Args:
        num_parameters: elements of all parameters.
        parameter_bytes: weights.
        gradient_bytes: their gradients.
        state_bytes: tensors of the optimizer.
        activation_bytes: tensors that the forward pass keeps for the backward pass, weights and their copies apart.
        weight_copy_bytes: 16-bit copies of weights that autocast keeps for the backward pass.
    """

    num_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    activation_bytes: int
    weight_copy_bytes: int

    @property
    def bytes_per_parameter(self) -> float:
        """Weights, gradients and optimizer state per parameter; activations grow with the batch, so they are apart."""
        return (self.parameter_bytes + self.gradient_bytes + self.state_bytes) / self.num_parameters


@dataclass
class SavedBytes:
    """Storages kept for the backward pass, by address: their bytes, in two kinds."""

    activations: dict[int, int] = field(default_factory=dict)
    weight_copies: dict[int, int] = field(default_factory=dict)


@contextmanager
def saved_bytes(model: nn.Module, record: SavedBytes | None = None) -> Iterator[SavedBytes]:
    """Watch a forward pass and note every storage that it keeps for the backward pass.

    Args:
        model: its parameters and buffers are not counted, for they are there anyway.
        record: the one to fill; None makes one.

    Yields:
        The record, which fills while the forward pass runs. A second forward pass would reuse addresses of the first.
    """
    record = SavedBytes() if record is None else record
    own = {tensor.untyped_storage().data_ptr() for tensor in chain(model.parameters(), model.buffers())}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kind = record.weight_copies if _is_made_of_a_weight(tensor) else record.activations
            kind[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield record


def _is_made_of_a_weight(tensor: Tensor) -> bool:
    """Whether casts and views alone lead from a parameter to this tensor: one line of history, ending in a leaf."""
    node = tensor.grad_fn
    while node is not None:
        if type(node).__name__ == "AccumulateGrad":
            return True
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        if len(parents) != 1 or type(node).__name__ not in _COPIES:
            return False
        node = parents[0]
    return False


_COPIES = {
    "ToCopyBackward0",
    "TBackward0",
    "TransposeBackward0",
    "ViewBackward0",
    "UnsafeViewBackward0",
    "CloneBackward0",
}


def footprint(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], gradient_bytes: int, saved: SavedBytes
) -> Footprint:
    """Count the bytes of live storages, each once.

    Args:
        model: its parameters count.
        optimizers: after at least one step, so that their state exists.
        gradient_bytes: of the gradients between backward and step, which are free again afterwards.
        saved: what a forward pass kept, from `saved_bytes`.

    Returns:
        The bytes by kind.
    """
    parameters = list(model.parameters())
    entries = [entry for optimizer in optimizers for entry in optimizer.state.values()]
    state = [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]
    return Footprint(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=storage_bytes(parameters),
        gradient_bytes=gradient_bytes,
        state_bytes=storage_bytes(state),
        activation_bytes=sum(saved.activations.values()),
        weight_copy_bytes=sum(saved.weight_copies.values()),
    )


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind some tensors, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
