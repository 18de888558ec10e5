"""MP-13: resuming starts again at the initial scale. MP-53: copying or pickling fails in the middle of a step."""

import copy
import math
import multiprocessing
import pickle
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch

import halfstep

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepWarning")
SGD = torch.optim.SGD


def overflow(scaler, optimizer, p, times):
    for _ in range(times):
        optimizer.zero_grad()
        scaler.scale((p * math.inf).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def test_MP_13_the_saved_scale_and_skips_come_back(make_scaler, param):
    p = param([1.0])
    optimizer, scaler = SGD([p], 0.1), make_scaler()
    overflow(scaler, optimizer, p, 3)
    assert scaler.get_scale() == 8192.0
    resumed = make_scaler()
    resumed.load_state_dict(scaler.state_dict())
    assert resumed.get_scale() == 8192.0
    assert resumed.skipped_steps == 3
    assert resumed.state_dict() == scaler.state_dict()


RUNS = {
    "growth": ("optim.SGD(ps, 0.1, momentum=0.9)", "halfstep.GradScaler('cpu', growth_interval=4)"),
    "hysteresis": ("optim.AdamW(ps, 0.01, fused=True)", "halfstep.GradScaler('cpu', growth_interval=5, hysteresis=2)"),
    "tolerance": ("optim.Adam(ps, 0.01)", "halfstep.GradScaler('cpu', growth_interval=6, tolerance=0.3)"),
    "adaptive": ("optim.Adam(ps, 0.01)", "halfstep.GradScaler('cpu', scale=halfstep.AdaptiveScale())"),
}
# Trains every run in a process of its own, from a checkpoint if there is one; a quarter of the steps overflow.
TRAIN = textwrap.dedent("""
    import math, sys, warnings
    import torch, halfstep
    from halfstep.errors import SkippedStepWarning
    warnings.simplefilter("ignore", SkippedStepWarning)

    def train(optimizer_text, scaler_text, start, stop, saved):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer = eval(optimizer_text, {"ps": model.parameters(), "optim": torch.optim})
        scaler = eval(scaler_text, {"halfstep": halfstep})
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            scaler.load_state_dict(saved["scaler"])
        scales = saved["scales"] if saved else []
        for step in range(start, stop):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(5, 4, generator=generator)
            fault = math.inf if torch.rand((), generator=generator) < 0.25 else 1.0
            optimizer.zero_grad()
            scaler.scale(model(x).pow(2).mean() * fault).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(),
                "scales": scales, "skipped": scaler.skipped_steps}

    start, stop, runs, load, save = sys.argv[1:]
    saved = torch.load(load) if load else {}
    steps = int(start), int(stop)
    torch.save({name: train(*texts, *steps, saved.get(name)) for name, texts in eval(runs).items()}, save)
""")


def train(start, stop, load, save):
    arguments = [str(start), str(stop), repr(RUNS), str(load), str(save)]
    subprocess.run([sys.executable, "-W", "error", "-c", TRAIN, *arguments], check=True)
    return torch.load(save)


@pytest.fixture(scope="module")
def in_one_and_in_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    whole = train(0, 40, "", folder / "whole.pt")
    # After 13 steps every counter is away from its start and about to decide something: a load that forgot one is seen.
    train(0, 13, "", folder / "half.pt")
    return whole, train(13, 40, folder / "half.pt", folder / "resumed.pt")


@pytest.mark.parametrize("name", RUNS)
def test_MP_13_a_run_in_two_processes_is_the_run_in_one(in_one_and_in_two, name):
    whole, resumed = (runs[name] for runs in in_one_and_in_two)
    assert len(set(whole["scales"])) > 3, "the scale must move for this test to say anything"
    assert whole["skipped"] > 3
    assert resumed["scales"] == whole["scales"]
    assert resumed["skipped"] == whole["skipped"]
    assert resumed["scaler"] == whole["scaler"]
    for parameter in whole["model"]:
        assert torch.equal(resumed["model"][parameter], whole["model"][parameter]), parameter


def test_MP_13_a_checkpoint_without_scaler_state_is_not_taken_in_silence(make_scaler):
    scaler = make_scaler()
    with pytest.raises(RuntimeError, match="empty"):
        scaler.load_state_dict({})
    assert scaler.get_scale() == 65536.0


def stages(scaler, p, optimizer):
    """The moments of one window, each reached from the one before; the gradient of p is 1."""
    yield "fresh"
    scaler.scale(p.sum()).backward()
    yield "scaled"
    scaler.unscale_(optimizer)
    yield "unscaled"
    scaler.step(optimizer)
    yield "stepped"
    scaler.update()
    yield "updated"


def by_pickle(scaler):
    return pickle.loads(pickle.dumps(scaler))


def tensors_in(value, seen=None):
    """Every tensor that can be reached from a value, through attributes and containers."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, seen)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from tensors_in(vars(value), seen)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, by_pickle], ids=["deepcopy", "copy", "pickle"])
@pytest.mark.parametrize("options", [
    {"init_scale": 8.0},
    {"init_scale": 8.0, "hysteresis": 3, "min_scale": 2.0, "max_scale": 32.0},
    {"scale": halfstep.NoScale()},
    {"scale": halfstep.StaticScale(128.0)},
    {"scale": halfstep.AdaptiveScale(8.0)},
    {"enabled": False},
], ids=lambda options: str(options)[:30])  # fmt: skip
def test_MP_53_a_copy_can_be_made_at_every_moment(make_scaler, param, duplicate, options):
    p = param([1.0])
    scaler = make_scaler(**copy.deepcopy(options))
    optimizer = SGD([p], 0.5)
    for stage in stages(scaler, p, optimizer):
        twin = duplicate(scaler)
        assert twin.state_dict() == scaler.state_dict(), stage
        own = {t.untyped_storage().data_ptr() for t in tensors_in(scaler)}
        assert not own & {t.untyped_storage().data_ptr() for t in tensors_in(twin)}, stage
        # its stage is empty: the copy begins a window of its own, whatever the original is in the middle of
        q = param([1.0])
        other = SGD([q], 0.5)
        twin.scale(q.sum()).backward()
        twin.step(other)
        twin.update()
        assert q.item() == 0.5, stage
    assert p.item() == 0.5, "the original was not disturbed"


def test_MP_53_a_copy_and_its_original_go_separate_ways(make_scaler, param):
    p = param([1.0])
    optimizer, scaler = SGD([p], 0.5), make_scaler(init_scale=8.0)
    overflow(scaler, optimizer, p, 1)
    twin = copy.deepcopy(scaler)
    overflow(twin, optimizer, p, 2)
    assert (scaler.get_scale(), scaler.skipped_steps) == (4.0, 1)
    assert (twin.get_scale(), twin.skipped_steps) == (1.0, 3)


def test_MP_53_a_copy_in_the_middle_of_a_skipped_step_keeps_the_scale_of_before(make_scaler, param):
    p = param([1.0])
    optimizer, scaler = SGD([p], 0.5), make_scaler(init_scale=8.0)
    scaler.scale((p * math.inf).sum()).backward()
    scaler.step(optimizer)
    twin = by_pickle(scaler)
    scaler.update()
    assert (scaler.get_scale(), twin.get_scale()) == (4.0, 8.0)


def test_MP_53_the_scaler_can_be_copied_together_with_its_model(make_scaler):
    model = torch.nn.Linear(1, 1)
    trainer = {"model": model, "scaler": make_scaler(model=model, init_scale=8.0)}
    trainer["scaler"].scale(model(torch.ones(1, 1)).sum()).backward()
    twin = copy.deepcopy(trainer)
    optimizer = SGD(twin["model"].parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        overflow(twin["scaler"], optimizer, twin["model"].weight, 1)
    assert twin["scaler"].get_scale() == 4.0
    assert trainer["scaler"].get_scale() == 8.0


def _report(scaler, queue):
    queue.put((scaler.get_scale(), scaler.skipped_steps, scaler.state_dict()))


def test_MP_53_the_scaler_survives_spawn(make_scaler, param):
    p = param([1.0])
    optimizer, scaler = SGD([p], 0.5), make_scaler(init_scale=8.0)
    overflow(scaler, optimizer, p, 2)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)  # in the middle of a window
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_report, args=(scaler, queue))
    process.start()
    answer = queue.get(timeout=120)
    process.join()
    assert answer == (2.0, 2, scaler.state_dict())
