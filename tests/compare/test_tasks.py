"""The tasks are what the report says they are."""

import pytest
import torch
from torch import nn

from halfstep.compare import tasks
from halfstep.compare.tasks import NUM_TRAIN_DIGITS, SMALL_UNIT, TASKS
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
    table = tasks._digits_table()
    assert torch.equal(table[:, :64], torch.tensor(bunch.data).long())
    assert torch.equal(table[:, 64], torch.tensor(bunch.target))


def test_without_scikit_learn_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError) as caught:
        tasks._digits_table()
    assert "'sklearn' is not installed" in caught.value.true
    assert caught.value.fix == "pip install 'halfstep[cli]'"
