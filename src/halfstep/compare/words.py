"""The study's words in the reader's language.

Purpose: table, report and plots look every text up here. Method: one file per language, ``texts/*.json``, with the
same keys and the same places in braces (a test compares them). Not here: names of tasks and regimes, which are the
same in every language because one types them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from halfstep.errors import ArgumentError

LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Words:
    """Texts of one language.

    Args:
        code: ``"en"`` or ``"zh"``.
        texts: key -> text.
    """

    code: str
    texts: dict[str, str]

    def __call__(self, key: str, **values: Any) -> str:
        """The text of a key with its braces filled in."""
        text = self.texts[key]
        return text.format(**values) if values else text

    def name_of(self, kind: str, name: str) -> str:
        """A task's or regime's title; its plain name where the dictionary has none (one added by a user)."""
        return self.texts.get(f"{kind}.{name}", name)

    def source(self, source: str, facts: Mapping[str, str]) -> str:
        """The sentence on what a task read: in this language where there are facts, else around the line given."""
        return self("source", source=self("source.stdlib", **facts) if facts else source)

    def constant(self, metric_name: str) -> str:
        """What stands for having learned nothing, under a metric."""
        return self.texts.get(f"constant.{metric_name}", self.texts["constant"])


def words_in(code: str) -> Words:
    """The texts of a language.

    Args:
        code: ``"en"`` or ``"zh"``.

    Returns:
        Its words.

    Raises:
        ArgumentError: another language.

    Example:
        >>> words_in("zh")("stalls")
        '停滞'
    """
    if code not in LANGUAGES:
        raise ArgumentError(
            asked=f"the language {code!r}",
            true=f"table and report exist in {', '.join(LANGUAGES)}",
            why="there is no translation",
            fix="pass --lang en or --lang zh",
        )
    return Words(code, _texts(code))


@cache
def _texts(code: str) -> dict[str, str]:
    text = files("halfstep.compare").joinpath("texts").joinpath(f"{code}.json").read_text(encoding="utf-8")
    return dict(json.loads(text))
