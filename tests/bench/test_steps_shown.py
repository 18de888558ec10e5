"""Tables, sentences, files and the picture say what was measured, and no more."""

import dataclasses
import json

import pytest
from rich.console import Console

from halfstep.bench import files, reports, steps_plot, steps_table
from halfstep.bench.clock import UNDECIDED
from halfstep.bench.steps_cells import StepMeasurement
from halfstep.bench.steps_verdict import noise_of, verdicts
from halfstep.hardware import Hardware

SPEEDS = {"fp32": 1.7, "fp32-master": 1.5, "split": 2.0, "split+bf16": 2.5, "split8+int8": 3.5}


@pytest.fixture
def measurement(measured_steps):
    return measured_steps(
        lambda r: SPEEDS.get(r.storage, 3.0) if r.executor == "numba" else 2e-3, rules=("adamw", "lion"), seconds=60
    )


def shown(measurement, width=140):
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(*steps_table.tables(measurement), sep="\n")
    return capture.get()


@pytest.mark.parametrize("width", [80, 140])
def test_tables_fit_and_say_everything(measurement, width):
    said = shown(measurement, width)
    assert max(map(len, said.splitlines())) <= width
    words = " ".join(said.split())
    assert "Optimizer steps over 0.994 M parameters in 150 tensors made up, 1 of" in words
    assert "torch's recipe fused 15.9 1.00 0.50 16.00" in words  # 16 ns a parameter; 32 bytes take 32 ns at 1 GB/s
    assert "split8+int8 numba 4.54 3.50 0.14 16.00" in words
    assert "lion torch has none: against AdamW's recipe" in words
    assert "not measured: adamw (torch), one step would take about fp32 7.9 s, fp32-master 7.9 s" in words
    assert all(" ".join(verdict.text.split()) in words for verdict in verdicts(measurement))


def test_the_brackets_of_an_extra_are_shown(measurement):
    settings = dataclasses.replace(measurement.settings, missing=(("numba", "pip install 'halfstep[cpu]'"),))
    assert "the executor numba: pip install 'halfstep[cpu]'" in shown(
        dataclasses.replace(measurement, settings=settings)
    )


def test_threads_that_stood_still_are_said(measured_steps, measurement):
    assert "waited for each other" not in noise_of(measurement)
    stalled = measured_steps(lambda r: 150.0 if r.executor == "numba" else 2e-3, rules=("adamw",), seconds=60)
    several = dataclasses.replace(stalled, settings=dataclasses.replace(stalled.settings, num_threads=2))
    one = dataclasses.replace(stalled, settings=dataclasses.replace(stalled.settings, num_threads=1))
    assert "these ratios mean nothing" in noise_of(several)
    assert "these ratios mean nothing" in " ".join(shown(several).split())
    assert "these ratios mean nothing" not in noise_of(one)


def test_sentences_are_computed(measurement):
    said = [verdict.text for verdict in verdicts(measurement)]
    assert (
        said[0] == "adamw, quickest: split8+int8 (numba), 16 bytes per parameter, as torch's recipe: 3.5 times as fast"
    )
    assert [verdict.rule for verdict in verdicts(measurement)] == ["adamw", "lion"]
    cells = [
        dataclasses.replace(cell, bytes_per_param={"split8+int8": 7.125, "fp32": 6.0}.get(cell.storage, 10.0))
        if cell.ratio else cell
        for cell in measurement.rules[0].cells
    ]  # fmt: skip
    one = dataclasses.replace(measurement.rules[0], cells=tuple(cells))
    said = [verdict.text for verdict in verdicts(dataclasses.replace(measurement, rules=(one,)))]
    assert said == [
        "adamw, quickest: split8+int8 (numba), 7.12 bytes per parameter instead of 16: 3.5 times as fast",
        "adamw, fewest bytes: fp32 (numba), 6 bytes per parameter instead of 16: 1.7 times as fast",
    ]


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ((1.05,) * 5, "as fast"),
        ((1.2,) * 5, "1.2 times as fast"),
        ((0.8,) * 5, "0.8 times as fast"),
        ((0.9, 1.0, 1.2, 1.4, 1.5), UNDECIDED),
    ],
)
def test_a_difference_within_the_spread_is_not_decided(measurement, ratios, words):
    cell = dataclasses.replace(measurement.rules[0].cells[0], over_torch=ratios)
    one = dataclasses.replace(measurement.rules[0], cells=(cell,))
    [verdict] = verdicts(StepMeasurement(measurement.settings, (one,), measurement.machine))
    assert verdict.text.endswith(f": {words}")
    assert noise_of(measurement) == ""


def test_where_nothing_was_measured_it_is_said(measured_steps, tmp_path):
    measurement = measured_steps(lambda r: 1e-9, rules=["sgd"])
    [verdict] = verdicts(measurement)
    assert verdict.ratio is None
    assert verdict.text.startswith("sgd: nothing was compared with torch's recipe: one step would take about")
    assert "sgd: nothing was compared" in shown(measurement, 80)
    files.write(reports.of_steps(measurement, ""), tmp_path)


def test_files_hold_the_measurement(measurement, tmp_path):
    report = reports.of_steps(measurement, "halfstep bench")
    paths = files.write(report, tmp_path / "out")
    assert [path.name for path in paths] == ["steps.json", "steps.png"]
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    plain = json.loads(paths[0].read_text())
    assert (plain["schema"], plain["command"], plain["noise"]) == ("halfstep.bench.steps/1", "halfstep bench", None)
    assert [said["text"] for said in plain["verdicts"]] == [verdict.text for verdict in verdicts(measurement)]
    recipes = {(r["storage"], r["executor"]): r for r in plain["rules"][0]["recipes"]}
    assert recipes["split", "numba"]["times_as_fast_as_torch"] == pytest.approx(2)
    assert recipes["split", "torch"]["times_as_fast_as_torch"] is None
    assert recipes["split", "torch"]["not_measured"].startswith("one step would take about")


def test_the_picture_shows_what_was_measured_and_no_more(measurement):
    figure = steps_plot.draw(measurement)
    adamw, lion = figure.axes
    assert (adamw.get_title(loc="left"), lion.get_title(loc="left")) == (
        "adamw",
        "lion, torch has none: against AdamW's recipe",
    )
    widths = [round(bar.get_width(), 6) for bars in adamw.containers for bar in bars]
    measured = [cell for cell in measurement.rules[0].cells if cell.ratio]
    assert widths == [round(cell.ratio, 6) for cell in measured]
    marks = [line.get_xdata()[0] for line in adamw.lines[:-1]]
    assert marks == pytest.approx([cell.ratio * cell.floors for cell in measured])
    assert adamw.lines[-1].get_xdata()[0] == 1, "torch's recipe"
    written = [text.get_text() for text in adamw.texts]
    assert written.count("not measured") == 7
    assert "3.5" in written
    assert adamw.get_yticklabels()[0].get_text() == "fp32  16 B"


def test_the_picture_and_its_caption_fit(measured_steps):
    hardware = Hardware("cpu", "AMD EPYC 7763 64-Core Processor")  # as long as names come
    measurement = measured_steps(lambda r: 3.0, hardware=hardware, rules=("adamw", "adam", "sgd", "lion"))
    figure = steps_plot.draw(measurement)
    figure.canvas.draw()
    [caption] = [text for text in figure.texts if "Medians" in text.get_text()]
    box = caption.get_window_extent()
    assert box.x0 >= 0
    assert box.y0 >= 0
    assert box.x1 <= figure.bbox.width
    assert len(figure.axes) == 4
    for axes in figure.axes:
        assert axes.title.get_window_extent().x1 <= figure.bbox.width
