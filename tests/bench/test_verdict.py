"""Verdicts follow the numbers: machines of known speeds, and the sentences that they must give."""

import dataclasses

import pytest

from halfstep.bench.clock import UNDECIDED
from halfstep.bench.measure import ALIGNMENT_STEPS
from halfstep.bench.plot import draw
from halfstep.bench.products import Layout
from halfstep.bench.timing import Cell
from halfstep.bench.verdict import noise_of, speed_over_fp32, verdicts
from halfstep.formats import BF16, FP16, FP32, TF32
from halfstep.hardware import Hardware

A100 = Hardware("cuda", "A100", capability=(8, 0))


def spread_out(cells):
    """The same medians, of rounds that spread by 100 %."""
    factors = (1, 1, 1, 1, 2, 2, 2)
    rounds = [tuple(s * f for s, f in zip(cell.seconds, factors, strict=True)) for cell in cells]
    return tuple(Cell(cell.product, seconds) for cell, seconds in zip(cells, rounds, strict=True))


def texts(measurement):
    return [verdict.text for verdict in verdicts(measurement)]


def speed_text(measurement):
    return texts(measurement)[0]


@pytest.mark.parametrize(
    ("gflops", "text"),
    [
        (3, "fp16 products are emulated here: 0.03 of fp32's speed at 1024 x 1024"),
        (19, "fp16 products are emulated here: 0.19 of fp32's speed at 1024 x 1024"),
        (50, "fp16 products are slower than fp32 here: 0.5 of fp32's speed at 1024 x 1024"),
        (95, "fp16 products are as fast as fp32's here: 0.95 of fp32's speed at 1024 x 1024"),
        (400, "fp16 products pay here: 4 times fp32's speed at 1024 x 1024"),
    ],
)
def test_a_dtype_is_judged_by_its_speed_over_fp32s(measured, gflops, text):
    assert speed_text(measured({"fp32": 100, "fp16": gflops})) == text


def test_it_is_said_when_the_hardware_claims_more_than_it_does(measured):
    text = speed_text(measured({"fp32": 100, "bf16": 50}, hardware=A100))
    assert text == (
        "bf16 products are slower than fp32 here: 0.5 of fp32's speed at 1024 x 1024, although the hardware lists "
        "it as native"
    )
    assert "although" not in speed_text(measured({"fp32": 100, "bf16": 50}))
    assert "although" not in speed_text(measured({"fp32": 100, "bf16": 300}, hardware=A100))


def test_tf32_is_compared_too(measured):
    assert speed_text(measured({"fp32": 100, "tf32": 700}, hardware=A100)).startswith("tf32 products pay here: 7 times")


def test_it_is_the_largest_size_that_both_have(measured):
    measurement = measured({"fp32": 100, "fp16": 3}, seconds=5)
    assert measurement.of(measurement.by_size, FP16)[-1].reason.startswith("one product would take about 0.7")
    assert speed_over_fp32(measurement, FP16) == (512, pytest.approx(0.03))
    assert speed_over_fp32(measurement, BF16) is None


def test_nothing_measured_is_said_with_the_reason(measured):
    text = speed_text(measured({"fp32": 100, "fp16": 1e-4}, sizes=(256,)))
    assert text.startswith("fp16 products were not compared with fp32's: one product would take about 3")


def test_odd_sizes_that_cost(measured):
    factor = {0: 1.0, 4: 0.8, 1: 0.6}
    measurement = measured({"fp32": 100, "bf16": 100}, lambda p: factor.get(p.size % 8, 0.5) if p.format == BF16 else 1)
    said = texts(measurement)
    assert "bf16: sizes off a multiple of 8 cost; 1023 runs at 0.5 of the speed of 1024" in said
    assert "fp32: sizes off a multiple of 8 cost less than 10% at 1024" in said
    sizes = [cell.product.size for cell in measurement.of(measurement.alignment, BF16)]
    assert sizes == [1024 + step for step in ALIGNMENT_STEPS]


def test_odd_sizes_that_are_faster(measured):
    measurement = measured({"fp32": 100}, lambda p: {0: 0.4, 7: 0.8}.get(p.size % 8, 1.0))
    assert texts(measurement)[0] == "fp32: sizes off a multiple of 8 are faster; 1023 by 2 times over 1024"


def test_layouts_that_matter(measured):
    factor = {Layout.RIGHT_TRANSPOSED: 4.0, Layout.LEFT_TRANSPOSED: 1.05, Layout.CHANNELS_LAST: 0.5}
    said = texts(measured({"fp32": 100}, lambda p: factor.get(p.layout, 1.0)))
    assert said[1] == "fp32: layouts change the speed: A Bᵀ 4 times A B, channels_last 0.5 times contiguous"
    assert texts(measured({"fp32": 100}))[1] == "fp32: layouts change the speed by less than 10%"


def test_a_difference_within_the_spread_is_not_decided(measured):
    measurement = measured({"fp32": 100}, lambda p: {0: 1.0, 7: 0.8}.get(p.size % 8, 0.9))
    assert "cost; 1023 runs at 0.8" in texts(measurement)[0]
    noisy = dataclasses.replace(measurement, alignment=spread_out(measurement.alignment))
    assert texts(noisy)[0] == f"fp32: sizes off a multiple of 8, at 1024: {UNDECIDED}"
    assert noise_of(measurement) == noise_of(noisy) == "", "half of the cells are quiet"
    noisy = dataclasses.replace(noisy, layouts=noisy.alignment, by_size=noisy.alignment)
    assert noise_of(noisy).startswith("The rounds spread by 100%: the machine was busy")


def test_no_sentence_says_nothing_where_the_rounds_spread(measured):
    measurement = measured({"fp32": 100, "fp16": 130}, lambda p: 0.35 if p.size % 8 == 1 else 1.0)
    cells = {name: spread_out(getattr(measurement, name)) for name in ("by_size", "layouts", "alignment")}
    said = texts(dataclasses.replace(measurement, **cells))
    assert said == [
        f"fp16 products against fp32's at 1024 x 1024: {UNDECIDED}",
        *(f"{name}: sizes off a multiple of 8, at 1024: {UNDECIDED}" for name in ("fp32", "fp16")),
        *(f"{name}: layouts: {UNDECIDED}" for name in ("fp32", "fp16")),
    ]
    assert UNDECIDED == "not decided: differences are within the rounds' spread"
    assert not any(UNDECIDED in text for text in texts(measurement))


def test_a_noisy_size_hides_no_cost_of_a_quiet_one(measured):
    measurement = measured({"fp32": 100}, lambda p: {1: 0.3, 7: 0.5}.get(p.size % 8, 1.0))
    base, below, above, four = measurement.alignment
    mixed = dataclasses.replace(measurement, alignment=(base, below, *spread_out([above]), four))
    assert texts(mixed)[0] == "fp32: sizes off a multiple of 8 cost; 1023 runs at 0.5 of the speed of 1024"


def test_layouts_that_are_decided_beside_some_that_are_not(measured):
    factor = {Layout.RIGHT_TRANSPOSED: 4.0}
    measurement = measured({"fp32": 100}, lambda p: factor.get(p.layout, 1.0))
    rows, right, *others = measurement.layouts
    mixed = dataclasses.replace(measurement, layouts=(rows, right, *spread_out(others)))
    assert texts(mixed)[1] == f"fp32: layouts change the speed: A Bᵀ 4 times A B; others {UNDECIDED}"


def test_the_caption_fits_the_picture_with_the_note(measured):
    measurement = measured({"fp32": 100, "fp16": 130})
    name = "AMD EPYC 7763 64-Core Processor"  # as long as names come
    settings = dataclasses.replace(measurement.settings, hardware=Hardware("cpu", name))
    cells = {name: spread_out(getattr(measurement, name)) for name in ("by_size", "layouts", "alignment")}
    measurement = dataclasses.replace(measurement, settings=settings, **cells)
    assert noise_of(measurement)
    figure = draw(measurement)
    figure.canvas.draw()
    [caption] = [text for text in figure.texts if "Medians" in text.get_text()]
    assert noise_of(measurement) in caption.get_text().replace("\n", " ")
    box = caption.get_window_extent()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= figure.bbox.width


def test_ratios_are_those_of_the_sentences(measured):
    measurement = measured({"fp32": 100, "fp16": 250}, lambda p: {0: 1.0, 7: 0.5}.get(p.size % 8, 0.6))
    by_text = {verdict.text: (verdict.ratio, verdict.format) for verdict in verdicts(measurement)}
    assert by_text["fp16 products pay here: 2.5 times fp32's speed at 1024 x 1024"] == (pytest.approx(2.5), FP16)
    assert by_text["fp32: sizes off a multiple of 8 cost; 1023 runs at 0.5 of the speed of 1024"][0] == pytest.approx(
        0.5
    )
    assert {fmt for _, fmt in by_text.values()} == {FP32, FP16}
    assert TF32 not in measurement.settings.formats
