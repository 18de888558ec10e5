"""The Stepper under master policies: fp32 masters step with the fp32 sum of 16-bit gradients."""

import warnings

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import PrecisionWarning
from halfstep.training.engine import open_window_text

DTYPES = {"bf16-master": torch.bfloat16, "fp16-master": torch.float16}


def make(policy, *, fused, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    halfstep.cast_model(model, policy)
    optimizer = halfstep.MasterWeights(torch.optim.AdamW(model.parameters(), 1e-2, fused=fused))
    return model, optimizer, halfstep.Stepper(model, optimizer, policy=policy, **options)


@pytest.mark.parametrize("policy", DTYPES)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.filterwarnings("error::halfstep.errors.PrecisionWarning")
def test_masters_equal_fp32_weights_fed_the_same_gradients(policy, fused, accumulate):
    """Bit for bit: the sum of the window in fp32, one division, the same optimizer."""
    model, optimizer, stepper = make(policy, fused=fused, accumulate=accumulate, on_overflow="ignore")
    shadow = [nn.Parameter(optimizer.state[p]["master"].clone()) for p in model.parameters()]
    plain = torch.optim.AdamW(shadow, 1e-2, fused=fused)
    for step in range(10):
        sums = [torch.zeros(p.shape) for p in shadow]
        for i in range(accumulate):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + i))
            if step == 4 and i == 0:
                x[0, 0] = float("inf")
            with stepper.forward():
                loss = model(x.to(DTYPES[policy])).float().square().mean()
            scaled = loss * stepper.scale.get()
            for total, g in zip(
                sums, torch.autograd.grad(scaled, list(model.parameters()), retain_graph=True), strict=True
            ):
                total += g.float()
            scale = stepper.scale.get()
            stepper.backward(loss)
            outcome = stepper.step()
        assert outcome.is_skipped is (step == 4)
        if outcome.is_applied:
            for p, total in zip(shadow, sums, strict=True):
                p.grad = total / (scale * accumulate)
            plain.step()
        for p, s in zip(model.parameters(), shadow, strict=True):
            assert torch.equal(optimizer.state[p]["master"], s.detach())
            assert torch.equal(p.detach(), s.detach().to(p.dtype))


def test_an_update_that_16_bit_weights_would_lose_arrives():
    model, optimizer, stepper = make("bf16-master", fused=True)
    before = [optimizer.state[p]["master"].clone() for p in model.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 1e-6
    with stepper.forward():
        loss = model(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum()
    stepper.backward(loss)
    assert stepper.step().is_applied
    assert all(
        not torch.equal(optimizer.state[p]["master"], b) for p, b in zip(model.parameters(), before, strict=True)
    )


def test_16_bit_weights_without_masters_are_warned_about_by_name():
    model = nn.Linear(2, 2).bfloat16()
    with pytest.warns(PrecisionWarning, match="keeps no masters"):
        halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), policy="bf16-true")


# -- what is warned about ---------------------------------------------------------------------------------------------


def caught(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in found if issubclass(one.category, PrecisionWarning)]


def half_linear(dtype=torch.float16, *, is_wrapped=True):
    model = nn.Linear(2, 2).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, halfstep.MasterWeights(optimizer) if is_wrapped else optimizer


@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.parametrize("policy", ["auto", "fp32", "bf16-mixed"])
def test_fp16_weights_without_loss_scaling_are_warned_about_once(policy, is_wrapped):
    """A gradient of 1e-8 is 0 in fp16, whatever the products are computed in."""
    pair = half_linear(is_wrapped=is_wrapped)
    for options in ({}, {"scale": halfstep.NoScale()}):
        (text,) = caught(lambda options=options: halfstep.Stepper(*pair, policy=policy, **options))
        assert "without loss scaling, and weight is fp16: gradients below 3e-8 become zero" in text
        assert 'policy="fp16-master"' in text
        assert ("nothing keeps their full value" in text) is not is_wrapped
    text = "".join(caught(lambda: halfstep.Stepper(*pair, policy=policy, scale=halfstep.DynamicScale())))
    assert "3e-8" not in text
    assert bool(text) is not is_wrapped


def test_gradients_of_bf16_and_frozen_weights_need_no_scale():
    assert caught(lambda: halfstep.Stepper(*half_linear(torch.bfloat16), policy="fp32")) == []
    model = nn.ModuleList([nn.Linear(2, 2).half().requires_grad_(False), nn.Linear(2, 2)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert caught(lambda: halfstep.Stepper(model, optimizer, policy="fp32")) == []


def test_fp16_masters_without_a_scale_are_warned_about_once():
    (text,) = caught(lambda: halfstep.Stepper(*half_linear(), policy="fp16-master", scale=halfstep.NoScale()))
    assert "fp16-master without loss scaling: gradients below 3e-8 become zero in fp16" in text


def test_bare_16_bit_weights_are_shown_both_ways_out():
    pair = half_linear(torch.bfloat16, is_wrapped=False)
    (text,) = caught(lambda: halfstep.Stepper(*pair, policy="fp32"))
    assert "Keep fp32 weights under a mixed policy, or wrap the optimizer" in text
    assert 'halfstep.MasterWeights(optimizer), under policy="bf16-master"' in text


@pytest.mark.parametrize("size", [1, 2])
def test_a_cast_after_the_stepper_was_made_is_noticed_when_a_window_opens(size):
    model = nn.Linear(2, 2)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), policy="bf16-mixed", accumulate=size)

    def micro_batch():
        with stepper.forward():
            loss = model(torch.ones(1, 2, dtype=model.weight.dtype)).float().sum()
        stepper.backward(loss)
        stepper.step()

    assert caught(lambda: [micro_batch() for _ in range(size)]) == []
    model.half()
    (text,) = caught(micro_batch)
    assert text.startswith("The model was cast after its Stepper was made. 2 of the parameters are 16-bit, the first")
    assert "one weight in fp16" in text
    assert caught(lambda: [micro_batch() for _ in range(2 * size)]) == [], "once"
    model.float()
    stepper.flush()
    assert caught(micro_batch) == [], "fp32 weights lose nothing"


@pytest.mark.parametrize(("size", "says"), [(1, "It is full: call step(), or discard()"), (2, "Call flush() at the")])
def test_what_to_call_for_an_open_window(size, says):
    model = nn.Linear(1, 1)
    stepper = halfstep.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), policy="fp32", accumulate=size)
    with stepper.forward():
        loss = model(torch.ones(1, 1)).sum()
    stepper.backward(loss)
    text = open_window_text(stepper._window)
    assert f"micro-batches so far: 1 of {size}." in text
    assert says in text
    assert ("flush()" in text) is (size == 2)
    stepper.discard()
