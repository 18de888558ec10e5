"""The chart of quality against bytes: its points are the rows, and its names can be read."""

import dataclasses
import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.compare import plot_style
from halfstep.compare.plot_quality import compares_storages, place_names
from halfstep.compare.plots import pictures
from halfstep.compare.regimes import REGIMES
from halfstep.compare.report import render_page
from halfstep.compare.tasks import STORAGES
from halfstep.compare.words import words_in

# Regime -> bytes per parameter, and the differences from fp32 of three seeds, much as they are on `digits-finetune`.
ROWS = {
    "fp32": (16.0, (0.0, 0.0, 0.0)),
    "bf16-master": (16.0, (-4e-5, 7e-5, 2e-4)),
    "bf16-true": (12.0, (0.048, 0.058, 0.059)),
    "fp16-split": (14.0, (1e-6, 7e-6, 2e-5)),
    "bf16-split": (14.0, (8e-5, -4e-5, 2e-4)),
    "bf16-split8": (13.0, (1e-4, -8e-5, 4e-5)),
    "bf16-stochastic": (12.0, (4e-4, 2e-4, -1e-5)),
    "bf16-split-bf16": (10.0, (5e-5, 2e-4, 2e-4)),
    "bf16-split8-int8": (7.15, (4e-5, 1e-4, 1e-4)),
    "bf16-split8-int8-released": (6.4, (4e-5, 1e-4, 1e-4)),
}
SAME_PLACE = dict.fromkeys(ROWS, (16.0, (0.0, 0.0, 0.0)))
LOST = {**ROWS, "bf16-true": (12.0, (math.nan, 0.1, 0.1))}


def study_of(study, rows):
    """The study's autoencoder with these regimes, bytes and differences, and a tolerance of 0.01."""
    template = study.rows_of("autoencoder")[0]
    made = []
    for name, (held, changes) in rows.items():
        seeds = tuple({"metric": 0.2 + change} for change in changes)
        change = sum(changes) / len(changes)
        new = {"regime": name, "seeds": len(changes), "metric": 0.2 + change, "metric_difference_from_fp32": change}
        made.append(dataclasses.replace(template, **new, bytes_per_parameter=held, per_seed=seeds))
    task = dataclasses.replace(study.settings.tasks[1], same_relative=0.0, same_absolute=0.01)
    chosen = dataclasses.replace(study.settings, tasks=(task,), regimes=tuple(REGIMES[name] for name in rows))
    return dataclasses.replace(study, settings=chosen, rows=tuple(made))


def draw(study, code="en"):
    (picture,) = [picture for picture in pictures(study) if picture.kind == "quality"]
    assert picture.name == "quality-autoencoder"
    with plot_style.drawing_with(None):
        figure = picture.draw(words_in(code))
        figure.draw_without_rendering()
    return figure


def boxes_of(figure, names):
    """Name -> the box of its letters, in pixels."""
    from matplotlib.text import Annotation, Text

    found = {text.get_text(): text for text in figure.findobj(Annotation)}
    return {name: Text.get_window_extent(found[name]) for name in names}


def big_points(axes):
    return [(line.get_xdata()[0], line.get_ydata()[0]) for line in axes.get_lines() if line.get_markersize() == 11]


def test_points_are_the_rows(study):
    (axes,) = draw(study_of(study, ROWS)).axes
    expected = [(held, sum(changes) / 3) for held, changes in ROWS.values()]
    assert big_points(axes) == [pytest.approx(point) for point in expected]
    small = sorted((float(x), float(y)) for line in axes.get_lines() if line.get_markersize() == 4
                   for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True))  # fmt: skip
    assert small == [pytest.approx(dot, abs=1e-12) for dot in sorted((h, c) for h, cs in ROWS.values() for c in cs)]


def test_the_green_field_ends_at_the_tolerance(study):
    (axes,) = draw(study_of(study, ROWS)).axes
    (field,) = axes.patches
    top = field.get_extents().y1
    assert axes.transData.inverted().transform((0, top))[1] == pytest.approx(0.01)
    low, high = axes.get_ylim()
    assert low < -0.001
    assert high > 0.059
    assert any(text.get_text() == "matches fp32: up to 0.01 above" for text in axes.texts)


@pytest.mark.parametrize("rows", [ROWS, SAME_PLACE, LOST], ids=["usual", "same place", "lost"])
def test_no_name_covers_another_name_or_point_or_leaves_the_axes(study, rows):
    figure = draw(study_of(study, rows))
    (axes,) = figure.axes
    names = [f"{name} (NaN)" if any(map(math.isnan, changes)) else name for name, (_, changes) in rows.items()]
    boxes = boxes_of(figure, names)
    for (one, a), (other, b) in combinations(boxes.items(), 2):
        assert not a.overlaps(b), f"{one} covers {other}"
    area = axes.get_window_extent()
    for name, box in boxes.items():
        assert area.x0 <= box.x0 <= box.x1 <= area.x1, name
        assert area.y0 <= box.y0 <= box.y1 <= area.y1, name
        for x, y in axes.transData.transform(big_points(axes)):
            assert not box.contains(x, y), name


def test_a_lost_run_stands_at_the_upper_edge(study):
    (axes,) = draw(study_of(study, LOST)).axes
    assert big_points(axes)[list(LOST).index("bf16-true")] == (12.0, axes.get_ylim()[1])


def test_only_what_differs_in_how_weights_are_kept_is_drawn(study):
    more = {**ROWS, "fp16-dynamic": (16.0, (0.0,) * 3), "wrong-sums-in-16-bits": (18.0, (0.0,) * 3)}
    assert len(big_points(draw(study_of(study, more)).axes[0])) == len(ROWS)


def test_there_is_no_chart_without_storages(study):
    without = study_of(study, {name: row for name, row in ROWS.items() if name in ("fp32", "bf16-master", "bf16-true")})
    for one in (without, study):
        assert not any(compares_storages(one, task) for task in one.settings.tasks)
        assert "quality" not in {picture.kind for picture in pictures(one)}
    assert all(REGIMES[name].is_packed for name in STORAGES)


def test_the_page_shows_it_in_the_section_of_its_task(study):
    one = study_of(study, ROWS)
    shown = {p.name: {"picture": p, "source": f"data:image/png;base64,{p.kind}"} for p in pictures(one)}
    text = render_page(one, shown, words_in("en"))
    assert text.count("data:image/png;base64,quality") == 1
    assert text.count("Points in the green field match fp32.") == 1
    without = render_page(study, {p.name: {"picture": p, "source": ""} for p in pictures(study)}, words_in("en"))
    assert "green field" not in without


def test_a_packed_regime_has_a_bar_of_its_own(study):
    (picture,) = [picture for picture in pictures(study_of(study, ROWS)) if picture.kind == "bytes"]
    with plot_style.drawing_with(None):
        labels = [label.get_text() for label in picture.draw(words_in("en")).axes[0].get_yticklabels()]
    assert labels == list(ROWS)


points = st.tuples(st.floats(60, 1140), st.floats(60, 640))


@settings(max_examples=60, deadline=None)
@given(st.lists(points, min_size=1, max_size=8), st.integers(60, 240))
def test_names_find_room_beside_each_other(where, width):
    names = place_names(where, [(float(width), 22.0)] * len(where), (0.0, 0.0, 1200.0, 700.0))
    for a, b in combinations(names, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, (a, b)
    assert all(a[0] >= 0 and a[2] <= 1200 and a[1] >= 0 and a[3] <= 700 for a in names)
