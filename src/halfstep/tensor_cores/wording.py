"""What a finding says: why a size matters in this kind of layer, and what to do about it."""

from __future__ import annotations

from halfstep.tensor_cores.layers import Layer
from halfstep.tensor_cores.padding import round_up

PIECE_BYTES = 16  # in which every card with Tensor Cores is fed


def of(layer: Layer, size: str, before: int, multiple: int, item_bytes: int) -> tuple[str, str]:
    """The two texts of a finding.

    Args:
        layer: whose size it is.
        size: torch's name for it.
        before: what it is.
        multiple: what it misses.
        item_bytes: bytes of one number in the products.

    Returns:
        Why it matters, and what to do.
    """
    after = round_up(before, multiple)
    if layer.kind in _FIXED:
        why, fix = _FIXED[layer.kind]
        return why, fix.format(after=after)
    return _why(before, multiple, item_bytes), _fix(layer, size, after, multiple)


_FIXED = {
    "lookup": (
        "its rows are looked up, not multiplied, so nothing is lost unless forward() multiplies by this weight",
        "leave it",
    ),
    "depthwise": (
        "one channel at a time is a product of vectors, which does not fill a Tensor Core's tile",
        "no padding helps: leave it, or use groups of 8 and more channels where its time matters",
    ),
    "parameter": (
        "if forward() multiplies by this matrix, its rows begin between the pieces that Tensor Cores are fed in",
        "then choose {after} when the model is made",
    ),
}


def _why(before: int, multiple: int, item_bytes: int) -> str:
    if before * item_bytes % PIECE_BYTES:
        return f"rows begin between {PIECE_BYTES}-byte pieces, and kernels load them in smaller ones"
    return f"the fastest kernels take multiples of {multiple} only"


def _fix(layer: Layer, size: str, after: int, multiple: int) -> str:
    choose = f"choose {size} = {after} when the model is made"
    if layer.kind == "vocabulary" and "out_features" in size:
        return f"halfstep.pad_to_multiple(model, {multiple}) pads the product and keeps results and checkpoints"
    if layer.kind == "linear":
        return f"{choose}, or halfstep.pad_to_multiple(model, {multiple}, modules={layer.names[0]!r})"
    if layer.kind == "first convolution" and size == "in_channels":
        return (
            f"add zero channels to the images: 4 are enough with a stride of 2, else {after}; or leave it, since it is "
            "one layer and cuDNN pads 16-bit channels by itself, at the price of a copy"
        )
    if size == "embed_dim / num_heads":
        return _fewer_heads(layer, after, multiple)
    if "/ groups" in size:
        return f"make it {after} channels per group, with fewer groups if the total is to stay"
    if layer.kind == "vocabulary":
        return "choose another width of the model when it is made"
    return choose


def _fewer_heads(layer: Layer, after: int, multiple: int) -> str:
    embed = layer.sizes["embed_dim"]
    fits = [n for n in range(layer.num_heads, 0, -1) if embed % n == 0 and embed // n % multiple == 0]
    if fits:
        return f"num_heads={fits[0]} has heads of {embed // fits[0]} at no cost; torch's fused kernels else pad and cut"
    return (
        f"choose embed_dim = {layer.num_heads * after} when the model is made; torch's fused kernels else pad and cut"
    )
