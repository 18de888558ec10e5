"""MP-50: sums kept in 16 bits stop growing. MP-18: so do averages. Here: every number that halfstep itself reports.

Each is fed with 16-bit tensors, 5000 of them or more, where a bf16 sum stops at 256 and an fp16 sum at 2048. What is
reported is a Python number, which any logger takes (a bf16 tensor does not convert to numpy); what is not finite is
counted apart.
"""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep import ops
from halfstep.compare import digits
from halfstep.compare.measure import gradient_stats
from halfstep.compare.task import Data
from halfstep.compare.text import NUM_BYTES, byte_loss
from halfstep.kernels.inspect import inspect
from halfstep.training.accumulate import Window, checked_weight

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepWarning")
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
STOPS_AT = {torch.float16: 2048.0, torch.bfloat16: 256.0}
NUM = 5000
CPU = torch.device("cpu")


def stepper_of(p, lr=1.0, **options):
    optimizer = halfstep.MasterWeights(torch.optim.SGD([p], lr))
    policy = "fp16-master" if p.dtype == torch.half else "bf16-master"
    return halfstep.Stepper(nn.ParameterList([p]), optimizer, policy=policy, **options)


def micro_batch(stepper, loss, weight=None):
    with stepper.forward():
        value = loss()
    stepper.backward(value, weight)
    return stepper.step()


@HALVES
def test_MP_50_what_a_running_sum_in_16_bits_makes_of_it(dtype):
    total = torch.zeros((), dtype=dtype)
    for _ in range(NUM):
        total += 1
    assert total.item() == STOPS_AT[dtype]
    if dtype == torch.bfloat16:
        with pytest.raises(TypeError, match="BFloat16"):
            total.numpy()


# -- a window's sums --------------------------------------------------------------------------------------------------


@HALVES
def test_MP_50_a_window_adds_up_gradients_and_weights(dtype):
    p = nn.Parameter(torch.zeros(2, dtype=dtype))
    stepper = stepper_of(p, accumulate=None, scale=halfstep.StaticScale(1.0))
    weight = torch.ones((), dtype=dtype)  # a count that somebody keeps in 16 bits
    for _ in range(NUM):
        micro_batch(stepper, p.sum, weight)
    assert p.fp32_grad.tolist() == [NUM, NUM]
    assert stepper.num_micro_batches == NUM
    outcome = stepper.flush()
    assert outcome.num_micro_batches == NUM
    assert outcome.grad_norm == pytest.approx(2**0.5, rel=1e-6)
    assert p.tolist() == [-1.0, -1.0]  # the mean of 5000 ones


@HALVES
def test_MP_50_a_weight_on_a_device_is_added_up_in_fp32(dtype, monkeypatch):
    """Where the host cannot look, the weights are tensors: the same sum, in fp32."""
    monkeypatch.setattr("halfstep.training.accumulate.is_host", lambda device: False)
    window = Window(None)
    window.scale = torch.ones(())
    for _ in range(NUM):
        weight = window.in_units(checked_weight(torch.full((), 3.0, dtype=dtype)))
        window.add(weight, torch.full((1,), 0.5, dtype=dtype))
    assert window.divisor.dtype == window.loss.dtype == torch.float32
    assert window.divisor.item() * window._unit.item() == 3.0 * NUM
    assert window.loss.item() == 0.5


@HALVES
def test_MP_50_counts_of_steps_and_skips(dtype):
    p = nn.Parameter(torch.zeros(1, dtype=dtype))
    stepper = stepper_of(p, lr=2.0**-24, scale=halfstep.StaticScale(1.0), on_overflow="ignore", on_repeat="ignore")
    scaler = halfstep.GradScaler("cpu", scale=halfstep.StaticScale(1.0), on_repeat="ignore")
    q = nn.Parameter(torch.zeros(1, dtype=dtype))
    optimizer = halfstep.MasterWeights(torch.optim.SGD([q], 0.0))
    for i in range(600):
        fault = math.nan if i % 2 else 1.0
        micro_batch(stepper, lambda fault=fault: p.float().sum() * fault)
        optimizer.zero_grad()
        scaler.scale(q.float().sum() * fault).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (stepper.steps, stepper.skipped_steps, scaler.skipped_steps) == (600, 300, 300)
    assert stepper.optimizers[0].state[p]["master"].item() == -300 * 2.0**-24  # each far below the weight's resolution


@HALVES
def test_MP_50_counts_of_weights(dtype):
    """5000 weights that saturate, and 5000 that somebody wrote, are 5000."""
    largest = torch.finfo(dtype).max
    p = nn.Parameter(torch.full((NUM,), largest, dtype=dtype))
    optimizer = halfstep.MasterWeights(torch.optim.SGD([p], largest / 64))
    p.grad = torch.full_like(p, -1.0)
    optimizer.step()
    assert optimizer.saturated_weights == NUM
    with torch.no_grad():
        p.fill_(1.0)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.adopted_weights == NUM
    assert {type(n) for n in (optimizer.saturated_weights, optimizer.adopted_weights)} == {int}


# -- norms ------------------------------------------------------------------------------------------------------------


@HALVES
@pytest.mark.parametrize("num_tensors", [1, NUM])
def test_MP_50_norms_add_up_beyond_where_16_bits_stop(dtype, num_tensors):
    """10**6 ones, in one gradient or in 5000: the squares add up to 10**6, which neither format can count to."""
    gradients = list(torch.ones(10**6, dtype=dtype).chunk(num_tensors))
    assert inspect(gradients).total_norm(CPU).item() == pytest.approx(1000.0, rel=1e-6)
    assert ops.norm(torch.ones(10**6, dtype=dtype)).item() == pytest.approx(1000.0, rel=1e-6)


@HALVES
@pytest.mark.parametrize("accumulate", [1, 4])
def test_MP_50_the_reported_norm_is_the_true_one(dtype, accumulate):
    p = nn.Parameter(torch.zeros(10**5, dtype=dtype))
    stepper = stepper_of(p, accumulate=accumulate, clip_norm=1.0, scale=halfstep.StaticScale(2.0**8))
    for _ in range(accumulate):
        outcome = micro_batch(stepper, lambda: (p.float() * 3.0).sum())
    norm = 3.0 * math.sqrt(10**5)
    assert outcome.grad_norm == pytest.approx(norm, rel=2.0**-15)
    assert outcome.clip_coefficient == pytest.approx(1 / norm, rel=2.0**-14)


# -- averages ---------------------------------------------------------------------------------------------------------


@HALVES
def test_MP_18_an_average_of_16_bit_weights_moves_with_every_step(dtype):
    """With masters the weight itself moves only now and then; the average follows what the model computes with."""
    p = nn.Parameter(torch.full((1,), 2.0, dtype=dtype))
    model = nn.ParameterList([p])
    ema = halfstep.EMA(model, decay=0.999)
    with torch.no_grad():
        p.fill_(1.0)
    expected = 2.0
    for step in range(1000):
        ema.update(found_inf=torch.tensor(float(step % 4 == 3)))
        expected += 0.0 if step % 4 == 3 else (1.0 - expected) * 0.001
    average = ema.state_dict()["averages"]["0"]
    assert average.dtype == torch.float32
    assert average.item() == pytest.approx(expected, abs=1e-4)
    assert (ema.num_updates, type(ema.num_updates)) == (750, int)


# -- losses -----------------------------------------------------------------------------------------------------------


@HALVES
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_MP_50_the_mean_loss_of_a_window_of_16_bit_losses(dtype, shape):
    """Half of the losses are 1, half are 2: a bf16 sum of them would stop at 512."""
    p = nn.Parameter(torch.ones(1, dtype=dtype))
    stepper = stepper_of(p, lr=0.0, accumulate=None, scale=halfstep.StaticScale(1.0))
    for i in range(NUM):
        outcome = micro_batch(stepper, lambda i=i: (p * (1 + i % 2)).reshape(shape))
        assert outcome.loss == pytest.approx(1.5, abs=0.5)
    assert outcome.loss == 1.5
    assert stepper.flush().loss == 1.5


@HALVES
def test_MP_50_the_mean_loss_is_weighted_as_the_gradients_are(dtype):
    p = nn.Parameter(torch.ones(1, dtype=dtype))
    stepper = stepper_of(p, lr=0.0, accumulate=3, scale=halfstep.StaticScale(1.0))
    for factor, num_tokens in ((1.0, 1000), (2.0, 3000), (4.0, 96)):
        outcome = micro_batch(stepper, lambda factor=factor: (p * factor).sum(), num_tokens)
    mean = (1.0 * 1000 + 2.0 * 3000 + 4.0 * 96) / 4096
    assert outcome.loss == pytest.approx(mean, rel=1e-12)
    # The loss is linear in p = 1; each gradient is rounded to 16 bits once.
    assert outcome.grad_norm == pytest.approx(mean, rel=torch.finfo(dtype).eps)


@HALVES
def test_MP_50_losses_and_sums_of_16_bit_tensors_are_fp32(dtype):
    ones = torch.ones(NUM, dtype=dtype)
    assert ops.sum(ones).item() == NUM
    assert ops.mean(ones).item() == 1.0
    scores = torch.zeros(NUM, 4, dtype=dtype)
    labels = torch.zeros(NUM, dtype=torch.int64)
    total = ops.cross_entropy(scores, labels, reduction="sum")
    assert total.item() == pytest.approx(NUM * math.log(4), rel=1e-6)
    half = torch.full((NUM,), 0.5, dtype=dtype)
    for loss in (ops.binary_cross_entropy, ops.binary_cross_entropy_with_logits):
        assert loss(half, half, reduction="sum").dtype == torch.float32
    assert ops.binary_cross_entropy(half, half, reduction="sum").item() == pytest.approx(NUM * math.log(2), rel=1e-6)
    assert ops.dice_loss(ones, ones).item() == 0.0


LOSSES = [halfstep.nn.CrossEntropyLoss, halfstep.nn.BCEWithLogitsLoss]


@HALVES
@pytest.mark.parametrize("module", LOSSES, ids=lambda m: m.__name__)
def test_MP_50_a_mean_of_means_over_5000_batches(dtype, module):
    """What a loop does with the loss: it is fp32, so that adding it up is."""
    is_binary = module is halfstep.nn.BCEWithLogitsLoss
    scores = torch.zeros(1, 2, dtype=dtype)
    target = torch.zeros(1, 2) if is_binary else torch.zeros(1, dtype=torch.int64)
    loss, total = module()(scores, target), torch.zeros(())
    for _ in range(NUM):
        total += loss.detach()
    assert (total / NUM).item() == pytest.approx(math.log(2), rel=NUM * 2.0**-24)  # each addition rounds once


@HALVES
def test_MP_50_what_a_logger_gets(dtype):
    """Python floats, that JSON and numpy take; a skipped step says so, and can be counted instead of averaged."""
    p = nn.Parameter(torch.ones(2, dtype=dtype))
    stepper = stepper_of(p, lr=0.25, scale=halfstep.DynamicScale(2.0**8))
    losses, num_skipped = [], 0
    for fault in (1.0, math.nan, 1.0, math.inf):
        outcome = micro_batch(stepper, lambda fault=fault: (p.float() * fault).sum())
        metrics = outcome.metrics()
        assert {type(value) for value in metrics.values()} == {float}
        assert np.asarray(list(metrics.values())).dtype == np.float64
        assert json.loads(json.dumps(metrics)).keys() == metrics.keys()
        assert math.isfinite(metrics["grad_norm"]) is outcome.is_applied
        num_skipped += outcome.is_skipped
        assert math.isfinite(metrics["loss"]) is outcome.is_applied
        losses += [metrics["loss"]] if outcome.is_applied else []
    assert losses == [2.0, 1.5]
    assert num_skipped == stepper.skipped_steps == 2
    assert type(stepper.scale.get()) is float


@HALVES
def test_MP_50_a_retried_window_reports_losses_of_16_bits_as_they_are(dtype):
    """A loss of one 16-bit element goes through retries, weights and scaling in fp32."""
    p = nn.Parameter(torch.full((1,), 3.0, dtype=dtype))
    stepper = stepper_of(p, lr=0.0, scale=halfstep.DynamicScale(2.0**15))
    outcome = stepper.run(lambda: (p * 3).sum(), retries=3)
    assert outcome.is_applied
    assert outcome.grad_norm == 3.0


# -- compare's measures -----------------------------------------------------------------------------------------------


@HALVES
def test_MP_50_shares_of_zero_gradients(dtype):
    gradient = torch.ones(70_000, dtype=dtype)
    gradient[:NUM] = 0
    stats = gradient_stats([gradient])
    assert (stats.num_elements, stats.num_zeros) == (70_000, NUM)
    assert stats.exponents == ((0, 65_000),)
    assert stats.zero_share == NUM / 70_000


@HALVES
def test_MP_50_errors_of_the_study_are_measured_in_fp32(dtype):
    """70 000 images with an error of one each, from a model whose output is 16-bit."""
    truth = torch.zeros(70_000, 2)
    data = Data(truth, truth, truth, truth, source="made here")
    output = torch.ones(70_000, 2, dtype=dtype)
    assert digits.squared_error(nn.Identity(), output, data) == 1.0
    assert F.mse_loss(output, truth.to(dtype), reduction="sum").item() != 140_000.0, "plain PyTorch"

    labels = torch.zeros(70_000, dtype=torch.int64)
    data = Data(truth, labels, truth, labels, source="made here")
    output[:NUM, 1] = 2.0
    output[NUM:, 0] = 2.0
    assert digits.wrong_share(nn.Identity(), output, data) == pytest.approx(NUM / 70_000, rel=1e-6)

    scores = torch.zeros(2, NUM, NUM_BYTES, dtype=dtype)
    loss = byte_loss(scores, torch.zeros(2, NUM, dtype=torch.int64))
    assert (loss.dtype, loss.item()) == (torch.float32, pytest.approx(math.log(NUM_BYTES), rel=1e-6))
