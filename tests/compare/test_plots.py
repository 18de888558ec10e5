"""The pictures show the numbers: read back from the figures that are drawn."""

import dataclasses
import math
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.compare import plot_gradients, plot_style
from halfstep.compare.plot_gradients import lesson
from halfstep.compare.plot_style import spread
from halfstep.compare.plots import pictures
from halfstep.compare.regimes import REGIMES
from halfstep.compare.trainer import CurvePoint
from halfstep.compare.words import words_in


def drawn(study, name):
    (picture,) = [picture for picture in pictures(study) if picture.name == name]
    with plot_style.drawing_with(None):
        return picture.draw(words_in("en"))


def texts(figure):
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text)]


def test_one_picture_per_question(study):
    assert [picture.name for picture in pictures(study)] == [
        "curves-linear-small-units", "curves-autoencoder", "gradients", "scale", "bytes",
    ]  # fmt: skip


def test_the_lesson_is_the_deep_network(study):
    assert lesson(study).name == "autoencoder"


def test_curves_are_the_runs_and_each_is_named(study):
    figure = drawn(study, "curves-linear-small-units")
    lines = {tuple(line.get_ydata()) for line in figure.axes[0].get_lines()}
    for regime, run in study.runs_of("linear-small-units").items():
        assert tuple(point.metric for point in run.curve) in lines
        assert regime in texts(figure)


def test_a_run_that_was_never_finite_is_named_and_breaks_no_picture(study):
    lost = [
        dataclasses.replace(run, curve=tuple(CurvePoint(point.step, math.nan, math.nan) for point in run.curve))
        if run.regime == "bf16"
        else run
        for run in study.runs
    ]
    figure = drawn(dataclasses.replace(study, runs=tuple(lost)), "curves-autoencoder")
    assert "bf16 (NaN)" in texts(figure)
    assert "fp32" in texts(figure)


def test_powers_of_ten_reach_down_to_the_lowest_error_of_any_step(study):
    """The best of a run need not be its end."""
    name = "linear-small-units"
    lowest = 1e-8
    dipping = [
        dataclasses.replace(run, curve=(*run.curve[:2], CurvePoint(2, lowest, lowest), *run.curve[3:]))
        if (run.task, run.regime) == (name, "bf16")
        else run
        for run in study.runs
    ]
    low, _ = drawn(dataclasses.replace(study, runs=tuple(dipping)), f"curves-{name}").axes[0].get_ylim()
    assert 0.1 * lowest < low < lowest


def test_a_picture_ends_where_the_runs_begin_if_that_is_below_the_constant_predictor(study):
    """Fine-tuning begins low; up to the constant predictor its picture would be empty."""
    constant = study.settings.tasks[1].constant_metric(study.settings.tasks[1].build_data())
    assert drawn(study, "curves-autoencoder").axes[0].get_ylim()[1] == pytest.approx(1.12 * constant)
    assert "predictor that ignores its input" in texts(drawn(study, "curves-autoencoder"))
    tuned = [
        dataclasses.replace(run, curve=tuple(CurvePoint(p.step, p.loss, 0.1 * p.metric) for p in run.curve))
        for run in study.runs
    ]
    highest = max(p.metric for run in tuned if run.task == "autoencoder" for p in run.curve)
    figure = drawn(dataclasses.replace(study, runs=tuple(tuned)), "curves-autoencoder")
    assert figure.axes[0].get_ylim()[1] == pytest.approx(1.12 * highest)
    assert 1.12 * highest < constant
    assert "predictor that ignores its input" not in texts(figure)


def test_the_histogram_shows_that_nothing_of_the_first_layer_is_left(study):
    """Unscaled, first layer: grey bars of the true gradient in the zone that rounds to 0, and no coloured bar."""
    figure = drawn(study, "gradients")
    top_left, top_right, bottom_left, _ = figure.axes
    orange = plot_style.style_of("fp16-unscaled").color
    assert not bars_of(top_left, orange)
    assert bars_of(top_left, plot_gradients.GREY)
    assert max(bar.get_x() for bar in bars_of(top_left, plot_gradients.GREY) if bar.get_height() > 50) < -24
    assert bars_of(top_right, orange)
    assert bars_of(bottom_left, plot_style.style_of("fp16-static-1024").color)
    assert any("zero: 100" in text for text in texts(figure))


def bars_of(axes, color):
    from matplotlib.colors import to_rgba

    return [bar for bar in axes.patches if bar.get_facecolor() == to_rgba(color) and bar.get_height() > 0]


def test_the_scale_picture_marks_skips(study):
    figure = drawn(study, "scale")
    assert "fp16-static-1024" in texts(figure)
    assert "fp16-unscaled" not in texts(figure)  # a scale of 1 is none
    assert "no step overflowed" in texts(figure)
    skipping = [dataclasses.replace(run, skipped=(2, 5)) for run in study.runs]
    figure = drawn(dataclasses.replace(study, runs=tuple(skipping)), "scale")
    assert "×  skipped step" in texts(figure)
    crosses = [line for line in figure.axes[0].get_lines() if line.get_marker() == "x"]
    assert [list(line.get_xdata()) for line in crosses] == [[2, 5]]
    assert [list(line.get_ydata()) for line in crosses] == [[1024.0, 1024.0]]


def test_bars_add_up_to_the_bytes(study):
    figure = drawn(study, "bytes")
    assert len(figure.axes) == 1  # the regression holds a few bytes; the autoencoder alone has something to show
    row = study.rows_of("autoencoder")[0]
    total = (
        row.parameter_bytes
        + row.gradient_bytes
        + row.optimizer_state_bytes
        + row.weight_copy_bytes
        + row.peak_activation_bytes
    )
    assert f"  {total / 1024:,.0f} KiB" in texts(figure)


def with_regime(study, old, new):
    """The study with one regime's runs and rows under another's name."""

    def rename(entries):
        return tuple(dataclasses.replace(entry, regime=new) if entry.regime == old else entry for entry in entries)

    regimes = tuple(REGIMES[new] if regime.name == old else regime for regime in study.settings.regimes)
    settings = dataclasses.replace(study.settings, regimes=regimes)
    return dataclasses.replace(study, settings=settings, rows=rename(study.rows), runs=rename(study.runs))


@pytest.mark.parametrize(
    ("old", "new", "bars"),
    [
        ("bf16", "bf16", ["fp32", "fp16, any scale", "bf16"]),
        ("fp16-unscaled", "bf16-true", ["fp32", "bf16-true", "fp16, any scale", "bf16"]),
        ("fp16-unscaled", "wrong-update-between", ["fp32", "fp16, any scale", "bf16"]),
    ],
)
def test_there_is_one_bar_per_policy(study, old, new, bars):
    figure = drawn(with_regime(study, old, new), "bytes")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == bars
    assert "weights" in texts(figure)


def test_bars_stand_in_the_order_of_the_table(study):
    again = [dataclasses.replace(row, regime="fp16-dynamic") for row in study.rows if row.regime == "fp16-unscaled"]
    regimes = (*study.settings.regimes, REGIMES["fp16-dynamic"])
    settings = dataclasses.replace(study.settings, regimes=regimes)
    figure = drawn(dataclasses.replace(study, settings=settings, rows=(*study.rows, *again)), "bytes")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["fp32", "fp16, any scale", "bf16"]


def test_every_regime_has_a_look_of_its_own():
    looks = [plot_style.style_of(name) for name in REGIMES]
    assert plot_style.style_of("my-own") not in looks
    assert len({(look.color, look.dash) for look in looks}) == len(REGIMES)


@given(st.lists(st.floats(-0.2, 1.2), max_size=14).map(sorted))
def test_labels_keep_apart_and_in_order(heights):
    placed = spread(heights, gap=0.06)
    assert len(placed) == len(heights)
    assert all(above - below > 0.06 - 1e-9 for below, above in pairwise(placed))
    assert all(-1e-9 <= height <= 1 + 1e-9 for height in placed)


@given(st.lists(st.floats(0, 1), max_size=8, unique=True).map(sorted))
def test_labels_that_do_not_crowd_stay_where_they_are(heights):
    if all(above - below >= 0.06 for below, above in pairwise(heights)):
        assert spread(heights, gap=0.06) == pytest.approx(heights)


def test_without_a_chinese_font_the_pictures_speak_english(monkeypatch):
    monkeypatch.setattr(plot_style, "CJK_FONTS", ("No Such Font",))
    words, font = plot_style.plot_words(words_in("zh"))
    assert (words.code, font) == ("en", None)


def test_with_a_font_they_speak_chinese(monkeypatch):
    monkeypatch.setattr(plot_style, "CJK_FONTS", ("No Such Font", "DejaVu Sans"))  # any installed font stands for one
    words, font = plot_style.plot_words(words_in("zh"))
    assert (words.code, font) == ("zh", "DejaVu Sans")


def settings_of_matplotlib():
    import matplotlib

    # Reading "backend" would make matplotlib choose one, and import pyplot for it.
    return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}


def test_drawing_leaves_matplotlibs_settings_alone(study):
    before = settings_of_matplotlib()
    drawn(study, "scale")
    assert settings_of_matplotlib() == before
    assert "matplotlib.pyplot" not in sys.modules
