"""Windows of many micro-batches: their sums in 16 bits and in fp32, against sums in fp64."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from halfstep.compare.regimes import REGIMES
from halfstep.compare.sums import ExactSums
from halfstep.compare.tasks import TASKS
from halfstep.compare.train import train
from halfstep.compare.trainer import Trainer
from halfstep.errors import PrecisionWarning
from halfstep.kernels.gradients import gradient_of
from halfstep.training.stepper import Stepper

CPU = torch.device("cpu")
TASK = TASKS["accumulation"]


def trainer_of(regime, task=TASK):
    trainer = Trainer(task, REGIMES[regime], 0, CPU, 10)
    trainer.watch_sums()
    return trainer


# ---- the meter ------------------------------------------------------------------------------------------------------


def test_a_bf16_sum_of_ones_stops_at_256():
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    sums = ExactSums([weight])
    for _ in range(1024):
        weight.sum().backward()
    assert weight.grad.item() == 256
    assert sums.error() == 0.75


@pytest.mark.filterwarnings("ignore:bf16-true keeps no masters")
def test_the_steppers_sum_of_ones_does_not():
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    stepper = Stepper(
        nn.ParameterList([weight]), torch.optim.SGD([weight], lr=1.0), policy="bf16-true", accumulate=1024
    )
    sums = ExactSums([weight])
    for _ in range(1023):
        with stepper.forward():
            loss = weight.sum()
        stepper.backward(loss)
        stepper.step()
    assert gradient_of(weight).item() == 1023
    assert sums.error() == 0.0
    stepper.discard()


def test_the_error_is_the_distance_over_all_parameters_together():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    sums = ExactSums([first, second])
    (3 * first + 4 * second).sum().backward()
    assert sums.error() == 0.0
    first.grad += 0.3
    second.grad -= 0.4
    assert sums.error() == pytest.approx(0.5 / 5, rel=1e-6)
    first.grad = second.grad = None
    assert sums.error() == 1.0  # as far off as no gradient
    sums.clear()
    assert math.isnan(sums.error())


# ---- the task -------------------------------------------------------------------------------------------------------


def test_a_step_is_256_micro_batches_of_one_image():
    assert (TASK.batch_size, TASK.num_micro_batches) == (256, 256)
    trainer = trainer_of("bf16-master")
    seen = []
    trainer._loop.backward = lambda loss_of: seen.append(loss_of.args[0])
    batch = next(trainer.batches(1))
    trainer.backward(batch)
    assert [len(part) for part in seen] == [1] * 256
    assert torch.equal(torch.cat(seen), batch)


def few(num_micro_batches, batch_size=None):
    return dataclasses.replace(TASK, num_micro_batches=num_micro_batches, batch_size=batch_size or num_micro_batches)


@pytest.mark.parametrize("regime", ["fp32", "bf16-master", "wrong-sums-in-16-bits"])
def test_a_window_is_the_mean_over_its_batch(regime):
    """Eight micro-batches of four images against one batch of 32: the same step, but for rounding."""
    changes = []
    for name, task in ((regime, few(8, 32)), ("fp32", few(1, 32))):
        trainer = trainer_of(name, task)
        state = trainer.optimizers[0].state
        kept = [state[p].get("master", p) for p in trainer.model.parameters()]  # the fp32 values
        before = [p.detach().clone() for p in kept]
        trainer.backward(next(trainer.batches(1)))
        assert trainer.step()
        changes.append(torch.cat([(new - old).flatten() for new, old in zip(kept, before, strict=True)]))
    assert torch.dist(*changes) <= (1e-5 if regime == "fp32" else 0.02) * changes[1].norm()


@pytest.mark.parametrize(
    ("regime", "low", "high"),
    [("fp32", 0, 1e-6), ("bf16-master", 0, 1e-6), ("fp16-master", 0, 1e-6), ("wrong-sums-in-16-bits", 1e-2, 1e-1)],
)
def test_over_256_micro_batches_a_bf16_sum_is_off_by_percents_and_an_fp32_sum_is_not(regime, low, high):
    trainer = trainer_of(regime)
    trainer.backward(next(trainer.batches(1)))
    assert low <= trainer._sum_error <= high
    assert trainer.step()


def test_the_wrong_loop_sums_as_autograd_does():
    """Its gradient is the sum in bf16, in the order of the micro-batches, of the gradients of a 256th of each loss."""
    trainer = trainer_of("wrong-sums-in-16-bits", few(16))
    terms = {p: [] for p in trainer.model.parameters()}
    for p, found in terms.items():
        p.register_hook(lambda g, found=found: found.append(g.clone()))
    trainer.backward(next(trainer.batches(1)))
    for p, found in terms.items():
        total = found[0]
        for term in found[1:]:
            total = total + term
        assert p.grad.dtype == torch.bfloat16
        assert torch.equal(p.grad, total)


def test_a_second_window_begins_with_nothing():
    for regime in ("bf16-master", "wrong-sums-in-16-bits"):
        trainer = trainer_of(regime, few(8))
        for batch in list(trainer.batches(1))[:2]:
            trainer.backward(batch)
            assert trainer._sum_error < 0.02  # had the first window been left in, it would be near 1
            trainer.step()


def test_a_short_run_is_judged_by_its_sums():
    task = dataclasses.replace(few(32, 32), build_data=lambda: first_images(96))
    runs = {name: train(task, REGIMES[name], 0, num_epochs=1) for name in TASK.regimes}
    for name, run in runs.items():
        assert math.isnan(run.curve[0].metric)  # before the first window there is no sum
        assert len(run.curve) == 4
        assert math.isfinite(run.final_loss)
        is_wrong = name.startswith("wrong-")
        assert (run.metric > TASK.same_absolute) is is_wrong
        assert run.footprint.gradient_bytes == (2 if is_wrong else 4) * run.footprint.num_parameters
    assert runs["bf16-master"].metric < 1e-6


def test_activations_are_those_of_one_micro_batch():
    """Addresses are used again from one micro-batch to the next, so a sum over all would be chance."""
    tasks = [dataclasses.replace(few(parts), build_data=lambda: first_images(16)) for parts in (16, 1)]
    many, one = (train(task, REGIMES["fp32"], 0, num_epochs=1).footprint for task in tasks)
    assert many.activation_bytes == one.activation_bytes > 0


def first_images(number):
    data = TASK.build_data()
    return dataclasses.replace(data, train_x=data.train_x[:number], train_y=data.train_y[:number])


def test_other_tasks_are_not_watched():
    trainer = Trainer(TASKS["linear"], REGIMES["fp32"], 0, CPU, 16)
    trainer.backward(next(trainer.batches(1)))
    trainer.step()
    assert trainer._sums is None
    with pytest.warns(PrecisionWarning):
        Trainer(TASKS["linear"], REGIMES["bf16-true"], 0, CPU, 16)
