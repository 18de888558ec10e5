"""What can be neither judged nor padded, refused in one place."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfstep.errors import ArgumentError, UnsupportedError


def check_model(model: object, call: str) -> nn.Module:
    """The model, if its sizes can be read.

    Args:
        model: what the caller was given. Meta tensors are fine: sizes are all that is read.
        call: how the message names the caller, such as ``"pad_to_multiple()"``.

    Returns:
        The same object.

    Raises:
        ArgumentError: it is no module, or has no floating-point parameter.
        UnsupportedError: parameters have no shape yet, are sharded, or are packed for integer kernels.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            asked=f"{call} of a {type(model).__name__}",
            true="a model is a torch.nn.Module",
            why="there are no layers whose sizes could be read",
            fix="pass the module itself, not its class, parameters or state_dict",
        )
    _refuse_quantized(model, call)
    for name, parameter in model.named_parameters():
        _refuse_unreadable(name, parameter, call)
    if not any(p.is_floating_point() for p in model.parameters()):
        raise ArgumentError(
            asked=f"{call} of {type(model).__name__}",
            true="it has no floating-point parameter",
            why="Tensor Cores multiply by weights, and there are none",
            fix="pass the model that holds the layers",
        )
    return model


def _refuse_unreadable(name: str, parameter: Tensor, call: str) -> None:
    if is_lazy(parameter):
        raise UnsupportedError(
            asked=f"{call} with the parameter {name}",
            true="it belongs to a lazy module that has not seen an input yet",
            why="it has no shape to be judged or padded",
            fix="run one batch through the model first",
        )
    # Asked by name, because importing torch.distributed.tensor costs more than the rest of halfstep.
    if hasattr(parameter, "placements") and hasattr(parameter, "to_local"):
        raise UnsupportedError(
            asked=f"{call} with the parameter {name}, a DTensor of shape {tuple(parameter.shape)}",
            true="it is sharded over a device mesh",
            why="each rank multiplies by its own shard, whose sizes and rows are others",
            fix="call it before fully_shard or parallelize_module",
        )
    if hasattr(parameter, "__tensor_flatten__"):
        raise UnsupportedError(
            asked=f"{call} with the parameter {name}, a {type(parameter).__name__}",
            true="such a tensor keeps its numbers in other tensors, packed for kernels of their own",
            why="those have an alignment of their own, and padding may not be defined",
            fix="call it before the model is quantized",
        )


def _refuse_quantized(model: nn.Module, call: str) -> None:
    for name, module in model.named_modules():
        tensors = (*module._parameters.values(), *module._buffers.values())
        is_packed = type(module).__module__.startswith("torch.ao.nn.") and ".quantized" in type(module).__module__
        if is_packed or any(t is not None and t.is_quantized for t in tensors):
            raise UnsupportedError(
                asked=f"{call} with the module {name or 'the model'}, a {type(module).__name__}",
                true="it is quantized: its weights are integers packed for their own kernels",
                why="those kernels have their own alignment, and padding would break the packing",
                fix="call it on the model before it is quantized",
            )
