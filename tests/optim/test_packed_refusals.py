"""Bad input of the packed optimizers, by kind: refused in four parts with nothing changed, or it goes through."""

import copy
import itertools
import math
import pickle
from collections import defaultdict

import pytest
import torch
from torch import nn

import halfstep
from halfstep import fp32_state_dict
from halfstep.errors import (
    ArgumentError,
    CallOrderError,
    HalfstepError,
    PrecisionWarning,
    SkippedStepWarning,
    StateError,
    UnsupportedError,
)
from halfstep.optim import SGD, Adam, AdamW, Lion

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NAN, INF = math.nan, math.inf
CLASSES = pytest.mark.parametrize("cls", [AdamW, Adam, SGD, Lion])


def param(*shape, dtype=FP32):
    return nn.Parameter(torch.randn(shape or (3,)).to(dtype))


def refused(error, call, *texts):
    """The error has the texts and all four parts; returned."""
    with pytest.raises(error) as caught:
        call()
    assert isinstance(caught.value, HalfstepError)
    for text in (*texts, "true:", "why:", "fix:"):
        assert text in str(caught.value), caught.value
    return caught.value


def everything(optimizer):
    """Copies of all parameters, states and options."""
    groups = [{name: copy.copy(v) for name, v in g.items() if name != "params"} for g in optimizer.param_groups]
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    states = [{k: copy.deepcopy(v) for k, v in optimizer.state.get(p, {}).items()} for p in parameters]
    return [p.detach().clone() for p in parameters], states, groups


def same(a, b):
    if isinstance(a, torch.Tensor):
        is_alike = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return is_alike and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


# -- the constructor --------------------------------------------------------------------------------------------------

NOT_FROM_0_ON = (NAN, INF, -1e-9, None, "1", [1.0], 1j)
NUMBERS = [
    *((cls, "lr", value) for cls in (AdamW, Adam, SGD, Lion) for value in NOT_FROM_0_ON),
    *((cls, "weight_decay", value) for cls in (AdamW, Adam, SGD, Lion) for value in NOT_FROM_0_ON),
    *((cls, "eps", value) for cls in (AdamW, Adam) for value in NOT_FROM_0_ON),
    *((SGD, "momentum", value) for value in NOT_FROM_0_ON),
    *((SGD, "dampening", value) for value in (NAN, INF, None, "1")),
    *(
        (cls, "betas", value)
        for cls in (AdamW, Adam, Lion)
        for value in ((1.0, 0.9), (0.9, 1.0), (-0.1, 0.9), (NAN, 0.9), (0.9,), 0.9, None, ("a", 0.9))
    ),
    *((AdamW, "lr", torch.tensor(value)) for value in (NAN, INF, -1.0, 1, [1.0, 2.0])),
]


@pytest.mark.parametrize(("cls", "name", "value"), NUMBERS, ids=str)
def test_hyperparameters_out_of_range(cls, name, value):
    p = param()
    before = p.detach().clone()
    refused(ArgumentError, lambda: cls([p], **{name: value}, policy="bf16-master"), f"{cls.__name__}({name}=")
    assert same(p.detach(), before), "nothing was cast"


@pytest.mark.parametrize(
    ("error", "options", "texts"),
    [
        (ArgumentError, {"master": "int8"}, ("master='int8'", "none, fp32, split, split8, stochastic")),
        (ArgumentError, {"master": ["split"]}, ("master is one of",)),
        (ArgumentError, {"moments": "split"}, ("moments='split'", "fp32, bf16, int8")),
        (ArgumentError, {"executor": "cuda"}, ("the executors are auto, torch, numba, triton",)),
        (UnsupportedError, {"executor": "triton"}, ("triton runs on CUDA",)),
        (ArgumentError, {"seed": -1}, ("a seed is a whole number",)),
        (ArgumentError, {"seed": 1.0}, ("a seed is a whole number",)),
        (ArgumentError, {"seed": True}, ("a seed is a whole number",)),
        (ArgumentError, {"seed": 2**63}, ("a seed is a whole number",)),
        *(
            (ArgumentError, {"clip_norm": value}, ("clip_norm=", "positive and finite"))
            for value in (0, -1.0, NAN, INF, "1", [1.0], True)
        ),
        (ArgumentError, {"policy": "bf16-mixed"}, ('policy="bf16-mixed"', "true: its weights are fp32", "bf16-master")),
        (ArgumentError, {"policy": "bf16"}, ('policy="bf16"\n', 'it means "bf16-mixed", whose weights are fp32')),
        (ArgumentError, {"policy": BF16}, ('policy="torch.bfloat16"', 'it means "bf16-mixed"')),
        (ArgumentError, {"policy": "fp32"}, ("its weights are fp32",)),
        (ArgumentError, {"policy": "nonsense"}, ()),
        (ArgumentError, {"policy": "bf16-master,master=split8", "master": "split"}, ("say it once",)),
        (ArgumentError, {"policy": "bf16-master,moments=int8", "moments": "bf16"}, ("say it once",)),
        (
            ArgumentError,
            {"policy": "bf16-master", "master": "none"},
            ('pass policy="bf16-true" if you want no masters',),
        ),
        (ArgumentError, {"policy": "O2", "master": "none"}, ('policy="O2" with', 'pass policy="fp16-true"')),
        (ArgumentError, {"master": "split"}, ("AdamW(master='split')", "all of its weights are fp32", "bf16-master")),
        (ArgumentError, {"master": "stochastic"}, ("own masters", "leave master out")),
        (UnsupportedError, {"amsgrad": True}, ("MasterWeights(torch.optim.AdamW(",)),
        (UnsupportedError, {"differentiable": True}, ("rounding has no derivative",)),
    ],
    ids=str,
)
def test_options_that_cannot_be(error, options, texts):
    p = param()
    before = p.detach().clone()

    def build():
        return AdamW([p], **options).executors  # an executor is looked for when it is needed

    refused(error, build, *texts)
    assert same(p.detach(), before)


@pytest.mark.filterwarnings("ignore:bf16-true keeps no masters")
def test_a_policy_without_masters_has_none():
    refused(ArgumentError, lambda: AdamW([param()], policy="bf16-true", master="split"), 'policy="bf16-master"')
    assert "rest" not in AdamW([p := param()], policy="bf16-true", master="none").state[p]


def test_masters_are_refused_where_all_weights_stay_fp32():
    p, half = param(), param(dtype=BF16)
    refused(ArgumentError, lambda: AdamW([{"params": [p], "master": "split8"}, {"params": [half]}]), "in a parameter")
    optimizer = AdamW([half])
    before = everything(optimizer)
    refused(ArgumentError, lambda: optimizer.add_param_group({"params": p, "master": "fp32"}), "master='fp32' in a")
    assert same(everything(optimizer), before)
    for master in ("fp32", "split", "split8", "stochastic"):
        both = AdamW([{"params": [param()]}, {"params": [param(dtype=BF16)]}], master=master)
        both.add_param_group({"params": [param()]})  # the default of all groups holds where it can
    AdamW([param()]).add_param_group({"params": [param()]})  # nobody has asked
    AdamW([param()], master="none")  # which is so
    AdamW(
        [param(), nn.Parameter(torch.ones(3, dtype=FP16), requires_grad=False)], master="split8"
    )  # may be trained yet
    copy.deepcopy(AdamW([p])).load_state_dict(AdamW([p]).state_dict())


TYPOS = {
    "momets": "moments", "mastr": "master", "sed": "seed", "weight_decya": "weight_decay", "beta": "betas", "LR": "lr",
    "weightdecay": "weight_decay", "clip_nrom": "clip_norm", "polcy": "policy",
}  # fmt: skip


@pytest.mark.parametrize("typo", TYPOS)
def test_a_misspelled_option_of_a_group(typo):
    group = {"params": [p := param(4, 40)], typo: 1.0}
    texts = f"{typo!r} in a parameter group of AdamW", f"write {TYPOS[typo]!r}"
    refused(ArgumentError, lambda: AdamW([group], policy="bf16-master"), *texts)
    assert p.dtype == FP32
    optimizer = AdamW([param()])
    refused(ArgumentError, lambda: optimizer.add_param_group(group), *texts)
    assert len(optimizer.param_groups) == 1
    optimizer.step()


def test_a_group_may_have_keys_of_its_own():
    own = {"lr_scale": 0.5, "layer": 3, "name": "head", "initial_lr": 0.1, "weight_decay_mult": 0.0, "lr0": 1.0, 7: 8}
    own |= {"max_momentum": 0.95, "base_momentum": 0.85, "swa_lr": 0.1}
    for cls in (AdamW, Adam, SGD, Lion):
        optimizer = cls([{"params": [param()], **own}])
        assert own.items() <= optimizer.param_groups[0].items()
        again = cls(optimizer.param_groups)
        torch.optim.lr_scheduler.OneCycleLR(again, 0.1, 10, cycle_momentum=cls is not SGD)
        again.add_param_group({**again.param_groups[0], "params": [param()]})


def test_nesterov_needs_momentum():
    for options in ({}, {"momentum": 0.9, "dampening": 0.1}):
        refused(ArgumentError, lambda options=options: SGD([param()], nesterov=True, **options), "no dampening")


def test_plain_16_bit_weights_by_name_only_and_with_a_warning():
    for cls in (AdamW, Adam, SGD, Lion):
        with pytest.warns(PrecisionWarning, match=r"1 parameters are 16-bit, and nothing keeps.*master='stochastic'"):
            cls([param(dtype=BF16), param()], master="none")
    with pytest.warns(PrecisionWarning, match="bf16-true keeps no masters") as caught:
        AdamW([param()], policy="bf16-true")
    assert len(caught) == 1, "said once"
    assert "rest" in AdamW([p := param(dtype=BF16)]).state[p], "what happens without a word is split"


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex32, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("policy", [None, "bf16-master"])
def test_parameters_that_no_rule_steps(dtype, policy):
    odd, plain = nn.Parameter(torch.zeros(3).to(dtype)), param()
    refused(ArgumentError, lambda: AdamW([plain, odd], policy=policy), str(dtype), "requires_grad to False")
    assert plain.dtype == FP32, "nothing was cast"
    odd.requires_grad_(False)
    number = nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False)
    optimizer = AdamW([plain, odd, number], policy=policy)
    assert list(optimizer.state) == [plain], "frozen ones are left alone"
    odd.requires_grad_(True)
    refused(ArgumentError, optimizer.step, str(dtype))


def test_memory_that_is_shared_or_has_gaps():
    flat = torch.randn(10)
    overlapping = nn.Parameter(flat[:6]), nn.Parameter(flat[4:])
    refused(UnsupportedError, lambda: SGD(overlapping, policy="bf16-master"), "two of them share bytes")
    assert {p.dtype for p in overlapping} == {FP32}
    for weight in (torch.ones(1).expand(4), torch.randn(4, 4)[:, :2], torch.randn(8)[::2]):
        weight = nn.Parameter(weight)
        refused(UnsupportedError, lambda weight=weight: SGD([weight]), "each once", ".contiguous()")
        assert weight.dtype == FP32
    beside = nn.Parameter(flat[:4]), nn.Parameter(flat[4:])
    optimizer = SGD(beside, lr=1.0)
    beside[0].grad = torch.ones(4)
    before = flat.clone()
    optimizer.step()
    assert torch.equal(flat, torch.cat([before[:4] - 1, before[4:]])), "views side by side are two parameters"


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_listed_twice():
    p = param()
    refused(ArgumentError, lambda: SGD([p, p], policy="bf16-master"), "list every parameter once")
    assert p.dtype == FP32


def test_casting_needs_weights_of_one_kind_and_no_gradients():
    p, other = param(), param(dtype=FP16)
    refused(ArgumentError, lambda: SGD([p, other], policy="bf16-master"), "is fp16 already")
    p.grad = torch.ones(3)
    refused(CallOrderError, lambda: SGD([p], policy="bf16-master"), "model.zero_grad()")
    assert p.dtype == FP32


def test_16_bit_weights_of_two_dtypes_without_a_policy_are_fine():
    weights = [param(4, dtype=dtype) for dtype in (FP32, BF16, FP16)]
    optimizer = AdamW(weights, lr=0.1)
    for w in weights:
        w.grad = torch.ones_like(w)
    before = [w.detach().float().clone() for w in weights]
    optimizer.step()
    for w, b in zip(weights, before, strict=True):
        assert torch.allclose(optimizer.full_weight(w), b * (1 - 1e-3) - 0.1, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (ArgumentError, {"master": "bogus"}),
        (ArgumentError, {"master": None}),
        (ArgumentError, {"moments": "bogus"}),
        (ArgumentError, {"seed": -1}),
        (ArgumentError, {"lr": NAN}),
        (ArgumentError, {"betas": (2.0, 0.9)}),
        (ArgumentError, {"policy": "fp16-master"}),
        (ArgumentError, {"executor": "numba"}),
        (ArgumentError, {"clip_norm": 1.0}),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["constructor", "add_param_group"])
def test_groups_that_cannot_be(error, options, where):
    first, new = param(2, 40), [param(4), param(4, 4, dtype=BF16)]
    if where == "constructor":
        refused(error, lambda: AdamW([{"params": [first]}, {"params": new, **options}], policy="bf16-master"))
    else:
        optimizer = AdamW([first], policy="bf16-master")
        before = everything(optimizer)
        refused(error, lambda: optimizer.add_param_group({"params": new, **options}))
        assert same(everything(optimizer), before)
        assert list(optimizer.state) == [first]
        optimizer.add_param_group({"params": new, "master": "split8", "moments": "int8"})  # and it goes on
        assert optimizer.state[new[0]]["rest"].dtype == torch.int8
    if where == "constructor":
        assert [p.dtype for p in (first, *new)] == [FP32, FP32, BF16]


# -- gradients --------------------------------------------------------------------------------------------------------

SHAPE = (4, 33)


def grad_of_dtype(dtype):
    def make(p):
        p.grad_dtype = dtype
        p.grad = torch.ones(SHAPE, dtype=dtype)

    return make


def fp32_sum(make):
    return lambda p: setattr(p, "fp32_grad", make())


BAD_GRADIENTS = {
    "sparse": (
        UnsupportedError,
        lambda p: setattr(
            p, "grad", torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 33, dtype=BF16), SHAPE, check_invariants=True)
        ),
        "SparseAdam",
    ),
    "sparse sum": (UnsupportedError, fp32_sum(lambda: torch.ones(SHAPE).to_sparse()), "sparse gradient"),
    "fp64": (UnsupportedError, grad_of_dtype(torch.float64), "torch.float64"),
    "complex": (UnsupportedError, grad_of_dtype(torch.complex64), "torch.complex64"),
    "shape of a sum": (CallOrderError, fp32_sum(lambda: torch.ones(33, 4)), "the gradient of something else"),
    "fewer elements": (CallOrderError, fp32_sum(lambda: torch.ones(1)), "the gradient of something else"),
    "device of a sum": (CallOrderError, fp32_sum(lambda: torch.ones(SHAPE, device="meta")), "is on meta"),
}


@CLASSES
@pytest.mark.parametrize("kind", BAD_GRADIENTS)
def test_gradients_that_no_rule_takes(cls, kind):
    error, make, text = BAD_GRADIENTS[kind]
    good, bad = param(), param(*SHAPE)
    optimizer = cls([good, bad], lr=0.1, policy="bf16-master")
    good.grad = torch.ones_like(good)
    make(bad)
    before = everything(optimizer)
    refused(error, optimizer.step, text)
    assert same(everything(optimizer), before), "the good one was not stepped either"


GOOD_GRADIENTS = {
    "expanded": lambda: torch.full((1, 1), 0.5).expand(SHAPE),
    "transposed": lambda: torch.full((33, 4), 0.5).t(),
    "strided": lambda: torch.full((8, 33), 0.5)[::2],
    "with a graph": lambda: torch.full(SHAPE, 0.5, requires_grad=True) * 1.0,
}


@pytest.mark.parametrize("kind", GOOD_GRADIENTS)
@pytest.mark.parametrize("gradient_dtype", [FP32, BF16, FP16], ids=str)
def test_gradients_of_any_layout_and_of_the_other_dtypes(kind, gradient_dtype):
    p, q = param(*SHAPE, dtype=BF16), None
    q = nn.Parameter(p.detach().clone())
    for weight, gradient in ((p, GOOD_GRADIENTS[kind]()), (q, torch.full(SHAPE, 0.5))):
        weight.grad_dtype = gradient_dtype
        weight.grad = gradient.to(gradient_dtype)
    for weight in (p, q):
        optimizer = AdamW([weight], lr=0.1)
        optimizer.step()
        assert not weight.grad.is_sparse
    assert same(p.detach(), q.detach())
    assert not any(v.requires_grad for v in AdamW([p]).state[p].values())


@pytest.mark.parametrize("make", [fp32_sum(lambda: torch.ones(1)), BAD_GRADIENTS["sparse"][1]])
def test_a_parameter_is_called_by_the_name_that_was_given(make):
    model = nn.ModuleDict({"fc": nn.Linear(33, 4)})
    optimizer = AdamW(model.named_parameters(), policy="bf16-master")
    weight, name = model["fc"].weight, "the parameter fc.weight of shape [4, 33]"
    make(weight)
    refused(HalfstepError, optimizer.step, name)
    weight.grad, weight.fp32_grad = torch.full_like(weight, NAN), None
    with pytest.warns(SkippedStepWarning, match=r"the gradient of the parameter fc.weight of shape \[4, 33\] is"):
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = torch.zeros(9)
    refused(StateError, lambda: optimizer.load_state_dict(saved), name)
    optimizer.state[weight]["exp_avg"] = torch.zeros(9)
    refused(StateError, optimizer.state_dict, name)
    trained = "the trainable parameter fc.weight of shape [4, 33]"
    refused(ArgumentError, lambda: AdamW(model.double().named_parameters()), trained, "float64")


# -- shapes -----------------------------------------------------------------------------------------------------------

SHAPES = [(), (0,), (0, 4), (4, 0), (1,), (5,), (3, 1), (1, 1), (2, 2), (3, 33), (1, 33), (2, 3, 4, 5)]
STORAGES = list(itertools.product(("fp32", "split", "split8", "stochastic"), ("fp32", "bf16", "int8")))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("cls", [AdamW, SGD, Lion])
def test_every_shape_in_every_storage(cls, dtype):
    options = {"momentum": 0.9} if cls is SGD else {}
    storages = STORAGES if dtype != FP32 else [(None, moments) for _, moments in STORAGES[:3]]
    for shape, (master, moments) in itertools.product(SHAPES, storages):
        p = nn.Parameter(torch.ones(shape).to(dtype))
        optimizer = cls([p], lr=0.25, weight_decay=0.0, master=master, moments=moments, **options)
        for step in range(2):
            p.grad = torch.ones_like(p)
            optimizer.step()
            assert optimizer.state[p]["step"] == step + 1
        wanted = 1 - 0.25 * (1 + 1.9) if cls is SGD else 0.5
        error = (optimizer.full_weight(p) - wanted).abs().amax() if p.numel() else 0.0
        assert error <= 0.25 * 0.02 + 2.0**-7, (shape, master, moments)
        assert p.shape == shape
        assert p.dtype == dtype
        scales = [name for name in optimizer.state[p] if name.endswith("_scales")]
        has_rows = len(shape) > 1 and p.numel() and p.numel() // shape[0] > 2
        assert bool(scales) == (moments == "int8" and bool(has_rows)), shape


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("sizes", [(2, 3, 4), (1, 3, 4), (2, 1, 4), (2, 3, 1), (1, 1, 4)], ids=str)
def test_weights_in_any_order_of_memory(order, sizes):
    value = torch.randn([sizes[order.index(i)] for i in range(3)])
    p, q = nn.Parameter(value.permute(order)), nn.Parameter(value.permute(order).contiguous())
    assert p.shape == sizes
    strides = p.stride()
    ours, plain = (AdamW([w], lr=0.1, policy="bf16-master", moments="fp32") for w in (p, q))
    for _ in range(3):
        p.grad = torch.randn(sizes, dtype=BF16)
        q.grad = p.grad.clone()
        ours.step()
        plain.step()
    assert p.stride() == strides
    assert same(ours.full_weight(p).contiguous(), plain.full_weight(q))
    assert same(p.detach().contiguous(), q.detach())
    assert pickle.loads(pickle.dumps(ours)).param_groups[0]["params"][0].stride() == strides


def test_channels_last_weights_keep_their_strides_in_every_storage():
    for master, moments in STORAGES:
        weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
        optimizer = AdamW([weight], lr=0.1, policy="bf16-master", master=master, moments=moments)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert optimizer.full_weight(weight).is_contiguous(memory_format=torch.channels_last)
        for value in optimizer.state[weight].values():
            assert value.dim() != 4 or value.is_contiguous(memory_format=torch.channels_last)


# -- what changes after the optimizer was built -----------------------------------------------------------------------


def model_and_optimizer(**options):
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Linear(3, 40))
    return model, AdamW(model.parameters(), lr=0.1, **{"policy": "bf16-master", **options})


def give_ones(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)


CHANGES = {
    "half()": lambda model: model.half(),
    "float()": lambda model: model.float(),
    "one of two": lambda model: model[1].half(),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
    "another shape": lambda model: setattr(model[1].weight, "data", torch.ones(3, 40, dtype=BF16)),
    "transposed": lambda model: setattr(model[1].weight, "data", torch.ones(3, 40, dtype=BF16).t()),
}
CALLS = {
    "step": lambda model, optimizer: optimizer.step(),
    "state_dict": lambda model, optimizer: optimizer.state_dict(),
    "load_state_dict": lambda model, optimizer: optimizer.load_state_dict({"state": {}, "param_groups": []}),
    "to_torch": lambda model, optimizer: optimizer.to_torch(),
    "fp32_state_dict": lambda model, optimizer: fp32_state_dict(model, optimizer),
    "deepcopy": lambda model, optimizer: copy.deepcopy(optimizer),
    "pickle": lambda model, optimizer: pickle.dumps(optimizer),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_cast_or_laid_out_anew_is_refused(change, call):
    model, optimizer = model_and_optimizer()
    CHANGES[change](model)
    give_ones(model)
    before = everything(optimizer)
    fix = "cast, move and lay out the model first"
    refused(CallOrderError, lambda: CALLS[call](model, optimizer), "when the optimizer made its state", fix)
    assert same(everything(optimizer), before)
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in before[0]], "to_torch() has begun nothing"


def test_there_and_back_again_keeps_every_bit():
    model, optimizer = model_and_optimizer()
    full = {p: optimizer.full_weight(p) for p in model.parameters()}
    model.float()
    give_ones(model)
    with pytest.raises(CallOrderError):
        optimizer.step()
    model.bfloat16()
    assert all(same(optimizer.full_weight(p), value) for p, value in full.items())


def test_other_memory_of_the_same_kind_is_followed():
    model, optimizer = model_and_optimizer()
    weight = model[1].weight
    weight.data = torch.full_like(weight, 2.0)
    give_ones(model)
    optimizer.step()
    assert (weight - 1.9).abs().max() < 0.02, "the first step of Adam is lr"


def replaced(name, make):
    return lambda state: state.__setitem__(name, make(state[name]))


STATE_CHANGES = {
    "another dtype": replaced("exp_avg", lambda t: t.bfloat16()),
    "another shape": replaced("exp_avg", lambda t: t[:1]),
    "other strides": replaced("exp_avg", lambda t: torch.zeros(t.shape[::-1]).t()),
    "no tensor": replaced("step", lambda t: 3),
    "None": replaced("rest", lambda t: None),
    "the last one lost": lambda state: state.pop("exp_avg_sq"),
    "the first one lost": lambda state: state.pop("step"),
    "the rest lost": lambda state: state.pop("rest"),
    "all lost": lambda state: state.clear(),
}


@pytest.mark.parametrize("change", STATE_CHANGES)
@pytest.mark.parametrize("call", ["step", "state_dict", "to_torch", "pickle"])
def test_a_state_that_was_exchanged_by_hand_is_refused(change, call):
    model, optimizer = model_and_optimizer()
    give_ones(model)
    STATE_CHANGES[change](optimizer.state[model[1].weight])
    before = everything(optimizer)
    refused(
        StateError, lambda: CALLS[call](model, optimizer), "a parameter of shape [40, 3]", "build the optimizer anew"
    )
    assert same(everything(optimizer), before)


def test_a_state_that_was_cleared():
    model, optimizer = model_and_optimizer()
    give_ones(model)
    optimizer.state = defaultdict(dict)
    refused(StateError, optimizer.step, "step of a parameter of shape [4, 3, 2, 2]", "is NoneType now")


def test_tensors_of_the_same_kind_are_followed_and_strangers_left_alone():
    model, optimizer = model_and_optimizer()
    weight = model[1].weight
    state = optimizer.state[weight]
    state["exp_avg"] = torch.full_like(state["exp_avg"], 1000.0)
    optimizer.state[weight] = {"somebody's": 3, **dict(reversed(list(state.items())))}
    give_ones(model)
    before = optimizer.full_weight(weight)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"][0, 0].item() == pytest.approx(900.1)
    assert (before - optimizer.full_weight(weight)).min() > 100
    assert optimizer.state[weight]["somebody's"] == 3


@pytest.mark.parametrize("value", [NAN, -1.0, -7.0])
def test_a_step_counter_that_counts_nothing(value):
    model, optimizer = model_and_optimizer()
    give_ones(model)
    optimizer.state[model[1].bias]["step"].fill_(value)
    before = everything(optimizer)
    refused(StateError, optimizer.step, f"a step counter is {value:g}")
    assert same(everything(optimizer), before)


# -- options that are changed between steps ---------------------------------------------------------------------------

OPTIONS = {
    "lr is NaN": (ArgumentError, {"lr": NAN}, "AdamW(lr=nan)"),
    "lr is inf": (ArgumentError, {"lr": INF}, "AdamW(lr=inf)"),
    "lr is a NaN tensor": (ArgumentError, {"lr": torch.tensor(NAN)}, "AdamW(lr=nan)"),
    "betas": (ArgumentError, {"betas": (NAN, 0.9)}, "two numbers in [0, 1)"),
    "amsgrad": (UnsupportedError, {"amsgrad": True}, "a third moment"),
    "differentiable": (UnsupportedError, {"differentiable": True}, "no derivative"),
    "master": (CallOrderError, {"master": "split8"}, "with master='split', moments='fp32'"),
    "moments": (CallOrderError, {"moments": "int8"}, "its state was made with"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_go_wrong_in_the_middle_of_a_run(name):
    error, option, text = OPTIONS[name]
    model, optimizer = model_and_optimizer()
    optimizer.add_param_group({"params": [param(5)]})
    give_ones(model)
    optimizer.param_groups[1]["params"][0].grad = torch.ones(5, dtype=BF16)
    optimizer.param_groups[1].update(option)
    before = everything(optimizer)
    refused(error, optimizer.step, text)
    assert same(everything(optimizer), before)


def test_no_learning_rate_writes_anything_that_is_not_finite():
    """lr may be a tensor that the host cannot see; here a number that overflows every product."""
    saturated = 0
    for cls, master in itertools.product((AdamW, Adam, SGD, Lion), ("fp32", "split", "split8", "stochastic")):
        for dtype, lr in itertools.product((FP32, BF16, FP16), (1e38, torch.tensor(3e38))):
            p = nn.Parameter(torch.full((2, 40), 2.0, dtype=dtype))
            asked = None if dtype == FP32 else master
            optimizer = cls([p], lr=lr, weight_decay=0.5, master=asked, moments="int8")
            for sign in (1.0, -1.0, 1.0):
                p.grad = torch.full_like(p, sign * torch.finfo(dtype).max)
                optimizer.step()
            values = [p.detach(), optimizer.full_weight(p), *optimizer.state[p].values()]
            assert all(v.isfinite().all() for v in values if v.is_floating_point()), (cls, master, dtype)
            saturated += optimizer.saturated_weights
    assert saturated > 0


# -- out of use -------------------------------------------------------------------------------------------------------


def test_nothing_works_after_to_torch():
    model, optimizer = model_and_optimizer()
    optimizer.to_torch()
    for call in ("step", "state_dict", "to_torch"):
        refused(CallOrderError, lambda call=call: CALLS[call](model, optimizer), "after to_torch()")
    refused(CallOrderError, lambda: optimizer.load_state_dict({}), "after to_torch()")
    refused(CallOrderError, lambda: optimizer.add_param_group({"params": [param()]}), "after to_torch()")
    refused(CallOrderError, lambda: fp32_state_dict(model, optimizer), "after to_torch()")
    refused(CallOrderError, copy.deepcopy(optimizer).step, "after to_torch()")


def test_torch_has_no_lion():
    p = param()
    refused(UnsupportedError, Lion([p], policy="bf16-master").to_torch, "fp32_state_dict(model, optimizer)")
    assert p.dtype == BF16


def test_an_export_needs_masters():
    model = nn.Linear(2, 2).bfloat16()
    with pytest.warns(PrecisionWarning):
        bare = SGD(model.parameters(), master="none")
    refused(ArgumentError, lambda: fp32_state_dict(model, bare), "no masters")


def test_two_who_would_clip():
    model = nn.Linear(2, 2)
    optimizer = SGD(model.parameters(), clip_norm=1.0)
    refused(ArgumentError, lambda: halfstep.Stepper(model, optimizer, policy="fp32"), "clip_norm")


def test_policies_that_ask_for_other_storages():
    model = nn.Linear(40, 2)
    optimizer = AdamW(model.parameters(), policy="bf16-master", master="split8")
    halfstep.Stepper(model, optimizer, policy="bf16-master")  # any storage stands for an fp32 master
    refused(ArgumentError, lambda: halfstep.Stepper(model, optimizer, policy="bf16-master,master=stochastic"))
    refused(ArgumentError, lambda: halfstep.Stepper(model, optimizer, policy="bf16-master,moments=int8"))


def test_masters_around_an_optimizer_that_has_its_own():
    p = nn.Parameter(torch.randn(4, 4).bfloat16())
    with pytest.raises(ArgumentError, match="keeps what they lose"):
        halfstep.MasterWeights(AdamW([p], master="split8"))
