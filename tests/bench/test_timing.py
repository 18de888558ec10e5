"""The budget, the rounds and their order, on a clock that only the products move."""

import contextlib

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halfstep.bench import timing
from halfstep.bench.clock import threads
from halfstep.bench.products import Layout, Product
from halfstep.bench.timing import FEWEST_ROUNDS, MOST_ROUNDS, ROUND_SECONDS, Cell, Timer, fp32_products
from halfstep.formats import BF16, FP16, FP32, TF32

CPU = torch.device("cpu")
FAST, SLOW = Product(FP32, 512), Product(FP16, 512)


def _as_fast_as_fp32(product):
    return 0.01 * product.flops / FAST.flops


def test_a_cell_is_the_median_of_its_rounds():
    cell = Cell(FAST, (0.3, 0.1, 0.2, 0.2, 9.0))
    assert cell.gflops == pytest.approx(2 * 512**3 / 0.2 / 1e9)
    assert cell.spread == pytest.approx((0.3 - 0.2) / 0.2)
    assert Cell(FAST, reason="no").gflops is Cell(FAST, reason="no").spread is None


def test_every_product_is_timed_at_its_own_speed(machine):
    made = machine(lambda product: {"fp32": 0.001, "fp16": 0.04}[str(product.format)] * product.flops / FAST.flops)
    fast, slow = Timer(CPU, 25, made.now).time([FAST, SLOW], 10)
    assert fast.seconds == pytest.approx((0.001,) * MOST_ROUNDS)
    assert slow.seconds == pytest.approx((0.04,) * MOST_ROUNDS)


def test_rounds_go_in_turn_and_turn_round(machine):
    made = machine(lambda product: 0.02 * product.flops / FAST.flops)
    Timer(CPU, 25, made.now).time([FAST, SLOW], 10)
    there, back = [FAST, SLOW], [SLOW, FAST]
    assert made.ran[-2 * MOST_ROUNDS :] == [*there, *back, *there, *back, *there, *back, *there]


def test_a_short_product_is_repeated_until_a_clock_can_see_it(machine):
    made = machine(lambda product: ROUND_SECONDS / 10 * product.flops / FAST.flops)
    Timer(CPU, 25, made.now).time([FAST], 10)
    assert made.ran.count(FAST) == pytest.approx(10 * MOST_ROUNDS, abs=MOST_ROUNDS + 3)


def test_what_would_take_too_long_is_not_run_and_says_so(machine):
    made = machine(lambda product: product.flops / (1e12 if product.format == FP32 else 1e9))
    large = Product(FP16, 2000)  # 16 s
    fast, slow = Timer(CPU, 25, made.now).time([Product(FP32, 2000), large], 10)
    assert fast.seconds
    assert slow == Cell(large, reason="one product would take about 16 s")
    assert large not in made.ran


def test_what_the_slow_do_not_use_is_left_to_the_quick(machine):
    made = machine(lambda product: (2.0 if product.format == FP32 else 40.0) * product.flops / FAST.flops)
    fast, slow = Timer(CPU, 25, made.now).time([FAST, SLOW], 2.0 * (1 + FEWEST_ROUNDS) * 1.01)
    assert len(fast.seconds) == FEWEST_ROUNDS
    assert slow.reason == "one product would take about 40 s"


def test_a_product_without_a_kernel_is_a_cell_with_torchs_words(machine):
    made = machine(
        lambda product: 0.01 * product.flops / FAST.flops,
        lambda product: "no kernel for Half" if product.format == FP16 else "",
    )
    fast, slow = Timer(CPU, 25, made.now).time([FAST, SLOW], 10)
    assert len(fast.seconds) == MOST_ROUNDS
    assert slow == Cell(SLOW, reason="torch: no kernel for Half")


def test_a_large_product_that_does_not_fit_is_a_cell_too(machine):
    made = machine(
        lambda product: 0.01 * product.flops / FAST.flops,
        lambda product: "out of memory" if product.size == 512 else "",
    )
    assert Timer(CPU, 25, made.now).time([FAST], 10) == (Cell(FAST, reason="torch: out of memory"),)


def test_when_the_time_is_spent_nothing_is_run(machine):
    made = machine(_as_fast_as_fp32)
    timer = Timer(CPU, 1, made.now)
    timer.time([FAST], 0.5)
    made.time, before = 2.0, len(made.ran)
    assert timer.seconds_left == -1
    assert timer.time([FAST], timer.seconds_left)[0].reason == "the time was spent"
    assert len(made.ran) == before


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(speed_log10=st.floats(6, 15), overhead_log10=st.floats(-7, -4), seconds=st.floats(0.5, 60))
def test_no_group_takes_much_more_than_it_may(machine, speed_log10, overhead_log10, seconds):
    made = machine(lambda product: 10**overhead_log10 + product.flops / 10**speed_log10)
    timer = Timer(CPU, seconds, made.now)
    timer._predict(FAST)  # finding out how fast it is costs what it costs: two products of 64, at least
    spent = made.time
    cells = timer.time([FAST, Product(FP32, 1024)], seconds)
    assert made.time - spent <= 1.1 * seconds + 3 * ROUND_SECONDS * MOST_ROUNDS
    assert all(cell.seconds or cell.reason for cell in cells)


@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.CONTIGUOUS])
def test_the_pilot_stops_at_the_product_itself(machine, layout):
    made = machine(lambda product: 1e-5)
    Timer(CPU, 25, made.now).time([Product(BF16, 100, layout)], 10)
    assert max(product.size for product in made.ran) == 100


def test_threads_are_put_back_even_after_an_error():
    before = torch.get_num_threads()
    with contextlib.suppress(KeyError), threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise KeyError
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("as_tf32", "inside"), [(True, "tf32"), (False, "ieee")])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_tf32_switches_are_set_where_they_say_otherwise_and_put_back(device, as_tf32, inside):
    backends = torch.backends
    of_device = {"cuda": (backends.cuda.matmul, backends.cudnn.conv), "cpu": (backends.mkldnn.matmul,)}[device]
    everything = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    before = [switch.fp32_precision for switch in everything]
    with contextlib.suppress(KeyError), fp32_products(device, as_tf32=as_tf32):
        assert {switch.fp32_precision for switch in of_device} <= {inside, "none" if inside == "ieee" else inside}
        others = [switch for switch in everything[:2] if device == "cpu"]
        assert [switch.fp32_precision for switch in others] == before[: len(others)]
        raise KeyError
    assert [switch.fp32_precision for switch in everything] == before


@pytest.mark.parametrize("as_tf32", [True, False])
def test_a_convolution_switch_that_says_nothing_still_says_nothing(as_tf32):
    cudnn = torch.backends.cudnn
    try:
        with fp32_products("cuda", as_tf32=as_tf32):
            assert cudnn.conv.fp32_precision == ("tf32" if as_tf32 else "ieee")
        assert cudnn.conv.fp32_precision == "tf32"
        cudnn.fp32_precision = "ieee"
        assert cudnn.conv.fp32_precision == "ieee", "it follows its parent, as before"
    finally:
        cudnn.fp32_precision = "none"


def test_a_switch_that_follows_its_parent_still_does():
    backends = torch.backends
    try:
        backends.fp32_precision = "tf32"
        with fp32_products("cpu", as_tf32=False):
            assert backends.mkldnn.matmul.fp32_precision == "ieee"
        assert backends.mkldnn.matmul.fp32_precision == "tf32"
        backends.fp32_precision = "ieee"
        assert backends.mkldnn.matmul.fp32_precision == "ieee"
    finally:
        backends.fp32_precision = "none"


def test_fp32_is_timed_with_tf32_off_and_tf32_with_it_on(machine, monkeypatch):
    seen = set()
    real = timing.fp32_products
    monkeypatch.setattr(timing, "fp32_products", lambda *a, as_tf32: seen.add(as_tf32) or real(*a, as_tf32=as_tf32))
    made = machine(_as_fast_as_fp32)
    Timer(CPU, 25, made.now).time([FAST], 10)
    assert seen == {False}
    Timer(CPU, 25, made.now).time([Product(TF32, 512)], 10)
    assert seen == {False, True}
