"""The average of the weights: against closed forms and fp64, bit for bit where it says so, and what it refuses."""

import copy
import io
import math
import pickle
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.errors import ArgumentError, CallOrderError, HalfstepWarning, StateError, UnsupportedError
from halfstep.training import ema as ema_module
from halfstep.training import ema_parts
from halfstep.training.ema import EMA

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def make_model(dtype=torch.float32):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_buffer("cache", torch.arange(5.0), persistent=False)
    return model.to(dtype)


def perturb(model, generator, scale=0.1):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator).to(p.dtype), alpha=scale)
        model[1].running_mean.add_(0.5)
        model[1].num_batches_tracked.add_(1)


def trained(dtype=torch.float32, decay=0.9, updates=3):
    model = make_model(dtype)
    ema = EMA(model, decay)
    generator = torch.Generator().manual_seed(1)
    for _ in range(updates):
        perturb(model, generator)
        ema.update()
    return model, ema


def bits(tensor):
    return (tensor.dtype, tuple(tensor.shape), tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def bits_of(model):
    return {n: bits(t) for n, t in [*model.named_parameters(), *model.named_buffers()]}


def state_bits(ema):
    state = ema.state_dict()
    tensors = {k: {n: bits(t) for n, t in state[k].items()} for k in ("averages", "buffers")}
    return {"decay": state["decay"], "num_updates": state["num_updates"], **tensors}


def assert_four_parts(error, *words):
    text = str(error.value)
    assert all(part in text for part in ("\n  true: ", "\n  why:  ", "\n  fix:  ")), text
    for word in words:
        assert word in text, text


@pytest.fixture
def on_device(monkeypatch):
    """The path for found_inf on an accelerator, run on CPU tensors."""
    monkeypatch.setattr(ema_module, "is_host", lambda device: False)
    monkeypatch.setattr(ema_parts, "is_host", lambda device: False)


# -- the average itself -----------------------------------------------------------------------------------------------


def error_bound(decay, largest):
    """Half an ulp of fp32 when the sum is rounded, at most as much again for the product, summed over all steps."""
    return 2 * 2.0**-24 * largest / (1 - decay)


@settings(max_examples=60, deadline=None)
@given(
    start=st.floats(-4, 4, width=16),
    target=st.floats(-4, 4, width=16),
    decay=st.floats(0.0, 0.9999),
    steps=st.integers(0, 60),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_closed_form_of_a_weight_that_jumps_once(start, target, decay, steps, dtype):
    model = nn.Linear(1, 1, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.fill_(start)
    ema = EMA(model, decay)
    with torch.no_grad():
        model.weight.fill_(target)
    for _ in range(steps):
        ema.update()
    expected = target + (start - target) * decay**steps
    assert ema.state_dict()["averages"]["weight"].item() == pytest.approx(expected, abs=error_bound(decay, 8.0))
    assert ema.num_updates == steps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.5, 0.99, 0.999])
@pytest.mark.parametrize("device_path", [False, True])
def test_random_walks_match_an_fp64_reference(dtype, decay, device_path, monkeypatch):
    if device_path:
        monkeypatch.setattr(ema_module, "is_host", lambda device: False)
        monkeypatch.setattr(ema_parts, "is_host", lambda device: False)
    model = make_model(dtype)
    ema = EMA(model, decay)
    reference = {n: p.detach().double().clone() for n, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for step in range(50):
        perturb(model, generator)
        skip = device_path and step % 5 == 2
        ema.update(torch.tensor(float(skip)) if device_path else None)
        for n, p in model.named_parameters():
            largest = max(largest, p.abs().max().item())
            if not skip:
                reference[n] = decay * reference[n] + (1 - decay) * p.detach().double()
    for n, average in ema.state_dict()["averages"].items():
        assert average.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert (average.double() - reference[n]).abs().max().item() <= error_bound(decay, 2 * largest)
    assert ema.num_updates == (40 if device_path else 50)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_parameters_are_averaged_as_complex64():
    for dtype in (torch.complex64, torch.complex32, torch.complex128):
        model = nn.Module()
        model.w = nn.Parameter(torch.tensor([1 + 2j]).to(dtype))
        ema = EMA(model, 0.5)
        model.w.data = torch.tensor([3 - 2j]).to(dtype)
        ema.update()
        average = ema.state_dict()["averages"]["w"]
        assert average.dtype == (torch.complex128 if dtype == torch.complex128 else torch.complex64)
        assert average.item() == 2 + 0j
        with ema.swapped():
            assert model.w.dtype == dtype
            assert torch.view_as_real(model.w.detach()).tolist() == [[2.0, 0.0]]
        assert torch.view_as_real(model.w.detach()).tolist() == [[3.0, -2.0]]


def test_decay_zero_gives_the_weights_themselves_and_a_still_weight_stays_exactly():
    model, ema = trained(decay=0.0)
    assert all(torch.equal(a, dict(model.named_parameters())[n]) for n, a in ema.state_dict()["averages"].items())
    still = make_model()
    ema = EMA(still, 0.37)
    before = bits_of(still)
    for _ in range(100):
        ema.update()
    assert {n: bits(a) for n, a in ema.state_dict()["averages"].items()}.items() <= before.items()


def test_large_tensors_are_widened_piece_by_piece(monkeypatch):
    """Never more than a chunk is widened at once, and cutting changes no bit."""
    model = nn.Sequential(nn.Linear(40, 40), nn.Conv2d(6, 5, 3).to(memory_format=torch.channels_last)).bfloat16()
    whole, cut = EMA(model, 0.9), EMA(model, 0.9)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    whole.update()
    sizes = []
    original = torch._foreach_lerp_
    monkeypatch.setattr(ema_parts, "_HOST_CHUNK", 300)
    monkeypatch.setattr(
        torch, "_foreach_lerp_", lambda a, b, w: (sizes.append(sum(map(torch.numel, b))), original(a, b, w))
    )
    cut.update()
    assert max(sizes) <= 300
    assert sum(sizes) == sum(p.numel() for p in model.parameters())
    for n, average in whole.state_dict()["averages"].items():
        # a vector's last elements are computed one by one, with another rounding of the product
        torch.testing.assert_close(average, cut.state_dict()["averages"][n], rtol=2**-22, atol=2**-24)


def test_fp32_averages_share_no_memory_with_the_model():
    model = make_model()
    ema = EMA(model, 0.9)
    pointers = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    state = ema.state_dict()
    assert not pointers & {t.untyped_storage().data_ptr() for k in ("averages", "buffers") for t in state[k].values()}


# -- which tensors ----------------------------------------------------------------------------------------------------


def test_buffers_are_copied_and_bytes_are_counted():
    model, ema = trained(torch.bfloat16)
    state = ema.state_dict()
    assert set(state["buffers"]) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(bits(state["buffers"][n]) == bits(dict(model.named_buffers())[n]) for n in state["buffers"])
    numbers = sum(p.numel() for p in model.parameters())
    assert ema.num_bytes == 4 * numbers + (4 + 4) * 2 + 8
    assert repr(ema) == f"EMA(decay=0.9, 6 averages, {ema.num_bytes} bytes)"


def test_tied_parameters_are_averaged_once():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    ema = EMA(model, 0.5)
    assert list(ema.state_dict()["averages"]) == ["0.weight"]
    start = model[0].weight.detach().clone()
    with torch.no_grad():
        model[0].weight.add_(1.0)
    ema.update()
    with ema.swapped():
        torch.testing.assert_close(model[1].weight.detach(), start + 0.5)
        assert model[1].weight is model[0].weight


def test_tensors_that_share_memory_come_back_bit_for_bit():
    model = nn.Module()
    whole = torch.randn(6)
    model.whole = nn.Parameter(whole)
    model.part = nn.Parameter(whole[2:4])
    model.register_buffer("seen", model.whole.data[:3])
    model.register_buffer("constant", torch.ones(1).expand(4))  # nothing can write to it in place
    ema = EMA(model, 0.5)
    with torch.no_grad():
        model.whole.add_(1.0)
    ema.update()
    before, average = bits_of(model), whole - 0.5
    with ema.swapped():
        torch.testing.assert_close(model.whole.detach(), average)
        torch.testing.assert_close(model.part.detach(), average[2:4])
        torch.testing.assert_close(model.seen, average[:3])
    assert bits_of(model) == before


def test_frozen_parameters_are_not_stored_and_show_their_own_value():
    model = make_model()
    model[0].requires_grad_(False)
    ema = EMA(model, 0.5)
    assert set(ema.state_dict()["averages"]) == {"1.weight", "1.bias", "2.weight", "2.bias"}
    with torch.no_grad():
        model[0].weight.fill_(7.0)
    ema.update()
    with ema.swapped():
        assert model[0].weight.eq(7.0).all()


@pytest.mark.parametrize("found_inf", [None, 0.0])
def test_an_unfrozen_parameter_begins_its_average_at_its_value_then(found_inf, on_device):
    model = make_model()
    model[0].requires_grad_(False)
    ema = EMA(model, 0.5)
    ema.update()
    model[0].requires_grad_(True)
    with torch.no_grad():
        model[0].weight.fill_(4.0)
    ema.update(None if found_inf is None else torch.tensor(found_inf))
    assert ema.state_dict()["averages"]["0.weight"].eq(4.0).all()
    with torch.no_grad():
        model[0].weight.fill_(8.0)
    ema.update()
    assert ema.state_dict()["averages"]["0.weight"].eq(6.0).all()
    model[0].requires_grad_(False)  # frozen again: goes on being averaged
    ema.update()
    assert ema.state_dict()["averages"]["0.weight"].eq(7.0).all()


def test_a_skipped_step_on_the_host_does_not_begin_an_average():
    model = make_model()
    model[0].requires_grad_(False)
    ema = EMA(model, 0.5)
    model[0].requires_grad_(True)
    ema.update(torch.ones(()))
    assert "0.weight" not in ema.state_dict()["averages"]


def test_a_model_cast_later_is_followed():
    model = make_model()
    ema = EMA(model, 0.5)
    model.half()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    ema.update()
    assert ema.state_dict()["averages"]["0.weight"].dtype == torch.float32
    model.double()
    ema.update()
    assert ema.state_dict()["averages"]["0.weight"].dtype == torch.float64
    with ema.swapped():
        assert model[0].weight.dtype == torch.float64


def test_a_parameter_that_is_gone_is_named():
    model, ema = trained()
    del model[2].weight
    with pytest.raises(UnsupportedError) as error:
        ema.update()
    assert_four_parts(error, "the average of '2.weight', shape [2, 4]", "gone from the model", "build a new EMA")
    model[2].weight = nn.Parameter(torch.ones(5, 5))
    with pytest.raises(UnsupportedError, match=r"its shape is now \[5, 5\]"), ema.swapped():
        pytest.fail("not reached")
    assert not ema.is_swapped


# -- skipped steps ----------------------------------------------------------------------------------------------------


def spoil(model):
    """Values that must not get in: what a skipped step may leave in a model that nobody guards."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(math.nan if tensor.is_floating_point() else 99)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device_path", [False, True])
def test_a_skipped_step_leaves_every_bit(dtype, device_path, monkeypatch):
    if device_path:
        monkeypatch.setattr(ema_module, "is_host", lambda device: False)
        monkeypatch.setattr(ema_parts, "is_host", lambda device: False)
    model = make_model(dtype)
    with torch.no_grad():
        model[0].weight.fill_(-0.0)
    ema = EMA(model, 0.9)
    before = state_bits(ema)
    spoil(model)
    for found_inf in (torch.tensor(1.0), torch.tensor([1.0])):
        ema.update(found_inf)
    assert state_bits(ema) == before
    assert math.copysign(1.0, ema.state_dict()["averages"]["0.weight"][0, 0].item()) == -1.0


class NoHostRead(TorchDispatchMode):
    """Fails where a device value is needed on the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket.__name__ not in {"_local_scalar_dense", "item", "is_nonzero", "equal"}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_found_inf_on_a_device_is_not_read(dtype, on_device):
    model = make_model(dtype)
    ema = EMA(model, 0.9)
    with NoHostRead():
        for value in (0.0, 1.0, 0.0):
            ema.update(torch.tensor(value))
    assert ema.num_updates == 2
    with pytest.raises(AssertionError), NoHostRead():
        assert ema.num_updates == 2  # reading the count settles; it also shows that the guard can fail


def test_both_ways_of_counting_add_up(on_device):
    _, ema = trained(updates=3)
    ema.update(torch.tensor(0.0))
    ema.update(torch.tensor(1.0))
    ema.update()
    assert ema.num_updates == 5
    ema.load_state_dict(copy.deepcopy(ema.state_dict()))
    ema.update(torch.tensor(0.0))
    assert ema.num_updates == 6


@pytest.mark.parametrize("wrong", [1.0, True, torch.ones(2), torch.ones(0), "no"])
def test_found_inf_of_another_kind_is_refused(wrong):
    _, ema = trained()
    before = state_bits(ema)
    with pytest.raises(ArgumentError) as error:
        ema.update(wrong)
    assert_four_parts(error, f"update(found_inf) with a {type(wrong).__name__}", "tensor of one element")
    assert state_bits(ema) == before


# -- swapping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_swapped_shows_the_averages_and_gives_everything_back(dtype):
    model, ema = trained(dtype)
    perturb(model, torch.Generator().manual_seed(9))
    before = bits_of(model)
    objects = [id(t) for t in [*model.parameters(), *model.buffers()]]
    pointers = [t.data_ptr() for t in [*model.parameters(), *model.buffers()]]
    with ema.swapped():
        assert ema.is_swapped
        state = ema.state_dict()
        for n, p in model.named_parameters():
            assert torch.equal(p.detach(), state["averages"][n].to(dtype))
        for n in state["buffers"]:
            assert bits(dict(model.named_buffers())[n]) == bits(state["buffers"][n])
        assert [id(t) for t in [*model.parameters(), *model.buffers()]] == objects
        assert [t.data_ptr() for t in [*model.parameters(), *model.buffers()]] == pointers
    assert not ema.is_swapped
    assert bits_of(model) == before


def spoil_and_raise(model):
    spoil(model)
    model.cache = torch.arange(9.0)  # a cache that grows for a longer evaluation
    raise KeyError("evaluation failed")


def halve_and_raise(model):
    model.half()
    raise KeyError("evaluation failed")


@pytest.mark.parametrize("harm", [spoil_and_raise, halve_and_raise])
def test_own_values_come_back_after_an_exception_whatever_was_done(harm):
    model, ema = trained()
    before, state = bits_of(model), state_bits(ema)
    with pytest.raises(KeyError, match="evaluation failed"), ema.swapped():
        harm(model)
    assert bits_of(model) == before
    assert state_bits(ema) == state
    ema.update()


def test_an_error_while_swapping_in_leaves_the_model_alone(monkeypatch):
    model, ema = trained(torch.float16)
    before = bits_of(model)
    calls = []

    def failing_cast(x, dtype):
        calls.append(dtype)
        if len(calls) == 3:
            raise MemoryError
        return x.to(dtype)

    monkeypatch.setattr(ema_parts, "cast", failing_cast)
    with pytest.raises(MemoryError), ema.swapped():
        pytest.fail("not reached")
    assert bits_of(model) == before
    assert not ema.is_swapped


def test_casts_into_16_bits_saturate():
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1e6)
    ema = EMA(model, 0.9)
    model.half()  # inf
    with ema.swapped():
        assert model.weight.item() == 65504.0
    assert model.weight.item() == math.inf
    target = nn.Linear(1, 1, bias=False).half()
    ema.copy_to(target)
    assert target.weight.item() == 65504.0


def test_autocast_does_not_use_the_casts_of_the_other_weights():
    """torch caches 16-bit casts of the weights until its context ends; they would be used on after a swap."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    ema = EMA(model, 0.9)
    with torch.no_grad():
        model.weight.fill_(2.0)
    x = torch.ones(1, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).item() == 2.0
        with ema.swapped():
            assert model(x).item() == 1.0
        assert model(x).item() == 2.0


def test_what_cannot_be_done_inside_swapped():
    model, ema = trained()
    state = copy.deepcopy(ema.state_dict())
    before = bits_of(model)
    calls = {
        "update()": ema.update,
        "swapped()": lambda: ema.swapped().__enter__(),
        "load_state_dict()": lambda: ema.load_state_dict(state),
        "a copy or pickle of the EMA": lambda: copy.deepcopy(ema),
    }
    with ema.swapped():
        inside = bits_of(model)
        for asked, call in calls.items():
            with pytest.raises(CallOrderError) as error:
                call()
            assert_four_parts(error, f"{asked} inside swapped()", "the model holds the averages", "leave the swapped()")
            assert bits_of(model) == inside
    assert bits_of(model) == before
    ema.update()


def test_inference_mode_around_everything():
    with torch.inference_mode(False):
        model = make_model()
    with torch.inference_mode():
        ema = EMA(model, 0.5)
        before = bits_of(model)
        with ema.swapped():
            pass
        assert bits_of(model) == before
        ema.load_state_dict(ema.state_dict())
    ema.update()
    assert ema.num_updates == 1


def test_a_graph_that_needs_the_old_weights_notices():
    model, ema = trained()
    loss = model(torch.randn(4, 3)).sum()
    with ema.swapped():
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -- another model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_to_equals_what_swapped_shows(dtype):
    model, ema = trained()
    model[0].requires_grad_(False)
    target = make_model(dtype)
    ema.copy_to(target)
    with ema.swapped():
        for n, p in model.named_parameters():
            assert torch.equal(dict(target.named_parameters())[n].detach(), p.detach().to(dtype))
        assert target[1].num_batches_tracked.item() == model[1].num_batches_tracked.item() == 3
    frozen = make_model()
    frozen[0].requires_grad_(False)
    EMA(frozen).copy_to(target.requires_grad_(False))  # a teacher that is never trained itself
    assert torch.equal(target[0].weight, frozen[0].weight.to(dtype))


def test_copy_to_another_architecture_is_refused_whole():
    _, ema = trained()
    other = nn.Sequential(nn.Linear(3, 4), nn.Identity(), nn.Linear(4, 2, bias=False), nn.Linear(1, 1))
    other[0].weight = nn.Parameter(torch.ones(4, 5))
    before = bits_of(other)
    with pytest.raises(ArgumentError) as error:
        ema.copy_to(other)
    assert_four_parts(
        error, "copy_to() a Sequential that does not fit", "'1.weight' is missing", "'1.bias' is missing", "and 4 more",
        "nothing was written",
    )  # fmt: skip
    assert bits_of(other) == before
    with pytest.raises(ArgumentError) as error:
        EMA(nn.Linear(2, 3)).copy_to(nn.Linear(2, 4))
    assert_four_parts(error, "'weight' has shape [4, 2], not [3, 2]", "'bias' has shape [4], not [3]")
    with pytest.raises(ArgumentError, match=r"copy_to\(\) a model of type str"):
        ema.copy_to("model")


# -- saving and loading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_comes_back_bit_for_bit_through_a_safe_file(dtype):
    _, ema = trained(dtype, decay=0.97)
    file = io.BytesIO()
    torch.save(ema.state_dict(), file)
    file.seek(0)
    fresh = EMA(make_model(dtype), 0.97)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert state_bits(fresh) == state_bits(ema)
    assert fresh.num_updates == 3
    assert list(fresh.state_dict()["averages"]) == list(ema.state_dict()["averages"])


def test_training_on_from_a_saved_state_gives_the_same_bits():
    generator, _ = torch.Generator().manual_seed(1), torch.manual_seed(5)
    model, ema = trained(torch.bfloat16)
    twin = copy.deepcopy(model)
    resumed = EMA(twin, 0.9)
    resumed.load_state_dict(pickle.loads(pickle.dumps(ema.state_dict())))
    for _ in range(5):
        perturb(model, generator)
        twin.load_state_dict(model.state_dict())
        ema.update()
        resumed.update()
    assert state_bits(resumed) == state_bits(ema)


def test_loading_shares_no_memory_with_the_state_and_never_narrows():
    _, ema = trained(torch.float64)
    fresh = EMA(make_model(torch.bfloat16), 0.9)
    state = ema.state_dict()
    fresh.load_state_dict(state)
    assert state_bits(fresh)["averages"] == state_bits(ema)["averages"]
    fresh.update()
    assert fresh.state_dict()["averages"]["0.weight"].dtype == torch.float64
    assert fresh.state_dict()["averages"]["0.weight"].data_ptr() != state["averages"]["0.weight"].data_ptr()
    narrow = {**state, "averages": {n: a.bfloat16() for n, a in state["averages"].items()}}
    model = make_model(torch.bfloat16)
    model[0].requires_grad_(False)
    other = EMA(model, 0.9)
    other.load_state_dict(narrow)
    assert {a.dtype for a in other.state_dict()["averages"].values()} == {torch.float32}


def test_the_saved_decay_wins_and_says_so():
    _, ema = trained(decay=0.97)
    fresh = EMA(make_model(), 0.5)
    with pytest.warns(HalfstepWarning, match=r"decay 0\.97 and this EMA was built with 0\.5: the saved one is used"):
        fresh.load_state_dict(ema.state_dict())
    assert fresh.decay == 0.97


def test_averages_of_parameters_that_are_frozen_here_are_taken():
    _, ema = trained()
    model = make_model()
    model[0].requires_grad_(False)
    fresh = EMA(model, 0.9)
    fresh.load_state_dict(ema.state_dict())
    assert state_bits(fresh) == state_bits(ema)
    assert list(fresh.state_dict()["averages"]) == list(ema.state_dict()["averages"])


def without(entries, name):
    return {n: t for n, t in entries.items() if n != name}


def change(key, name, value):
    return lambda state: {**state, key: {**state[key], name: value}}


WRONG_STATES = {
    "no state": (lambda state: None, "a NoneType"),
    "an entry less": (lambda state: without(state, "decay"), "entries ['averages', 'buffers', 'num_updates']"),
    "an entry more": (lambda state: {**state, "x": 1}, "'x'"),
    "averages missing": (lambda s: {**s, "averages": without(s["averages"], "2.bias")}, "'2.bias' is missing"),
    "averages unexpected": (change("averages", "extra", torch.ones(1)), "'extra' is unexpected"),
    "buffer missing": (lambda s: {**s, "buffers": {}}, "'1.running_mean' is missing"),
    "buffer unexpected": (change("buffers", "cache", torch.ones(5)), "'cache' is unexpected"),
    "shape": (change("averages", "2.bias", torch.ones(3)), "'2.bias' has shape [3], not [2]"),
    "integers": (change("averages", "2.bias", torch.ones(2, dtype=torch.int32)), "'2.bias' is torch.int32"),
    "complex": (change("averages", "2.bias", torch.ones(2, dtype=torch.complex64)), "'2.bias' is torch.complex64"),
    "counter": (change("buffers", "1.num_batches_tracked", torch.tensor(1.0)), "is torch.float32, not torch.int64"),
    "nan": (change("averages", "2.bias", torch.tensor([1.0, math.nan])), "averages['2.bias'] holds inf or NaN"),
    "inf": (change("averages", "2.bias", torch.tensor([1.0, -math.inf])), "averages['2.bias'] holds inf or NaN"),
    "no tensor": (change("averages", "2.bias", [1.0, 2.0]), "averages maps names to tensors"),
    "no mapping": (lambda s: {**s, "buffers": []}, "buffers maps names to tensors"),
    "decay 1": (lambda s: {**s, "decay": 1.0}, "decay=1.0"),
    "decay nan": (lambda s: {**s, "decay": math.nan}, "decay=nan"),
    "decay text": (lambda s: {**s, "decay": "0.9"}, "decay='0.9'"),
    "updates": (lambda s: {**s, "num_updates": -1}, "num_updates=-1"),
    "updates bool": (lambda s: {**s, "num_updates": True}, "num_updates=True"),
    "updates float": (lambda s: {**s, "num_updates": 1.5}, "num_updates=1.5"),
}


@pytest.mark.parametrize(("spoiled", "words"), WRONG_STATES.values(), ids=WRONG_STATES)
def test_a_wrong_state_is_refused_whole(spoiled, words):
    _, saved = trained(decay=0.97)
    _, ema = trained(updates=1)
    before = state_bits(ema)
    with pytest.raises(StateError) as error:
        ema.load_state_dict(spoiled(dict(saved.state_dict())))
    assert_four_parts(error, "load_state_dict(): ", words, "nothing was loaded", "pass what state_dict()")
    assert state_bits(ema) == before
    ema.update()


# -- copies and wrappers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copied_pair_stays_together_and_apart_from_the_original(duplicate):
    model, ema = trained()
    twin, twin_ema = duplicate((model, ema))
    before = state_bits(ema)
    assert state_bits(twin_ema) == before
    with torch.no_grad():
        twin[0].weight.fill_(3.0)
    twin_ema.update()
    assert state_bits(ema) == before
    assert twin_ema.state_dict()["averages"]["0.weight"].sum() > ema.state_dict()["averages"]["0.weight"].sum()
    with twin_ema.swapped():
        assert torch.equal(twin[0].weight, twin_ema.state_dict()["averages"]["0.weight"])
    assert twin[0].weight.eq(3.0).all()


class Holder(nn.Module):
    """Has a submodule that is really called "module"."""

    def __init__(self, inner):
        super().__init__()
        self.module = inner


@pytest.mark.parametrize("wrap", [
    torch.compile,
    nn.DataParallel,
    lambda model: nn.DataParallel(torch.compile(model)),
    lambda model: torch.compile(nn.DataParallel(model)),
], ids=["compile", "parallel", "parallel(compile)", "compile(parallel)"])  # fmt: skip
def test_names_are_those_of_the_bare_model(wrap):
    model = Holder(make_model())
    model.module[0] = torch.compile(model.module[0])
    ema = EMA(wrap(model), 0.9)
    plain = Holder(make_model())
    bare = EMA(plain, 0.9)
    assert list(ema.state_dict()["averages"]) == [n for n, _ in plain.named_parameters()]
    bare.load_state_dict(ema.state_dict())
    assert state_bits(bare) == state_bits(ema)
    ema.copy_to(plain)


class Counting(nn.Module):
    """Changes a buffer in training forward, as BatchNorm does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.count.add_(1)
        return self.linear(x)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_evaluates_with_the_averages():
    model = torch.compile(Counting(), backend="aot_eager")
    ema = EMA(model, 0.5)
    x = torch.ones(1, 2)
    model(x)
    with torch.no_grad():
        model.linear.bias.add_(2.0)
    ema.update()
    own = model(x).detach().clone()
    with ema.swapped():
        torch.testing.assert_close(model(x).detach(), own - 1.0)
        assert model.count.item() == 2
    torch.testing.assert_close(model(x).detach(), own)
    assert model.count.item() == 3


FSDP2 = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
import warnings; warnings.simplefilter("ignore")
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from halfstep.errors import UnsupportedError
from halfstep.training.ema import EMA

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))

plain, model = make(), make()
mesh = init_device_mesh("cpu", (2,))
fully_shard(model[0], mesh=mesh); fully_shard(model, mesh=mesh)
ema, reference = EMA(model, 0.5), EMA(plain, 0.5)
x = torch.randn(6, 4)
runs = [(m, e, torch.optim.SGD(m.parameters(), 0.1)) for m, e in ((model, ema), (plain, reference))]
for step in range(3):
    for m, e, optimizer in runs:
        m(x).square().mean().backward()
        optimizer.step(); optimizer.zero_grad()
        e.update()
        with torch.no_grad():
            m(x)                                # FSDP2 keeps the root's whole weights after this
            with e.swapped():
                m.shown = m.eval()(x).clone()
            m.train()
            m.after = m(x).clone()
    assert torch.allclose(model.shown, plain.shown, atol=1e-5), step
    assert torch.allclose(model.after, plain.after, atol=1e-5), step
    assert not torch.allclose(model.shown, model.after, atol=1e-3)
for name, average in ema.state_dict()["averages"].items():
    assert torch.allclose(average.full_tensor(), reference.state_dict()["averages"][name], atol=1e-6)
assert ema.num_bytes < reference.num_bytes
again = make(); fully_shard(again[0], mesh=mesh); fully_shard(again, mesh=mesh)
resumed = EMA(again, 0.5); resumed.load_state_dict(ema.state_dict()); resumed.copy_to(again)
late = make(); late_ema = EMA(late); fully_shard(late, mesh=mesh)
for call in (lambda: ema.load_state_dict(reference.state_dict()), lambda: ema.copy_to(plain), late_ema.update):
    try:
        call()
    except UnsupportedError as error:
        assert "full_tensor()" in str(error)
    else:
        raise AssertionError("a sharded and a whole model were mixed")
dist.destroy_process_group()
print("done")
"""


def test_sharded_parameters_on_two_ranks(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", FSDP2, str(tmp_path / "store"), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [out.strip() for out, _ in said] == ["done", "done"], [err[-2000:] for _, err in said]


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [1.0, 1, -0.1, 2, math.nan, math.inf, "0.9", None, True, torch.tensor(0.9)])
def test_decay_out_of_range_is_refused(decay):
    model = make_model()
    with pytest.raises(ArgumentError) as error:
        EMA(model, decay)
    assert_four_parts(error, f"decay={decay!r}", "from 0 to below 1", "pass a number such as 0.999")
    ema = EMA(model, 0.25)
    with pytest.raises(ArgumentError):
        ema.decay = decay
    assert ema.decay == 0.25
    ema.decay = 0
    assert ema.decay == 0.0


@pytest.mark.parametrize(("model", "words"), [
    (torch.ones(2), "EMA of a model of type Tensor"),
    (nn.Identity(), "none of its parameters requires a gradient"),
    (nn.Linear(2, 2).requires_grad_(False), "none of its parameters requires a gradient"),
    (nn.Linear(2, 2, device="meta"), "whose parameter 'weight' has no values yet"),
])  # fmt: skip
def test_models_without_anything_to_average_are_refused(model, words):
    with pytest.raises(ArgumentError) as error:
        EMA(model)
    assert_four_parts(error, words, "trainable parameters")


@pytest.mark.filterwarnings("ignore")
def test_a_lazy_model_is_refused_until_it_has_values():
    model = nn.LazyLinear(2)
    with pytest.raises(ArgumentError, match="has no values yet"):
        EMA(model)
    model(torch.ones(1, 3))
    EMA(model).update()


@pytest.mark.parametrize("use_buffers", [False, True])
def test_torchs_averaged_model_is_read(use_buffers):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
    ema = EMA(model, 0.9)
    for step in range(4):
        model(torch.randn(8, 3)).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        theirs.update_parameters(model)
        if step == 1:
            ema.load_state_dict(theirs.state_dict())
            assert ema.num_updates == 2
            assert ema.decay == 0.9
        elif step > 1:
            ema.update()
    for name, p in theirs.module.named_parameters():
        torch.testing.assert_close(ema.state_dict()["averages"][name], p.detach(), rtol=1e-6, atol=1e-7)
    before = ema.state_dict()["averages"]["0.weight"].clone()
    with pytest.raises(StateError, match="averages that do not fit"):
        ema.load_state_dict(AveragedModel(nn.Linear(3, 4)).state_dict())
    assert torch.equal(ema.state_dict()["averages"]["0.weight"], before)
