"""What the lecture says, run: short trainings whose outcome is known."""

import dataclasses
from collections import Counter
from functools import partial

import pytest
import torch

from halfstep.compare.regimes import REGIMES
from halfstep.compare.rows import make_row
from halfstep.compare.tasks import TASKS
from halfstep.compare.train import train
from halfstep.compare.trainer import Trainer
from halfstep.compare.verdict import Verdict
from halfstep.errors import PrecisionWarning
from halfstep.scaling.scale import DynamicScale, StaticScale


def run(task, regime, *, seed=0, epochs=None):
    return train(TASKS[task], REGIMES[regime], seed, num_epochs=epochs or TASKS[task].epochs)


@pytest.fixture(scope="module")
def small_units_fp32():
    return run("linear-small-units", "fp32")


def test_in_fp32_the_two_systems_of_units_are_one_run(small_units_fp32):
    ordinary = run("linear", "fp32")
    assert [point.metric for point in ordinary.curve] == [
        point.metric for point in small_units_fp32.curve
    ]  # to the bit
    assert ordinary.metric < 1e-6


def test_ordinary_inputs_need_no_scaling():
    assert run("linear", "fp16-unscaled").metric < 1e-3


def test_in_small_units_unscaled_fp16_is_a_flat_line(small_units_fp32):
    unscaled = run("linear-small-units", "fp16-unscaled")
    assert len({point.metric for point in unscaled.curve}) == 1
    assert unscaled.moved_share == 0.0
    assert unscaled.start.zero_share == unscaled.end.zero_share == 1.0
    assert not unscaled.skipped  # nothing was inf: the run looks healthy
    row = make_row(TASKS["linear-small-units"], [unscaled], [small_units_fp32], step_time_ratio=None)
    assert row.verdict is Verdict.STALLS
    assert row.extra_zero_share_start == 1.0


@pytest.mark.parametrize(("regime", "error"), [("fp16-static-1024", 8e-3), ("fp16-dynamic", 1e-3), ("bf16", 1e-2)])
def test_in_small_units_scaling_or_bf16_converges(regime, error, small_units_fp32):
    scaled = run("linear-small-units", regime)
    assert scaled.metric < error
    assert make_row(TASKS[scaled.task], [scaled], [small_units_fp32], step_time_ratio=None).verdict is Verdict.MATCHES


def test_a_larger_scale_comes_closer_to_the_true_weights():
    errors = [train(TASKS["linear-small-units"], scaled_by(2.0**log2), 0, num_epochs=8).metric for log2 in (3, 10, 16)]
    assert errors[0] > 10 * errors[1] > 50 * errors[2]


def scaled_by(scale):
    return dataclasses.replace(REGIMES["fp16-static-1024"], build_scale=partial(StaticScale, scale))


@pytest.mark.parametrize(("regime", "share"), [("fp16-unscaled", 1.0), ("fp16-static-8", 1.0), ("fp32", 0.125)])
def test_the_autoencoders_first_layer_gets_no_gradient(regime, share):
    """In fp32 an eighth is zero as well: pixels that no image of the batch uses."""
    assert run("autoencoder", regime, epochs=1).start_first_layer.zero_share == share


def test_a_scale_brings_the_first_layer_back():
    assert run("autoencoder", "fp16-dynamic", epochs=1).start_first_layer.zero_share < 0.15


LECTURE_EPOCHS = 30  # 330 steps; fp32 has left the plateau of the mean image by step 280


@pytest.fixture(scope="module")
def lecture_fp32():
    return run("autoencoder-short", "fp32", epochs=LECTURE_EPOCHS)


@pytest.mark.parametrize(
    ("regime", "share", "verdict"),
    [("fp16-unscaled", 1.0, Verdict.STALLS), ("fp16-dynamic", 0.125, Verdict.MATCHES)],
)
def test_in_the_lecture_unscaled_fp16_stays_with_the_mean_image(regime, share, verdict, lecture_fp32):
    half = run("autoencoder-short", regime, epochs=LECTURE_EPOCHS)
    assert half.start_first_layer.zero_share == pytest.approx(share, abs=0.005)
    assert make_row(TASKS[half.task], [half], [lecture_fp32], step_time_ratio=None).verdict is verdict


@pytest.mark.parametrize("task", ["autoencoder-tanh", "autoencoder-relu"])
def test_tanh_and_relu_keep_gradients_in_range(task):
    unscaled, reference = run(task, "fp16-unscaled", epochs=1), run(task, "fp32", epochs=1)
    assert unscaled.start.zero_share - reference.start.zero_share < 0.05  # the sigmoid loses 0.47


def test_runs_of_one_seed_start_alike_and_of_two_seeds_do_not():
    runs = [run("linear", regime, seed=seed, epochs=1) for regime, seed in (("fp32", 0), ("bf16", 0), ("fp32", 1))]
    starts = [one.curve[0].metric for one in runs]
    assert starts[0] == starts[1] != starts[2]


def test_batches_depend_on_the_seed_alone_and_are_all_full():
    trainers = [Trainer(TASKS["digits"], REGIMES["fp32"], seed, torch.device("cpu"), 1) for seed in (0, 0, 1)]
    orders = [torch.stack(list(trainer.batches(2))) for trainer in trainers]
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert orders[0].shape == (2 * 11, 128)
    assert len(orders[0][:11].unique()) == 11 * 128  # no example twice in an epoch


def test_bf16_true_keeps_weights_and_gradients_in_bf16_and_moments_in_fp32():
    with pytest.warns(PrecisionWarning, match="bf16-true keeps no masters"):
        trainer = Trainer(TASKS["text"], REGIMES["bf16-true"], 0, torch.device("cpu"), 600)
    assert str(trainer._loop.stepper.policy) == "bf16-true"
    trainer.backward(next(trainer.batches(1)))
    assert {gradient.dtype for gradient in trainer.gradients()} == {torch.bfloat16}
    assert trainer.step()
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.bfloat16}
    (optimizer,) = trainer.optimizers
    moments = [entry[key] for entry in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 2 * len(list(trainer.model.parameters()))
    assert {moment.dtype for moment in moments} == {torch.float32}
    assert trainer.scale() == 1.0


def test_bf16_true_starts_from_fp32s_weights_rounded():
    full = Trainer(TASKS["digits"], REGIMES["fp32"], 0, torch.device("cpu"), 88)
    with pytest.warns(PrecisionWarning, match="bf16-true keeps no masters"):
        half = Trainer(TASKS["digits"], REGIMES["bf16-true"], 0, torch.device("cpu"), 88)
    kinds = Counter()
    for weight, rounded in zip(full.model.parameters(), half.model.parameters(), strict=True):
        assert torch.equal(weight.to(rounded.dtype), rounded)
        kinds[rounded.dtype] += 1
    assert kinds == {torch.bfloat16: 6, torch.float32: 4}  # batch normalisation stays in fp32


@pytest.mark.parametrize("task", ["linear", "autoencoder", "digits", "digits-sgd"])
def test_bf16_true_trains_every_kind_of_model(task):
    assert run(task, "bf16-true", epochs=1).is_finite


@pytest.mark.parametrize(
    ("regime", "bytes_per_element"), [("fp32", 4), ("fp16-dynamic", 4), ("bf16-true", 2), ("wrong-update-between", 4)]
)
def test_gradients_are_counted_although_the_step_drops_them(regime, bytes_per_element):
    held = run("autoencoder", regime, epochs=1).footprint
    assert held.gradient_bytes == bytes_per_element * held.num_parameters
    assert held.parameter_bytes == bytes_per_element * held.num_parameters
    assert held.state_bytes >= 8 * held.num_parameters  # two fp32 moments, 16-bit weights included
    assert run("linear", "fp32", epochs=1).footprint.state_bytes == 0  # plain SGD has none


def test_after_a_step_the_stepper_holds_no_gradient():
    trainer = Trainer(TASKS["linear"], REGIMES["fp16-dynamic"], 0, torch.device("cpu"), 16)
    trainer.backward(next(trainer.batches(1)))
    assert len(trainer.gradients()) == 1
    trainer.step()
    assert trainer.gradients() == []


def test_every_step_that_overflows_is_noted_and_not_taken():
    overflowing = train(TASKS["linear"], scaled_by(2.0**20), 0, num_epochs=1)
    assert overflowing.skipped == tuple(range(16))
    assert overflowing.moved_share == 0.0
    assert overflowing.is_finite
    assert overflowing.scales == (2.0**20,) * 16


def test_a_learning_rate_that_blows_up_diverges():
    task = dataclasses.replace(TASKS["linear"], build_optimizer=partial(torch.optim.SGD, lr=10.0))
    blown = train(task, REGIMES["fp32"], 0, num_epochs=2)
    assert make_row(task, [blown], [blown], step_time_ratio=None).verdict is Verdict.DIVERGES


def test_the_curve_starts_before_the_first_step_and_ends_after_the_last():
    one = run("linear", "fp32", epochs=3)
    assert [one.curve[0].step, one.curve[-1].step] == [0, 48]
    assert len(one.curve) <= 41
    assert len(one.scales) == 48


def test_batch_normalisation_does_not_mind_half_precision():
    half, full = run("digits", "fp16-unscaled", epochs=2), run("digits", "fp32", epochs=2)
    assert abs(half.metric - full.metric) <= TASKS["digits"].same_absolute
    assert half.footprint.activation_bytes < 0.6 * full.footprint.activation_bytes


def test_a_dynamic_regime_grows_after_its_own_number_of_clean_steps():
    regime = dataclasses.replace(REGIMES["fp16-dynamic"], build_scale=partial(DynamicScale, 8.0, growth_interval=10))
    growing = train(TASKS["linear-small-units"], regime, 0, num_epochs=2)
    assert growing.scales == (8.0,) * 10 + (16.0,) * 10 + (32.0,) * 10 + (64.0,) * 2
    assert growing.final_scale == 64.0
