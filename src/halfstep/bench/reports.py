"""What a measurement leaves behind: plain data and a picture, under one name.

Not here: writing them (files.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep.bench.measure import Measurement
    from halfstep.bench.steps_cells import StepMeasurement

MATMUL, STEPS = "matmul", "steps"


@dataclass(frozen=True)
class Report:
    """What is written and printed of a measurement.

    Args:
        name: of its files, without an ending.
        plain: data for JSON.
        draw: makes the picture.
    """

    name: str
    plain: dict[str, Any]
    draw: Callable[[], Any]


def of_products(measurement: Measurement, command: str) -> Report:
    """The report of `halfstep bench --matmul`.

    Args:
        measurement: from ``measure.measure``.
        command: what was typed.

    Returns:
        ``plain`` has ``schema``, ``command``, ``verdicts``, ``noise`` (a sentence, or None), and the measurement's own
        keys.
    """
    from halfstep.bench.verdict import noise_of, verdicts

    said = [{"dtype": str(v.format), "ratio": v.ratio, "text": v.text} for v in verdicts(measurement)]
    head = {"schema": "halfstep.bench.matmul/1", "command": command, "verdicts": said}
    plain = {**head, "noise": noise_of(measurement) or None, **measurement.as_dict()}

    def draw() -> Any:
        from halfstep.bench import plot

        return plot.draw(measurement)

    return Report(MATMUL, plain, draw)


def of_steps(measurement: StepMeasurement, command: str) -> Report:
    """The report of `halfstep bench --steps`.

    Args:
        measurement: from ``steps_measure.measure``.
        command: what was typed.

    Returns:
        ``plain`` has the same keys as `of_products`, with ``rules`` for what was measured.
    """
    from halfstep.bench.steps_verdict import noise_of, verdicts

    said = [{"rule": v.rule, "ratio": v.ratio, "text": v.text} for v in verdicts(measurement)]
    head = {"schema": "halfstep.bench.steps/1", "command": command, "verdicts": said}
    plain = {**head, "noise": noise_of(measurement) or None, **measurement.as_dict()}

    def draw() -> Any:
        from halfstep.bench import steps_plot

        return steps_plot.draw(measurement)

    return Report(STEPS, plain, draw)
