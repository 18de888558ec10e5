"""Tensor Core advice against real padded layers; a padded vocabulary against the plain one, bit for bit."""

import copy
import dataclasses
import io
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor

from halfstep.casting import cast_model
from halfstep.errors import ArgumentError, UnsupportedError
from halfstep.formats import BF16, FORMATS
from halfstep.hardware import Hardware
from halfstep.optim.export import fp32_state_dict
from halfstep.optim.masters import MasterWeights
from halfstep.tensor_cores import PaddedLinear, pad_to_multiple, tensor_core_advice, unpad
from halfstep.tensor_cores.padding import MIN_ROWS, round_up

ITEM_BYTES = {"tf32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3fn": 1, "fp8_e5m2": 1}


class Language(nn.Module):
    """Embedding, a layer, and one or two heads, the first of them tied if asked."""

    def __init__(self, vocabulary=13, width=8, *, tie=True, bias=True, heads=1, **embedding):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, **embedding)
        self.inner = nn.Linear(width, width)
        self.heads = nn.ModuleList(nn.Linear(width, vocabulary, bias=bias) for _ in range(heads))
        if tie:
            self.heads[0].weight = self.embed.weight

    def forward(self, ids):
        x = torch.tanh(self.inner(self.embed(ids)))
        return torch.stack([head(x) for head in self.heads])


def sizes_found(model, dtype="bf16", **options):
    return [(f.names, f.size, f.before, f.after) for f in tensor_core_advice(model, dtype, **options).findings]


def num_weights(model):
    return sum(p.numel() for p in model.parameters())


# -- advice: which sizes ----------------------------------------------------------------------------------------------

# A layer as a function of its sizes: padding one of them must cost what the real padded layer has more.
MAKERS = {
    "Linear": (lambda out_features, in_features: nn.Linear(in_features, out_features),
               {"out_features": 50, "in_features": 30}),
    "Linear without bias": (lambda out_features, in_features: nn.Linear(in_features, out_features, bias=False),
                            {"out_features": 3, "in_features": 17}),
    "Bilinear": (lambda out_features, in1_features, in2_features: nn.Bilinear(in1_features, in2_features, out_features),
                 {"out_features": 5, "in1_features": 3, "in2_features": 9}),
    "Conv1d": (lambda in_channels, out_channels: nn.Conv1d(in_channels, out_channels, 5),
               {"in_channels": 20, "out_channels": 33}),
    "Conv3d": (lambda in_channels, out_channels: nn.Conv3d(in_channels, out_channels, (3, 2, 1), bias=False),
               {"in_channels": 9, "out_channels": 4}),
    "ConvTranspose2d": (lambda in_channels, out_channels: nn.ConvTranspose2d(in_channels, out_channels, 3),
                        {"in_channels": 12, "out_channels": 7}),
    "LSTM": (lambda hidden_size, input_size, proj_size: nn.LSTM(
        input_size, hidden_size, 3, bidirectional=True, proj_size=proj_size),
        {"hidden_size": 50, "input_size": 30, "proj_size": 20}),
    "GRU": (lambda hidden_size, input_size: nn.GRU(input_size, hidden_size, 2, bias=False),
            {"hidden_size": 9, "input_size": 3}),
    "RNN": (lambda hidden_size, input_size: nn.RNN(input_size, hidden_size, bidirectional=True),
            {"hidden_size": 9, "input_size": 3}),
    "LSTMCell": (lambda hidden_size, input_size: nn.LSTMCell(input_size, hidden_size),
                 {"hidden_size": 9, "input_size": 3}),
    "GRUCell": (lambda hidden_size, input_size: nn.GRUCell(input_size, hidden_size, bias=False),
                {"hidden_size": 9, "input_size": 3}),
    "Embedding": (lambda num_embeddings: nn.Embedding(num_embeddings, 6), {"num_embeddings": 101}),
    "EmbeddingBag": (lambda num_embeddings: nn.EmbeddingBag(num_embeddings, 6), {"num_embeddings": 101}),
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_bytes_are_those_of_the_padded_layer(name, dtype):
    make, sizes = MAKERS[name]
    model, multiple = make(**sizes), 16 // ITEM_BYTES[dtype]
    advice = tensor_core_advice(model, dtype)
    found = {f.size: f for f in advice.findings}
    assert set(found) == {size for size, value in sizes.items() if value % multiple}
    assert advice.multiple == multiple
    for size, finding in found.items():
        more = num_weights(make(**{**sizes, size: finding.after})) - num_weights(model)
        assert finding.added_bytes == more * ITEM_BYTES[dtype]
        assert finding.added_percent == pytest.approx(100 * more / num_weights(model))


@pytest.mark.parametrize(
    ("options", "padded"),
    [
        ({}, {"embed_dim": 104, "embed_dim / num_heads": 128}),
        ({"bias": False, "add_bias_kv": True}, {"embed_dim": 104, "embed_dim / num_heads": 128}),
        ({"kdim": 20, "vdim": 64}, {"embed_dim": 104, "embed_dim / num_heads": 128, "kdim": 24}),
    ],
)
def test_attention(options, padded):
    model = nn.MultiheadAttention(100, 4, **options)
    found = {f.size: f for f in tensor_core_advice(model, "fp16").findings}
    assert set(found) == set(padded), "the packed weights and out_proj are the attention's own"
    for size, wide in padded.items():
        changed = {**options, "kdim": wide} if size == "kdim" else options
        more = num_weights(nn.MultiheadAttention(100 if size == "kdim" else wide, 4, **changed)) - num_weights(model)
        assert found[size].added_bytes == 2 * more
    assert (found["embed_dim / num_heads"].before, found["embed_dim / num_heads"].after) == (25, 32)


def test_attention_with_fewer_heads_costs_nothing():
    [finding] = tensor_core_advice(nn.MultiheadAttention(64, 16), "bf16").findings
    assert (finding.size, finding.before, finding.after) == ("embed_dim / num_heads", 4, 8)
    assert "num_heads=8 has heads of 8 at no cost" in finding.fix


def test_gpt2():
    """50257 x 768, tied: 7 rows of 768 more at multiples of 8, 47 at multiples of 64; 3 for tf32, 15 for fp8."""
    with torch.device("meta"):
        model = Language(50257, 768, bias=False)
    for dtype, after, num_rows in (("bf16", 50264, 7), ("tf32", 50260, 3), ("fp8_e4m3fn", 50272, 15)):
        [finding] = tensor_core_advice(model, dtype).findings
        assert (finding.before, finding.after) == (50257, after)
        assert finding.added_bytes == num_rows * 768 * ITEM_BYTES[dtype]
        assert (finding.names, finding.kind) == (("embed", "heads.0"), "vocabulary")
    [finding] = tensor_core_advice(model, "bf16", multiple=64).findings
    assert (finding.after, finding.added_bytes) == (50304, 47 * 768 * 2)
    assert tensor_core_advice(model, "bf16").best_multiple == 64


def test_tied_weights_and_shared_modules_are_one_entry():
    model = Language(13, 8, heads=3)
    model.heads[2].weight = model.heads[1].weight
    model.again = model.inner
    model.narrow = nn.Linear(8, 3)
    model.same = model.narrow
    assert sizes_found(model) == [
        (("embed", "heads.0"), "num_embeddings = out_features", 13, 16),
        (("heads.1", "heads.2"), "out_features", 13, 16),
        (("narrow", "same"), "out_features", 3, 8),
    ]
    [tied, *_] = tensor_core_advice(model, "bf16").findings
    assert tied.added_bytes == 2 * 3 * (8 + 1), "three rows and three numbers of the head's bias"


def test_vocabularies_come_first_then_attention_then_weights_and_lookups_last():
    model = nn.Sequential(
        nn.Linear(1000, 1001), nn.Embedding(33, 8), nn.Linear(8, 3), nn.MultiheadAttention(12, 1),
        nn.Embedding(13, 8), nn.Linear(8, 13), nn.Conv2d(8, 8, 3, groups=8),
    )  # fmt: skip
    kinds = [(f.names[0], f.kind) for f in tensor_core_advice(model, "bf16").findings]
    assert kinds == [
        ("5", "vocabulary"), ("3", "attention"), ("3", "attention"), ("0", "linear"), ("2", "linear"),
        ("1", "lookup"), ("4", "lookup"), ("6", "depthwise"),
    ]  # fmt: skip


def test_lookups_alone_are_nothing_to_do():
    advice = tensor_core_advice(nn.Embedding(13, 8), "bf16")
    assert [f.needs_action for f in advice.findings] == [False]
    assert advice.nothing_to_do
    assert "looked up, not multiplied" in str(advice)
    assert "no layer here is known to multiply" in str(advice)


def test_transformer_layers_and_aligned_models():
    aligned = nn.TransformerEncoderLayer(64, 4, 128)
    assert tensor_core_advice(aligned, torch.bfloat16).nothing_to_do
    assert str(tensor_core_advice(aligned, BF16)).endswith("nothing to do")
    odd = nn.TransformerEncoderLayer(60, 4, 100)
    assert {(names[0], size) for names, size, *_ in sizes_found(odd)} == {
        ("self_attn", "embed_dim"), ("self_attn", "embed_dim / num_heads"), ("linear1", "in_features"),
        ("linear1", "out_features"), ("linear2", "in_features"), ("linear2", "out_features"),
    }  # fmt: skip


def test_convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 32, 7, stride=2), nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 64, 1, groups=16),
        nn.Conv2d(64, 3, 1),
    )  # fmt: skip
    first, last, groups_in, groups_out, depthwise = tensor_core_advice(model, "fp16").findings
    assert (first.names, first.kind, first.before, first.after) == (("0",), "first convolution", 3, 8)
    assert first.added_bytes == 5 * 32 * 49 * 2
    assert "4 are enough with a stride of 2" in first.fix
    assert (last.names, last.kind, last.size) == (("3",), "convolution", "out_channels")
    assert (groups_in.size, groups_in.before, groups_in.after) == ("in_channels / groups", 2, 8)
    assert (groups_out.size, groups_out.before, groups_out.after) == ("out_channels / groups", 4, 8)
    assert "8 channels per group, with fewer groups" in groups_in.fix
    assert (depthwise.names, depthwise.kind, depthwise.added_bytes) == (("1",), "depthwise", 0)
    assert not depthwise.needs_action
    assert "product of vectors" in depthwise.why


def test_groups_are_counted_per_group():
    model = nn.Conv2d(20, 40, 3, groups=5)  # 4 in and 8 out in each group
    [finding] = tensor_core_advice(model, "bf16").findings
    assert (finding.size, finding.before, finding.after) == ("in_channels / groups", 4, 8)
    assert finding.added_bytes == 2 * (num_weights(nn.Conv2d(40, 40, 3, groups=5)) - num_weights(model))


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(24, 30))
        self.vector = nn.Parameter(torch.zeros(3))
        self.ids = nn.Parameter(torch.zeros(3, 3, dtype=torch.int64), requires_grad=False)


class Adapter(nn.Linear):
    """A class derived from nn.Linear, with a matrix of its own."""

    def __init__(self):
        super().__init__(8, 8)
        self.lora = nn.Parameter(torch.zeros(8, 3))


def test_raw_parameters_are_named_with_caution():
    advice = tensor_core_advice(nn.Sequential(Own(), Adapter()), "bf16")
    assert [(f.names, f.size, f.before, f.after, f.added_bytes) for f in advice.findings] == [
        (("0.matrix",), "size(1)", 30, 32, 2 * 24 * 2),
        (("1.lora",), "size(1)", 3, 8, 2 * 8 * 5),
    ]
    assert all(f.why.startswith("if forward() multiplies by this matrix") for f in advice.findings)
    assert [f.names for f in tensor_core_advice(Own(), "bf16").findings] == [("matrix",)]


def test_parametrized_layers_are_read_as_the_layers_they_are():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))
    assert sizes_found(model) == [(("the model",), "out_features", 3, 8)]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 10**7), st.integers(2, 300))
def test_rounding_up_is_the_smallest_multiple(size, multiple):
    after = round_up(size, multiple)
    assert after % multiple == 0
    assert 0 <= after - size < multiple


# -- advice: layout, hardware, form -----------------------------------------------------------------------------------


def test_channels_last():
    assert tensor_core_advice(nn.Linear(8, 8), "fp16").channels_last is None
    assert tensor_core_advice(nn.Conv1d(8, 8, 3), "fp16").channels_last is None, "torch has none for it"
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=8))
    advice = tensor_core_advice(model, "fp16")
    layout = advice.channels_last
    assert (layout.helps, layout.is_set, layout.names) == (True, False, ("0",))
    assert not advice.nothing_to_do
    assert "model.to(memory_format=torch.channels_last)" in layout.reason
    model.to(memory_format=torch.channels_last)
    advice = tensor_core_advice(model, "fp16")
    assert advice.channels_last.is_set
    assert advice.nothing_to_do
    solid = tensor_core_advice(nn.ConvTranspose3d(8, 8, 3), "bf16").channels_last
    assert solid.memory_formats == ("torch.channels_last_3d",)
    pointwise = tensor_core_advice(nn.Conv2d(8, 8, 1), "bf16").channels_last
    assert (pointwise.helps, pointwise.is_set) == (True, True), "a 1x1 weight is the same in both"
    depthwise = tensor_core_advice(nn.Conv2d(8, 8, 3, groups=8), "bf16").channels_last
    assert (depthwise.helps, depthwise.names) == (False, ())
    assert "measure" in tensor_core_advice(nn.Conv2d(64, 64, 3, groups=4), "bf16").channels_last.reason


def test_hardware_gives_notes_only():
    model = nn.Linear(8, 3)
    plain = tensor_core_advice(model, "bf16")
    v100 = tensor_core_advice(model, "bf16", hardware=Hardware("cuda", capability=(7, 0)))
    assert v100.notes == ("sm_70 does not multiply bf16 natively, only fp32, fp16",)
    assert (v100.best_multiple, plain.best_multiple) == (8, 64)
    assert v100.findings == plain.findings
    h100 = tensor_core_advice(model, "bf16", hardware=Hardware("cuda", capability=(9, 0)))
    assert h100 == plain
    no_units = tensor_core_advice(model, "fp16", hardware=Hardware("cpu"))
    assert "has no matrix units" in no_units.notes[0]


def test_advice_is_frozen_data():
    advice = tensor_core_advice(nn.Sequential(nn.Conv2d(3, 5, 3), nn.Linear(5, 7)), "fp8_e5m2")
    data = json.loads(json.dumps(advice.as_dict()))
    assert data["format"] == "fp8_e5m2"
    assert [f["after"] for f in data["findings"]] == [16, 16, 16, 16]
    assert data["channels_last"]["helps"] is True
    assert data["nothing_to_do"] is False
    assert "refuses sizes" in data["notes"][0]
    for value in (advice, advice.findings[0], advice.channels_last):
        with pytest.raises(dataclasses.FrozenInstanceError):
            value.names = ()


def test_text():
    model = nn.Sequential(nn.Embedding(50257, 768), nn.Linear(768, 50257, bias=False))
    model[1].weight = model[0].weight
    advice = tensor_core_advice(model, "bf16")
    assert str(advice) == (
        "bf16: sizes in products should be multiples of 8 (64 from A100 on)\n"
        "rows begin between 16-byte pieces, and kernels load them in smaller ones:\n"
        "  0, 1  num_embeddings = out_features  50257 -> 50264  +10752 bytes  0.014 %  "
        "halfstep.pad_to_multiple(model, 8) pads the product and keeps results and checkpoints"
    )
    assert str(advice.findings[0]).startswith("0, 1 num_embeddings = out_features 50257 -> 50264 +10752 bytes 0.014 %:")


def test_the_model_is_not_touched():
    model = Language()
    before = copy.deepcopy(model.state_dict())
    tensor_core_advice(model, "bf16")
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert type(model.heads[0]) is nn.Linear


# -- a padded vocabulary: equal results -------------------------------------------------------------------------------


class ExactProducts(TorchFunctionMode):
    """F.linear summed in fp64 and rounded once, so that the order of summation cannot show; records its sizes."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.linear:
            return function(*args, **(kwargs or {}))
        x, weight, bias = args
        self.shapes.append(tuple(weight.shape))
        product = x.double() @ weight.double().T
        return (product if bias is None else product + bias.double()).to(x.dtype)


CONFIGURATIONS = {
    "tied": {},
    "untied": {"tie": False},
    "without bias": {"bias": False},
    "several heads": {"heads": 3},
    "odd width": {"width": 5},
    "padding_idx": {"padding_idx": 2},
    "max_norm": {"max_norm": 0.5, "tie": False},
    "max_norm, tied": {"max_norm": 0.5},
    "sparse": {"sparse": True, "tie": False},
}


def pair(**options):
    """A plain model and a padded copy of it."""
    plain = Language(**options)
    padded = copy.deepcopy(plain)
    pad_to_multiple(padded, 8, min_rows=0)
    return plain, padded


def loss_of(model, ids):
    logits = model(ids)
    return sum(F.cross_entropy(one.float(), ids.roll(1), label_smoothing=0.1) for one in logits)


def dense(gradient):
    return gradient.to_dense() if gradient.is_sparse else gradient


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_loss_and_gradients_are_bit_equal(name):
    plain, padded = pair(**CONFIGURATIONS[name])
    ids = torch.randint(13, (64,))
    with ExactProducts() as products:
        losses = [loss_of(model, ids) for model in (plain, padded)]
        for loss in losses:
            loss.backward()
    assert torch.equal(*losses)
    assert {(13, products.shapes[1][1]), (16, 8)} <= set(products.shapes), "one plain, one padded"
    for (key, ours), theirs in zip(padded.named_parameters(), plain.parameters(), strict=True):
        assert ours.shape == theirs.shape
        assert torch.equal(dense(ours.grad), dense(theirs.grad)), key


@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name != "sparse"])
def test_twenty_steps_of_adamw_with_weight_decay_are_bit_equal(name):
    plain, padded = pair(**CONFIGURATIONS[name])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.1) for m in (plain, padded)]
    with ExactProducts():
        for _ in range(20):
            ids = torch.randint(13, (64,))
            for model, optimizer in zip((plain, padded), optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model, ids).backward()
                optimizer.step()
    for ours, theirs in zip(padded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    states = [json.dumps(o.state_dict(), default=lambda t: t.tolist()) for o in optimizers]
    assert states[0] == states[1], "an optimizer's checkpoint is interchangeable too"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [1, 7, 13, 16, 61])
def test_torchs_own_products_agree_where_every_sum_is_exact(vocabulary, dtype):
    """Small whole numbers: any order of summation gives the same bits, in torch's kernels as they are."""
    plain = nn.Linear(8, vocabulary, dtype=dtype)
    with torch.no_grad():
        for p in plain.parameters():
            p.copy_(torch.randint(-2, 3, p.shape))
    padded = copy.deepcopy(plain)
    pad_to_multiple(padded, 8, modules="the model", min_rows=0)
    x = torch.randint(-2, 3, (3, 5, 8)).to(dtype)
    weight = torch.randint(-1, 2, (3, 5, vocabulary)).to(dtype)
    results = []
    for model in (plain, padded):
        given = x.clone().requires_grad_()
        out = model(given)
        (out * weight).sum().backward()
        results.append((out.detach(), given.grad, *(p.grad for p in model.parameters())))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


def test_torchs_own_fp32_products_agree_to_rounding():
    plain, padded = pair(vocabulary=1001, width=64)
    ids = torch.randint(1001, (300,))
    losses = [loss_of(model, ids) for model in (plain, padded)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for ours, theirs in zip(padded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_logits_have_the_old_width_and_are_not_copied():
    head = nn.Linear(8, 13)
    pad_to_multiple(head, 8, modules="*", min_rows=0)
    out = head(torch.randn(2, 5, 8))
    assert out.shape == (2, 5, 13)
    assert out.stride() == (5 * 16, 16, 1), "a view of the padded product"
    assert out.view(-1, 13).shape == (10, 13)
    assert head(torch.randn(8)).shape == (13,)
    assert head(torch.randn(0, 8)).shape == (0, 13)


def test_infinities_stay_where_they_are():
    plain = nn.Linear(5, 13)
    padded = copy.deepcopy(plain)
    pad_to_multiple(padded, 8, modules="*", min_rows=0)
    x = torch.randn(4, 5)
    x[1, 2] = torch.inf
    assert torch.equal(plain(x).isfinite(), padded(x).isfinite())
    padded(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(padded.weight.grad.isfinite(), plain.weight.grad.isfinite())


def test_small_products_are_left():
    with ExactProducts() as products:
        model = Language()
        pad_to_multiple(model, 8)
        model(torch.zeros(MIN_ROWS - 1, dtype=torch.int64))
        model(torch.zeros(2, MIN_ROWS // 2, dtype=torch.int64))
    assert products.shapes == [(8, 8), (13, 8), (8, 8), (16, 8)]


def test_a_wrong_id_is_still_an_error():
    _, padded = pair()
    with pytest.raises(IndexError):
        padded(torch.tensor([13]))


def test_products_written_by_hand_see_no_padding():
    _, padded = pair()
    assert F.linear(torch.randn(2, 8), padded.embed.weight).shape == (2, 13)


# -- a padded vocabulary: state ---------------------------------------------------------------------------------------


def test_parameters_are_the_same_objects_and_ties_hold():
    model = Language(heads=2)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    pad_to_multiple(model, 8, min_rows=0)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert model.heads[0].weight is model.embed.weight
    before = model.embed.weight.clone()
    loss_of(model, torch.randint(13, (9,))).backward()
    optimizer.step()
    assert not torch.equal(before, model.heads[0].weight), "an optimizer made before goes on"


def test_checkpoints_are_interchangeable():
    plain, padded = pair()
    assert {k: v.shape for k, v in padded.state_dict().items()} == {k: v.shape for k, v in plain.state_dict().items()}
    other = Language()
    padded.load_state_dict(other.state_dict())
    plain.load_state_dict(padded.state_dict())
    ids = torch.randint(13, (5,))
    assert torch.equal(plain(ids), other(ids))


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_save])
def test_copies_stay_padded_and_tied(copied):
    _, padded = pair()
    ids = torch.randint(13, (5,))
    again = copied(padded)
    assert type(again.heads[0]) is PaddedLinear
    assert again.heads[0].weight is again.embed.weight
    assert torch.equal(again(ids), padded(ids))
    unpad(again)
    assert type(padded.heads[0]) is PaddedLinear


def test_there_and_back():
    model = Language(heads=2)
    calls = []
    model.heads[0].register_forward_hook(lambda *_: calls.append(1))
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    records = pad_to_multiple(model, 8)
    assert [str(r) for r in records] == [
        "embed: num_embeddings 13 (its rows are looked up, not multiplied)",
        "heads.0: out_features 13 -> 16, a copy of 576 bytes (its weight is embed's too)",
        "heads.1: out_features 13 -> 16, a copy of 576 bytes (as wide as embed is tall)",
    ]
    assert [r.is_changed for r in records] == [False, True, True]
    assert records[1].copied_bytes == 16 * (8 + 1) * 4
    assert json.loads(json.dumps(records[1].as_dict()))["after"] == 16
    model(torch.tensor([1]))
    assert calls == [1], "hooks stay"
    assert [str(r) for r in unpad(model)] == [
        "heads.0: out_features 16 -> 13 (padding taken back)",
        "heads.1: out_features 16 -> 13 (padding taken back)",
    ]
    assert {name: module.__dict__ for name, module in model.named_modules()} == before
    assert unpad(model) == ()


def test_again_with_another_multiple():
    model = Language()
    pad_to_multiple(model, 8)
    assert [r.is_changed for r in pad_to_multiple(model, 8)] == [False, False]
    [_, head] = pad_to_multiple(model, 24)
    assert (head.before, head.after) == (16, 24)
    assert "multiples of 24" in repr(model)
    [_, head] = pad_to_multiple(model, 13, modules=("heads.*", "inner"))
    assert "13" in str(head)
    aligned = Language(16)
    assert "a multiple of 8 as it is" in str(pad_to_multiple(aligned, 8)[1])
    assert type(aligned.heads[0]) is nn.Linear


def test_padding_that_is_no_longer_needed_goes():
    model = nn.Linear(13, 13)
    pad_to_multiple(model, 8, modules="*")
    [record] = pad_to_multiple(model, 13, modules="*")
    assert (record.before, record.after, type(model)) == (16, 13, nn.Linear)


def test_named_modules():
    model = nn.Sequential(nn.Linear(8, 10), nn.Linear(10, 8), nn.Linear(10, 6))
    [first, second] = pad_to_multiple(model, 8, modules=["0", "1"])
    assert str(first) == "0: out_features 10 -> 16, a copy of 576 bytes (named by '0')"
    assert "its in_features are padded too, 10 -> 16" in str(second)
    assert [type(m) for m in model] == [PaddedLinear, PaddedLinear, nn.Linear]


def test_padded_layers_are_no_longer_found():
    model = Language(width=12)
    before = tensor_core_advice(model, "bf16")
    pad_to_multiple(model, 8, modules="*")
    after = tensor_core_advice(model, "bf16")
    assert len(before.findings) == 4
    assert after.nothing_to_do
    assert tensor_core_advice(model, "fp8_e5m2").findings == (), "12 -> 16 and 13 -> 16 fit fp8 too"
    assert len(tensor_core_advice(model, "bf16", multiple=32).findings) == 4


def test_meta_models_can_be_padded_and_filled_later():
    with torch.device("meta"):
        model = Language()
    pad_to_multiple(model, 8, min_rows=0)
    model.to_empty(device="cpu")
    model.load_state_dict(Language().state_dict())
    assert model(torch.tensor([1, 2])).shape == (1, 2, 13)


# -- a padded vocabulary: in 16 bits, compiled ------------------------------------------------------------------------


def test_autocast():
    plain, padded = pair()
    ids = torch.randint(13, (32,))
    results = []
    for model in (plain, padded):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids)
        assert logits.dtype == torch.bfloat16
        F.cross_entropy(logits[0].float(), ids).backward()
        results.append((logits.detach(), *(p.grad for p in model.parameters())))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore::halfstep.errors.PrecisionWarning")
def test_master_weights_over_a_cast_model():
    plain, padded = pair()
    optimizers = []
    for model in (plain, padded):
        cast_model(model, "bf16-master")
        optimizers.append(MasterWeights(torch.optim.AdamW(model.parameters(), lr=0.05)))
    with ExactProducts():
        for _ in range(5):
            ids = torch.randint(13, (32,))
            for model, optimizer in zip((plain, padded), optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model, ids).backward()
                optimizer.step()
    exported = [fp32_state_dict(m, o) for m, o in zip((plain, padded), optimizers, strict=True)]
    assert exported[0]["embed.weight"].dtype == torch.float32
    assert all(torch.equal(exported[0][key], exported[1][key]) for key in exported[0])


def test_it_compiles_without_a_break():
    _, padded = pair()
    compiled = torch.compile(padded, backend="eager", fullgraph=True)
    ids = torch.randint(13, (4, 5))
    assert torch.equal(compiled(ids), padded(ids))


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(call, error, *words):
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert all(part in text for part in ("\n  true: ", "\n  why:  ", "\n  fix:  "))
    for word in words:
        assert word in text
    return caught.value


CALLS = {
    "advice": lambda model: tensor_core_advice(model, "bf16"),
    "pad": lambda model: pad_to_multiple(model, 8),
    "unpad": unpad,
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@each_call
def test_what_is_no_model(call):
    refused(lambda: call([nn.Linear(2, 2)]), ArgumentError, "of a list", "pass the module itself")
    refused(lambda: call(nn.Linear), ArgumentError, "of a type")
    refused(lambda: call(nn.ReLU()), ArgumentError, "of ReLU", "no floating-point parameter")


@each_call
def test_lazy_modules(call):
    lazy = nn.Sequential(nn.Embedding(5, 3), nn.LazyLinear(5))
    refused(lambda: call(lazy), UnsupportedError, "the parameter 1.weight", "run one batch")


@each_call
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_modules(call):
    packed = type("Linear", (nn.Module,), {"__module__": "torch.ao.nn.quantized.modules.linear"})()
    refused(lambda: call(nn.Sequential(nn.Linear(2, 2), packed)), UnsupportedError, "the module 1", "before it is")
    model = nn.Linear(2, 2)
    model.register_buffer("packed", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    refused(lambda: call(model), UnsupportedError, "it is quantized")
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(TwoTensor(model.weight.detach(), model.weight.detach()))
    refused(lambda: call(model), UnsupportedError, "a TwoTensor", "before the model is quantized")


@each_call
def test_sharded_modules(call):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), init_device_mesh("cpu", (1,))))
        refused(lambda: call(model), UnsupportedError, "a DTensor of shape (4, 4)", "before fully_shard")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["fp64", torch.float64, torch.int8, "int8", torch.complex64, None, 16, "fp32"])
def test_dtypes_that_tensor_cores_do_not_multiply(dtype):
    refused(
        lambda: tensor_core_advice(nn.Linear(2, 2), dtype), ArgumentError,
        "tensor_core_advice() for", "tf32, fp16, bf16, fp8_e4m3fn, fp8_e5m2",
    )  # fmt: skip


def test_dtypes_by_every_name():
    model = nn.Linear(3, 3)
    for fmt in FORMATS[1:]:
        spellings = [fmt, fmt.name, *([] if fmt.dtype is None else [fmt.dtype, str(fmt.dtype)])]
        assert {str(tensor_core_advice(model, s).format) for s in spellings} == {fmt.name}


@pytest.mark.parametrize("multiple", [0, -8, 1, 8.0, "8", True, None])
def test_multiples_that_are_none(multiple):
    refused(lambda: pad_to_multiple(Language(), multiple), ArgumentError, f"multiple={multiple!r}", "pass 8")
    if multiple is not None:
        refused(
            lambda: tensor_core_advice(nn.Linear(2, 2), "bf16", multiple=multiple),
            ArgumentError, f"multiple={multiple!r}",
        )  # fmt: skip


@pytest.mark.parametrize("min_rows", [-1, 2.5, True, None])
def test_rows_that_are_none(min_rows):
    refused(lambda: pad_to_multiple(Language(), 8, min_rows=min_rows), ArgumentError, f"min_rows={min_rows!r}")


def test_multiples_that_are_no_power_of_two():
    model = Language()
    assert [r.after for r in pad_to_multiple(model, 12, min_rows=0)] == [13, 24]
    assert model(torch.tensor([1, 2])).shape == (1, 2, 13)


def test_patterns_that_name_no_linear_layer():
    model = nn.Sequential(nn.Conv1d(3, 3, 1), nn.Linear(2, 3), Adapter())
    refused(
        lambda: pad_to_multiple(model, 8, modules="lm_head"), ArgumentError, "it names nothing", "nn.Linear here: 1"
    )
    refused(lambda: pad_to_multiple(model, 8, modules=["1", "0"]), ArgumentError, "it names only Conv1d")
    refused(lambda: pad_to_multiple(model, 8, modules="2"), ArgumentError, "it names only Adapter")
    assert type(model[1]) is nn.Linear, "refused as a whole"


def test_no_vocabulary():
    refused(
        lambda: pad_to_multiple(nn.Linear(2, 3), 8), ArgumentError, "no embedding", "the model", 'modules="lm_head"'
    )


def test_hardware_that_is_none():
    refused(lambda: tensor_core_advice(nn.Linear(2, 3), "bf16", hardware="cuda"), ArgumentError, "hardware='cuda'")
