"""Every text exists in every language, with the same places to fill in."""

import re
import string
from pathlib import Path

import pytest

import halfstep.compare
from halfstep.compare.regimes import REGIMES
from halfstep.compare.tasks import TASKS
from halfstep.compare.text import library_text
from halfstep.compare.verdict import Verdict
from halfstep.compare.words import LANGUAGES, words_in
from halfstep.errors import ArgumentError

ENGLISH = words_in("en").texts


def places(text):
    return sorted(name for _, name, _, _ in string.Formatter().parse(text) if name)


@pytest.mark.parametrize("code", [code for code in LANGUAGES if code != "en"])
def test_keys_and_places_are_those_of_english(code):
    words = words_in(code).texts
    assert words.keys() == ENGLISH.keys()
    assert {key: places(text) for key, text in words.items()} == {key: places(text) for key, text in ENGLISH.items()}
    assert all(text.strip() for text in words.values())


def test_chinese_is_chinese():
    same = {key for key, text in words_in("zh").texts.items() if text == ENGLISH[key]}
    assert same == {"plot.too_large"}  # "inf" is what torch prints
    without = [key for key, text in words_in("zh").texts.items() if not re.search("[\u4e00-\u9fff]", text)]
    assert set(without) <= {"plot.too_large", "machine"}


def test_every_task_regime_and_verdict_has_words():
    for task in TASKS.values():
        assert {
            f"task.{task.name}",
            f"task.{task.name}.text",
            task.metric_name,
            f"{task.metric_name}_long",
        } <= ENGLISH.keys()
    assert {f"regime.{name}" for name in REGIMES} <= ENGLISH.keys()
    assert {verdict.value for verdict in Verdict} <= ENGLISH.keys()


def test_no_text_is_asked_for_that_does_not_exist_and_none_lies_unused():
    folder = Path(halfstep.compare.__file__).parent
    source = "\n".join(path.read_text() for path in [*folder.glob("*.py"), *folder.glob("templates/*")])
    asked = set(re.findall(r"""\b(?:words|t)\(\s*"([a-z_0-9.]+)\"""", source))
    assert asked <= ENGLISH.keys()
    for key in ENGLISH:
        is_made_up_of_parts = (
            key.startswith(("task.", "regime.", "constant."))
            or key.endswith("_long")
            or key in {v.value for v in Verdict}
        )
        assert is_made_up_of_parts or f'"{key}"' in source, f"nobody reads {key!r}"


def test_an_unknown_language_is_refused():
    with pytest.raises(ArgumentError) as caught:
        words_in("de")
    assert caught.value.asked == "the language 'de'"
    assert "en, zh" in caught.value.true
    assert caught.value.fix == "pass --lang en or --lang zh"


def test_a_task_added_by_a_user_goes_by_its_name():
    assert words_in("zh").name_of("task", "my-own") == "my-own"


def test_what_was_read_is_said_in_the_readers_language():
    facts = library_text().facts
    line = words_in("zh").source("a line", facts)
    start, end = f"所用数据：{facts['python']} 标准库的 {facts['modules']} 个模块，", f"sha256 {facts['sha256']}。"
    assert line == f"{start}{facts['megabytes']} MB，{end}"
    assert words_in("en").source("a line", facts) == f"Read for it: {library_text().source}."
    assert words_in("zh").source("a line", {}) == "所用数据：a line。"


def test_having_learned_nothing_goes_by_the_metrics_name_where_it_has_one():
    assert words_in("en").constant("sum_error") == "no gradient at all"
    assert words_in("en").constant("test_mse") == "predictor that ignores its input"
    metrics = {task.metric_name for task in TASKS.values()}
    assert {key.removeprefix("constant.") for key in ENGLISH if key.startswith("constant.")} <= metrics
