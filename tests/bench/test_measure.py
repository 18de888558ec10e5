"""One small run for real, and runs of made-up machines: shares of the time, files, tables, the picture."""

import json

import pytest
import torch
from rich.console import Console

from halfstep.bench import files, plot, reports, table
from halfstep.bench.measure import measure
from halfstep.bench.settings import choose
from halfstep.bench.verdict import verdicts
from halfstep.errors import ArgumentError, MissingDependencyError
from halfstep.formats import FP16, FP32
from halfstep.hardware import Hardware

H200 = Hardware("cuda", "NVIDIA H200", capability=(9, 0))


@pytest.fixture(scope="module")
def real():
    """fp32 and bf16 on this CPU, sizes so small that it takes a second."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    measurement = measure(choose(["bf16"], [8, 24], device="cpu", num_threads=1, seconds=2.0))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    return measurement


def test_a_real_run_measures_every_size_in_every_dtype(real):
    assert [(str(cell.product.format), cell.product.size) for cell in real.by_size] == [
        ("fp32", 8), ("bf16", 8), ("fp32", 24), ("bf16", 24),
    ]  # fmt: skip
    assert all(cell.gflops > 0 and cell.spread >= 0 and cell.reason == "" for cell in real.by_size)
    assert len(real.alignment) == 2 * 4
    assert len(real.layouts) == 2 * 3 + 2 * 2
    assert real.machine["threads"] == 1
    assert real.machine["torch"] == torch.__version__


def test_progress_is_told(measured, machine):
    calls = []
    made = machine(lambda product: product.flops / 1e11)
    measure(choose(["fp16"], [64, 128], device="cpu"), lambda *call: calls.append(call), now=made.now)
    assert calls[0] == (0, 6, "64 x 64")
    assert calls[-1] == (6, 6, "fp16, convolutions")
    assert [done for done, *_ in calls] == sorted(done for done, *_ in calls)


def test_a_slow_dtype_is_measured_around_a_smaller_size(measured):
    measurement = measured({"fp32": 100, "fp16": 1}, seconds=15)
    base = {fmt: measurement.of(measurement.alignment, fmt)[0] for fmt in (FP32, FP16)}
    assert base[FP32].product.size == 1024
    assert base[FP16].product.size < 1024
    assert base[FP16].gflops == pytest.approx(1)
    images = {fmt: measurement.of(measurement.layouts, fmt)[-1].product.size for fmt in (FP32, FP16)}
    assert images[FP16] < images[FP32] == 56


@pytest.mark.parametrize("seconds", [1, 5, 25])
def test_the_budget_is_kept(machine, seconds):
    made = machine(lambda product: product.flops / (6e10 if product.format == FP32 else 1e9))
    measure(choose(device="cpu", seconds=seconds), now=made.now)
    pilots = 2 * 0.06 * 2 + 1  # two kinds of product in two slow dtypes, before anything is known
    assert made.time <= 1.1 * seconds + pilots


def test_files_hold_the_measurement(real, tmp_path):
    paths = files.write(reports.of_products(real, "halfstep bench --matmul"), tmp_path / "deep" / "out")
    assert (
        [path.name for path in paths]
        == ["matmul.json", "matmul.png"]
        == sorted(path.name for path in paths[0].parent.iterdir())
    )
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    plain = json.loads(paths[0].read_text())
    assert plain["command"] == "halfstep bench --matmul"
    assert plain["machine"]["hardware"]["device_type"] == "cpu"
    assert [cell["gflops_per_s"] for cell in plain["by_size"]] == [cell.gflops for cell in real.by_size]
    assert [said["text"] for said in plain["verdicts"]] == [verdict.text for verdict in verdicts(real)]
    files.write(reports.of_products(real, "again"), tmp_path / "deep" / "out")
    assert json.loads(paths[0].read_text())["command"] == "again"


def test_what_was_not_measured_is_null_with_its_reason(measured):
    plain = reports.of_products(measured({"fp32": 100, "fp16": 0.1}), "").plain
    [cell] = [cell for cell in plain["by_size"] if cell["dtype"] == "fp16" and cell["size"] == 1024]
    assert cell["gflops_per_s"] is cell["spread"] is None
    assert cell["not_measured"] == "one product would take about 21 s"
    json.dumps(plain, allow_nan=False)


def test_a_folder_that_cannot_be_is_found_out_before(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "deep"):
        with pytest.raises(ArgumentError, match=r"matmul.json and matmul.png have to be written there"):
            files.check_folder(folder, "matmul")
    files.check_folder(tmp_path / "new" / "deep", "matmul")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_matplotlib_it_is_said_before(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="matplotlib"):
        files.check_folder(tmp_path, "matmul")


def shown(measurement, width):
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(*table.tables(measurement), sep="\n")
    return capture.get()


@pytest.mark.parametrize("width", [80, 140])
def test_tables_fit_and_say_everything(measured, width):
    measurement = measured(
        {"fp32": 50000, "tf32": 400000, "fp16": 700000, "bf16": 0.2}, hardware=H200, sizes=(256, 1024, 4096)
    )
    said = shown(measurement, width)
    assert max(map(len, said.splitlines())) <= width
    words = " ".join(said.split())
    assert "4096 50000 400000 8x 700000 14x -" in words
    assert "not measured: bf16 at 1024 and above: one product would take about 11 s" in words
    assert "n - 1 1.00 1.00 1.00" in words
    assert all(" ".join(verdict.text.split()) in words for verdict in verdicts(measurement))


def test_the_picture_shows_what_was_measured_and_no_more(measured):
    factor = {7: 0.5, 1: 0.25, 4: 0.75}
    measurement = measured({"fp32": 100, "fp16": 3}, lambda product: factor.get(product.size % 8, 1.0), seconds=5)
    speeds, sizes, layouts = plot.draw(measurement).axes
    lines = {line.get_color(): line.get_xdata().tolist() for line in speeds.lines}
    assert lines[plot.COLORS["fp32"]] == [128, 256, 512, 1024]
    assert lines[plot.COLORS["fp16"]] == [128, 256, 512]
    labels = [text.get_text() for text in speeds.get_legend().get_texts()]
    assert labels == ["fp32: 100 at 1024", "fp16: 3 at 512"]
    heights = [round(bar.get_height(), 6) for bars in sizes.containers for bar in bars]
    assert heights == [0.5, 0.25, 0.75] * 2
    assert len(layouts.containers) == 2


def test_a_picture_with_nothing_but_gaps_can_be_drawn(measured, tmp_path):
    measurement = measured({"fp32": 1e-6, "fp16": 1e-6}, sizes=(1024,))
    assert all(cell.reason for cell in measurement.by_size)
    assert shown(measurement, 80)
    files.write(reports.of_products(measurement, ""), tmp_path)
