"""What a task is: data, a model, and how it is judged.

Purpose: the two values that everything else here is handed. Method: a task is data (a frozen dataclass) plus functions
that build its tensors, model and optimizer. Not here: the tasks themselves (tasks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler


@dataclass(frozen=True)
class Data:
    """Training and test tensors of a task.

    Args:
        train_x: examples in dimension 0.
        train_y: their targets.
        test_x: unseen examples.
        test_y: their targets.
        truth: the weights behind the targets, where they are known.
        source: one line on what was read and which version of it, where that depends on the machine; else empty.
        source_facts: what the text ``source.stdlib`` needs to say so in other languages; empty: ``source`` is all.
    """

    train_x: Tensor  # [examples, ...]
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    truth: Tensor | None = None
    source: str = ""
    source_facts: Mapping[str, str] = field(default_factory=dict)

    def to(self, device: torch.device) -> Data:
        """The same data on another device."""
        return replace(
            self,
            train_x=self.train_x.to(device),
            train_y=self.train_y.to(device),
            test_x=self.test_x.to(device),
            test_y=self.test_y.to(device),
            truth=None if self.truth is None else self.truth.to(device),
        )


@dataclass(frozen=True)
class Task:
    """One learning problem, described by data and build functions.

    Args:
        name: what the command line calls it.
        build_data: makes the tensors; the same on every call.
        build_model: makes the model from torch's global random state, which the caller has seeded.
        build_optimizer: makes the optimizer from the parameters.
        loss: loss of (model output, target), a scalar.
        metric: error of (model, model output on the test inputs, data); *lower is better*. Verdicts judge this number.
            None: the relative error of the latest window's summed gradient, whatever it is that was summed (sums.py).
        constant_metric: the metric of the best predictor that ignores its input.
        metric_name: a key of texts/*.json.
        batch_size: examples per step.
        epochs: passes over the training data.
        quick_epochs: the same in a lecture demonstration; 0 leaves the task out there.
        in_full: whether the full study shows the task without being asked for it by name.
        regimes: names of those that it shows without being asked; empty: all that are meant for every task.
        build_scheduler: makes a learning-rate schedule from the optimizer and the number of steps of the run; it is
            stepped after every optimizer step. None keeps the learning rate as it is.
        clip_norm: the largest norm of all gradients together; longer ones are shortened to it. None does not clip.
        num_micro_batches: equal parts that the examples of a step are computed in; their gradients are summed.
        keep_fp32: patterns of modules that stay in fp32, for `halfstep.cast_model`, where a regime has masters; one
            without casts all that it can. Norms with running statistics stay anyway.
        more_regimes: names of those that it shows beside the usual ones.
        same_relative: a metric up to this share above fp32's still matches it.
        same_absolute: and so does one up to this much above it, in the metric's own unit.
        has_log_curve: whether the learning curve is drawn on a logarithmic scale.
    """

    name: str
    build_data: Callable[[], Data]
    build_model: Callable[[], nn.Module]
    build_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    metric: Callable[[nn.Module, Tensor, Data], float] | None
    constant_metric: Callable[[Data], float]
    metric_name: str
    batch_size: int
    epochs: int
    quick_epochs: int
    same_relative: float
    same_absolute: float
    has_log_curve: bool = False
    in_full: bool = True
    regimes: tuple[str, ...] = ()
    build_scheduler: Callable[[torch.optim.Optimizer, int], LRScheduler] | None = None
    clip_norm: float | None = None
    num_micro_batches: int = 1
    keep_fp32: tuple[str, ...] = ()
    more_regimes: tuple[str, ...] = ()

    def num_epochs(self, *, is_quick: bool) -> int:
        """Passes over the training data; a task without a short form is trained in full there too."""
        return self.quick_epochs or self.epochs if is_quick else self.epochs

    def is_shown(self, *, is_quick: bool) -> bool:
        """Whether the study, or its short form, shows the task without being asked for it by name."""
        return self.quick_epochs > 0 if is_quick else self.in_full


def as_plain(task: Task) -> dict[str, Any]:
    """What a reader of the JSON needs to know of a task to judge its rows."""
    keys = (
        "metric_name",
        "batch_size",
        "num_micro_batches",
        "epochs",
        "quick_epochs",
        "same_relative",
        "same_absolute",
        "clip_norm",
        "keep_fp32",
    )
    return {key: getattr(task, key) for key in keys}
