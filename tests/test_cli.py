"""The command line as a user types it."""

import contextlib
import json
import os
import re
import subprocess
import sys

import pytest
import torch

import halfstep
from halfstep import cli
from halfstep.autocast_ops import ops_table
from halfstep.formats import FORMATS
from halfstep.hardware import choose_dtype


def halfstep_says(monkeypatch, capsys, *arguments):
    """(exit code, stdout, stderr) of the command line in this process."""
    monkeypatch.setattr(sys, "argv", ["halfstep", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out = capsys.readouterr()
    return caught.value.code or 0, out.out, out.err


@pytest.fixture
def says(monkeypatch, capsys):
    return lambda *arguments: halfstep_says(monkeypatch, capsys, *arguments)


def test_probe_as_json_is_the_librarys_answer(says):
    code, out, _ = says("probe", "--json")
    answer = json.loads(out)
    hardware = halfstep.probe()
    assert code == 0
    assert answer["hardware"]["device_type"] == hardware.device_type
    assert answer["choice"] == choose_dtype(hardware).as_dict()


def test_probe_gives_the_choice_first_and_its_reason(says):
    code, out, _ = says("probe")
    assert code == 0
    assert out.startswith("train in")
    dtype, reason = choose_dtype(halfstep.probe()).reason.split(": ", 1)
    said = " ".join(out.split())
    assert said.startswith(f"train in {dtype},")
    assert "because " + " ".join(reason.split()[:6]) in said
    assert said.count(" ".join(reason.split()[:6])) == 1, "said once, not again under notes"


def test_formats_shows_both_small_numbers_of_fp16(says):
    code, out, _ = says("formats")
    assert code == 0
    for fmt in FORMATS:
        assert fmt.name in out
    assert "6.10352e-05" in out
    assert "5.96046e-08" in out
    assert "two questions" in " ".join(out.split())


def test_compare_writes_prints_and_names_what_it_wrote(says, tmp_path):
    target = tmp_path / "report"
    options = ["--task", "linear-small-units", "--regime", "fp16-unscaled", "--jobs", 1, "--device", "cpu"]
    code, out, err = says("compare", *options, "--out", target)
    assert code == 0
    assert "✗ stalls" in out
    assert str(target / "report.html") in out
    assert "2/2" in err  # the progress bar
    rows = json.loads((target / "compare.json").read_text())["rows"]
    assert [(row["regime"], row["verdict"]) for row in rows] == [("fp32", "matches fp32"), ("fp16-unscaled", "stalls")]


@pytest.mark.parametrize(
    ("arguments", "asked", "fix"),
    [
        (["--task", "mnist"], "the task 'mnist'", "choose one of these"),
        (["--regime", "fp8"], "the regime 'fp8'", "choose one of these"),
        (["--seeds", "0"], "seeds=0", "pass --seeds 1"),
        (["--jobs", "0"], "jobs=0", "pass --jobs 1"),
        (["--lang", "fr"], "the language 'fr'", "pass --lang en"),
        (["--device", "tpu"], "device='tpu'", "pass --device cpu"),
        (["--out", "{file}/report"], "a report in", "pass --out"),
    ],
)
def test_bad_input_ends_in_four_lines_and_exit_code_2(says, tmp_path, arguments, asked, fix):
    (tmp_path / "file").write_text("")
    arguments = [argument.format(file=tmp_path / "file") for argument in arguments]
    out_folder = [] if "--out" in arguments else ["--out", tmp_path / "out"]
    code, out, err = says("compare", *arguments, *out_folder)
    assert code == 2
    assert out == ""
    lines = err.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(f"error: {asked}")
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["true", "why", "fix"]
    assert fix in lines[3]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # nothing written, not even in part


def test_probe_ops_is_the_librarys_table(says):
    code, out, _ = says("probe", "--ops", "--device", "cpu", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["policy"] == "bf16-mixed"
    assert answer["hardware"]["device_type"] == "cpu"
    assert answer["operations"] == [op.as_dict() for op in ops_table("bf16-mixed", "cpu")]


@pytest.mark.parametrize("columns", ["80", "140"])
def test_probe_ops_shows_every_operation_under_what_decides_its_dtype(says, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    code, out, err = says("probe", "--ops", "--policy", "fp16-mixed", "--device", "cpu")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= int(columns)
    assert out.startswith("Operations under fp16-mixed")
    groups = {text.split("  ")[0]: " ".join(text.split()) for text in out.split("\n\n")}
    for op in ops_table("fp16-mixed", "cpu"):
        group = groups["halfstep.ops" if op.family == "halfstep.ops" else op.kind.value]
        assert op.name in group, op.name
    assert "with fp16 bilinear" in groups["fails"]
    assert "gru_cell*" in groups["runs in 16 bits"]  # whichever CPU this is
    assert all(line == line.rstrip() for line in out.splitlines()), "no blanks at the ends in a pipe"


def test_probe_ops_starts_no_training_and_gives_no_advice_for_it(says):
    code, out, err = says("probe", "--ops", "--policy", "bf16-true", "--device", "cpu")
    assert (code, err) == (0, "")
    assert "rounded once" in out


@pytest.mark.parametrize("policy", ["bf16-true", "bf16-mixed"])
def test_probe_ops_promises_no_dtype_to_what_fails(says, monkeypatch, policy):
    """An operation that fails with some inputs says so where it stands, by its mark or by its heading."""
    monkeypatch.setenv("COLUMNS", "4000")
    _, out, _ = says("probe", "--ops", "--policy", policy, "--device", "cpu")
    groups = {text.split("  ")[0]: text for text in out.split("\n\n")}
    heading = groups["runs in 16 bits"].splitlines()[0]
    assert ("needs 16-bit inputs" in heading) == (policy == "bf16-true")
    with pytest.warns(match="keeps no masters") if policy == "bf16-true" else contextlib.nullcontext():
        table = ops_table(policy, "cpu")
    marked = 0
    for op in table:
        group = groups["halfstep.ops" if op.family == "halfstep.ops" else op.kind.value]
        fails = any(run.error for run in op.runs)
        if "needs" not in group.splitlines()[0]:
            entries = re.split(r", | {2,}|\n", group.replace("*", ""))
            assert (f"{op.name}†" in entries) == fails, op.name
            marked += fails
    assert marked
    assert '† fails with some inputs: those under "fails"' in out


def test_bench_measures_prints_and_names_what_it_wrote(says, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    options = ["--device", "cpu", "--threads", 1, "--dtype", "bf16", "--sizes", "8,16", "--seconds", 1]
    code, out, err = says("bench", "--matmul", *options, "--out", tmp_path / "new")
    assert code == 0
    assert max(len(line) for line in out.splitlines() if str(tmp_path)[:12] not in line) <= 80
    assert "bf16 products" in out
    assert "6/6" in err
    plain = json.loads((tmp_path / "new" / "matmul.json").read_text())
    assert plain["command"].startswith("halfstep bench --matmul --device cpu")
    assert {cell["size"] for cell in plain["by_size"]} == {8, 16}
    assert (tmp_path / "new" / "matmul.png").exists()
    assert torch.get_num_threads() == 1


def test_bench_as_json_is_what_would_be_written(says):
    code, out, _ = says(
        "bench", "--matmul", "--device", "cpu", "--dtype", "fp32", "--sizes", "8", "--seconds", 1, "--json"
    )
    assert code == 0
    assert json.loads(out)["by_size"][0]["dtype"] == "fp32"


def test_bench_steps_optimizers_by_default(says, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    what = ["--rule", "adamw", "--rule", "lion", "--storage", "split+bf16", "--executor", "torch", "--dtype", "fp16"]
    size = ["--params", "2e4", "--tensors", "4", "--threads", 1, "--seconds", 4, "--device", "cpu"]
    code, out, err = says("bench", *what, *size, "--out", tmp_path / "new")
    assert code == 0
    assert max(len(line) for line in out.splitlines() if str(tmp_path)[:12] not in line) <= 80
    assert "adamw, quickest: split+bf16 (torch), 10 bytes per parameter instead of 16" in " ".join(out.split())
    assert "lion: rounds" in err
    plain = json.loads((tmp_path / "new" / "steps.json").read_text())
    assert plain["command"].startswith("halfstep bench --rule adamw --rule lion")
    assert (plain["half_dtype"], plain["tensors"]) == ("fp16", 4)
    assert [recipe["executor"] for recipe in plain["rules"][1]["recipes"]] == ["fused", "torch"]
    assert (tmp_path / "new" / "steps.png").exists()


def test_bench_of_steps_as_json_is_what_would_be_written(says):
    options = ["--rule", "sgd", "--storage", "fp32", "--executor", "torch", "--tensors", "3x16", "--seconds", 2]
    code, out, _ = says("bench", "--steps", *options, "--device", "cpu", "--json")
    assert code == 0
    plain = json.loads(out)
    assert (plain["schema"], plain["params"]) == ("halfstep.bench.steps/1", 48)
    assert plain["rules"][0]["recipes"][1]["bytes_per_param"] == pytest.approx(12 + 3 * 4 / 48)


@pytest.mark.parametrize(
    ("arguments", "asked", "fix"),
    [
        (["bench", "--steps", "--matmul"], "halfstep bench --steps --matmul", "run it twice"),
        (["bench", "--matmul", "--rule", "sgd"], "halfstep bench --matmul with --rule", "leave --rule out"),
        (["bench", "--matmul", "--params", "1e6"], "halfstep bench --matmul with --params", "leave --params out"),
        (["bench", "--matmul", "--tensors", "3"], "halfstep bench --matmul with --tensors", "leave --tensors out"),
        (["bench", "--sizes", "8"], "halfstep bench --steps with --sizes", "leave --sizes out"),
        (["bench", "--dtype", "bf16", "--dtype", "fp16"], "halfstep bench --steps with a second --dtype", "leave"),
        (["bench", "--dtype", "tf32"], "the dtype 'tf32'", "pass --dtype bf16"),
        (["bench", "--rule", "muon"], "the rule 'muon'", "choose one of these"),
        (["bench", "--storage", "int4"], "the storage 'int4'", "pass, for example"),
        (["bench", "--device", "cpu", "--executor", "triton"], "executor='triton'", "leave executor out"),
        (["bench", "--device", "cpu", "--params", "1e15"], "1e+09 M parameters in 7 storages", "pass fewer --storage"),
        (["bench", "--tensors", "2048xK"], "tensors='2048xK'", "pass --tensors 150"),
        (["bench", "--steps", "--seconds", "0"], "seconds=0", "pass --seconds 60"),
        (["bench", "--out", "{file}"], "files in", "pass --out"),
        (["bench", "--matmul", "--dtype", "fp64"], "the dtype 'fp64'", "choose one of these"),
        (["bench", "--matmul", "--sizes", "0"], "size=0", "pass"),
        (["bench", "--matmul", "--sizes", "8,x"], "sizes='8,x'", "pass"),
        (
            ["bench", "--matmul", "--device", "cpu", "--sizes", "100000000"],
            "products of 100000000 x",
            "pass --sizes up",
        ),
        (["bench", "--matmul", "--device", "cpu", "--threads", "0"], "threads=0", "pass --threads 1"),
        (["bench", "--matmul", "--seconds", "-1"], "seconds=-1", "pass --seconds"),
        (["bench", "--matmul", "--device", "cuda:77"], "to probe the device 'cuda:77'", "pass a device"),
        (["bench", "--matmul", "--out", "{file}"], "files in", "pass --out"),
        (["probe", "--ops", "--policy", "bf17"], "the policy 'bf17'", "use one of these"),
        (["probe", "--ops", "--device", "gpu"], "the device 'gpu'", "pass"),
        (["probe", "--policy", "bf16-mixed"], "halfstep probe --policy", "add --ops"),
    ],
)
def test_bad_input_of_probe_and_bench(says, tmp_path, monkeypatch, arguments, asked, fix):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("halfstep.bench.measure.measure", lambda *_: pytest.fail("measured for nothing"))
    monkeypatch.setattr("halfstep.bench.steps_measure.measure", lambda *_: pytest.fail("measured for nothing"))
    code, out, err = says(*(argument.format(file=tmp_path / "file") for argument in arguments))
    assert (code, out) == (2, "")
    lines = err.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith(f"error: {asked}")
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["true", "why", "fix"]
    assert fix in lines[3]


def test_help_lists_the_commands(says):
    _, out, _ = says("--help")
    for command in ("probe", "formats", "compare", "bench"):
        assert command in out


def run_python(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


def test_python_m_halfstep_is_the_same_command_line():
    done = run_python("-m", "halfstep", "formats")
    assert done.returncode == 0
    assert "fp8_e4m3fn" in done.stdout


def test_without_typer_the_message_says_what_to_install():
    done = run_python(
        "-c", "import sys; sys.modules['typer'] = None\nimport runpy; runpy.run_module('halfstep', run_name='__main__')"
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "error: the halfstep command line\n  true: the package 'typer' is not installed" in done.stderr
    assert "fix:  pip install 'halfstep[cli]'" in done.stderr


@pytest.mark.parametrize("package", ["matplotlib", "jinja2", "rich"])
def test_without_another_package_of_the_extra_nothing_is_trained(says, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr("halfstep.compare.run.compare", lambda *_: pytest.fail("trained for nothing"))
    code, _, err = says("compare", "--out", tmp_path / "out")
    assert code == 2
    assert f"the package {package!r} is not installed" in err
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_changes_no_thread_setting(says):
    before = torch.get_num_threads()
    says("probe")
    assert torch.get_num_threads() == before
