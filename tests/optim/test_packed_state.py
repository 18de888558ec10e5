"""States of the packed optimizers: resumed bit for bit, converted between storages, taken from and given to torch."""

import copy
import io
import itertools
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from halfstep import MasterWeights, fp32_state_dict
from halfstep.errors import PrecisionWarning, StateError
from halfstep.optim import SGD, Adam, AdamW, Lion

from .test_master_state import assert_same

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NAN, INF = float("nan"), float("inf")


def make_model(dtype=FP32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 33), nn.Linear(33, 3)).to(dtype)


def step(model, optimizer, steps):
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        for p in model.parameters():
            p.grad = (torch.randn(p.shape, generator=generator) * 0.1).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()


def trained(cls=AdamW, steps=3, seed=0, **options):
    model = make_model(seed=seed)
    options = {"policy": "bf16-master", **({"momentum": 0.9} if cls is SGD else {}), **options}
    optimizer = cls(model.parameters(), lr=1e-2, **options)
    step(model, optimizer, range(steps))
    return model, optimizer


def everything(model, optimizer):
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return copy.deepcopy((dict(model.state_dict()), [dict(s) for s in optimizer.state.values()], groups))


def full_weights(model, optimizer):
    return [optimizer.full_weight(p) for p in model.parameters()]


# -- a run in two processes is the run in one -------------------------------------------------------------------------

RUNS = {
    "split": "AdamW(ps, 1e-2, policy='bf16-master')",
    "small": "AdamW(ps, 1e-2, policy='bf16-master', master='split8', moments='int8')",
    "chance": "Lion(ps, 1e-3, policy='bf16-master', master='stochastic', moments='bf16', seed=7)",
    "fp16": "SGD(ps, 0.05, momentum=0.9, dampening=0.5, policy='fp16-master', master='fp32')",
    "tensor lr": "Adam(ps, torch.tensor(1e-2), moments='int8', clip_norm=0.5)",
}
# Trains every run in a process of its own, from a checkpoint if there is one. The last bias has no gradient until step
# 25: its state is saved before it was ever stepped. Some steps are skipped.
TRAIN = textwrap.dedent("""
    import sys, torch, torch.distributed.checkpoint as dcp
    from torch import nn, optim
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from halfstep.optim import SGD, Adam, AdamW, Lion
    torch.set_num_threads(1)
    BOTH_WAYS = ("small", "chance", "tensor lr")

    def train(text, start, stop, load, save, way):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = eval(text, {**globals(), "ps": model.parameters()})
        schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if load:
            saved = torch.load(load + ".pt", weights_only=True)
            model.load_state_dict(saved["model"])
            if way == "dcp":
                template = {"optimizer": get_optimizer_state_dict(model, optimizer)}
                dcp.load(template, checkpoint_id=load + ".dcp")
                set_optimizer_state_dict(model, optimizer, template["optimizer"])
            else:
                optimizer.load_state_dict(saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
        for step in range(start, stop):
            x = torch.randn(5, 40, generator=torch.Generator().manual_seed(step)).to(model[0].weight.dtype)
            optimizer.zero_grad()
            (model(x).float().pow(2).mean() * (float("inf") if step % 7 == 3 else 1.0)).backward()
            if step < 25:
                model[2].bias.grad = None
            optimizer.step()
            schedule.step()
        if way == "dcp":
            dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=save + ".dcp")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict()}, save + ".pt")

    runs, *parts = sys.argv[1:]
    for name, text in eval(runs).items():
        for way in ("torch", "dcp")[: 1 + (name in BOTH_WAYS)]:
            for part in parts:
                start, stop, load, save = part.split(",")
                end = f"-{name}-{way}"
                train(text, int(start), int(stop), load and load + end, save + end, way)
""")


def train(*parts):
    """Each part is ``start,stop,load,save``. DCP warns that there is no process group, torch about its own storages."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", TRAIN, repr(RUNS), *parts], check=True, capture_output=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    train(f"0,40,,{folder}/whole", f"0,20,,{folder}/half")
    train(f"20,40,{folder}/half,{folder}/resumed")
    return folder


WAYS = [*((name, "torch") for name in RUNS), *((name, "dcp") for name in ("small", "chance", "tensor lr"))]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_a_run_in_two_processes_is_the_run_in_one(runs, name, way):
    whole, resumed, half = (
        torch.load(runs / f"{which}-{name}-{way}.pt", weights_only=True) for which in ("whole", "resumed", "half")
    )
    assert_same(whole, resumed)
    assert half["optimizer"]["state"].keys() == {0, 1, 2, 3}  # the one that was never stepped has its state too
    assert [float(s["step"]) for s in half["optimizer"]["state"].values()] == [17.0, 17.0, 17.0, 0.0]
    assert [float(s["step"]) for s in whole["optimizer"]["state"].values()] == [34.0, 34.0, 34.0, 13.0]
    assert_differ(whole["optimizer"]["state"], half["optimizer"]["state"])


def assert_differ(a, b):
    with pytest.raises(AssertionError):
        assert_same(a, b)


LOST = {
    "rest": lambda state: state["rest"].zero_(),
    "exp_avg_codes": lambda state: state["exp_avg_codes"].zero_(),
    "exp_avg_sq_scales": lambda state: state["exp_avg_sq_scales"].add_(1),
    "step": lambda state: state["step"].add_(1),
}


@pytest.mark.parametrize("lost", LOST)
def test_a_part_that_is_not_right_is_missed(lost):
    """The comparison above can fail, whatever part of the state is another one."""
    model, optimizer = trained(master="split8", moments="int8")
    model_b, optimizer_b = copy.deepcopy((model, optimizer))
    LOST[lost](optimizer_b.state[model_b[0].weight])
    for pair in ((model, optimizer), (model_b, optimizer_b)):
        step(*pair, range(3, 10))
    assert_differ(full_weights(model, optimizer), full_weights(model_b, optimizer_b))


def test_a_checkpoint_of_five_bytes_resumes_bit_for_bit():
    """2 + 1 of the weight, 2 of two moments, 2 / 16 of their scales, and what torch.save writes around them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 480))
    num_parameters = sum(p.numel() for p in model.parameters())
    optimizer = AdamW(model.parameters(), lr=1e-2, policy="bf16-master", master="split8", moments="int8")
    step(model, optimizer, range(2))
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    assert len(buffer.getvalue()) / num_parameters <= 5.15
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    model_b = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 480))
    optimizer_b = AdamW(model_b.parameters(), lr=1e-2, policy="bf16-master", master="split8", moments="int8")
    model_b.load_state_dict(saved["model"])
    optimizer_b.load_state_dict(saved["optimizer"])
    for pair in ((model, optimizer), (model_b, optimizer_b)):
        step(*pair, range(2, 4))
    assert_same(everything(model, optimizer), everything(model_b, optimizer_b))


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
@pytest.mark.parametrize("cls", [AdamW, SGD, Lion])
def test_copies_go_on_alone(cls, copy_of):
    model, optimizer = trained(cls, master="stochastic", moments="bf16", clip_norm=0.5, seed=3, executor="torch")
    other_model, other = copy_of((model, optimizer))
    step(model, optimizer, range(3, 6))
    before = everything(model, optimizer)
    step(other_model, other, range(3, 6))
    assert_same(everything(other_model, other), before)
    assert_same(everything(model, optimizer), before)
    assert other.clip_norm == 0.5
    assert [e.reason for e in other.executors.values()] == ["torch: it was asked for"]
    other.add_param_group({"params": [late := nn.Parameter(torch.ones(3))]})
    assert late.dtype == BF16, "the policy goes with the copy"


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("master", ["fp32", "split", "split8", "stochastic"])
def test_model_and_optimizer_load_in_any_order(order, master):
    model, optimizer = trained(master=master)
    other_model, other = trained(master=master, steps=1, seed=5)
    parts = [
        lambda: other_model.load_state_dict(model.state_dict()),
        lambda: other.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    ]
    for load in parts if order == "model first" else reversed(parts):
        load()
    for pair in ((model, optimizer), (other_model, other)):
        step(*pair, range(3, 6))
    assert_same(everything(model, optimizer), everything(other_model, other))


# -- DCP --------------------------------------------------------------------------------------------------------------

OF_ADAM = ("exp_avg", "exp_avg_sq")
OPTIONS = [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_DCP_names_the_whole_state_of_an_optimizer_that_never_stepped(options):
    model, optimizer = trained(steps=0, moments="int8")
    saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
    names = {"step", "rest", *(f"{moment}_{part}" for moment in OF_ADAM for part in ("codes", "scales"))}
    if options.get("flatten_optimizer_state_dict"):
        assert {f"state.0.weight.{name}" for name in names} <= saved.keys()
    else:
        assert names <= saved["state"]["0.weight"].keys()
        assert saved["state"].keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert optimizer.state[model[0].weight]["step"] == 0, "no dummy step"
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_DCP_round_trip_without_a_dummy_step(options, tmp_path):
    model, optimizer = trained(master="split8", moments="int8")
    saved = {"o": get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))}
    dcp.save(saved, checkpoint_id=tmp_path / "c")
    wanted = copy.deepcopy(optimizer.state_dict())
    other_model, other = trained(master="split8", moments="int8", steps=0, seed=5)
    other_model.load_state_dict(model.state_dict())
    template = {"o": get_optimizer_state_dict(other_model, other, options=StateDictOptions(**options))}
    dcp.load(template, checkpoint_id=tmp_path / "c")
    set_optimizer_state_dict(other_model, other, template["o"], options=StateDictOptions(**options))
    found = other.state_dict()
    for group in (*wanted["param_groups"], *found["param_groups"]):
        group["betas"] = list(group["betas"])  # torch makes a list of the tuple
    assert_same(wanted, found)


# -- from one storage to another --------------------------------------------------------------------------------------

MASTERS = ("fp32", "split", "split8", "stochastic", "none", "fp32 weights")
MOMENTS = ("fp32", "bf16", "int8")
# Which storages hold everything that another one can keep. (Of fp16 weights a split rest holds masters from 2**-16 on.)
HOLDS = {
    "fp32 weights": {"fp32 weights", "fp32", "split"},
    "fp32": {"fp32 weights", "fp32", "split"},
    "split": {"fp32 weights", "fp32", "split"},
    "split8": {"fp32 weights", "fp32", "split", "split8"},
    "stochastic": set(MASTERS),
    "none": set(MASTERS),
}
MOMENT_HOLDS = {"fp32": {"fp32"}, "bf16": {"fp32", "bf16"}, "int8": {"fp32", "int8"}}


def in_storage(master, moments="fp32", dtype=BF16, seed=0, steps=3, cls=AdamW):
    """Trained in it; weights are far from 0, so that fp16's split holds them too."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 33), nn.Linear(33, 3))
    for p in model.parameters():
        p.data.uniform_(0.5, 2.0).mul_(torch.randn_like(p).sign())
    options = {"policy": "fp16-master" if dtype == FP16 else "bf16-master", "master": master}
    if master in ("fp32 weights", "none"):
        model.to(dtype if master == "none" else FP32)
        options = {"master": "none"}
    options |= {"momentum": 0.9} if cls is SGD else {}
    optimizer = cls(model.parameters(), lr=1e-2, moments=moments, **options)
    step(model, optimizer, range(steps))
    return model, optimizer


def loaded(source, target, lossy=False, cast=None):
    """The model's weights, then the optimizer's state."""
    (model, optimizer), (other_model, other) = source, target
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()), lossy=lossy)


def refused_whole(load, model, optimizer, match):
    before = everything(model, optimizer)
    with pytest.raises(StateError, match=f"(?s){match}") as caught:
        load()
    assert all(part in str(caught.value) for part in ("true:", "why:", "fix:", "nothing was loaded"))
    assert_same(everything(model, optimizer), before)


@pytest.mark.filterwarnings("ignore::halfstep.errors.PrecisionWarning")
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("saved", "wanted"), list(itertools.product(MASTERS[:5], MASTERS)))
def test_masters_go_from_every_storage_to_every_other(saved, wanted, dtype):
    source, target = in_storage(saved, dtype=dtype), in_storage(wanted, dtype=dtype, seed=1, steps=1)
    exact = full_weights(*source)
    if wanted in HOLDS[saved]:
        loaded(source, target)
        assert_same(full_weights(*target), exact)
    else:
        target[0].load_state_dict(source[0].state_dict())
        refused_whole(lambda: loaded(source, target), *target, "the full value of a parameter.*lossy=True")
        loaded(source, target, lossy=True)
        units = 2.0**-7 if wanted in ("stochastic", "none") else 2.0**-15
        for found, right in zip(full_weights(*target), exact, strict=True):
            assert 0 < (found / right - 1).abs().max() <= units
    assert [s["exp_avg"].sum().item() for s in target[1].state.values()] == [
        s["exp_avg"].sum().item() for s in source[1].state.values()
    ]
    assert {float(s["step"]) for s in target[1].state.values()} == {3.0}
    names = {name: group["master"] for name, group in zip(("found",), target[1].param_groups, strict=True)}
    assert names == {"found": "none" if wanted == "fp32 weights" else wanted}, "the storages stay what they are"


@pytest.mark.filterwarnings("ignore::halfstep.errors.PrecisionWarning")
@pytest.mark.parametrize("wanted", ["fp32", "split", "split8", "stochastic"])
def test_a_run_of_fp32_weights_goes_on_with_masters(wanted):
    """The model is loaded in fp32; then the optimizer casts it, and keeps the rest; then the state is loaded."""
    model, optimizer = in_storage("fp32 weights")
    other_model = make_model(seed=5)
    other_model.load_state_dict(model.state_dict())
    other = AdamW(other_model.parameters(), policy="bf16-master", master=wanted)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if wanted in HOLDS["fp32 weights"]:
        assert_same(full_weights(other_model, other), full_weights(model, optimizer))
    for a, b in zip(model.parameters(), other_model.parameters(), strict=True):
        assert_same(optimizer.state[a]["exp_avg"], other.state[b]["exp_avg"])


@pytest.mark.parametrize(("saved", "wanted"), list(itertools.product(MOMENTS, MOMENTS)))
@pytest.mark.parametrize("cls", [AdamW, SGD, Lion])
def test_moments_go_from_every_storage_to_every_other(cls, saved, wanted):
    source, target = in_storage("split", saved, cls=cls), in_storage("split", wanted, seed=1, steps=1, cls=cls)
    names = [
        name for name in ("exp_avg", "exp_avg_sq", "momentum_buffer") if name in source[1].state[source[0][0].bias]
    ]
    if wanted in MOMENT_HOLDS[saved]:
        loaded(source, target)
    else:
        target[0].load_state_dict(source[0].state_dict())
        refused_whole(lambda: loaded(source, target), *target, f"{names[0]} of a parameter.*lossy=True")
        loaded(source, target, lossy=True)
    back = in_storage("split", "fp32", seed=2, steps=1, cls=cls)
    wide = in_storage("split", "fp32", seed=2, steps=1, cls=cls)
    loaded(source, wide)
    loaded(target, back)
    for name, p, q in itertools.product(names, [wide[0][0].weight], [back[0][0].weight]):
        right, found = wide[1].state[p][name], back[1].state[q][name]
        if wanted in MOMENT_HOLDS[saved]:
            assert_same(found, right)
        else:
            scale = right.abs().amax(1, keepdim=True)
            assert 0 < ((found - right) / scale).abs().max() < (2.0**-8 if wanted == "bf16" else 2.0**-6)
            assert found.isfinite().all()
            assert name != "exp_avg_sq" or (found > 0).all()


def test_a_lossy_load_writes_nothing_that_is_not_finite():
    """fp32's largest second moment would round to bf16's infinity."""
    source, target = in_storage("split", "fp32"), in_storage("split", "bf16", seed=1)
    largest = torch.finfo(FP32).max
    for state in source[1].state.values():
        state["exp_avg_sq"].fill_(largest)
        state["exp_avg"].fill_(-largest)
    loaded(source, target, lossy=True)
    assert {float(s["exp_avg_sq"].max()) for s in target[1].state.values()} == {torch.finfo(BF16).max}
    assert {float(s["exp_avg"].min()) for s in target[1].state.values()} == {-torch.finfo(BF16).max}


@pytest.mark.parametrize("saved", ["fp32", "split", "split8"])
def test_another_16_bit_dtype(saved):
    """An fp32 master goes anywhere. A rest belongs to weights of its dtype, which are rounded here: it is refused."""
    source, target = in_storage(saved, dtype=FP16), in_storage("split", dtype=BF16, seed=1)
    if saved == "fp32":
        loaded(source, target)
        assert_same(full_weights(*target), full_weights(*source))
        return
    target[0].load_state_dict(source[0].state_dict())
    refused_whole(
        lambda: loaded(source, target, lossy=True), *target, "are not those that were saved beside this state"
    )
    wide = in_storage("fp32 weights", seed=1)  # fp32 weights hold what was loaded
    loaded(source, wide)
    assert_same(full_weights(*wide), full_weights(*source))


@pytest.mark.parametrize("saved", ["split", "split8", "fp32"])
def test_other_storages_need_the_models_weights_first(saved):
    source, target = in_storage(saved), in_storage({"split": "fp32", "split8": "split", "fp32": "split"}[saved], seed=1)
    state = copy.deepcopy(source[1].state_dict())
    match = "load the model's weights first, then the optimizer"
    refused_whole(lambda: target[1].load_state_dict(state), *target, match)
    target[0].load_state_dict(source[0].state_dict())
    target[1].load_state_dict(state)
    assert_same(full_weights(*target), full_weights(*source))


# -- from torch, to torch ---------------------------------------------------------------------------------------------

PAIRS = {
    "AdamW": (AdamW, torch.optim.AdamW, {}),
    "AdamW, fused": (AdamW, torch.optim.AdamW, {"fused": True}),
    "Adam": (Adam, torch.optim.Adam, {"weight_decay": 0.1}),
    "SGD": (SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "SGD, no momentum": (SGD, torch.optim.SGD, {}),
}


def feed_same(pairs, steps):
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        gradients = [(torch.randn(p.shape, generator=generator) * 0.1).bfloat16() for p in pairs[0][0].parameters()]
        for model, optimizer in pairs:
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient.to(p.dtype)
            optimizer.step()
            optimizer.zero_grad()


def assert_near(weights, others, at_most=1e-6):
    for a, b in zip(weights, others, strict=True):
        assert (a.detach() - b.detach()).abs().max() <= at_most


@pytest.mark.parametrize("name", PAIRS)
def test_a_run_of_torchs_goes_on_here(name):
    cls, theirs, options = PAIRS[name]
    plain_model = make_model()
    plain = theirs(plain_model.parameters(), lr=1e-2, **options)
    feed_same([(plain_model, plain)], range(3))
    model = make_model(seed=5)
    model.load_state_dict(plain_model.state_dict())
    optimizer = cls(model.parameters(), lr=1.0, **options, policy="bf16-master")
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert_same(full_weights(model, optimizer), [p.detach() for p in plain_model.parameters()])
    assert optimizer.param_groups[0]["lr"] == 1e-2
    feed_same([(model, optimizer), (plain_model, plain)], range(3, 20))
    assert_near(full_weights(model, optimizer), plain_model.parameters())


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_a_run_goes_on_in_torch(name, dtype):
    cls, theirs, options = PAIRS[name]
    model, plain_model = make_model(), make_model()
    objects = list(model.parameters())
    policy = "bf16-master" if dtype == BF16 else None
    optimizer, plain = cls(model.parameters(), lr=1e-2, **options, policy=policy), None
    plain = theirs(plain_model.parameters(), lr=1e-2, **options)
    feed_same([(model, optimizer), (plain_model, plain)], range(3))
    exact = full_weights(model, optimizer)
    back = optimizer.to_torch()
    assert type(back) is theirs
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert_same([p.detach() for p in model.parameters()], exact)
    assert {p.dtype for p in model.parameters()} == {FP32}
    own = {"master", "moments", "seed", "params"}
    assert not own & (back.param_groups[0].keys() - {"params"})
    assert back.state_dict()["state"].keys() == plain.state_dict()["state"].keys()
    for a, b in zip(back.state_dict()["state"].values(), plain.state_dict()["state"].values(), strict=True):
        assert a.keys() - {"momentum_buffer"} == b.keys() - {"momentum_buffer"}
    feed_same([(model, back), (plain_model, plain)], range(3, 20))
    assert_near(model.parameters(), plain_model.parameters())
    plain.load_state_dict(back.state_dict())  # and its state is one of torch's


def test_there_and_back_again():
    model, optimizer = trained()
    exact = everything(model, optimizer)[1]
    back = optimizer.to_torch()
    again = AdamW(model.parameters(), policy="bf16-master")
    again.load_state_dict(back.state_dict())
    assert_same(everything(model, again)[1], exact)


def test_a_parameter_that_never_had_a_gradient_has_no_state_in_torch():
    model, optimizer = trained(steps=0)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    back = optimizer.to_torch()
    assert list(back.state) == [model[0].weight]
    back.zero_grad()
    model(torch.ones(1, 40)).sum().backward()
    back.step()


@pytest.mark.parametrize("master", ["fp32", "split", "split8", "stochastic"])
@pytest.mark.parametrize("cls", [AdamW, SGD])
def test_a_run_with_MasterWeights_goes_on_here(cls, master):
    theirs, options = (torch.optim.AdamW, {}) if cls is AdamW else (torch.optim.SGD, {"momentum": 0.9})
    model_a, model = make_model(), make_model(seed=5)
    wrapped = MasterWeights(theirs(model_a.parameters(), lr=1e-2, **options), "bf16")
    step(model_a, wrapped, range(3))
    optimizer = cls(model.parameters(), lr=1.0, **options, policy="bf16-master", master=master)
    model.load_state_dict(model_a.state_dict())
    state = copy.deepcopy(wrapped.state_dict())
    if master in ("split8", "stochastic"):
        refused_whole(lambda: optimizer.load_state_dict(state), model, optimizer, "lossy=True")
        optimizer.load_state_dict(state, lossy=True)
    else:
        optimizer.load_state_dict(state)
        assert_same(full_weights(model, optimizer), [wrapped.state[p]["master"] for p in model_a.parameters()])
        step(model_a, wrapped, range(3, 10))
        step(model, optimizer, range(3, 10))
        assert_near(full_weights(model, optimizer), [wrapped.state[p]["master"] for p in model_a.parameters()])
    assert "state_names" not in optimizer.param_groups[0]


def test_a_plain_optimizers_16_bit_state_is_widened_with_a_warning():
    plain_model = make_model(FP16)
    plain = torch.optim.Adam(plain_model.parameters(), eps=1e-3)
    step(plain_model, plain, range(2))
    _, optimizer = trained(Adam, policy="fp16-master", steps=0)
    with pytest.warns(PrecisionWarning, match="The state exp_avg, exp_avg_sq was kept in 16 bits"):
        optimizer.load_state_dict(plain.state_dict())
    assert {v.dtype for s in optimizer.state.values() for k, v in s.items() if k != "rest"} == {FP32}


def test_an_adam_of_torchs_does_not_turn_an_adamw_into_one():
    """As in torch, AdamW's decay stays decoupled, whatever was loaded."""
    plain_model = make_model()
    plain = torch.optim.Adam(plain_model.parameters(), weight_decay=0.1)
    step(plain_model, plain, range(1))
    _, optimizer = trained(steps=0)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_torch_loads_ours():
    model, optimizer = trained(policy=None)
    plain_model = make_model()
    plain_model.load_state_dict(fp32_state_dict(model, optimizer))
    plain = torch.optim.AdamW(plain_model.parameters())
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    feed_same([(model, optimizer), (plain_model, plain)], range(3, 10))
    assert_near(model.parameters(), plain_model.parameters())


# -- MP-56's kind: nothing is narrowed, nothing shared, nothing half loaded -------------------------------------------


@pytest.mark.parametrize("cls", [AdamW, Adam])
def test_torch_does_not_step_with_codes(cls):
    """It casts what it loads to the weight's dtype, and checks no names: with its names it would step with codes."""
    model, optimizer = trained(cls, moments="int8")
    assert optimizer.state[model[0].bias]["exp_avg"].dtype == BF16, "numbers keep torch's names"
    plain = cls.torch_class(model.parameters())
    plain.load_state_dict(optimizer.state_dict())
    model(torch.ones(1, 40, dtype=BF16)).sum().backward()
    before = full_weights(model, optimizer)
    with pytest.raises(KeyError, match="exp_avg"):
        plain.step()
    assert_same(full_weights(model, optimizer), before)


def test_SGD_keeps_codes_under_their_own_name_too():
    model, optimizer = trained(SGD, moments="int8")
    assert optimizer.state[model[0].weight].keys() == {
        "step",
        "rest",
        "momentum_buffer_codes",
        "momentum_buffer_scales",
    }
    back = optimizer.to_torch()
    assert back.state[model[0].weight]["momentum_buffer"].dtype == FP32


def test_nothing_is_narrowed_or_shared():
    model, optimizer = trained(policy="fp16-master")
    state = copy.deepcopy(optimizer.state_dict())
    for saved in state["state"].values():
        saved["exp_avg_sq"].fill_(1e-9)
    other_model, other = trained(policy="fp16-master", steps=0)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(state)
    assert_same(state, other.state_dict())
    state["state"][0]["rest"].zero_()
    state["state"][0]["exp_avg"].zero_()
    assert other.state[other_model[0].weight]["rest"].any()
    assert other.state[other_model[0].weight]["exp_avg"].any()


def test_its_own_live_state_can_be_loaded():
    model, optimizer = trained()
    before = everything(model, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same(everything(model, optimizer), before)


def test_hooks_of_saving_and_loading():
    _, optimizer = trained()
    calls = []
    optimizer.register_state_dict_post_hook(lambda o, state: calls.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda o, state: calls.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["saved", "loading", "loaded"]


def test_state_can_be_put_back_by_hand():
    model, optimizer = trained(moments="int8")
    before = {p: copy.deepcopy(state) for p, state in optimizer.state.items()}
    wanted, values = everything(model, optimizer), [p.detach().clone() for p in model.parameters()]
    step(model, optimizer, range(3, 5))
    optimizer.state.clear()
    optimizer.state.update(before)
    with torch.no_grad():
        for p, value in zip(model.parameters(), values, strict=True):
            p.copy_(value)
    step(model, optimizer, [])
    assert_same(everything(model, optimizer), wanted)
    fresh = trained(moments="int8")
    for pair in (fresh, (model, optimizer)):
        step(*pair, range(3, 6))
    assert_same(everything(*fresh), everything(model, optimizer))


def test_frozen_parameters_and_unfreezing():
    model = make_model()
    model[0].requires_grad_(False)
    optimizer = AdamW(model.parameters(), policy="bf16-master")
    assert optimizer.state_dict()["state"].keys() == {2, 3}
    saved = copy.deepcopy(optimizer.state_dict())
    model[0].requires_grad_(True)
    assert optimizer.state_dict()["state"].keys() == {0, 1, 2, 3}, "a checkpoint knows of it at once"
    assert model[0].weight.dtype == FP32, "and it is stepped as it is"
    optimizer.load_state_dict(saved)
    other_model = make_model()
    other_model[0].requires_grad_(False)
    other = AdamW(other_model.parameters(), policy="bf16-master")
    refused_whole(lambda: other.load_state_dict(optimizer.state_dict()), other_model, other, "which is frozen")


def another_model(s):
    s["state"][1]["exp_avg"] = torch.zeros(9)


def renamed(before, after):
    return lambda s: s["state"][0].update({after: s["state"][0].pop(before)})


SHAPE = (33, 40)
FAULTS = {
    "no groups": (lambda s: s.pop("param_groups"), "a state has state and param_groups"),
    "no state": (lambda s: s.pop("state"), "a state has state and param_groups"),
    "groups of another kind": (lambda s: s.update(param_groups=[3]), "its state is no dict"),
    "a state of another kind": (lambda s: s.update(state=[1]), "its state is no dict"),
    "a parameter's state of another kind": (lambda s: s["state"].update({0: [1]}), "is of type list"),
    "fewer parameters": (lambda s: s["param_groups"][0]["params"].pop(), "states belong to parameters by their place"),
    "a group more": (lambda s: s["param_groups"].append({"params": []}), "groups that were added later"),
    "another model": (another_model, "the state of another model"),
    "another rule": (lambda s: s["state"][0].update(max_exp_avg_sq=torch.zeros(SHAPE)), "it has max_exp_avg_sq"),
    "a lost moment": (lambda s: s["state"][3].pop("exp_avg_sq"), "exp_avg_sq of a parameter of shape"),
    "a lost rest": (lambda s: s["state"][3].pop("rest"), "the rest of a parameter of shape"),
    "lost scales": (lambda s: s["state"][0].pop("exp_avg_scales"), "without scales"),
    "codes under torch's name": (renamed("exp_avg_codes", "exp_avg"), "int8 under the name exp_avg_codes"),
    "no codes under their name": (
        lambda s: s["state"][0].update(exp_avg_codes=torch.zeros(SHAPE)),
        "exp_avg_codes of a parameter of shape .* is torch.float32",
    ),
    "codes and values": (lambda s: s["state"][0].update(exp_avg=torch.zeros(SHAPE)), "one would be dropped"),
    "lost codes": (lambda s: s["state"][0].pop("exp_avg_codes"), "exp_avg of a parameter of shape"),
    "scales too many": (lambda s: s["state"][1].update(exp_avg_scales=torch.zeros(1)), "only int8 has them"),
    "scales of another shape": (
        lambda s: s["state"][0].update(exp_avg_scales=torch.zeros(33, 3, dtype=torch.int16)),
        "another number of groups",
    ),
    "scales of another dtype": (lambda s: s["state"][0].update(exp_avg_scales=torch.zeros(33, 2)), "scales of exp_avg"),
    "a wide moment": (lambda s: s["state"][1].update(exp_avg=torch.zeros(33).double()), "moments are fp32, bf16 or"),
    "a moment that is NaN": (lambda s: s["state"][1]["exp_avg"].fill_(NAN), "from before the run diverged"),
    "a moment that is inf": (lambda s: s["state"][1]["exp_avg"].fill_(INF), "from before the run diverged"),
    "a negative second moment": (lambda s: s["state"][1]["exp_avg_sq"].sub_(2), "a negative second moment"),
    "a wide rest": (lambda s: s["state"][0].update(rest=torch.zeros(SHAPE)), "rest is torch.float32"),
    "a rest of another shape": (
        lambda s: s["state"][0].update(rest=torch.zeros(3, dtype=torch.int8)),
        "rest has shape",
    ),
    "a narrow master": (lambda s: s["state"][0].update(master=torch.zeros(SHAPE).half()), "master is torch.float16"),
    "a sparse moment": (lambda s: s["state"][0].update(exp_avg=torch.zeros(SHAPE).to_sparse()), "a dense tensor"),
    "a moment without values": (
        lambda s: s["state"][0].update(exp_avg=torch.zeros(SHAPE, device="meta")),
        "a dense tensor, with values",
    ),
    "a moment that is no tensor": (lambda s: s["state"][0].update(exp_avg="x"), "is str"),
    "a sum of another dtype": (lambda s: s["state"][0].update(weight_sum=torch.zeros(())), "weight_sum is"),
    "a step that is NaN": (lambda s: s["state"][0]["step"].fill_(NAN), "a step counter is"),
    "a negative step": (lambda s: s["state"][0]["step"].fill_(-1), "a step counter is"),
    "a step of another kind": (lambda s: s["state"][0].update(step="x"), "a step counter is 'x'"),
    "many steps": (lambda s: s["state"][0].update(step=torch.zeros(2)), "a step counter is"),
}


@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_refused_whole(fault, lossy):
    change, text = FAULTS[fault]
    model, optimizer = trained(master="split8", moments="int8")
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        for name, value in values.items():
            if name != "weight_sum":
                value.fill_(1)  # whatever were loaded would show
    state["param_groups"][0]["lr"] = 77.0
    change(state)
    refused_whole(lambda: optimizer.load_state_dict(state, lossy=lossy), model, optimizer, text)


@pytest.mark.parametrize("state", [None, "x", 3, [1], {}, {"state": {}}])
def test_what_is_no_state_at_all(state):
    model, optimizer = trained()
    refused_whole(lambda: optimizer.load_state_dict(state), model, optimizer, "a state (is a dict with|has) state and")


@pytest.mark.parametrize(("option", "value"), [("lr", NAN), ("betas", (2.0, 0.9)), ("seed", -1), ("amsgrad", True)])
def test_options_that_cannot_be_are_refused_whole(option, value):
    model, optimizer = trained()
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        values["exp_avg"].fill_(1)
    state["param_groups"][0][option] = value
    before = everything(model, optimizer)
    with pytest.raises((ValueError, RuntimeError), match="fix:"):
        optimizer.load_state_dict(state)
    assert_same(everything(model, optimizer), before)


def test_rules_do_not_load_each_others_state():
    for saved, wanted in itertools.permutations((AdamW, SGD, Lion), 2):
        source, (model, optimizer) = trained(saved), trained(wanted, seed=5)
        match = "it has|is missing"
        refused_whole(lambda o=optimizer, s=source: o.load_state_dict(s[1].state_dict()), model, optimizer, match)
