"""What a step did: a handle to numbers that are on their way, read when somebody asks.

``Stepper.step()`` never waits for the window that it enqueues. Its numbers travel to the host behind the work; the
first question that is put to its :class:`Outcome` waits for them, or the next step does, whichever comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from halfstep.scaling.culprit import Culprit

Kind = Literal["accumulating", "applied", "skipped", "no_gradients"]


class Facts(NamedTuple):
    """What the host knows about a step once it is settled.

    Args:
        kind: ``"accumulating"``: the window is not full, nothing was stepped; ``"applied"``; ``"skipped"``: a gradient
            was inf or NaN and nothing was written; ``"no_gradients"``: no parameter had one.
        step: number of the window, from 1; of an accumulating one, the number it will have.
        num_micro_batches: how many the window has or had.
        scale: what its losses were multiplied by.
        grad_norm: L2 norm of the true, unscaled gradient before clipping; inf or NaN if one of its elements is.
        clip_coefficient: what the gradient was multiplied by to respect ``clip_norm``; 1.0 if it was not clipped.
        culprit: who was at fault, for a skipped step.
        loss: mean of the micro-batches' losses, by their weights; this process's.
        stalled: share of the updates that rounded to nothing; NaN where they were not counted.
    """

    kind: Kind
    step: int
    num_micro_batches: int
    scale: float = 1.0
    grad_norm: float = math.nan
    clip_coefficient: float = 1.0
    culprit: Culprit | None = None
    loss: float = math.nan
    stalled: float = math.nan


class Outcome:
    """What one ``step()`` did. Any answer waits for the device, the first time; printing it does too.

    Example:
        >>> outcome = Outcome(Facts("applied", step=3, num_micro_batches=1, scale=1024.0, grad_norm=0.5))
        >>> outcome
        step 3 applied: gradient norm 0.5, scale 1024
        >>> outcome.metrics()
        {'applied': 1.0, 'grad_norm': 0.5, 'clip_coefficient': 1.0, 'scale': 1024.0, 'loss': nan}
    """

    __slots__ = ("_facts", "_settle")

    def __init__(self, facts: Facts | None = None, settle: Callable[[], Facts] | None = None) -> None:
        self._facts, self._settle = facts, settle

    @property
    def facts(self) -> Facts:
        """Everything at once, as a plain value."""
        if self._facts is None:
            assert self._settle is not None
            self._facts, self._settle = self._settle(), None
        return self._facts

    @property
    def kind(self) -> Kind:
        """``"accumulating"``, ``"applied"``, ``"skipped"`` or ``"no_gradients"``."""
        return self.facts.kind

    @property
    def is_applied(self) -> bool:
        """Whether the weights were updated."""
        return self.facts.kind == "applied"

    @property
    def is_skipped(self) -> bool:
        """Whether the window's gradients were not finite, so that nothing was written."""
        return self.facts.kind == "skipped"

    @property
    def step(self) -> int:
        """Number of the window, from 1, skipped ones counted."""
        return self.facts.step

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches the window has or had."""
        return self.facts.num_micro_batches

    @property
    def scale(self) -> float:
        """What the window's losses were multiplied by."""
        return self.facts.scale

    @property
    def grad_norm(self) -> float:
        """L2 norm of the true, unscaled gradient before clipping; NaN while accumulating."""
        return self.facts.grad_norm

    @property
    def loss(self) -> float:
        """Mean of the losses of the window so far, by their weights, added in fp32 or wider; of this process alone."""
        return self.facts.loss

    @property
    def stalled(self) -> float:
        """Share of the updates that rounded to nothing, if the window was counted (``stall_every``), else NaN."""
        return self.facts.stalled

    @property
    def clip_coefficient(self) -> float:
        """What the gradient was multiplied by to respect ``clip_norm``; 1.0 if it was not clipped."""
        return self.facts.clip_coefficient

    @property
    def culprit(self) -> Culprit | None:
        """The parameter nearest the loss whose gradient was inf or NaN, for a skipped step."""
        return self.facts.culprit

    def metrics(self) -> dict[str, float]:
        """Numbers for a logger; empty while accumulating, and without a norm where there was no gradient."""
        facts = self.facts
        if facts.kind == "accumulating":
            return {}
        metrics = {
            "applied": float(facts.kind == "applied"),
            "grad_norm": facts.grad_norm,
            "clip_coefficient": facts.clip_coefficient,
            "scale": facts.scale,
            "loss": facts.loss,
            **({} if math.isnan(facts.stalled) else {"stalled": facts.stalled}),
        }
        return {name: value for name, value in metrics.items() if name != "grad_norm" or facts.kind != "no_gradients"}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Outcome):
            return False
        pairs = zip(self.facts, other.facts, strict=True)
        return all(a == b or (a != a and b != b) for a, b in pairs)  # NaN is what was not counted

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        return (Outcome, (self.facts,))

    def __repr__(self) -> str:
        facts = self.facts
        if facts.kind == "accumulating":
            return f"step {facts.step} accumulating: micro-batches so far: {facts.num_micro_batches}"
        if facts.kind == "no_gradients":
            return f"step {facts.step}: no parameter had a gradient"
        if facts.kind == "skipped":
            culprit = f"the gradient of {facts.culprit}" if facts.culprit else "a gradient is inf or NaN"
            return f"step {facts.step} skipped: {culprit}; at scale {facts.scale:g}"
        clipped = f" clipped by {facts.clip_coefficient:.3g}" if facts.clip_coefficient != 1.0 else ""
        return f"step {facts.step} applied: gradient norm {facts.grad_norm:.4g}{clipped}, scale {facts.scale:g}"
