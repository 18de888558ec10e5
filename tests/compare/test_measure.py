"""Gradient statistics and byte counts against closed forms."""

import math

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from halfstep.compare.measure import footprint, gradient_stats, saved_bytes, storage_bytes

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(finite, min_size=1, max_size=30))
def test_exponents_are_floor_log2_of_every_element_that_is_not_zero(values):
    stats = gradient_stats([torch.tensor(values)])
    expected = sorted(math.frexp(value)[1] - 1 for value in values if value != 0)
    assert [exponent for exponent, count in stats.exponents for _ in range(count)] == expected
    assert stats.num_zeros == sum(value == 0 for value in values)


def test_tensors_are_pooled_and_non_finite_elements_have_no_exponent():
    stats = gradient_stats([torch.tensor([[0.0, 3.0]]), torch.tensor([float("inf"), float("nan"), -0.0, 2.0**-30])])
    assert stats.num_elements == 6
    assert stats.zero_share == 2 / 6
    assert stats.exponents == ((-30, 1), (1, 1))


def test_no_gradients_at_all():
    assert gradient_stats([]).zero_share == 0.0


def test_bytes_of_adam_are_sixteen_per_parameter_plus_its_step_counters():
    model = nn.Linear(100, 10)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    with saved_bytes(model) as saved:
        pass
    held = footprint(model, [optimizer], storage_bytes(p.grad for p in model.parameters()), saved)
    assert (held.num_parameters, held.parameter_bytes, held.gradient_bytes) == (1010, 4040, 4040)
    assert held.state_bytes == 2 * 4040 + 2 * 4  # two moments, and one fp32 step count for each of two tensors
    assert held.bytes_per_parameter == (4 * 4040 + 8) / 1010


def test_a_storage_is_counted_once_however_often_it_is_kept():
    weight = nn.Parameter(torch.ones(8))
    model = nn.ParameterList([weight])
    with saved_bytes(model) as saved:
        hidden = weight * 2.0
        (hidden * hidden).sum()  # keeps `hidden` twice
    assert list(saved.activations.values()) == [32]


def test_activations_of_a_two_layer_network_by_hand():
    """fp32 keeps input, hidden and the loss's two operands; weights are there anyway."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 6))
    x, y = torch.ones(4, 6), torch.zeros(4, 6)
    with saved_bytes(model) as saved:
        F.mse_loss(model(x), y)
    assert sum(saved.activations.values()) == 4 * 4 * (6 + 5 + 6 + 6)  # x, hidden, output, y
    assert not saved.weight_copies


def test_autocast_halves_activations_and_adds_copies_of_weights():
    model = nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 6))
    x, y = torch.ones(4, 6), torch.zeros(4, 6)
    with saved_bytes(model) as saved, torch.autocast("cpu", torch.bfloat16):
        F.mse_loss(model(x), y)
    # x and hidden in 16 bits; the loss is autocast to fp32, so it keeps the output and y in 32.
    assert sum(saved.activations.values()) == 4 * (2 * (6 + 5) + 4 * (6 + 6))
    # Only the second layer needs its weight again, to send the gradient on; the first has nothing before it.
    assert sum(saved.weight_copies.values()) == 2 * 5 * 6


def test_a_function_of_weights_and_data_is_an_activation():
    model = nn.Linear(3, 3)
    with saved_bytes(model) as saved:
        torch.sigmoid(model.weight * torch.ones(3)).sum()
    assert saved.activations
    assert not saved.weight_copies
