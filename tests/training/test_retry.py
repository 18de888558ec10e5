"""run(closure, retries): the same micro-batches again, with the lowered scale and the same random state."""

import functools
import math

import pytest
import torch
from torch import nn

import halfstep
from halfstep.errors import SkippedStepWarning, UnsupportedError

OVERFLOWS_ABOVE = 2.0**12


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.linear(x)))


def loss_of(model, x):
    # The gradient passes through fp16 on its way, times ten: it overflows there at scales above 2**12.
    return (model(x).half() * 10.0).sum().float()


def make(scale=2.0**16, accumulate=1, **options):
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    options = {"on_overflow": "ignore", "scale": halfstep.DynamicScale(scale), **options}
    return model, halfstep.Stepper(model, optimizer, policy="fp32", accumulate=accumulate, **options)


def state(model):
    return [t.clone() for t in model.state_dict().values()]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_no_data_is_lost_and_the_result_is_that_of_a_run_that_began_with_the_right_scale(accumulate):
    batches = torch.randn(3, 4, 3)
    ends = []
    for scale in (2.0**16, 2.0**11):
        model, stepper = make(scale, accumulate)
        torch.manual_seed(7)
        for batch in batches:
            outcome = stepper.run(loss_of, model, batch, retries=6)
        ends.append((outcome.kind, state(model), torch.get_rng_state()))
    assert [kind for kind, *_ in ends] == ["applied", "applied"]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True)), "weights and buffers, all bits"
    assert torch.equal(ends[0][2], ends[1][2]), "and the random state after it"


def test_attempts_are_counted_and_the_scale_has_come_down():
    model, stepper = make()
    outcome = stepper.run(loss_of, model, torch.randn(4, 3), retries=6)
    assert outcome.is_applied
    assert outcome.step == stepper.steps == stepper.skipped_steps + 1
    assert outcome.scale == stepper.scale.get() <= OVERFLOWS_ABOVE


def test_without_retries_the_batch_is_lost():
    model, stepper = make()
    before = state(model)
    assert stepper.run(loss_of, model, torch.randn(4, 3)).is_skipped
    assert all(torch.equal(a, b) for a, b in zip(state(model), before, strict=True))


def test_too_few_retries_say_that_more_would_help():
    model, stepper = make(on_overflow="warn")
    with pytest.warns(SkippedStepWarning) as caught:
        outcome = stepper.run(loss_of, model, torch.randn(4, 3), retries=1)
    assert outcome.is_skipped
    text = str(caught[-1].message)
    assert "run 2 times, at scale 65536, 32768, and lost" in text
    assert "more retries" in text
    assert "holds NaN" in text, "inf became NaN in the backward pass of the norm"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_bad_itself_is_not_run_again(bad):
    model, stepper = make(2.0**10, on_overflow="warn")
    calls = []

    def closure():
        calls.append(1)
        return loss_of(model, torch.randn(4, 3)) * bad

    with pytest.warns(SkippedStepWarning) as caught:
        outcome = stepper.run(closure, retries=5)
    assert outcome.is_skipped
    assert len(calls) == 1
    assert f"the loss itself is {'inf' if bad == math.inf else 'nan'}" in str(caught[-1].message).replace("-inf", "inf")


def test_the_bad_micro_batch_is_named():
    model, stepper = make(2.0**10, accumulate=2, on_overflow="warn")
    stepper.run(loss_of, model, torch.randn(4, 3), retries=1)
    with pytest.warns(SkippedStepWarning) as caught:
        stepper.run(lambda x: loss_of(model, x) * math.nan, torch.randn(4, 3), retries=1)
    assert "loss itself of micro-batch 2 is nan" in str(caught[-1].message)


def test_an_overflow_that_stays_inf_asks_for_more_retries():
    p = nn.Parameter(torch.ones(2))
    stepper = halfstep.Stepper(
        nn.ParameterList([p]), torch.optim.SGD([p], 0.1), policy="fp32", scale=halfstep.DynamicScale(2.0**16)
    )
    with pytest.warns(SkippedStepWarning) as caught:
        stepper.run(lambda: (p.half() * 100.0).sum().float(), retries=1)
    assert "the gradients overflow: allow more retries" in str(caught[-1].message)
    assert "holds inf" in str(caught[-1].message)


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * math.nan


def test_a_gradient_that_is_nan_at_every_scale_is_not_blamed_on_the_scale():
    model, stepper = make(2.0**10, on_overflow="warn")
    calls = []

    def closure(x):
        calls.append(1)
        return NanBackward.apply(model(x)).sum()

    with pytest.warns(SkippedStepWarning) as caught:
        stepper.run(closure, torch.randn(4, 3), retries=2)
    assert len(calls) == 3
    text = str(caught[-1].message)
    assert "at scale 1024, 512, 256" in text
    assert "its gradient was NaN each time" in text
    assert "makes the NaN itself" in text
    assert "norm.bias" in text or "norm.weight" in text, "the parameter nearest the loss"


def test_a_scale_that_cannot_fall_is_not_tried_again():
    for scale in (halfstep.NoScale(), halfstep.StaticScale(2.0**16), halfstep.DynamicScale(2.0**16, min_scale=2.0**16)):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        stepper = halfstep.Stepper(model, optimizer, policy="fp32", scale=scale, on_overflow="ignore")
        calls = []

        def closure(x, model=model, calls=calls):
            calls.append(1)
            return NanBackward.apply(model(x)).sum()

        assert stepper.run(closure, torch.randn(4, 3), retries=4).is_skipped
        assert len(calls) == 1


def test_a_partial_carries_its_batch_and_a_closure_may_return_a_weight():
    model, stepper = make(2.0**10, accumulate=2)
    for weight in (1.0, 3.0):
        batch = torch.randn(4, 3)
        outcome = stepper.run(functools.partial(lambda x, w: (loss_of(model, x), w), batch, weight), retries=1)
    assert outcome.is_applied


def test_an_exception_in_a_later_attempt_gives_the_window_up():
    model, stepper = make()
    before, attempts = state(model), []

    def closure(x):
        attempts.append(1)
        if len(attempts) == 2:
            raise KeyError
        return loss_of(model, x)

    with pytest.raises(KeyError):
        stepper.run(closure, torch.randn(4, 3), retries=3)
    assert stepper.num_micro_batches == 0
    assert all(torch.equal(a, b) for a, b in zip(state(model), before, strict=True))
    assert stepper.run(loss_of, model, torch.randn(4, 3), retries=6).is_applied


@pytest.mark.parametrize("accumulate", [None, 4])
def test_a_window_that_flush_ends_is_run_again_too(accumulate):
    model, stepper = make(accumulate=accumulate)
    for _ in range(2):
        assert stepper.run(loss_of, model, torch.randn(4, 3), retries=8).kind == "accumulating"
    outcome = stepper.flush()
    assert outcome.is_applied
    assert outcome.num_micro_batches == 2
    assert outcome.scale <= OVERFLOWS_ABOVE


def test_several_ranks_are_refused(tmp_path):
    """Each would decide by its own losses, and one might run its window again while another goes on."""
    dist = pytest.importorskip("torch.distributed")
    model, stepper = make()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert stepper.run(loss_of, model, torch.randn(4, 3), retries=8).is_applied
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_world_size", lambda: 2)
            with pytest.raises(UnsupportedError, match="paired wrongly"):
                stepper.run(loss_of, model, torch.randn(4, 3), retries=1)
    finally:
        dist.destroy_process_group()
