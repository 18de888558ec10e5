"""Which sizes of a layer enter matrix products, and how many weights it has as a function of them.

A layer is a few named sizes and a count: ``count(sizes)`` is the number of its weights, biases included. What padding
one size costs is then a difference of two counts, exact for every kind of layer, and each formula is written once.

Not here: which sizes are good (``advice``), products of raw tensors in a ``forward``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from halfstep.tensor_cores.padding import PaddedLinear, round_up, vocabularies

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Layer:
    """One set of weights with its sizes; tied weights and shared modules make one layer with several names.

    Args:
        names: dotted names, in the model's order.
        kind: ``"vocabulary"`` (an output as wide as an embedding is tall), ``"linear"``, ``"bilinear"``,
            ``"convolution"``, ``"first convolution"`` (of an image's 1 to 3 channels), ``"depthwise"``,
            ``"attention"``, ``"recurrent"``, ``"lookup"`` (an embedding that no layer multiplies by) or
            ``"parameter"`` (a matrix of a class that is not torch's).
        sizes: sizes that enter products, by torch's name for them.
        count: number of weights as a function of the sizes.
        num_heads: of an attention; else 1.
    """

    names: tuple[str, ...]
    kind: str
    sizes: Sizes
    count: Callable[[Sizes], int]
    num_heads: int = 1

    @property
    def num_weights(self) -> int:
        """Weights and biases as they are."""
        return self.count(self.sizes)

    def added(self, size: str, padded: int) -> int:
        """How many weights more there are with one size padded."""
        return self.count({**self.sizes, size: padded}) - self.num_weights


def layers_of(named: Mapping[nn.Module, tuple[str, ...]]) -> Iterator[Layer]:
    """Every set of weights of a model once.

    Args:
        named: module -> its dotted names, from ``padding.names_of``.

    Returns:
        Layers in the model's order.
    """
    heads: set[nn.Module] = {head for head, _, _ in vocabularies(named)}
    users = _users(named)
    # An attention's output matrix is a layer of its own only by name; the attention counts it.
    seen: set[nn.Module] = {m.out_proj for m in named if isinstance(m, nn.MultiheadAttention)}
    num_convolutions = 0
    for module, names in named.items():
        layer = None
        if module not in seen:
            members = users.get(module._parameters.get("weight"), [module])
            seen.update(members)
            layer = _tied(members, named) if len(members) > 1 else _described(module, names)
        if layer is not None:
            layer = replace(layer, kind="vocabulary") if module in heads else layer
            num_convolutions += layer.kind == "convolution"
            is_first = layer.kind == "convolution" and num_convolutions == 1 and min(layer.sizes.values()) < 4
            yield replace(layer, kind="first convolution") if is_first else layer
        yield from _own_matrices(module, names, users)


def _users(named: Mapping[nn.Module, tuple[str, ...]]) -> dict[Tensor | None, list[nn.Module]]:
    """Weight -> the linear layers and embeddings that share it."""
    users: dict[Tensor | None, list[nn.Module]] = {}
    for module in named:
        weight = module._parameters.get("weight")
        if weight is not None and isinstance(module, (nn.Linear, nn.Embedding, nn.EmbeddingBag)):
            users.setdefault(weight, []).append(module)
    return users


def _described(module: nn.Module, names: tuple[str, ...]) -> Layer | None:
    """The sizes of a module of torch.nn, or of a class derived from one; None for a module without products."""
    read = next((read for kind, read in _READERS.items() if isinstance(module, kind)), None)
    return None if read is None else read(module, names)


def _tied(members: list[nn.Module], named: Mapping[nn.Module, tuple[str, ...]]) -> Layer | None:
    """Several modules with one weight: looked up at one end and multiplied at the other, or multiplied twice."""
    names = tuple(name for module in named if module in members for name in named[module])
    linears = [module for module in members if isinstance(module, nn.Linear)]
    if not linears:
        return _described(members[0], names)
    layer = _linear(linears[0], names)
    if len(linears) == len(members):
        return layer
    num_biases = sum(module.bias is not None for module in linears)
    out, inner = layer.sizes.values()
    sizes = {"num_embeddings = out_features": out, "embedding_dim = in_features": inner}
    return Layer(names, "vocabulary", sizes, lambda s: _rows(s, num_biases))


def _own_matrices(
    module: nn.Module, names: tuple[str, ...], users: Mapping[Tensor | None, list[nn.Module]]
) -> Iterator[Layer]:
    """Raw parameters of two dimensions in a class that is not torch's."""
    if type(module).__module__.startswith(("torch.", "halfstep.")):
        return
    is_described = any(isinstance(module, kind) for kind in _READERS)
    for name, parameter in module._parameters.items():
        if parameter is None or parameter.dim() != 2 or not parameter.is_floating_point():
            continue
        if parameter in users or (is_described and name == "weight"):
            continue
        sizes = {"size(0)": int(parameter.shape[0]), "size(1)": int(parameter.shape[1])}
        owners = tuple(name if owner == "the model" else f"{owner}.{name}" for owner in names)
        yield Layer(owners, "parameter", sizes, lambda s: s["size(0)"] * s["size(1)"])


def _rows(sizes: Sizes, num_biases: int) -> int:
    out, inner = sizes.values()
    return out * (inner + num_biases)


# --- one reader for each kind of module


def _linear(module: nn.Linear, names: tuple[str, ...]) -> Layer:
    multiple = module.multiple if isinstance(module, PaddedLinear) else 1
    sizes = {
        "out_features": round_up(module.out_features, multiple),
        "in_features": round_up(module.in_features, multiple),
    }
    num_biases = int(module.bias is not None)
    return Layer(names, "linear", sizes, lambda s: _rows(s, num_biases))


def _lookup(module: nn.Embedding | nn.EmbeddingBag, names: tuple[str, ...]) -> Layer:
    columns = module.embedding_dim
    return Layer(names, "lookup", {"num_embeddings": module.num_embeddings}, lambda s: s["num_embeddings"] * columns)


def _bilinear(module: nn.Bilinear, names: tuple[str, ...]) -> Layer:
    bias = module.bias is not None
    sizes = {name: int(getattr(module, name)) for name in ("out_features", "in1_features", "in2_features")}
    return Layer(names, "bilinear", sizes, lambda s: s["out_features"] * (s["in1_features"] * s["in2_features"] + bias))


_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


def _convolution(module: _Conv, names: tuple[str, ...]) -> Layer:
    # One product per group: weight [out, in / groups, *kernel], of a transposed one [in, out / groups, *kernel].
    groups, bias = int(module.groups), module.bias is not None
    kernel = math.prod(module.kernel_size)
    suffix = "" if groups == 1 else " / groups"
    into, out = f"in_channels{suffix}", f"out_channels{suffix}"
    kind = "depthwise" if groups > 1 and groups == module.in_channels else "convolution"
    sizes = {into: module.in_channels // groups, out: module.out_channels // groups}
    return Layer(names, kind, sizes, lambda s: int(groups * s[out] * (s[into] * kernel + bias)))


def _attention(module: nn.MultiheadAttention, names: tuple[str, ...]) -> Layer:
    heads, bias, bias_kv = module.num_heads, module.in_proj_bias is not None, module.bias_k is not None
    is_packed = module.in_proj_weight is not None  # one matrix [3 * embed_dim, embed_dim]
    sizes = {"embed_dim": module.embed_dim, "embed_dim / num_heads": module.head_dim}
    if not is_packed:
        sizes |= {"kdim": int(module.kdim or 0), "vdim": int(module.vdim or 0)}

    def count(s: Sizes) -> int:
        # A padded head makes the embedding wider: nn.MultiheadAttention has no head size of its own.
        embed = max(s["embed_dim"], heads * s["embed_dim / num_heads"])
        inputs = 3 * embed if is_packed else embed + s["kdim"] + s["vdim"]
        return int(embed * (inputs + embed + 4 * bias + 2 * bias_kv))

    return Layer(names, "attention", sizes, count, heads)


_GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}


def _recurrent(module: nn.RNNBase, names: tuple[str, ...]) -> Layer:
    gates, bias, directions = _GATES[module.mode], 2 * module.bias, 1 + module.bidirectional
    sizes = {"hidden_size": module.hidden_size, "input_size": module.input_size}
    if module.proj_size:
        sizes["proj_size"] = module.proj_size

    def count(s: Sizes) -> int:
        hidden, projected = s["hidden_size"], s.get("proj_size", 0)
        state = projected or hidden
        inputs = s["input_size"] + (module.num_layers - 1) * directions * state  # over all layers
        each = gates * hidden * (state + bias) + projected * hidden
        return directions * (gates * hidden * inputs + module.num_layers * each)

    return Layer(names, "recurrent", sizes, count)


def _cell(module: nn.RNNCellBase, names: tuple[str, ...]) -> Layer:
    gates = int(module.weight_hh.shape[0]) // module.hidden_size
    sizes = {"hidden_size": module.hidden_size, "input_size": module.input_size}
    bias = 2 * module.bias
    return Layer(
        names, "recurrent", sizes, lambda s: gates * s["hidden_size"] * (s["input_size"] + s["hidden_size"] + bias)
    )


_READERS: dict[type[nn.Module], Callable[..., Layer]] = {
    nn.Linear: _linear,
    nn.Bilinear: _bilinear,
    nn.Conv1d: _convolution, nn.Conv2d: _convolution, nn.Conv3d: _convolution,
    nn.ConvTranspose1d: _convolution, nn.ConvTranspose2d: _convolution, nn.ConvTranspose3d: _convolution,
    nn.MultiheadAttention: _attention,
    nn.RNNBase: _recurrent,
    nn.RNNCellBase: _cell,
    nn.Embedding: _lookup, nn.EmbeddingBag: _lookup,
}  # fmt: skip
