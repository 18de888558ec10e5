"""Windows of several micro-batches with 16-bit weights: summed in fp32, freed at once, stepped with the true mean."""

import copy
import gc

import pytest
import torch
from torch import nn

import halfstep
from halfstep.kernels.gradients import gradient_of

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.PrecisionWarning")
BF16, FP16 = torch.bfloat16, torch.float16


def run_window(stepper, losses):
    for loss_of in losses:
        with stepper.forward():
            loss = loss_of()
        stepper.backward(loss)
        outcome = stepper.step()
    return outcome


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_a_thousand_micro_batches_of_gradient_one_give_a_thousand_and_not_256(dtype):
    p = nn.Parameter(torch.zeros(3, dtype=dtype))
    for _ in range(1024):
        p.sum().backward()
    assert p.grad[0].item() == (256.0 if dtype == BF16 else 1024.0), "plain PyTorch"
    p.grad = None
    stepper = halfstep.Stepper(nn.ParameterList([p]), torch.optim.SGD([p], 1.0), policy="fp32", accumulate=None)
    run_window(stepper, [p.sum] * 1024)
    assert torch.equal(gradient_of(p), torch.full((3,), 1024.0))
    assert p.grad is None
    outcome = stepper.flush()
    assert outcome.grad_norm == pytest.approx(3**0.5)
    assert torch.equal(p.detach(), torch.full((3,), -1.0, dtype=dtype))
    assert gradient_of(p) is None


def test_the_error_over_256_real_micro_batches():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).to(BF16)
    x, y = torch.randn(256, 4, 32, dtype=BF16), torch.randn(256, 4, 8, dtype=BF16)
    exact = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
    for i in range(256):
        loss = (model(x[i]) - y[i]).float().square().mean()
        for total, g in zip(exact, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            total += g.double()
    for i in range(256):
        (model(x[i]) - y[i]).float().square().mean().backward()
    norm = torch.stack([e.norm() for e in exact]).norm()

    def error(found):
        return (torch.stack([(g.double() - e).norm() for g, e in zip(found, exact, strict=True)]).norm() / norm).item()

    assert error([p.grad for p in model.parameters()]) > 1e-2, "plain PyTorch"
    model.zero_grad()
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), policy="fp32", accumulate=None)
    run_window(stepper, [lambda i=i: (model(x[i]) - y[i]).float().square().mean() for i in range(256)])
    assert error([gradient_of(p) for p in model.parameters()]) < 1e-6


def test_bytes_are_those_of_the_sum_and_no_more_than_one_gradient_waits():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))).to(BF16)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), policy="fp32", accumulate=2)
    waiting = []
    for p in model.parameters():  # behind the stepper's own hooks, which the first window hangs on
        run_window(stepper, [lambda: model(torch.ones(1, 8, dtype=BF16)).float().sum()] * 2)
        p.register_post_accumulate_grad_hook(
            lambda _: waiting.append(sum(q.grad is not None for q in model.parameters()))
        )
    run_window(stepper, [lambda: model(torch.ones(1, 8, dtype=BF16)).float().sum()])
    assert max(waiting) == 0
    assert sum(gradient_of(p).nbytes for p in model.parameters()) == 4 * 4 * 64


def test_windows_of_one_micro_batch_keep_no_sum():
    p = nn.Parameter(torch.ones(3, dtype=BF16))
    stepper = halfstep.Stepper(nn.ParameterList([p]), torch.optim.SGD([p], 1.0), policy="fp32")
    with stepper.forward():
        loss = p.float().sum()
    stepper.backward(loss)
    assert p.grad.dtype == BF16
    assert not hasattr(p, "fp32_grad")
    stepper.step()
    stepper.accumulate = 2  # may change between windows
    run_window(stepper, [lambda: p.float().sum()])
    assert p.fp32_grad.dtype == torch.float32


@pytest.mark.parametrize("fused", [True, False])
def test_the_step_is_that_of_the_fp32_sum(fused):
    torch.manual_seed(0)
    w = torch.randn(64).to(BF16)
    gradients = [torch.randn(64).to(BF16) for _ in range(3)]
    p = nn.Parameter(w.clone())
    stepper = halfstep.Stepper(
        nn.ParameterList([p]), torch.optim.AdamW([p], 0.1, fused=fused), policy="fp32", accumulate=3, clip_norm=1.0
    )
    run_window(stepper, [lambda g=g: (p.float() * g.float()).sum() for g in gradients])
    reference = nn.Parameter(w.float())
    reference.grad = sum(g.float() for g in gradients) / 3
    nn.utils.clip_grad_norm_([reference], 1.0)
    torch.optim.AdamW([reference], 0.1, fused=fused).step()
    assert torch.equal(p.detach(), reference.detach().to(BF16))


def test_a_skip_drops_the_sum_and_the_next_window_is_clean():
    p = nn.Parameter(torch.ones(3, dtype=FP16))
    stepper = halfstep.Stepper(
        *(nn.ParameterList([p]), torch.optim.SGD([p], 0.1)), policy="fp32", accumulate=2, on_overflow="ignore"
    )
    assert run_window(stepper, [lambda: p.float().sum() * float("inf"), lambda: p.float().sum()]).is_skipped
    assert gradient_of(p) is None
    assert torch.equal(p.detach(), torch.ones(3, dtype=FP16))
    assert run_window(stepper, [lambda: p.float().sum()] * 2).grad_norm == pytest.approx(3**0.5)


def test_copies_of_a_model_have_no_sum_and_a_dead_stepper_sums_nothing():
    model = nn.Linear(2, 2).to(BF16)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), policy="fp32", accumulate=2)
    run_window(stepper, [lambda: model(torch.ones(1, 2, dtype=BF16)).float().sum()])
    assert not hasattr(copy.deepcopy(model).weight, "fp32_grad")
    stepper.discard()
    del stepper
    gc.collect()
    model(torch.ones(1, 2, dtype=BF16)).float().sum().backward()
    assert model.weight.grad is not None
    assert not hasattr(model.weight, "fp32_grad")


def test_between_windows_gradients_are_the_users_own():
    """A loop by hand after a window: no hook moves its gradients away, and no sum is left to be stepped with."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    model = nn.ParameterList([p])
    optimizer = halfstep.MasterWeights(torch.optim.SGD([p], lr=1.0))
    stepper = halfstep.Stepper(model, optimizer, policy="bf16-master", accumulate=2)
    for _ in range(2):
        with stepper.forward():
            loss = p.float().sum()
        stepper.backward(loss)
        stepper.step()
    for step in range(3):
        optimizer.zero_grad()
        p.float().sum().backward()
        assert p.grad is not None
        optimizer.step()
        assert p.item() == -2.0 - step
    with stepper.forward():
        loss = p.float().sum()
    stepper.backward(loss)
    assert p.grad is None
    optimizer.zero_grad()
    assert getattr(p, "fp32_grad", None) is None
    stepper.discard()


@pytest.mark.parametrize("policy", ["fp16-master", "bf16-master"])
@pytest.mark.parametrize("kind", ["packed", "masters"])
def test_a_hook_on_the_optimizer_changes_no_step(policy, kind):
    """Hooks look at gradients, so these are divided before: the sums in fp32 too."""

    def weights(has_hook):
        torch.manual_seed(0)
        dtype = torch.float16 if policy == "fp16-master" else torch.bfloat16
        model = torch.nn.Linear(8, 2).to(dtype)
        if kind == "packed":
            optimizer = halfstep.optim.SGD(model.parameters(), lr=0.01)
        else:
            optimizer = halfstep.MasterWeights(torch.optim.SGD(model.parameters(), lr=0.01))
        if has_hook:
            optimizer.register_step_pre_hook(lambda *_: None)
        stepper = halfstep.Stepper(model, optimizer, policy=policy, accumulate=2)
        for _ in range(8):
            with stepper.forward():
                loss = model(torch.randn(4, 8).to(dtype)).float().square().mean()
            stepper.backward(loss)
            stepper.step()
        return [p.detach().clone() for p in model.parameters()]

    for with_hook, without in zip(weights(True), weights(False), strict=True):
        torch.testing.assert_close(with_hook, without, rtol=2e-3, atol=1e-4)
