"""The Stepper under master policies: fp32 masters step with the fp32 sum of 16-bit gradients."""

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import PrecisionWarning

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
