"""Saving and loading: 40 = 20 + save + new process + 20, through torch.save and DCP; nothing narrowed or lost."""

import copy
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

from halfstep.errors import PrecisionWarning, StateError
from halfstep.optim.masters import MasterWeights

RUNS = {
    "AdamW-fused": "optim.AdamW(ps, 1e-2, fused=True)",
    "Adam-amsgrad": "optim.Adam(ps, 1e-2, amsgrad=True)",
    "SGD-dampening": "optim.SGD(ps, 0.05, momentum=0.9, dampening=0.5)",
    "SGD-fused": "optim.SGD(ps, 0.05, momentum=0.9, fused=True)",
    "Adafactor": "optim.Adafactor(ps)",
    "ASGD": "optim.ASGD(ps)",
    "Rprop": "optim.Rprop(ps)",
    "NAdam": "optim.NAdam(ps)",
    "Adagrad": "optim.Adagrad(ps, 0.1)",
}
# Trains every run in a process of its own, from a checkpoint if there is one. The second layer's bias has no gradient
# until step 25: its state is saved before it was ever stepped.
TRAIN = textwrap.dedent("""
    import sys, torch, torch.distributed.checkpoint as dcp
    from torch import nn, optim
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    from halfstep.optim.masters import MasterWeights
    torch.set_num_threads(1)

    def train(text, dtype, start, stop, load, save, way):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = MasterWeights(eval(text, {"ps": model.parameters(), "optim": optim}), dtype)
        schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        if load:
            saved = torch.load(load + ".pt")
            model.load_state_dict(saved["model"])
            if way == "dcp":
                template = {"optimizer": get_optimizer_state_dict(model, optimizer)}
                dcp.load(template, checkpoint_id=load + ".dcp")
                set_optimizer_state_dict(model, optimizer, template["optimizer"])
            else:
                optimizer.load_state_dict(saved["optimizer"])
            schedule.load_state_dict(saved["schedule"])
        for step in range(start, stop):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(5, 4, generator=generator).to(model[0].weight.dtype)
            optimizer.zero_grad()
            model(x).float().pow(2).mean().backward()
            if step < 25:
                model[2].bias.grad = None
            optimizer.step()
            schedule.step()
        if way == "dcp":
            dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=save + ".dcp")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "adopted": optimizer.adopted_weights, "schedule": schedule.state_dict()}, save + ".pt")

    start, stop, runs, load, save = sys.argv[1:]
    for name, text in eval(runs).items():
        for dtype in ("bf16", "fp16"):
            for way in ("torch", "dcp"):
                end = f"-{name}-{dtype}-{way}"
                train(text, dtype, int(start), int(stop), load and load + end, save + end, way)
""")


def train(start, stop, load, save):
    arguments = [str(start), str(stop), repr(RUNS), str(load), str(save)]
    # DCP warns that there is no process group, and torch about its own storages.
    subprocess.run([sys.executable, "-W", "ignore", "-c", TRAIN, *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    train(0, 40, "", folder / "whole")
    train(0, 20, "", folder / "half")
    train(20, 40, folder / "half", folder / "resumed")
    return folder


def assert_same(a, b, where=""):
    """Equal bit for bit, types and dtypes too, through dicts and lists."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)), where
    elif isinstance(a, (list, tuple)):
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{index}]")
    else:
        assert a == b, where


@pytest.mark.parametrize("way", ["torch", "dcp"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", RUNS)
def test_a_run_in_two_processes_is_the_run_in_one(runs, name, dtype, way):
    whole, resumed, half = (
        torch.load(runs / f"{which}-{name}-{dtype}-{way}.pt") for which in ("whole", "resumed", "half")
    )
    assert_same(whole, resumed)
    assert whole["adopted"] == 0
    assert half["optimizer"]["state"].keys() == {0, 1, 2, 3}  # the one that was never stepped has its state too
    masters = [state["master"] for state in whole["optimizer"]["state"].values()]
    assert any((m != m.bfloat16().float()).any() for m in masters), "masters must hold more than 16 bits"


def trained(make=lambda p: torch.optim.AdamW(p, 1e-2, fused=True), dtype="bf16", steps=3):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = MasterWeights(make(model.parameters()), dtype)
    step(model, optimizer, range(steps))
    return model, optimizer


def step(model, optimizer, steps):
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}])
def test_DCP_names_the_whole_state_of_an_optimizer_that_never_stepped(options):
    model, optimizer = trained(steps=0)
    saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
    names = {"master", "step", "exp_avg", "exp_avg_sq"}
    if options.get("flatten_optimizer_state_dict"):
        assert {f"state.0.weight.{name}" for name in names} <= saved.keys()
    else:
        assert {key: set(state) for key, state in saved["state"].items()} == dict.fromkeys(
            ["0.weight", "0.bias", "1.weight", "1.bias"], names
        )
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.state[model[0].weight]["step"].item() == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}, {"full_state_dict": True}])
def test_DCP_round_trip(options):
    model, optimizer = trained()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options)))
    wanted = copy.deepcopy(optimizer.state_dict())
    other_model, other = trained(steps=0)
    other_model.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other_model, other, saved, options=StateDictOptions(**options))
    found = other.state_dict()
    for group in (*wanted["param_groups"], *found["param_groups"]):
        group["betas"] = list(group["betas"])  # torch makes a list of the tuple
    assert_same(wanted, found)


def test_nothing_is_narrowed_or_shared():
    model, optimizer = trained(lambda p: torch.optim.Adam(p), "fp16")
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg_sq"].fill_(1e-9)
    other_model, other = trained(lambda p: torch.optim.Adam(p), "fp16", steps=0)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(state)
    assert_same(state, other.state_dict())
    state["state"][0]["master"].zero_()
    assert other.state[other_model[0].weight]["master"].any()


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_model_and_optimizer_load_in_any_order(order):
    model, optimizer = trained()
    other_model, other = trained(steps=0)
    parts = [
        lambda: other_model.load_state_dict(model.state_dict()),
        lambda: other.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    ]
    for load in parts if order == "model first" else reversed(parts):
        load()
    step(model, optimizer, range(3, 6))
    step(other_model, other, range(3, 6))
    assert_same(optimizer.state_dict(), other.state_dict())
    assert other.adopted_weights == 0


def test_a_plain_optimizers_state_from_before_the_switch():
    torch.manual_seed(0)
    plain_model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    plain = torch.optim.AdamW(plain_model.parameters(), 1e-2, fused=True)
    step(plain_model, plain, range(3))
    saved = copy.deepcopy((plain_model.state_dict(), plain.state_dict()))
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model.load_state_dict(saved[0])
    optimizer = MasterWeights(torch.optim.AdamW(model.parameters(), 1e-2, fused=True), "bf16")
    optimizer.load_state_dict(saved[1])
    for number in range(3, 6):
        for p, q in zip(model.parameters(), plain_model.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number)).bfloat16()
            q.grad = p.grad.float()
        optimizer.step()
        plain.step()
    for p, q in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["master"], q)


def test_a_plain_optimizers_16_bit_state_is_widened_with_a_warning():
    model = nn.Linear(2, 2).half()
    plain = torch.optim.Adam(model.parameters(), eps=1e-3)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    plain.step()
    optimizer = MasterWeights(torch.optim.Adam(nn.Linear(2, 2).parameters()), "fp16")
    with pytest.warns(PrecisionWarning, match="exp_avg, exp_avg_sq of Adam was kept in 16 bits"):
        optimizer.load_state_dict(plain.state_dict())
    assert {v.dtype for state in optimizer.state.values() for v in state.values()} == {torch.float32}


def test_a_plain_optimizer_loads_ours():
    model, optimizer = trained()
    plain = torch.optim.AdamW(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).parameters(), fused=True)
    plain.load_state_dict(optimizer.state_dict())
    moment = next(iter(plain.state.values()))["exp_avg"]
    assert torch.equal(moment, optimizer.state[model[0].weight]["exp_avg"])


def broken(change):
    model, optimizer = trained()
    state = copy.deepcopy(optimizer.state_dict())
    change(state)
    return model, optimizer, state


FAULTS = {
    "no groups": (lambda s: s.pop("param_groups"), "a state has state and param_groups"),
    "fewer parameters": (lambda s: s["param_groups"][0]["params"].pop(), "states belong to parameters by their place"),
    "another model": (lambda s: s["state"][0].update(exp_avg=torch.zeros(9)), "the state of another model"),
    "a narrow master": (lambda s: s["state"][1].update(master=torch.zeros(4).half()), "a master is fp32"),
    "a wide moment": (lambda s: s["state"][3].update(exp_avg=torch.zeros(2).double()), "never narrowed"),
    "a lost master": (lambda s: s["state"][3].pop("master"), "a part of the state is missing"),
    "a lost moment": (lambda s: s["state"][3].pop("exp_avg_sq"), "exp_avg_sq of a parameter of shape"),
    "a lost kind": (
        lambda s: [state.pop("exp_avg") for state in s["state"].values()],
        "exp_avg was saved and is not there any more",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_refused_whole(fault):
    change, text = FAULTS[fault]
    _, optimizer, state = broken(change)
    for values in state["state"].values():
        for value in values.values():
            value.fill_(0.0)  # whatever were loaded would show
    state.get("param_groups", [{}])[0]["lr"] = 77.0
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(StateError, match=text) as caught:
        optimizer.load_state_dict(state)
    assert "nothing was loaded" in str(caught.value)
    assert_same(before, optimizer.state_dict())


def test_masters_for_parameters_that_have_none_here():
    _, optimizer = trained()
    wide = MasterWeights(torch.optim.AdamW(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).parameters(), fused=True))
    with pytest.raises(StateError, match="there is no master here that could take it"):
        wide.load_state_dict(optimizer.state_dict())


def test_hooks_of_saving_and_loading():
    _, optimizer = trained()
    calls = []
    optimizer.register_state_dict_post_hook(lambda o, state: calls.append("saved"))
    optimizer.register_load_state_dict_pre_hook(lambda o, state: calls.append("loading"))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["saved", "loading", "loaded"]


def test_state_can_be_put_back_as_closures_do():
    model, optimizer = trained()
    before = {p: copy.deepcopy(state) for p, state in optimizer.state.items()}
    wanted = copy.deepcopy(optimizer.state_dict())
    values = [p.detach().clone() for p in model.parameters()]
    step(model, optimizer, range(3, 5))
    optimizer.state.clear()
    optimizer.state.update(before)
    with torch.no_grad():
        for p, value in zip(model.parameters(), values, strict=True):
            p.copy_(value)
    assert_same(wanted, optimizer.state_dict())


def test_checkpoint_id_in_this_process(tmp_path):
    """A template made by a fresh optimizer holds everything that the checkpoint does."""
    model, optimizer = trained(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5))
    wanted = copy.deepcopy(optimizer.state_dict())
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"o": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path / "c")
        other_model, other = trained(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5), steps=0)
        template = {"o": get_optimizer_state_dict(other_model, other)}
        dcp.load(template, checkpoint_id=tmp_path / "c")
        set_optimizer_state_dict(other_model, other, template["o"])
    assert_same(wanted, other.state_dict())
