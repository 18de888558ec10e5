"""The pages are run: Python blocks and their output, docstrings' examples, links, commands, files, quoted numbers.

A page is Markdown with HTML comments that say what a block does, and that a reader of the rendered page never sees:

    <!-- warns: SkippedStepWarning -->   above a ```python block: it issues this warning (several: comma), and no other
    <!-- raises: ValueError -->          above a ```python block: it ends in this error
    <!-- output -->                      above a ```text block: what the block before it prints, then its warnings and
                                         its error, word for word; white space does not count
    <!-- output: rtol 0.05 -->           the same, but numbers may differ by this share: other CPUs add in other orders
    <!-- = EXPRESSION -->20              the number that follows equals this expression over halfstep's modules
    <!-- defaults: halfstep.emulate -->  above a table of `name` | `default`: all defaults of a signature, and no others

Blocks of one page share one namespace and one working folder, and run in order.

A page under docs/zh is a page under docs in Chinese: the same blocks with the same code, so that the two cannot drift
apart. On docs/lecture-map.md the last cells of the tables are run too: `a` → `b` promises that str(a) is b.
"""

import ast
import builtins
import contextlib
import doctest
import functools
import importlib
import inspect
import io
import itertools
import math
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import halfstep
import halfstep.errors

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [path for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS) if path.exists()]
MODULES = [
    module.name for module in pkgutil.walk_packages(halfstep.__path__, "halfstep.") if "__main__" not in module.name
]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))

_COMMENT = re.compile(r"<!-- (warns|raises|output|defaults)(?:: (.*?))? -->$")
_NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?|\bnan\b|\binf\b")


class PageError(AssertionError):
    """A page says something that is not so."""


@dataclass(frozen=True)
class Block:
    """A fenced block, its place, and what the comments above it ask for."""

    where: str
    line: int
    language: str
    text: str
    asked: dict[str, str] = field(default_factory=dict)


def blocks_of(text: str, page: str) -> list[Block]:
    found: list[Block] = []
    asked: dict[str, str] = {}
    lines = enumerate(text.splitlines(), 1)
    for number, line in lines:
        if fence := re.match(r"( *)```(\w*)", line):
            body = []
            for _, inner in lines:
                if inner.startswith(fence[1] + "```"):
                    break
                body.append(inner)
            else:
                raise PageError(f"{page}:{number}: this block is never closed")
            code = textwrap.dedent("\n".join(body)) + "\n"
            found.append(Block(f"{page}:{number}", number, fence[2], code, asked))
            asked = {}
        elif comment := _COMMENT.match(line.strip()):
            asked = {**asked, comment[1]: comment[2] or ""}
        elif line.strip():
            asked = {}
    return found


# -- running a page --------------------------------------------------------------------------------------------------


def run_page(path: Path, *, must_show_output: bool) -> None:
    blocks = blocks_of(path.read_text(encoding="utf-8"), path.name)
    namespace: dict[str, object] = {"__name__": path.stem}
    for block, following in itertools.zip_longest(blocks, blocks[1:]):
        if block.language != "python":
            if "output" in block.asked and block.language != "text":
                raise PageError(f"{block.where}: output is shown in a ```text block")
            continue
        printed, said = run_block(block, path, namespace)
        if following is not None and "output" in following.asked:
            compare_output(following, printed + said)
        elif printed and must_show_output:
            raise PageError(f"{block.where}: it prints, and no output is shown:\n{printed}")


def run_block(block: Block, path: Path, namespace: dict[str, object]) -> tuple[str, str]:
    """What it printed, and the texts of its expected warnings and error."""
    code = compile("\n" * block.line + block.text, str(path), "exec", dont_inherit=True)
    error: BaseException | None = None
    with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            exec(code, namespace)
        except Exception as raised:
            error = raised
    expected = [_class_named(name) for name in block.asked.get("warns", "").split(", ") if name]
    for warning in caught:
        if not any(issubclass(warning.category, cls) for cls in expected):
            raise PageError(f"{block.where}: unexpected {warning.category.__name__}: {warning.message}")
    for cls in expected:
        if not any(issubclass(warning.category, cls) for warning in caught):
            raise PageError(f"{block.where}: {cls.__name__} was not issued")
    texts = [f"{warning.category.__name__}: {warning.message}" for warning in caught]
    if "raises" in block.asked:
        if not isinstance(error, _class_named(block.asked["raises"])):
            raise PageError(f"{block.where}: {block.asked['raises']} was not raised, but {error!r}")
        texts.append(f"{type(error).__name__}: {error}")
    elif error is not None:
        raise PageError(f"{block.where}: {''.join(traceback.format_exception(error))}")
    return printed.getvalue(), "\n".join(texts)


def _class_named(name: str) -> type:
    return getattr(halfstep.errors, name, None) or getattr(builtins, name)


def compare_output(shown: Block, printed: str) -> None:
    rtol = float((shown.asked["output"] or "rtol 0").removeprefix("rtol"))
    if not _same(shown.text, printed, rtol):
        raise PageError(f"{shown.where}: the page shows\n{shown.text}\nbut the block prints\n{printed}")


def _same(shown: str, printed: str, rtol: float) -> bool:
    if rtol == 0:
        return shown.split() == printed.split()
    numbers = [[float(n) for n in _NUMBER.findall(text)] for text in (shown, printed)]
    words = [" ".join(_NUMBER.sub("#", text).split()) for text in (shown, printed)]
    close = (math.isclose(a, b, rel_tol=rtol) or a != a != b for a, b in zip(*numbers, strict=False))
    return words[0] == words[1] and len(numbers[0]) == len(numbers[1]) and all(close)


@every_page
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(20261129)  # not what the suite seeds with: a page that needs a seed must set its own
    run_page(page, must_show_output=page.name != "README.md")


FAULTS = [
    ("```python\n1 / 0\n```", "ZeroDivisionError"),
    ("```python\nx = 1\n```\nlater\n```python\ny = z\n```", "name 'z' is not defined"),
    ("```python\nprint('one')\n```", "no output is shown"),
    ("```python\nprint('one')\n```\n<!-- output -->\n```text\ntwo\n```", "the page shows"),
    ("```python\nprint(1.0)\n```\n<!-- output: rtol 0.05 -->\n```text\n1.1\n```", "the page shows"),
    ("```python\nprint('a', 1.0)\n```\n<!-- output: rtol 0.5 -->\n```text\nb 1.0\n```", "the page shows"),
    ("```python\nimport warnings; warnings.warn('oh')\n```", "unexpected UserWarning: oh"),
    ("<!-- warns: UserWarning -->\n```python\nx = 1\n```", "UserWarning was not issued"),
    ("<!-- raises: ValueError -->\n```python\nx = 1\n```", "ValueError was not raised"),
    ("<!-- raises: ValueError -->\n```python\n1 / 0\n```", "but ZeroDivisionError"),
    ("<!-- raises: ValueError -->\n```python\nint('x')\n```\n<!-- output -->\n```text\nfine\n```", "invalid literal"),
    ("```python\nx = 1\n", "never closed"),
]


@pytest.mark.parametrize(("text", "words"), FAULTS)
def test_the_runner_can_fail(text, words, tmp_path):
    path = tmp_path / "page.md"
    path.write_text(text)
    with pytest.raises(PageError, match=re.escape(words)):
        run_page(path, must_show_output=True)


def test_the_runner_accepts_what_is_so(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(
        "<!-- warns: UserWarning -->\n```python\nimport warnings; warnings.warn('oh'); print(1.02, 'a   b')\n```\n\n"
        "<!-- output: rtol 0.05 -->\n```text\n1.0 a b\nUserWarning: oh\n```\n"
        "- in a list:\n  <!-- raises: ValueError -->\n  ```python\n  int('x')\n  ```\n"
        "```bash\nnot python\n```\n"
    )
    run_page(path, must_show_output=True)


# -- docstrings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    report = io.StringIO()
    with contextlib.redirect_stdout(report):
        failed = doctest.testmod(module).failed
    assert failed == 0, report.getvalue()


PUBLIC_WITH_EXAMPLES = (
    "GradScaler",
    "Stepper",
    "EMA",
    "Outcome",
    "DynamicScale",
    "AdaptiveScale",
    "Policy",
    "FloatFormat",
    "choose_dtype",
    "emulate",
)


@pytest.mark.parametrize("name", PUBLIC_WITH_EXAMPLES)
def test_there_are_docstring_examples(name):
    public = getattr(halfstep, name)
    found = doctest.DocTestFinder().find(public, module=importlib.import_module(public.__module__))
    assert any(test.examples for test in found)


# -- two languages, and lines in tables -------------------------------------------------------------------------------

TRANSLATED = sorted((ROOT / "docs" / "zh").rglob("*.md"))
MAPS = [page for page in DOCS if page.name == "lecture-map.md"]


def program_of(block: Block) -> str:
    """What a block does: Python without comments and docstrings, shell without comments, text word for word."""
    if block.language == "bash":
        return re.sub(r" *#.*", "", block.text)
    if block.language != "python":
        return block.text
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


def lines_of(text: str) -> list[tuple[str, str]]:
    """Code that ends a row of a table, and the value that an arrow behind it promises, or nothing."""
    return re.findall(r"\| `([^`\n]+)`(?: → `([^`\n]+)`)? \|$", prose_of(text), flags=re.MULTILINE)


def drift(text: str, other: str) -> list[str]:
    """Where two pages do not have the same blocks, markers and lines."""
    drifted = []
    for ours, theirs in itertools.zip_longest(blocks_of(text, "page"), blocks_of(other, "other")):
        if ours is None or theirs is None:
            drifted.append(f"{(ours or theirs).where}: a block that the other page does not have")
        elif (ours.language, ours.asked, program_of(ours)) != (theirs.language, theirs.asked, program_of(theirs)):
            drifted.append(f"{ours.where}: not what {theirs.where} is")
    both = itertools.zip_longest(lines_of(text), lines_of(other))
    return drifted + [f"{ours} in a table, not {theirs}" for ours, theirs in both if ours != theirs]


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda path: path.name)
def test_both_languages_have_the_same_code(page):
    original = ROOT / "docs" / page.relative_to(ROOT / "docs" / "zh")
    text, other = (path.read_text(encoding="utf-8") for path in (page, original))
    assert drift(text, other) == []
    assert f"[English]({os.path.relpath(original, page.parent)})" in text
    assert f"[中文]({os.path.relpath(page, original.parent)})" in other


def test_there_are_translations():
    assert {"quickstart.md", "lecture-notes-what-to-correct.md", "lecture-map.md"} <= {p.name for p in TRANSLATED}


def test_the_language_test_can_fail():
    english = (
        'A.\n```python\ndef f():\n    """One."""\n    return 1  # one\n```\n<!-- output -->\n```text\n1\n```\n'
        "```bash\nhalfstep formats  # limits\n```\n| a | `f()` → `1` |\n"
    )
    chinese = english.replace("A.", "甲。").replace("One", "一").replace("# one", "# 一").replace("# limits", "# 界限")
    assert chinese != english
    assert drift(chinese, english) == []
    for wrong in (
        chinese.replace("return 1", "return 2"),
        chinese.replace("text\n1", "text\n2"),
        chinese.replace("halfstep formats", "halfstep probe"),
        chinese.replace("<!-- output -->", "<!-- output: rtol 0.1 -->"),
        chinese.replace("`f()`", "`g()`"),
        chinese + "```python\nf()\n```\n",
    ):
        assert len(drift(wrong, english)) == 1
        assert len(drift(english, wrong)) == 1


def wrong_lines(text: str, page: Path) -> list[str]:
    """Lines in tables that do not run, or whose value is not the promised one; each after the page's first block."""
    first = next(block for block in blocks_of(text, page.name) if block.language == "python")
    wrong = []
    for line, promised in lines_of(text):
        if line.startswith("halfstep "):
            continue  # a command: looked up with all the others below
        names: dict[str, object] = {}
        run_block(first, page, names)
        try:
            value = str(eval(line, names))
        except Exception as error:
            wrong.append(f"{line}: {error!r}")
            continue
        if promised not in ("", value):
            wrong.append(f"{line} is {value}, not {promised}")
    return wrong


@pytest.mark.parametrize("page", MAPS, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_in_tables_run(page):
    text = page.read_text(encoding="utf-8")
    assert len(lines_of(text)) > 30
    assert wrong_lines(text, page) == []


def test_the_line_test_can_fail():
    page = "```python\nx = [1]\n```\n| a | `x.pop()` → `1` |\n| b | `x.pop()` → `2` |\n| c | `y` |\n| d | `x` |\n"
    wrong = wrong_lines(page, ROOT)
    assert [line.partition(":")[0] for line in wrong] == ["x.pop() is 1, not 2", "y"]


# -- links, numbers, commands ----------------------------------------------------------------------------------------


def prose_of(text: str) -> str:
    """The page without its fenced blocks, which hold no links."""
    return re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors_of(text: str) -> set[str]:
    """GitHub's anchors of the headings."""
    titles = re.findall(r"^#+ +(.*?) *$", prose_of(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue  # nothing is fetched in a test
        name, _, anchor = target.partition("#")
        path = page if not name else (page.parent / name).resolve()
        if not path.exists() or (anchor and anchor not in anchors_of(path.read_text(encoding="utf-8"))):
            broken.append(target)
    return broken


@every_page
def test_links_resolve(page):
    assert broken_links(page) == []


def test_every_page_is_listed_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = {(ROOT / "docs" / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)\)", index)}
    assert {page for page in DOCS if page.name != "index.md"} <= listed


def test_the_link_test_can_fail(tmp_path):
    (tmp_path / "other.md").write_text("# A title, with: signs\n## “V100” 用 bf16，训练\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#v100-用-bf16训练) [b](other.md#v100-用-bf16-训练)\n", encoding="utf-8")
    assert broken_links(page) == ["other.md#v100-用-bf16-训练"]
    page.write_text("[a](other.md#a-title-with-signs) [b](gone.md) [c](#nowhere) [d](other.md#gone) [e](https://x.y)\n")
    assert broken_links(page) == ["gone.md", "#nowhere", "other.md#gone"]


def wrong_numbers(text: str) -> list[str]:
    """Quoted numbers that differ from the source, and tables of defaults that differ from a signature."""
    for name in MODULES:
        importlib.import_module(name)
    quoted = re.findall(r"<!-- = (.+?) -->`?([-+*./\w]*\w)", text)
    wrong = [] if len(quoted) == text.count("<!-- =") else ["a comment that no number follows"]
    for expression, literal in quoted:
        if eval(literal) != eval(expression, {"halfstep": halfstep, "torch": torch}):
            wrong.append(f"{literal} is not {expression}")
    for name, table in re.findall(r"<!-- defaults: ([\w.]+) -->\n((?:\|.*\n)+)", text):
        parameters = inspect.signature(pkgutil.resolve_name(name)).parameters.values()
        true = {p.name: p.default for p in parameters if p.default is not p.empty}
        said = {row[0]: eval(row[1]) for row in re.findall(r"^\| `(\w+)` \| `(.*?)` \|", table, flags=re.MULTILINE)}
        if true != said:
            wrong.append(f"defaults of {name}: {sorted(true.items() ^ said.items(), key=str)}")
    return wrong


@every_page
def test_quoted_numbers_are_the_sources(page):
    assert wrong_numbers(page.read_text(encoding="utf-8")) == []


def test_the_number_test_can_fail():
    right = (
        "at most <!-- = halfstep.formats.FP16.largest -->65504, as <!-- = halfstep.formats.FP16.bits -->`2**4` bits.\n"
    )
    assert wrong_numbers(right) == []
    assert len(wrong_numbers(right.replace("65504", "65536").replace("2**4", "17"))) == 2
    assert len(wrong_numbers(right.replace("65504", "\n(65504)"))) == 1
    table = "<!-- defaults: halfstep.emulate -->\n| argument | default |\n|---|---|\n| `format` | `'fp16'` |\n"
    assert wrong_numbers(table) == []
    assert wrong_numbers(table.replace("fp16", "bf16")) != []
    assert wrong_numbers(table.replace("| `format` | `'fp16'` |\n", "")) != []


def code_of(text: str) -> list[str]:
    """Code spans, and the lines of shell blocks: where commands and files are named."""
    shell = [block.text for block in blocks_of(text, "page") if block.language in ("bash", "sh", "console")]
    lines = [line.partition("#")[0].strip(" $") for line in "".join(shell).splitlines()]
    return re.findall(r"`([^`\n]+)`", prose_of(text)) + lines


def wrong_versions(text: str) -> list[str]:
    """Versions and extras that are not pyproject's."""
    project = (ROOT / "pyproject.toml").read_text()
    wrong = []
    for name, true in (("torch", r'"torch>=([\d.]+)"'), ("Python", r'requires-python = ">=([\d.]+)"')):
        said = re.findall(rf"(?<![A-Za-z]){name} ?>= ?(\d+\.\d+)", text)
        wrong += [f"{name} >= {version}" for version in said if [version] != re.findall(true, project)]
    (extras,) = re.findall(r"optional-dependencies\]\n(.*?)\n\n", project, flags=re.DOTALL)
    named = re.findall(r"(?:halfstep|\.)\[(\w+)\]", "\n".join(code_of(text)))
    return wrong + [f"[{extra}]" for extra in named if not re.search(rf"^{extra} =", extras, flags=re.MULTILINE)]


@every_page
def test_versions_are_the_projects(page):
    assert wrong_versions(page.read_text(encoding="utf-8")) == []


def test_the_version_test_can_fail():
    assert wrong_versions("需要torch >= 1.0") == ["torch >= 1.0"]  # no space, as Chinese allows
    assert wrong_versions("torch >= 1.0, Python>=3.2, `pip install halfstep[gold]`") == [
        "torch >= 1.0", "Python >= 3.2", "[gold]",
    ]  # fmt: skip


@functools.cache
def help_of(command: str) -> str:
    """What a subcommand says about its options; empty if there is no such command."""
    environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
    arguments = [sys.executable, "-m", "halfstep", command, "--help"]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment)
    return done.stdout if done.returncode == 0 else ""


def unknown_names(text: str) -> list[str]:
    """Commands, options, make targets and files that do not exist."""
    unknown = []
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for code in code_of(text):
        program, _, rest = code.partition(" ")
        command, *arguments = rest.split() or [""]
        if program == "halfstep" and command:
            options = [word for word in arguments if word.startswith("--")]
            is_known = help_of(command) and all(option in help_of(command) for option in options)
        elif program == "make" and command:
            is_known = command in targets
        elif re.fullmatch(r"[\w./-]+\.(py|md|toml)|\.?\w[\w/-]+/\w*", code):
            is_known = any((ROOT / folder / code).exists() for folder in FOLDERS)
        else:
            is_known = True
        unknown += [] if is_known else [code]
    return unknown


FOLDERS = (".", "src/halfstep", "src/halfstep/scaling", "src/halfstep/compare")


@every_page
def test_commands_and_files_exist(page):
    assert unknown_names(page.read_text(encoding="utf-8")) == []


def test_the_name_test_can_fail():
    right = "`halfstep probe --json`, `halfstep`, `.ci/run`, `scaling/`, `skips.py`, `make test ARGS=x`, `a/b`\n"
    assert unknown_names(right.replace(", `a/b`", "")) == []
    wrong = "`halfstep explode` `gone/`, `docs/gone.md`\n```bash\nhalfstep formats --loud  # why\nmake gold\n```\n"
    assert unknown_names(wrong) == ["halfstep explode", "gone/", "docs/gone.md", "halfstep formats --loud", "make gold"]
