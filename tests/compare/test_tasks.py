"""The tasks are what the report says they are."""

import dataclasses
import math
from collections import Counter

import pytest
import torch
from torch import nn

from halfstep.compare import digits
from halfstep.compare.digits import NUM_TRAIN_DIGITS
from halfstep.compare.regimes import REGIMES
from halfstep.compare.task import Task
from halfstep.compare.tasks import SMALL_UNIT, TASKS
from halfstep.compare.text import library_text
from halfstep.compare.trainer import Trainer
from halfstep.errors import MissingDependencyError
from halfstep.formats import FP16


def test_the_digits_are_split_once_and_for_all():
    first, second = (TASKS["autoencoder"].build_data() for _ in range(2))
    assert first.train_x.shape == (NUM_TRAIN_DIGITS, 64)
    assert first.test_x.shape == (360, 64)
    assert torch.equal(first.test_x, second.test_x)
    assert first.train_x.min() == 0
    assert first.train_x.max() == 1
    assert torch.equal(first.train_x, first.train_y)  # an autoencoder's target is its input


def test_the_autoencoder_has_ten_linear_layers_and_a_linear_output():
    model = TASKS["autoencoder"].build_model()
    sizes = [layer.out_features for layer in model if isinstance(layer, nn.Linear)]
    assert sizes == [256, 128, 64, 32, 8, 32, 64, 128, 256, 64]
    assert [type(layer) for layer in model[1::2]] == [nn.Sigmoid] * 9
    assert all(not layer.bias.any() for layer in model if isinstance(layer, nn.Linear))
    # Xavier: uniform within sqrt(6 / (in + out)), whose standard deviation is a third of that bound's square root of 3.
    assert model[0].weight.std().item() == pytest.approx((2 / (64 + 256)) ** 0.5, rel=0.02)


@pytest.mark.parametrize(("name", "activation"), [("autoencoder-tanh", nn.Tanh), ("autoencoder-relu", nn.ReLU)])
def test_the_variants_differ_in_the_activation_only(name, activation):
    torch.manual_seed(0)
    ours = TASKS["autoencoder"].build_model()
    torch.manual_seed(0)
    variant = TASKS[name].build_model()
    assert isinstance(variant[1], activation)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), variant.parameters(), strict=True))


def test_the_two_regressions_differ_in_their_unit_only():
    ordinary, small = TASKS["linear"].build_data(), TASKS["linear-small-units"].build_data()
    assert torch.equal(ordinary.train_x * SMALL_UNIT, small.train_x)
    assert torch.equal(ordinary.train_y * SMALL_UNIT, small.train_y)
    assert torch.equal(ordinary.truth, small.truth)


def test_the_small_units_gradient_is_below_what_fp16_can_hold_and_the_ordinary_one_is_not():
    for name, is_lost in (("linear-small-units", True), ("linear", False)):
        task = TASKS[name]
        data = task.build_data()
        model = task.build_model()
        loss = task.loss(model(data.train_x), data.train_y)  # fp32: the true gradient
        (gradient,) = torch.autograd.grad(loss, model.parameters())
        assert bool((gradient.abs() <= FP16.smallest_subnormal / 2).all()) is is_lost


def test_constant_predictors():
    data = TASKS["autoencoder"].build_data()
    mean = data.train_x.double().mean(0)
    closed_form = ((data.test_x.double() - mean) ** 2).mean().item()
    assert TASKS["autoencoder"].constant_metric(data) == pytest.approx(closed_form, rel=1e-5)
    assert closed_form == pytest.approx(0.0738, abs=1e-4)
    labels = TASKS["digits"].build_data()
    commonest = int(labels.train_y.bincount().argmax())
    assert TASKS["digits"].constant_metric(labels) == pytest.approx(
        1 - (labels.test_y == commonest).double().mean().item()
    )
    assert TASKS["linear"].constant_metric(TASKS["linear"].build_data()) == 1.0


def test_weight_error_is_zero_at_the_truth_and_one_at_the_zero_weight():
    task = TASKS["linear"]
    data, model = task.build_data(), task.build_model()
    for weight, error in ((data.truth, 0.0), (torch.zeros_like(data.truth), 1.0), (2 * data.truth, 1.0)):
        model.weight.data.copy_(weight)
        assert task.metric(model, torch.empty(0), data) == pytest.approx(error)


def test_an_output_of_nan_is_an_error_of_nan_and_not_a_guess():
    task = TASKS["digits"]
    data = task.build_data()
    output = torch.full((360, 10), float("nan"))
    assert task.metric(task.build_model(), output, data) != task.metric(task.build_model(), output, data)  # NaN


def test_the_digits_are_scikit_learns():
    """Read past scikit-learn's own loader, which must find the same."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    table = digits.digits_table()
    assert torch.equal(table[:, :64], torch.tensor(bunch.data).long())
    assert torch.equal(table[:, 64], torch.tensor(bunch.target))


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError) as caught:
        digits.digits_table()
    assert "'sklearn' is not installed" in caught.value.true
    assert caught.value.fix == "pip install 'halfstep[cli]'"


# ---- text -----------------------------------------------------------------------------------------------------------


def test_the_text_is_split_and_its_windows_are_600_batches():
    task = TASKS["text"]
    data, text = task.build_data(), library_text()
    assert len(data.train_x) == 600 * task.batch_size
    assert task.epochs == 1
    assert torch.equal(data.train_x[:, 1:], data.train_y[:, :-1])
    assert torch.equal(data.test_x[:, 1:], data.test_y[:, :-1])
    train, test = (bytes(x.flatten().tolist()) for x in (data.train_x[-1], data.test_x[0]))
    assert (
        train in text.train[-2 * len(data.train_x) :]
    )  # up to the end of the training text, but for what is left over
    assert test == text.held_out[:64]
    assert data.source == text.source


def test_seeds_change_the_order_of_the_windows_and_not_the_windows():
    trainers = [Trainer(TASKS["text"], REGIMES["fp32"], seed, torch.device("cpu"), 1) for seed in (0, 0, 1)]
    first, again, other = (torch.cat(list(trainer.batches(1))) for trainer in trainers)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first.sort().values, torch.arange(9600))
    assert torch.equal(trainers[0].data.train_x, trainers[2].data.train_x)
    assert len(list(trainers[0].batches(1))) == 600


def test_the_text_tasks_differ_in_the_learning_rate_only():
    ours, slow = TASKS["text"], TASKS["text-small-lr"]
    differing = {
        field.name for field in dataclasses.fields(Task) if getattr(ours, field.name) != getattr(slow, field.name)
    }
    assert differing == {"name", "build_optimizer"}
    rates = [task.build_optimizer(nn.Linear(1, 1).parameters()).defaults for task in (ours, slow)]
    assert [rate.pop("lr") for rate in rates] == [1e-3, 1e-4]
    assert rates[0] == rates[1]
    assert rates[0]["betas"] == (0.9, 0.99)


def test_the_text_tasks_are_there_by_name_only():
    for name in ("text", "text-small-lr"):
        assert not TASKS[name].is_shown(is_quick=True)
        assert not TASKS[name].is_shown(is_quick=False)
        assert TASKS[name].num_epochs(is_quick=True) == 1


def test_the_schedule_of_the_text_starts_its_warm_up_and_other_tasks_have_none():
    task = TASKS["text"]
    optimizer = task.build_optimizer(nn.Linear(1, 1).parameters())
    task.build_scheduler(optimizer, 600)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 / 50)
    assert task.clip_norm == 1.0
    for other in ("linear", "autoencoder", "digits"):
        assert TASKS[other].build_scheduler is None
        assert TASKS[other].clip_norm is None


def test_the_task_for_mistakes_is_digits_with_another_loss_and_optimizer():
    ours, other = TASKS["digits"], TASKS["digits-sgd"]
    differing = {
        field.name for field in dataclasses.fields(Task) if getattr(ours, field.name) != getattr(other, field.name)
    }
    assert differing == {
        "name", "build_optimizer", "loss", "build_scheduler", "clip_norm", "in_full", "regimes"
    }  # fmt: skip
    output, target = torch.randn(8, 10), torch.arange(8)
    assert other.loss(output, target).item() == pytest.approx(8 * ours.loss(output, target).item(), rel=1e-6)
    optimizer = other.build_optimizer(nn.Linear(1, 1).parameters())
    assert not optimizer.defaults["fused"]  # torch's fused SGD loses its momentum when the first step is skipped
    other.build_scheduler(optimizer, 88)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2e-3 / 10)


def test_the_best_guess_without_an_input_is_counted():
    task = TASKS["text"]
    data = task.build_data()
    seen, held_out = Counter(data.train_y.flatten().tolist()), data.test_y.flatten().tolist()
    total = seen.total() + 256
    direct = -sum(math.log((seen[byte] + 1) / total) for byte in held_out) / len(held_out)
    assert task.constant_metric(data) == pytest.approx(direct, rel=1e-12)
    # A model that gives every position the logarithms of the frequencies has that error.
    logits = torch.tensor([math.log((seen[byte] + 1) / total) for byte in range(256)])
    output = logits.expand(*data.test_y.shape, 256)
    assert task.metric(nn.Identity(), output, data) == pytest.approx(direct, rel=1e-5)


def test_data_on_another_device_is_the_same_data():
    data = TASKS["linear"].build_data()
    moved = dataclasses.replace(data, source="a line").to(torch.device("meta"))
    assert {value.device.type for value in vars(moved).values() if isinstance(value, torch.Tensor)} == {"meta"}
    assert moved.source == "a line"
    assert TASKS["digits"].build_data().to(torch.device("meta")).truth is None
