"""The tasks of the study: small, real, and each with a reason to be there.

Purpose: show where half precision is free, where it fails, and that the difference is a property of the gradients.

Method: a task is data (a frozen dataclass) plus functions that build its tensors, model and optimizer.

- ``linear`` and ``linear-small-units`` are one regression in two systems of units. Inputs and targets of the second
  are 2**-14 times those of the first and its learning rate 2**28 times, so in exact arithmetic the two runs are the
  same run. Its gradients are 2**-28 times as large, below fp16's smallest subnormal.
- ``autoencoder`` is a deep sigmoid autoencoder on handwritten digits. A sigmoid's derivative is at most 1/4, so each
  layer shrinks the gradient; nine of them push the first layers' gradients out of fp16. ``autoencoder-tanh`` and
  ``autoencoder-relu`` differ in the activation only; ``autoencoder-short`` has two layers fewer, for a lecture.
- ``digits`` is a convolutional classifier with batch normalisation, the ordinary case. ``digits-sgd`` trains it with
  SGD on a loss that is summed over the batch, clipped: large gradients, so that steps overflow and are skipped, and an
  optimizer that takes a wrong factor at its word. It is there for the mistakes (mistakes.py).
- ``text`` is a small language model (text.py). Its gradients fit into fp16 without scaling; what it shows is that bf16
  cannot hold the *weights*: the smaller the learning rate, the more updates round away (``text-small-lr``).

Not here: training (train.py), precision (regimes.py), judgement beyond a task's own tolerances (verdict.py).

Source of the data: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI; the copy inside scikit-
learn.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from halfstep.compare._extras import missing
from halfstep.compare.text import ByteGpt, byte_loss, frequency_loss, library_text, warmup_then_cosine, windows

NUM_TRAIN_DIGITS = 1437  # of 1797: four fifths, as in most published splits of this set

# 2**-14 is fp16's smallest normal (6.1e-5): inputs of this size still have most of their digits in fp16, while the
# gradient of the mean squared error, which is quadratic in the unit, is near 2**-28: fp16 rounds 2**-25 and less to 0.
SMALL_UNIT = 2.0**-14


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
    """

    train_x: Tensor  # [examples, ...]
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    truth: Tensor | None = None
    source: str = ""

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
        same_relative: a metric up to this share above fp32's still matches it.
        same_absolute: and so does one up to this much above it, in the metric's own unit.
        has_log_curve: whether the learning curve is drawn on a logarithmic scale.
    """

    name: str
    build_data: Callable[[], Data]
    build_model: Callable[[], nn.Module]
    build_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    loss: Callable[[Tensor, Tensor], Tensor]
    metric: Callable[[nn.Module, Tensor, Data], float]
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

    def num_epochs(self, *, is_quick: bool) -> int:
        """Passes over the training data; a task without a short form is trained in full there too."""
        return self.quick_epochs or self.epochs if is_quick else self.epochs

    def is_shown(self, *, is_quick: bool) -> bool:
        """Whether the study, or its short form, shows the task without being asked for it by name."""
        return self.quick_epochs > 0 if is_quick else self.in_full


# ---- the lecture's example: one linear layer ------------------------------------------------------------------------


def _linear_data(unit: float) -> Data:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    truth = draw(1, 10)
    train_x, test_x = draw(1024, 10) * unit, draw(256, 10) * unit
    return Data(train_x, train_x @ truth.T, test_x, test_x @ truth.T, truth)


def _linear_model() -> nn.Module:
    # No bias: its gradient does not carry the unit of the inputs, so one learning rate could not serve both.
    return nn.Linear(10, 1, bias=False)


def _weight_error(model: nn.Module, _: Tensor, data: Data) -> float:
    """Distance from the true weights relative to their length; no unit, unlike the loss."""
    assert data.truth is not None
    weight = next(model.parameters()).detach()
    return float((weight - data.truth).norm() / data.truth.norm())


def _zero_weight_error(_: Data) -> float:
    return 1.0  # the constant predictor of centred data is the zero weight, all of the truth away from it


# ---- handwritten digits ---------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _digits() -> tuple[Tensor, Tensor]:
    """Images [1797, 64] in 0..1 and labels [1797], in an order fixed by seed 0."""
    table = _digits_table()
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    return table[:, :64].float() / 16, table[:, 64]  # the pixels are whole numbers from 0 to 16


def _digits_table() -> Tensor:
    """Pixels and label of each image, [1797, 65], as scikit-learn's package holds them.

    The file is read past ``sklearn.datasets.load_digits``, whose import takes two seconds in each worker process.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise missing("sklearn", "the handwritten digits of scikit-learn")
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as lines:
        return torch.tensor([[round(float(number)) for number in line.split(",")] for line in lines])


def _reconstruction_data() -> Data:
    train, test = _digits()[0].tensor_split([NUM_TRAIN_DIGITS])
    return Data(train, train, test, test)


def _classification_data() -> Data:
    images, labels = _digits()
    train_x, test_x = images.reshape(-1, 1, 8, 8).tensor_split([NUM_TRAIN_DIGITS])
    train_y, test_y = labels.tensor_split([NUM_TRAIN_DIGITS])
    return Data(train_x, train_y, test_x, test_y)


DEEP = (64, 256, 128, 64, 32, 8)  # ten layers, there and back
SHORT = (64, 128, 64, 32, 8)  # eight


def _autoencoder(encoder: Sequence[int], activation: Callable[[], nn.Module]) -> nn.Module:
    """Linear layers of these sizes and back again, the activation between them, a linear output."""
    layers: list[nn.Module] = []
    for num_in, num_out in pairwise([*encoder, *reversed(encoder[:-1])]):
        linear = nn.Linear(num_in, num_out)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1])


def _convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),  # [batch, 8, 8, 8]
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),  # [batch, 16, 4, 4]
        *(nn.Flatten(), nn.Linear(16 * 4 * 4, 10)),
    )


def _squared_error(_: nn.Module, output: Tensor, data: Data) -> float:
    return float(F.mse_loss(output.float(), data.test_y))


def _mean_squared_error(data: Data) -> float:
    return float(F.mse_loss(data.train_y.mean(0).expand_as(data.test_y), data.test_y))


def _wrong_share(_: nn.Module, output: Tensor, data: Data) -> float:
    """Share of the test images that are misread; NaN outputs count as NaN, not as a guess."""
    if not bool(torch.isfinite(output).all()):
        return float("nan")
    return float((output.argmax(1) != data.test_y).float().mean())


def _commonest_wrong_share(data: Data) -> float:
    return float((data.test_y != data.train_y.mode().values).float().mean())


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def _summed_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def _mse(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


# ---- text -----------------------------------------------------------------------------------------------------------

NUM_TEXT_STEPS, TEXT_BATCH = 600, 16
# 8192 bytes. With four times as many, differences between paired runs come out the same to within 0.006 nats, and the
# forty evaluations of a run cost as much as its steps.
NUM_HELD_OUT_WINDOWS = 128


@lru_cache(maxsize=1)
def _text_data() -> Data:
    """Windows for exactly one epoch of `NUM_TEXT_STEPS`; a seed changes their order only."""
    text = library_text()
    train_x, train_y = windows(text.train, NUM_TEXT_STEPS * TEXT_BATCH)
    test_x, test_y = windows(text.held_out, NUM_HELD_OUT_WINDOWS)
    return Data(train_x, train_y, test_x, test_y, source=text.source)


def _nats_per_byte(_: nn.Module, output: Tensor, data: Data) -> float:
    return float(byte_loss(output, data.test_y))


def _frequency_nats_per_byte(data: Data) -> float:
    return frequency_loss(data.train_y, data.test_y)


# ---- the table ------------------------------------------------------------------------------------------------------


def _linear_task(name: str, unit: float) -> Task:
    return Task(
        name=name,
        build_data=partial(_linear_data, unit),
        build_model=_linear_model,
        # Curvature of the loss is 2 * unit**2 in each direction, so the learning rate carries 1 / unit**2.
        build_optimizer=partial(torch.optim.SGD, lr=0.06 / unit**2, fused=True),
        loss=_mse,
        metric=_weight_error,
        constant_metric=_zero_weight_error,
        metric_name="weight_error",
        batch_size=64,
        epochs=8,
        quick_epochs=8,
        same_relative=0.1,
        # fp32 reaches 1e-7; nobody needs weights that exact. 2 % is above the 4e-3 that bf16's inputs alone can cost.
        same_absolute=0.02,
        has_log_curve=True,
    )


def _autoencoder_task(
    name: str, encoder: Sequence[int], activation: Callable[[], nn.Module], epochs: int, *, is_for_lecture: bool = False
) -> Task:
    return Task(
        name=name,
        build_data=_reconstruction_data,
        build_model=partial(_autoencoder, encoder, activation),
        build_optimizer=partial(torch.optim.Adam, lr=3e-3, fused=True),
        loss=_mse,
        metric=_squared_error,
        constant_metric=_mean_squared_error,
        metric_name="test_mse",
        batch_size=128,
        epochs=epochs,
        quick_epochs=epochs if is_for_lecture else 0,
        in_full=not is_for_lecture,
        same_relative=0.1,  # fp16 runs of equal quality scatter by up to 7 % around fp32's with the same seed
        same_absolute=0.0,
    )


def _digits_task() -> Task:
    return Task(
        name="digits",
        build_data=_classification_data,
        build_model=_convolutional,
        build_optimizer=partial(torch.optim.Adam, lr=3e-3, fused=True),
        loss=_cross_entropy,
        metric=_wrong_share,
        constant_metric=_commonest_wrong_share,
        metric_name="test_error",
        batch_size=128,
        epochs=8,
        quick_epochs=0,
        same_relative=0.1,
        same_absolute=0.02,  # 7 of 360 images; the binomial standard deviation at 2 % error is 0.7 points
    )


def _digits_sgd_task() -> Task:
    return replace(
        _digits_task(),
        name="digits-sgd",
        # Not fused: torch 2.13's fused SGD leaves the momentum of a skipped first step uninitialised, which a loop
        # around torch's scaler turns into NaN. That is another mistake than those shown here, and not the loop's.
        build_optimizer=partial(torch.optim.SGD, lr=2e-3, momentum=0.9),
        loss=_summed_cross_entropy,
        build_scheduler=partial(warmup_then_cosine, num_warmup_steps=10),
        clip_norm=64.0,  # half a unit per image of the batch
        in_full=False,
        regimes=("fp32", "fp16-dynamic", *WRONG_REGIMES),
    )


WRONG_REGIMES = ("wrong-clip-before-unscale", "wrong-update-between", "wrong-schedule-on-skip")
TEXT_REGIMES = ("fp32", "fp16-unscaled", "fp16-dynamic", "bf16", "bf16-true", *WRONG_REGIMES)


def _text_task(name: str, lr: float) -> Task:
    return Task(
        name=name,
        build_data=_text_data,
        build_model=ByteGpt,
        # One group: torch's default decay of 0.01 takes 0.3 % off a weight in the whole run, biases included.
        build_optimizer=partial(torch.optim.AdamW, lr=lr, betas=(0.9, 0.99), eps=1e-8, fused=True),
        loss=byte_loss,
        metric=_nats_per_byte,
        constant_metric=_frequency_nats_per_byte,
        metric_name="nats_per_byte",
        batch_size=TEXT_BATCH,
        epochs=1,
        quick_epochs=0,
        same_relative=0.0,
        # Nats. Runs that differ in rounding alone (fp16 or bf16 autocast, first weights moved by 2**-22 of themselves)
        # end within 0.002 of fp32 with the same seed; weights held in bf16 cost 0.05 and more.
        same_absolute=0.01,
        in_full=False,  # half a minute to two minutes a run
        regimes=TEXT_REGIMES,
        build_scheduler=warmup_then_cosine,
        clip_norm=1.0,
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _linear_task("linear", 1.0),
        _linear_task("linear-small-units", SMALL_UNIT),
        _autoencoder_task("autoencoder", DEEP, nn.Sigmoid, 200),
        # fp32 leaves the plateau between steps 224 and 280 of 440; the deep one needs 660 of its 2200.
        _autoencoder_task("autoencoder-short", SHORT, nn.Sigmoid, 40, is_for_lecture=True),
        _autoencoder_task("autoencoder-tanh", DEEP, nn.Tanh, 20),
        _autoencoder_task("autoencoder-relu", DEEP, nn.ReLU, 20),
        _digits_task(),
        _digits_sgd_task(),
        _text_task("text", 1e-3),
        _text_task("text-small-lr", 1e-4),
    )
}


def as_plain(task: Task) -> dict[str, Any]:
    """The numbers of a task that a reader of the JSON needs to judge its rows."""
    keys = ("metric_name", "batch_size", "epochs", "quick_epochs", "same_relative", "same_absolute", "clip_norm")
    return {key: getattr(task, key) for key in keys}
