"""Bad input, by kind: each is refused in four parts, warned about with the remedy, or goes through and is seen.

Beside this file: refusals of MasterWeights one by one (test_refusals.py), states that do not fit
(test_master_state.py), each function's own checks (tests/ops).
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep import MasterWeights, Policy, ops
from halfstep.errors import ArgumentError, CallOrderError, PrecisionWarning, StateError

SGD, Adam = torch.optim.SGD, torch.optim.Adam
FP16, BF16 = torch.float16, torch.bfloat16
HALVES = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])
EVERY_FLOAT = pytest.mark.parametrize("dtype", [FP16, BF16, torch.float32, torch.float64], ids=str)
NAN, INF = math.nan, math.inf


def half(*values, dtype=BF16):
    return nn.Parameter(torch.tensor(values or (1.0, 1.0), dtype=dtype))


def refused(error, call, *texts):
    with pytest.raises(error) as caught:
        call()
    for text in (*texts, "true:", "why:", "fix:"):
        assert text in str(caught.value), caught.value


# -- fp16 weights with a bare Adam: eps = 1e-8 is 0 in fp16 -----------------------------------------------------------


def test_what_a_bare_adam_does_to_fp16_weights():
    assert torch.tensor(1e-8).half() == 0
    p = half(dtype=FP16)
    p.grad = torch.tensor([0.0, 1e-4]).half()
    Adam([p], lr=1e-3).step()
    assert p[0].isnan()
    assert p[1] == -INF


def one_step(policy, optimizer_of=lambda ps: Adam(ps, 1e-3), build=None):
    """The weights and the optimizer after one step of a Stepper with the gradient (0, 1e-4)."""
    p = half(dtype=FP16)
    optimizer = optimizer_of([p])
    stepper = halfstep.Stepper(nn.ParameterList([p]), optimizer, policy=build() if build else policy)
    with stepper.forward():
        loss = (p.float() * torch.tensor([0.0, 1e-4])).sum()
    stepper.backward(loss)
    assert stepper.step().is_applied
    return p, optimizer


@pytest.mark.parametrize("policy", ["fp32", "fp16-mixed", "bf16-mixed", "auto"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_stepper_warns_of_bare_16_bit_weights_and_steps_them_in_fp32(policy, fused):
    with pytest.warns(PrecisionWarning, match=r"0 in fp16, and nothing keeps.*Keep fp32 weights under a mixed policy"):
        p, optimizer = one_step(policy, lambda ps: Adam(ps, 1e-3, fused=fused))
    assert p.tolist() == [1.0, torch.tensor(0.999).half().item()]
    assert all(value.dtype == torch.float32 for value in optimizer.state[p].values())


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed"])
@pytest.mark.filterwarnings("error::halfstep.errors.PrecisionWarning")
def test_frozen_16_bit_weights_are_nothing_to_warn_about(policy):
    """The base under fp32 adapters: nothing is ever added to it. Unfrozen, it is."""
    model = nn.ModuleList([nn.Linear(2, 2).bfloat16().requires_grad_(False), nn.Linear(2, 2)])
    halfstep.Stepper(model, Adam(model.parameters()), policy=policy)
    model[0].requires_grad_(True)
    with pytest.raises(PrecisionWarning, match=r"2 of the parameters are 16-bit, the first one 0\.weight in bf16"):
        halfstep.Stepper(model, Adam(model.parameters()), policy=policy)


HAND_MADE = {
    "by name": None,
    "by hand": lambda: Policy(param_dtype=FP16, compute_dtype=FP16, scaling="dynamic"),
}


@pytest.mark.parametrize("build", HAND_MADE.values(), ids=HAND_MADE)
def test_a_policy_without_masters_warns_however_it_was_made(build):
    with pytest.warns(PrecisionWarning, match=r"(keeps no masters|nothing keeps).*(fp16-master|mixed policy)"):
        p, _ = one_step("fp16-true", build=build)
    assert p.isfinite().all()


def test_a_master_policy_refuses_a_bare_adam():
    refused(ArgumentError, lambda: one_step("fp16-master"), "with Adam", "keeps none", "halfstep.MasterWeights(")


@pytest.mark.parametrize("policy", ["fp16-master"])
@pytest.mark.filterwarnings("error::halfstep.errors.PrecisionWarning")
def test_masters_need_no_warning_and_step_in_fp32(policy):
    p, optimizer = one_step(policy, lambda ps: MasterWeights(Adam(ps, 1e-3)))
    assert optimizer.state[p]["master"].tolist() == pytest.approx([1.0, 1 - 1e-3 / (1 + 1e-4)], abs=1e-7)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_steps_bare_fp16_weights_in_fp32(fused):
    p = half(dtype=FP16)
    optimizer, scaler = Adam([p], 1e-3, fused=fused), halfstep.GradScaler("cpu")
    scaler.scale((p.float() * torch.tensor([0.0, 1e-4])).sum()).backward()
    with pytest.warns(
        PrecisionWarning, match=r"Adam steps 16-bit weights without masters.*halfstep\.MasterWeights\(Adam"
    ):
        scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == [1.0, torch.tensor(0.999).half().item()]
    scaler.scale(p.float().sum()).backward()
    scaler.step(optimizer)  # says it once
    assert all(value.dtype == torch.float32 for value in optimizer.state[p].values())


# -- a parameter whose dtype changes after wrapping -------------------------------------------------------------------


def linear():
    model = nn.Linear(2, 2).bfloat16()
    return model, MasterWeights(SGD(model.parameters(), 1e-4))


def assert_same(one, other):
    """Equal, bit for bit, through dicts and lists."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


def give_ones(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)


CASTS = {
    "module": lambda model: model.half(),
    "data": lambda model: setattr(model.weight, "data", model.weight.data.float()),
    "one of two": lambda model: setattr(model.bias, "data", model.bias.data.half()),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("call", ["step", "state_dict", "load_state_dict"])
def test_a_cast_after_wrapping_is_refused_and_no_master_moves(cast, call):
    model, optimizer = linear()
    saved = copy.deepcopy(optimizer.state_dict())
    masters = [optimizer.state[p]["master"].clone() for p in model.parameters()]
    cast(model)
    give_ones(model)
    arguments = (saved,) if call == "load_state_dict" else ()
    refused(CallOrderError, lambda: getattr(optimizer, call)(*arguments), "when MasterWeights took it in", "cast and")
    assert all(torch.equal(optimizer.state[p]["master"], m) for p, m in zip(model.parameters(), masters, strict=True))


def test_there_and_back_again_keeps_every_bit_of_the_masters():
    model, optimizer = linear()
    give_ones(model)
    optimizer.step()
    masters = [optimizer.state[p]["master"].clone() for p in model.parameters()]
    model.float()
    with pytest.raises(CallOrderError):
        optimizer.step()
    model.bfloat16()
    give_ones(model)
    optimizer.step()
    assert optimizer.adopted_weights == 0
    for p, m in zip(model.parameters(), masters, strict=True):
        assert torch.equal(optimizer.state[p]["master"], m - 1e-4)


def test_a_frozen_parameter_may_be_cast_and_its_master_begins_where_it_is():
    model = nn.Linear(2, 2).bfloat16()
    model.bias.requires_grad_(False)
    optimizer = MasterWeights(SGD(model.parameters(), 1e-4))
    model.bias.data = model.bias.data.half()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    model.bias.requires_grad_(True)
    optimizer.step()
    assert torch.equal(optimizer.state[model.bias]["master"], model.bias.detach().float())


def test_a_cast_under_a_stepper_ends_the_window_and_moves_nothing():
    model = nn.Linear(2, 2)
    optimizer = MasterWeights(Adam(model.parameters(), 0.1), BF16)
    stepper = halfstep.Stepper(model, optimizer, policy="bf16-master")

    def micro_batch():
        with stepper.forward():
            loss = model(torch.ones(1, 2, dtype=model.weight.dtype)).float().sum()
        stepper.backward(loss)
        return stepper.step()

    master = optimizer.state[model.weight]["master"].clone()
    model.half()
    refused(CallOrderError, micro_batch, "torch.float16 on cpu now")
    assert torch.equal(optimizer.state[model.weight]["master"], master)
    assert (stepper.num_micro_batches, model.weight.grad) == (0, None)
    model.bfloat16()
    assert micro_batch().is_applied
    assert not torch.equal(optimizer.state[model.weight]["master"], master)


# -- the state of another model or optimizer --------------------------------------------------------------------------


def with_state(optimizer_of, *sizes):
    ps = [half(*[1.0] * n) for n in sizes]
    optimizer = MasterWeights(optimizer_of(ps))
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


STRANGERS = {
    "another order": (lambda ps: Adam(ps), (3, 2), "belongs to a parameter of shape|fp32 of its shape"),
    "more parameters": (lambda ps: Adam(ps), (2, 3, 4), r"saved groups hold \[3\] parameters"),
    "SGD's": (lambda ps: SGD(ps, 0.1, momentum=0.9), (2, 3), "exp_avg, exp_avg_sq, step of a parameter.*missing"),
    "RMSprop's": (lambda ps: torch.optim.RMSprop(ps, 0.1), (2, 3), r"exp_avg, exp_avg_sq of a parameter.*missing"),
}


@pytest.mark.parametrize(("optimizer_of", "sizes", "text"), STRANGERS.values(), ids=STRANGERS)
def test_the_state_of_another_model_is_refused_whole(optimizer_of, sizes, text):
    stranger, optimizer = with_state(optimizer_of, *sizes), with_state(lambda ps: Adam(ps), 2, 3)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(StateError, match=text) as caught:
        optimizer.load_state_dict(stranger.state_dict())
    assert "nothing was loaded" in str(caught.value)
    assert_same(optimizer.state_dict(), before)


# -- integer and complex masters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float64, FP16], ids=str)
def test_a_saved_master_that_is_not_fp32_is_refused(dtype):
    optimizer = with_state(lambda ps: Adam(ps), 2)
    before = copy.deepcopy(optimizer.state_dict())
    state = copy.deepcopy(before)
    state["state"][0]["master"] = torch.zeros(2, dtype=dtype)
    refused(StateError, lambda: optimizer.load_state_dict(state), f"is {dtype} of shape [2]", "a master is fp32")
    assert_same(optimizer.state_dict(), before)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("cast_to", [None, "bf16"])
def test_frozen_integers_beside_16_bit_weights_are_left_alone(dtype, cast_to):
    """The weights of a quantised base, in the same groups."""
    packed = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
    p = half() if cast_to is None else nn.Parameter(torch.ones(2))
    optimizer = MasterWeights(Adam([packed, p], 0.1), cast_to)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert (packed.dtype, packed.tolist()) == (dtype, [1] * 4)
    assert list(optimizer.state_dict()["state"]) == [1]


@pytest.mark.parametrize("cast_to", [None, "bf16", "fp16"])
def test_complex_weights_need_no_master_and_step_as_ever(cast_to):
    ours, plain = (nn.Parameter(torch.tensor([1 + 1j, 2 - 1j])) for _ in range(2))
    optimizer, reference = MasterWeights(Adam([ours, nn.Parameter(torch.ones(2))], 0.1), cast_to), Adam([plain], 0.1)
    for _ in range(3):
        ours.grad = plain.grad = torch.tensor([0.5 + 0.25j, -1j])
        optimizer.step()
        reference.step()
    assert torch.equal(ours, plain)
    assert "master" not in optimizer.state[ours]


# -- masks ------------------------------------------------------------------------------------------------------------

Q = torch.randn(2, 3, 4).half()
MASKED = {
    "softmax": lambda mask: ops.softmax(Q, mask=mask),
    "log_softmax": lambda mask: ops.log_softmax(Q, mask=mask),
    "attention": lambda mask: ops.attention(Q, Q, Q, mask=mask),
}
every_masked = pytest.mark.parametrize("name", MASKED)


@every_masked
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.complex64], ids=str)
def test_a_mask_of_a_dtype_that_could_mean_either(name, dtype):
    mask = torch.ones(3, 3 if name == "attention" else 4, dtype=dtype)
    refused(ArgumentError, lambda: MASKED[name](mask), f"{name} with a mask of dtype {dtype}", "mask.bool() if 1 means")


@every_masked
def test_a_mask_of_columns_alone_is_a_row_of_the_scores(name):
    keep = torch.tensor([True, False, True] + [True] * (name != "attention"))
    rows = keep.expand(3, len(keep))
    assert torch.equal(MASKED[name](keep), MASKED[name](rows))


@every_masked
@pytest.mark.parametrize("shape", [(5, 4), (2, 4), (2, 1, 3, 4), (0, 4)])
def test_a_mask_of_a_shape_that_does_not_fit(name, shape):
    refused(ArgumentError, lambda: MASKED[name](torch.ones(shape, dtype=torch.bool)), f"mask of shape {shape}")


@pytest.mark.parametrize("function", [ops.dice_loss, ops.binary_cross_entropy, ops.binary_cross_entropy_with_logits])
@HALVES
def test_a_target_mask_of_a_dtype_or_shape_that_does_not_fit(function, dtype):
    p = torch.full((2, 3), 0.5, dtype=dtype)
    for kind in (torch.bool, torch.uint8, torch.int64):  # 0 and 1 mean 0 and 1 here
        assert torch.equal(function(p, torch.ones(2, 3).to(kind)), function(p, torch.ones(2, 3)))
    refused(ArgumentError, lambda: function(p, torch.ones(2, 3, dtype=torch.cfloat)), "torch.complex64", "imaginary")
    refused(ArgumentError, lambda: function(p, torch.ones(3)), "targets (3,)")


@EVERY_FLOAT
def test_targets_that_are_no_probabilities(dtype):
    p = torch.full((2,), 0.5, dtype=dtype)
    refused(
        ArgumentError,
        lambda: ops.binary_cross_entropy(p, torch.tensor([0, 255])),  # the mask of an image file
        "targets from 0 to 255",
    )


# -- rows and tensors without elements --------------------------------------------------------------------------------


def empty(*shape, dtype=FP16):
    return torch.zeros(*shape, dtype=dtype, requires_grad=True)


NO_LABELS = torch.zeros(0, dtype=torch.int64)
OF_NOTHING = {
    "sum": (lambda x: ops.sum(x), (0, 3)),
    "sum of rows": (lambda x: ops.sum(x, -1), (2, 0)),
    "cross_entropy": (lambda x: ops.cross_entropy(x, NO_LABELS), (0, 3)),
    "cross_entropy, smoothed": (lambda x: ops.cross_entropy(x, NO_LABELS, label_smoothing=0.1), (0, 3)),
    "cross_entropy, probabilities": (lambda x: ops.cross_entropy(x, torch.zeros(0, 3)), (0, 3)),
    "binary": (lambda x: ops.binary_cross_entropy(x, torch.zeros(0, 2)), (0, 2)),
    "binary, logits": (lambda x: ops.binary_cross_entropy_with_logits(x, torch.zeros(0, 2)), (0, 2)),
    "dice": (lambda x: ops.dice_loss(x, torch.zeros(0, 4)), (0, 4)),
    "dice of no image": (lambda x: ops.dice_loss(x, torch.zeros(0, 2, 2), dim=(-2, -1)), (0, 2, 2)),
    "dice of images without pixels": (lambda x: ops.dice_loss(x, torch.zeros(2, 0), dim=-1), (2, 0)),
}


@EVERY_FLOAT
@pytest.mark.parametrize("name", OF_NOTHING)
def test_what_is_reduced_from_nothing_is_zero_and_has_a_gradient(name, dtype):
    function, shape = OF_NOTHING[name]
    x = empty(*shape, dtype=dtype)
    y = function(x)
    assert (y == 0).all()
    y.sum().backward()
    assert x.grad.shape == shape


KEEPS_SHAPE = {
    "softmax": lambda x: ops.softmax(x),
    "log_softmax": lambda x: ops.log_softmax(x),
    "normalize": lambda x: ops.normalize(x),
    "clamp_probability": lambda x: ops.clamp_probability(x),
    "attention": lambda x: ops.attention(
        x, torch.zeros(5, x.shape[-1], dtype=x.dtype), torch.ones(5, x.shape[-1]).to(x)
    ),
    "apply_rotary": lambda x: ops.apply_rotary(x, *[torch.zeros(x.shape[0], x.shape[-1] // 2)] * 2),
    "layer_norm": lambda x: ops.layer_norm(x, x.shape[-1]),
    "rms_norm": lambda x: ops.rms_norm(x, x.shape[-1]),
}


@EVERY_FLOAT
@pytest.mark.parametrize("name", KEEPS_SHAPE)
def test_no_rows_give_no_rows(name, dtype):
    x = empty(0, 4, dtype=dtype)
    y = KEEPS_SHAPE[name](x)
    assert (y.shape, y.dtype) == ((0, 4), dtype)
    y.sum().backward()
    assert x.grad.shape == (0, 4)


@HALVES
def test_a_query_without_keys_gets_zeros(dtype):
    q, k = empty(2, 4, dtype=dtype), empty(0, 4, dtype=dtype)
    y = ops.attention(q, k, k)
    y.float().sum().backward()
    assert torch.equal(y.detach(), torch.zeros(2, 4, dtype=dtype))
    assert torch.equal(q.grad, torch.zeros(2, 4, dtype=dtype))


@EVERY_FLOAT
@pytest.mark.parametrize("function", [ops.norm, ops.mean])
@pytest.mark.parametrize(("shape", "dim"), [((0,), None), ((0, 3), 0), ((3, 0), -1), ((3, 0), (0, 1)), ((0,), ())])
def test_norm_and_mean_over_no_elements(function, shape, dim, dtype):
    refused(ArgumentError, lambda: function(torch.zeros(shape, dtype=dtype), dim), "no elements", "leave out empty")


@pytest.mark.parametrize("function", [ops.sum, ops.mean, ops.norm])
@HALVES
def test_no_dimension_named_means_all_of_them(function, dtype):
    x = torch.full((2, 3), 2.0, dtype=dtype)
    for dim in ((), []):
        assert torch.equal(function(x, dim), function(x))
        assert function(x, dim, keepdim=True).shape == (1, 1)


@pytest.mark.parametrize("dim", [2, -3, (0, 5), (1, 1), (1, -1)])
def test_a_dimension_that_does_not_exist_or_comes_twice(dim):
    x = torch.ones(2, 3).half()
    for function in (ops.sum, ops.mean, ops.norm, lambda x, dim: ops.dice_loss(x, x, dim=dim)):
        refused(ArgumentError, lambda function=function: function(x, dim), f"dim={dim} of a tensor with 2 dimensions")
    for function in (ops.sum, ops.mean, ops.norm):
        assert function(torch.tensor(2.0).half(), -1).item() == 2.0  # a number has one, as in torch


@HALVES
def test_a_parameter_without_elements_has_a_master_without_elements(dtype):
    nothing, p = nn.Parameter(torch.zeros(0, 3, dtype=dtype)), half(dtype=dtype)
    optimizer = MasterWeights(Adam([nothing, p], 0.1))
    for _ in range(2):
        optimizer.zero_grad()
        (nothing.float().sum() + p.float().sum()).backward()
        optimizer.step()
    assert optimizer.state[nothing]["master"].shape == (0, 3)
    assert (optimizer.saturated_weights, optimizer.adopted_weights) == (0, 0)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert optimizer.state[p]["master"].tolist() == pytest.approx([0.8, 0.8], abs=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_norm_of_gradients_without_elements_is_zero(accumulate):
    nothing = nn.Parameter(torch.zeros(0, 3, dtype=BF16))
    optimizer = MasterWeights(SGD([nothing], 0.1))
    stepper = halfstep.Stepper(nn.ParameterList([nothing]), optimizer, policy="bf16-master", accumulate=accumulate)
    for _ in range(accumulate):
        with stepper.forward():
            loss = nothing.float().sum()
        stepper.backward(loss)
        outcome = stepper.step()
    assert (outcome.kind, outcome.grad_norm) == ("applied", 0.0)


# -- NaN: goes through, and is seen in the output and in the gradient -------------------------------------------------

TWO = torch.tensor([0.25, 0.75])
THROUGH = {  # of rows of two; row 1 of the result, or all of it, depends on row 1 of x
    "softmax": lambda x: ops.softmax(x),
    "log_softmax": lambda x: ops.log_softmax(x),
    "normalize": lambda x: ops.normalize(x),
    "layer_norm": lambda x: ops.layer_norm(x, 2),
    "rms_norm": lambda x: ops.rms_norm(x, 2),
    "norm": lambda x: ops.norm(x, -1),
    "dice_loss": lambda x: ops.dice_loss(x, torch.ones(3, 2), dim=-1, reduction="none"),
    "cross_entropy": lambda x: ops.cross_entropy(x, torch.tensor([0, 1, 0]), reduction="none"),
    "cross_entropy, probabilities": lambda x: ops.cross_entropy(x, TWO.expand(3, 2).clone(), reduction="none"),
    "binary_cross_entropy": lambda x: ops.binary_cross_entropy(x, torch.zeros(3, 2), reduction="none").sum(-1),
    "binary, logits": lambda x: ops.binary_cross_entropy_with_logits(x, torch.zeros(3, 2), reduction="none").sum(-1),
    "logarithm of clamp_probability": lambda x: ops.clamp_probability(x).log().sum(-1),
    "query": lambda x: ops.attention(x, TWO.expand(3, 2).to(x.dtype), TWO.expand(3, 2).to(x.dtype)),
}


@EVERY_FLOAT
@pytest.mark.parametrize("name", THROUGH)
def test_nan_in_a_row_is_seen_in_that_row_and_nowhere_else(name, dtype):
    x = torch.tensor([[0.25, 0.5], [NAN, 0.5], [0.5, 0.75]], dtype=dtype, requires_grad=True)
    y = THROUGH[name](x)
    is_bad = y.reshape(3, -1).isnan().any(-1)
    assert is_bad.tolist() == [False, True, False]
    y.sum().backward()
    assert x.grad.isnan().any(-1).tolist() == [False, True, False]


WHOLE = {"sum": ops.sum, "mean": ops.mean, "norm": ops.norm}


@EVERY_FLOAT
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("at", [0, 2**18, 2**18 + 2])
def test_nan_in_any_piece_is_seen_in_the_whole(name, dtype, at):
    x = torch.ones(2**18 + 3, dtype=dtype)
    assert WHOLE[name](x).isfinite()
    x[at] = NAN
    assert WHOLE[name](x).isnan()


def _nan_beside(*values):
    return torch.tensor([NAN, *values])


BESIDE = {
    "target of binary_cross_entropy": lambda x: ops.binary_cross_entropy(x, _nan_beside(1.0)),
    "target of binary, logits": lambda x: ops.binary_cross_entropy_with_logits(x, _nan_beside(1.0)),
    "target of dice_loss": lambda x: ops.dice_loss(x, _nan_beside(1.0)),
    "probabilities of cross_entropy": lambda x: ops.cross_entropy(x, _nan_beside(1.0).to(x.dtype)),
    "weight of binary_cross_entropy": lambda x: ops.binary_cross_entropy(x, torch.ones(2), weight=_nan_beside(1.0)),
    "weight of cross_entropy": lambda x: ops.cross_entropy(x, torch.tensor(0), weight=_nan_beside(1.0)),
    "weight of layer_norm": lambda x: ops.layer_norm(x, 2, _nan_beside(1.0)),
    "bias of layer_norm": lambda x: ops.layer_norm(x, 2, None, _nan_beside(1.0)),
    "weight of rms_norm": lambda x: ops.rms_norm(x, 2, _nan_beside(1.0)),
    "cosine": lambda x: ops.apply_rotary(x, torch.tensor([NAN]), torch.zeros(1)),
    "positions": lambda x: ops.sinusoidal_embedding(torch.tensor([NAN]), 2).to(x.dtype),
    "additive mask": lambda x: ops.attention(x.view(1, 2), *[torch.ones(2, 2).to(x.dtype)] * 2, mask=_nan_beside(0.0)),
}


@EVERY_FLOAT
@pytest.mark.parametrize("name", BESIDE)
def test_nan_beside_the_input_is_seen(name, dtype):
    assert BESIDE[name](torch.tensor([0.25, 0.75], dtype=dtype)).isnan().any()


@EVERY_FLOAT
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_shows_what_torchs_CPU_kernel_takes_for_a_masked_row(dtype, is_causal):
    """All scores of a query are NaN: torch 2.13 finds no largest one, and answers zeros. If this goes red, rejoice."""
    q, k, v = (torch.randn(1, 1, 3, 4).to(dtype) for _ in range(3))
    q[0, 0, 1, 2] = NAN
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    assert torch.equal(plain[0, 0, 1], torch.zeros(4, dtype=dtype)), "plain PyTorch"
    ours = ops.attention(q, k, v, is_causal=is_causal)
    assert ours[0, 0].isnan().any(-1).tolist() == [False, True, False]
    torch.testing.assert_close(ours[0, 0, [0, 2]], plain[0, 0, [0, 2]], rtol=2e-2, atol=2e-2)


@HALVES
def test_attention_shows_keys_that_are_all_nan_to_a_query(dtype):
    q, k, v = (torch.randn(3, 4).to(dtype) for _ in range(3))
    k[0] = NAN
    assert ops.attention(q, k, v, is_causal=True).isnan().all()  # query 0 sees key 0 alone
    assert ops.attention(q, torch.full_like(k, NAN), v).isnan().all()


def test_attention_shows_scores_that_overflow_fp32_from_finite_inputs():
    q, k = torch.full((2, 2), 3e38).bfloat16(), torch.tensor([[3e38, -3e38]] * 2).bfloat16()
    assert ops.attention(q, k, k).isnan().all()  # inf - inf


@HALVES
def test_zeros_of_fully_masked_rows_are_no_fault(dtype):
    q, k = torch.randn(2, 3, 4).to(dtype), torch.randn(2, 3, 4).to(dtype)
    y = ops.attention(q, k, k, mask=torch.tensor([[True, True, True], [False, False, False], [True, False, False]]))
    assert torch.equal(y[:, 1], torch.zeros(2, 4, dtype=dtype))
    assert y.isfinite().all()


@HALVES
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW fused"])
def test_nan_in_a_gradient_reaches_weight_and_master_where_nobody_looks_for_it(dtype, name):
    """Without a scaler or a stepper MasterWeights checks nothing, as torch's optimizers do not; nor does it hide it."""
    make = {"SGD": lambda ps: SGD(ps, 0.1), "Adam": lambda ps: Adam(ps, 0.1)}.get(
        name, lambda ps: torch.optim.AdamW(ps, 0.1, fused=True)
    )
    p = half(dtype=dtype)
    optimizer = MasterWeights(make([p]))
    p.grad = torch.tensor([NAN, 1.0]).to(dtype)
    optimizer.step()
    assert p.isnan().tolist() == optimizer.state[p]["master"].isnan().tolist() == [True, False]
    assert optimizer.saturated_weights == 0
