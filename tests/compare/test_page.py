"""The page about the command names every task and every regime, as they are."""

import dataclasses
import re
from pathlib import Path

import pytest

from halfstep.compare.regimes import REGIMES, Weights
from halfstep.compare.tasks import TASKS
from halfstep.compare.words import words_in

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "compare.md"
WORDS = words_in("en")


def rows_of(text, table):
    """Rows of a marked table, without its two lines of heading."""
    lines = re.search(rf"<!-- {table} -->\n(.*?)<!-- end -->", text, re.DOTALL)[1].strip().splitlines()
    return lines[2:]


def task_row(task):
    shown = [form for form, is_quick in (("study", False), ("quick", True)) if task.is_shown(is_quick=is_quick)]
    return f"| `{task.name}` | {WORDS.name_of('task', task.name)} | {', '.join(shown) or 'by name only'} |"


def regime_row(regime):
    forms = ["study"] * regime.in_full + ["quick"] * (regime.in_full and regime.in_quick)
    shown = ", ".join(forms) or "tasks that ask for it"
    return f"| `{regime.name}` | `{regime.policy}` | {WORDS.name_of('regime', regime.name)} | {shown} |"


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text(encoding="utf-8")


def test_the_page_names_every_task(page):
    assert rows_of(page, "tasks") == [task_row(task) for task in TASKS.values()]


def test_the_page_names_every_regime(page):
    assert rows_of(page, "regimes") == [regime_row(regime) for regime in REGIMES.values()]


def test_a_row_tells_what_would_go_stale():
    task, regime = TASKS["text"], REGIMES["bf16-true"]
    assert task_row(task) != task_row(dataclasses.replace(task, in_full=True))
    assert regime_row(regime) != regime_row(dataclasses.replace(regime, weights=Weights.FULL))


def test_every_mistake_is_explained(page):
    for regime in REGIMES.values():
        assert page.count(f"| `{regime.name}` | ") >= 1 + (regime.mistake is not None)
