"""The report on disk: complete or not there, and in need of nothing else."""

import base64
import dataclasses
import io
import json
import math
import re
from html.parser import HTMLParser

import pytest

from halfstep.compare import cells, report, table
from halfstep.compare.regimes import REGIMES
from halfstep.compare.report import check_report, default_folder, write_report
from halfstep.compare.text import library_text
from halfstep.compare.verdict import Thresholds
from halfstep.compare.words import words_in
from halfstep.errors import ArgumentError

from .test_run import assert_is_schema_1


@pytest.fixture(scope="module")
def folder(study, tmp_path_factory):
    target = tmp_path_factory.mktemp("report") / "new" / "folder"
    write_report(study, target, words_in("en"))
    return target


@pytest.fixture(scope="module")
def page(folder):
    return (folder / "report.html").read_text(encoding="utf-8")


class Tags(HTMLParser):
    """Open tags, attributes that point somewhere, and rows of cells."""

    def __init__(self):
        super().__init__()
        self.open, self.links, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(page):
    tags = Tags()
    tags.feed(page)
    assert not tags.open
    return tags


def test_what_is_written(folder):
    assert sorted(path.name for path in folder.iterdir()) == [
        "bytes.png", "compare.json", "curves-autoencoder.png", "curves-linear-small-units.png", "gradients.png",
        "report.html", "scale.png",
    ]  # fmt: skip
    for path in folder.glob("*.png"):
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_json_is_the_study(folder, study):
    plain = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
    assert_is_schema_1(plain)
    assert plain == json.loads(json.dumps(study.as_plain()))


def test_the_page_points_at_nothing_but_itself(page, folder):
    links = parsed(page).links
    assert len(links) == 5
    pictures = {path.read_bytes() for path in folder.glob("*.png")}
    for link in links:
        head, data = link.split(",", 1)
        assert head == "data:image/png;base64"
        assert base64.b64decode(data) in pictures
    without_pictures = re.sub(r"base64,[^\"]*", "", page)
    assert not re.search(r"https?://|url\(|@import|<script", without_pictures)


def test_each_row_and_each_threshold_is_on_the_page(page, study):
    text = " ".join(parsed(page).text)
    for row in study.rows:
        assert row.regime in text
        assert f"{row.bytes_per_parameter:.2f}" in text
    for stated in ("more than 4 times", "95\N{NO-BREAK SPACE}%", "10\N{NO-BREAK SPACE}% of fp32's error + 0.02"):
        assert stated in text
    assert text.count("stalls") >= 3  # at a glance, in the table, in the thresholds
    assert "0.9610" in text  # the flat line's error
    assert "halfstep compare --task linear-small-units --task autoencoder" in text


def test_the_page_says_that_emulation_shows_no_time(page, study):
    if study.machine["emulated_formats"]:
        assert "no native arithmetic for " + ", ".join(study.machine["emulated_formats"]) in page
        assert "emulated" in page


@pytest.mark.usefixtures("no_drawing")
def test_chinese_page(study, tmp_path):
    write_report(study, tmp_path, words_in("zh"))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    parsed(page)
    assert '<html lang="zh">' in page
    for word in ("半精度实测", "停滞", "与 fp32 相当", "手写数字上的深层 sigmoid 自编码器"):
        assert word in page
    assert "matches fp32" not in page


@pytest.fixture
def no_drawing(monkeypatch):
    """Drawing takes seconds; tests that are about files put a letter in a picture's place."""

    def write(picture, folder, _):
        (folder / f"{picture.name}.png").write_bytes(b"x")
        return {"picture": picture, "source": "data:image/png;base64,eA=="}

    monkeypatch.setattr(report, "_write_picture", write)


@pytest.fixture
def page_of(tmp_path, no_drawing):
    """Writes a study; returns the page's text and its table at a glance, row by row."""

    def write(study, code="en"):
        write_report(study, tmp_path, words_in(code))
        text = (tmp_path / "report.html").read_text(encoding="utf-8")
        parsed(text)
        glance = text[text.index('<table class="overview">') : text.index("</table>")]
        return text, [row.split("</tr>")[0] for row in glance.split("<tr")[1:]]

    return write


def test_a_regime_that_a_task_does_not_show_leaves_the_columns_in_place(study, page_of):
    fewer = [row for row in study.rows if (row.task, row.regime) != ("linear-small-units", "bf16")]
    _, rows = page_of(dataclasses.replace(study, rows=tuple(fewer)))
    head, *body = rows
    assert [row.count("<td") for row in body] == [head.count("<th")] * len(body)
    (bf16,) = [row for row in body if "<code>bf16</code>" in row]
    first, second = bf16.split("<td")[2:]
    assert "–" in first
    assert 'title="not run on this task"' in first
    assert "matches fp32" in second or "stalls" in second or "worse" in second


def test_the_command_names_regimes_only_where_the_user_did(study, page_of):
    assert "--regime fp16-unscaled" in page_of(study)[0]
    settings = dataclasses.replace(study.settings, are_regimes_named=False)
    text, _ = page_of(dataclasses.replace(study, settings=settings))
    assert "--regime" not in text
    assert "halfstep compare --task linear-small-units --task autoencoder --seeds 1" in text


def test_the_heading_of_the_histogram_says_what_it_shows(study, page_of):
    assert "Why fp16 needs a scale" in page_of(study)[0]
    settings = dataclasses.replace(study.settings, tasks=study.settings.tasks[1:])  # the autoencoder alone
    reference = study.runs_of("autoencoder")["fp32"]
    healthy = tuple(dataclasses.replace(run, start_first_layer=reference.start_first_layer) for run in study.runs)
    text = page_of(dataclasses.replace(study, settings=settings, runs=healthy))[0]
    assert "Why fp16 needs no scale here" in text
    assert "Why fp16 needs a scale" not in text


def with_source(study, source):
    """The study with a line on its data for the first task."""
    first, *rest = study.settings.tasks
    data = dataclasses.replace(first.build_data(), source=source)
    tasks = (dataclasses.replace(first, build_data=lambda: data), *rest)
    return dataclasses.replace(study, settings=dataclasses.replace(study.settings, tasks=tasks))


@pytest.mark.parametrize(("code", "line"), [("en", "Read for it: 3 books, 1 MB."), ("zh", "所用数据：3 books, 1 MB。")])
def test_what_a_task_read_stands_under_its_heading_and_under_its_table(study, page_of, code, line):
    reading = with_source(study, "3 books, 1 MB")
    text, _ = page_of(reading, code)
    assert text.count(line) == printed(reading, code, 140).count(line) == 1
    assert text.index('<h2 id="linear-small-units">') < text.index(line) < text.index('<h2 id="autoencoder">')
    assert line[:4] not in page_of(study, code)[0]


def test_the_librarys_text_is_described_in_the_readers_language(study, page_of):
    first, *rest = study.settings.tasks
    facts = library_text().facts
    data = dataclasses.replace(first.build_data(), source=library_text().source, source_facts=facts)
    tasks = (dataclasses.replace(first, build_data=lambda: data), *rest)
    reading = dataclasses.replace(study, settings=dataclasses.replace(study.settings, tasks=tasks))
    for text in (page_of(reading, "zh")[0], printed(reading, "zh", 140)):
        assert f"{facts['python']} 标准库的 {facts['modules']} 个模块" in text
        assert "modules of" not in text


def test_a_study_of_sums_does_not_speak_of_unseen_data(study, page_of):
    first, *rest = study.settings.tasks
    sums = dataclasses.replace(first, metric=None, metric_name="sum_error")
    text, _ = page_of(dataclasses.replace(study, settings=dataclasses.replace(study.settings, tasks=(sums, *rest))))
    assert text.count("Error of each step&#39;s summed gradient") == text.count("Error on unseen data") == 1


def with_mistake(study, old):
    """The study with one regime's rows as those of a mistaken loop."""
    new = "wrong-schedule-on-skip"
    rows = tuple(
        dataclasses.replace(row, regime=new, skipped_steps=2) if row.regime == old else row for row in study.rows
    )
    regimes = tuple(REGIMES[new] if regime.name == old else regime for regime in study.settings.regimes)
    return dataclasses.replace(study, rows=rows, settings=dataclasses.replace(study.settings, regimes=regimes))


def test_a_mistake_that_cost_nothing_is_admitted(study, page_of):
    (steps,) = {row.num_steps for row in study.rows_of("linear-small-units")}
    text, _ = page_of(with_mistake(study, "fp16-static-1024"))
    assert f"nothing measurable here: wrong-schedule-on-skip (2 of their {steps} steps" in text
    assert text.index("nothing measurable") < text.index('<h2 id="autoencoder">')


@pytest.mark.parametrize(
    ("change", "shown"), [(1.6e-10, "0"), (-1.6e-10, "0"), (0.0, "0"), (2e-9, "+2e-09"), (-0.02, "−0.0200")]
)
def test_a_difference_that_is_rounding_alone_is_shown_as_none(study, change, shown):
    row = dataclasses.replace(study.rows[1], metric=0.012, metric_difference_from_fp32=change)
    assert cells.difference(row) == shown
    assert cells.difference(dataclasses.replace(row, regime="fp32")) == "–"


def test_a_lost_seed_leaves_no_deviation(study):
    metrics = [{"metric": 1.0}, {"metric": 3.0}]
    row = dataclasses.replace(study.rows[1], seeds=2, metric=2.0, per_seed=tuple(metrics))
    assert cells.error(row) == "2.0000 ± 1.4142"
    lost = dataclasses.replace(row, metric=math.nan, per_seed=({"metric": 1.0}, {"metric": math.nan}))
    assert cells.error(lost) == "nan"


def test_a_mistake_that_cost_something_is_not_excused(study, page_of):
    text, _ = page_of(with_mistake(study, "fp16-unscaled"))
    section = text[text.index('<h2 id="linear-small-units">') : text.index('<h2 id="autoencoder">')]
    assert "stalls" in section
    assert "nothing measurable" not in section


@pytest.mark.usefixtures("no_drawing")
def test_an_earlier_report_is_replaced_and_other_files_stay(study, tmp_path):
    (tmp_path / "report.html").write_text("old")
    (tmp_path / "mine.txt").write_text("keep")
    write_report(study, tmp_path, words_in("en"))
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert (tmp_path / "mine.txt").read_text() == "keep"


@pytest.mark.usefixtures("no_drawing")
def test_a_failure_on_the_way_leaves_nothing(study, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("interrupted")

    monkeypatch.setattr(report, "render_page", fail)
    target = tmp_path / "report"
    with pytest.raises(RuntimeError, match="interrupted"):
        write_report(study, target, words_in("en"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_drawing")
def test_a_folder_that_cannot_be_written_is_refused_before_and_after(study, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    for refuse in (check_report, lambda folder: write_report(study, folder, words_in("en"))):
        for target in (blocked, blocked / "below"):
            with pytest.raises(ArgumentError) as caught:
                refuse(target)
            assert str(target) in caught.value.asked
            assert "the system says: Not a directory" in caught.value.true
            assert caught.value.fix == "pass --out with a folder that you may write to"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_checking_a_folder_makes_none(tmp_path):
    check_report(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def printed(study, code, width):
    from rich.console import Console

    console = Console(width=width, file=io.StringIO())
    console.print(*table.tables(study, words_in(code), console), sep="\n")
    return console.file.getvalue()


@pytest.mark.parametrize(("code", "stalls"), [("en", "✗ stalls"), ("zh", "✗ 停滞")])
def test_the_table_in_the_terminal(study, code, stalls):
    text = printed(study, code, 140)
    for row in study.rows:
        assert row.regime in text
    assert text.count(stalls) == sum(row.verdict.value == "stalls" for row in study.rows)
    assert "100% → 100%" in text
    if study.machine["emulated_formats"]:
        assert words_in(code)("emulated_short", formats=", ".join(study.machine["emulated_formats"])) in text


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("en", ["tolerance: 10\N{NO-BREAK SPACE}% of fp32's error + 0.02; predictor that ignores its input: 1.0000",
                "tolerance: 10\N{NO-BREAK SPACE}% of fp32's error; predictor that ignores its input: 0.0738"]),
        ("zh", ["容差: fp32 误差的 10\N{NO-BREAK SPACE}% + 0.02; 忽略输入的预测: 1.0000",
                "容差: fp32 误差的 10\N{NO-BREAK SPACE}%; 忽略输入的预测: 0.0738"]),
    ],
)  # fmt: skip
def test_under_each_table_stands_what_its_verdicts_were_judged_by(study, code, lines):
    text = printed(study, code, 140)
    for line in lines:
        assert text.count(line) == 1


def test_a_tolerance_says_no_more_than_it_has_to():
    texts = [cells.tolerance(Thresholds(*pair), words_in("en")) for pair in ((0.1, 0.02), (0.1, 0.0), (0.0, 0.01))]
    assert texts == [
        "10\N{NO-BREAK SPACE}% of fp32's error + 0.02", "10\N{NO-BREAK SPACE}% of fp32's error", "0.01"
    ]  # fmt: skip


def test_the_short_form_does_not_replace_the_studys_report():
    assert {str(default_folder(is_quick=is_quick)) for is_quick in (False, True)} == {
        "halfstep-compare", "halfstep-compare-quick"
    }  # fmt: skip


def test_bytes_have_a_column_where_regimes_differ_in_them(study):
    assert "bytes" not in printed(study, "en", 140)
    lighter = [
        dataclasses.replace(row, bytes_per_parameter=7.125) if row.regime == "bf16" else row for row in study.rows
    ]
    text = printed(dataclasses.replace(study, rows=tuple(lighter)), "en", 140)
    assert text.count("bytes") == text.count(" 7.12 ") == 2  # two tasks
    assert "bytes" not in printed(dataclasses.replace(study, rows=tuple(lighter)), "en", 50)


def test_a_narrow_terminal_gets_fewer_columns_and_whole_words(study):
    text = printed(study, "en", 70)
    assert "fp16-static-1024" in text
    assert "✓ matches fp32" in text
    assert "…" not in text
    assert "activations" not in text
    assert "activations" in printed(study, "en", 120)
