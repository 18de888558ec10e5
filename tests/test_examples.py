"""The examples run, without a warning, and what they print is what they mean to teach."""

import ast
import contextlib
import io
import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def run(number):
    """What main() of an example returns and prints."""
    (path,) = [path for path in EXAMPLES if path.name.startswith(number)]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = runpy.run_path(str(path))["main"]()
    return result, printed.getvalue()


def test_01_an_overflow_changes_nothing_and_training_goes_on():
    result, printed = run("01")
    assert result["unchanged"]
    assert result["skipped"] == 1
    assert "step 61 skipped: the gradient of 3.weight (shape [4, 64]) holds NaN" in printed
    assert "step 1 applied" in printed
    assert result["loss"] < 1.0, "chance is log(4), 1.39"
    assert result["loss_after"] < 1.0


def test_02_weighted_windows_equal_one_big_batch():
    result, printed = run("02")
    assert result["weighted"] < 1e-5, "60 steps in fp32, summed in another order"
    assert result["alike"] > 1e-3
    assert printed.count("[4, 4, 2]") == 2


def test_03_the_generator_learns_and_a_bad_batch_of_the_critic_is_not_its_business():
    result, _ = run("03")
    assert result["end"] < 0.5 * result["start"]
    assert result["kinds"] == ("skipped", "applied")
    assert result["unchanged"]
    assert result["scales"] == (2.0**13, 2.0**14)


def test_04_sam_resists_wrong_labels_and_a_penalty_holds_the_norm_near_one():
    result, _ = run("04")
    assert result["SAM"] > result["plain"] + 0.02
    assert 0.8 < result["penalty"] < 1.3
    assert result["no penalty"] > 10


def test_05_fewer_bytes_learn_as_much_and_a_checkpoint_resumes_bit_for_bit():
    result, printed = run("05")
    *bytes_in_fp32, accuracy_in_fp32 = result["fp32"]
    *bytes_packed, accuracy = result["packed"]
    assert bytes_in_fp32 == pytest.approx([4.0, 8.0], rel=1e-3)
    assert bytes_packed == pytest.approx([2.0, 3.15], rel=1e-2)
    assert accuracy > accuracy_in_fp32 - 0.02 > 0.9
    assert result["is_same"]
    assert "bit for bit: True" in printed


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_explained_and_downloads_nothing(path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) < 120
    assert f"python examples/{path.name}" in (ast.get_docstring(tree) or "")
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= {"math", "tempfile", "torch", "sklearn", "halfstep"}


def test_there_are_five():
    assert [path.name[:2] for path in EXAMPLES] == ["01", "02", "03", "04", "05"]
