"""The tasks of the study: small, real, and each with a reason to be there.

Purpose: show where half precision is free, where it fails, and that the difference is a property of the gradients.

Method: a task is a value (task.py); a new one is a new entry in ``TASKS``.

- ``linear`` and ``linear-small-units`` are one regression in two systems of units. Inputs and targets of the second
  are 2**-14 times those of the first and its learning rate 2**28 times, so in exact arithmetic the two runs are the
  same run. Its gradients are 2**-28 times as large, below fp16's smallest subnormal.
- ``autoencoder`` is a deep sigmoid autoencoder on handwritten digits. A sigmoid's derivative is at most 1/4, so each
  layer shrinks the gradient; nine of them push the first layers' gradients out of fp16. ``autoencoder-tanh`` and
  ``autoencoder-relu`` differ in the activation only; ``autoencoder-short`` has two layers fewer, for a lecture.
- ``digits`` is a convolutional classifier with batch normalisation, the ordinary case. ``digits-sgd`` trains it with
  SGD on a loss that is summed over the batch, clipped: large gradients, so that steps overflow and are skipped, and an
  optimizer that takes a wrong factor at its word. It is there for the mistakes (mistakes.py).
- ``digits-finetune`` goes on with a classifier that has learned already, in small steps. It is the shortest task in
  which the storage of the weights decides, with a chart of quality against bytes (plot_quality.py).
- ``accumulation`` takes each step with the mean of 256 micro-batches of one image, and is judged by how far off that
  mean is (sums.py). ``attention`` and ``attention-naive`` are one small language model of lines with the right and with
  the usual wrong attention for 16 bits (attention.py).
- ``text`` is a small language model (text.py). Its gradients fit into fp16 without scaling; what it shows is that bf16
  cannot hold the *weights*: the smaller the learning rate, the more updates round away (``text-small-lr``).

Not here: training (train.py), precision (regimes.py), judgement beyond a task's own tolerances (verdict.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.compare import digits
from halfstep.compare.attention import LINE, PADDING, line_loss, lines, naive_attention, stable_attention
from halfstep.compare.task import Data, Task
from halfstep.compare.text import Attend, ByteGpt, byte_loss, frequency_loss, library_text, warmup_then_cosine, windows
from halfstep.formats import BF16

# 2**-14 is fp16's smallest normal (6.1e-5): inputs of this size still have most of their digits in fp16, while the
# gradient of the mean squared error, which is quadratic in the unit, is near 2**-28: fp16 rounds 2**-25 and less to 0.
SMALL_UNIT = 2.0**-14


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
    return Data(train_x, train_y, test_x, test_y, source=text.source, source_facts=text.facts)


NUM_LINE_STEPS, LINE_BATCH, NUM_TEST_LINES = 100, 32, 64


@lru_cache(maxsize=1)
def _line_data() -> Data:
    """Lines for exactly one epoch of `NUM_LINE_STEPS`."""
    text = library_text()
    train_x, train_y = lines(text.train, NUM_LINE_STEPS * LINE_BATCH)
    test_x, test_y = lines(text.held_out, NUM_TEST_LINES)
    return Data(train_x, train_y, test_x, test_y, source=text.source, source_facts=text.facts)


def _line_nats_per_byte(_: nn.Module, output: Tensor, data: Data) -> float:
    return float(line_loss(output, data.test_y))


def _line_frequency_nats_per_byte(data: Data) -> float:
    train, test = (targets[targets != PADDING] for targets in (data.train_y, data.test_y))
    return frequency_loss(train, test)


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
        loss=F.mse_loss,
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
        more_regimes=HALF_WEIGHTS,
    )


def _autoencoder_task(
    name: str, encoder: Sequence[int], activation: Callable[[], nn.Module], epochs: int, *, is_for_lecture: bool = False
) -> Task:
    return Task(
        name=name,
        build_data=digits.reconstruction_data,
        build_model=partial(digits.autoencoder, encoder, activation),
        build_optimizer=partial(torch.optim.Adam, lr=3e-3, fused=True),
        loss=F.mse_loss,
        metric=digits.squared_error,
        constant_metric=digits.mean_squared_error,
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
        build_data=digits.classification_data,
        build_model=digits.convolutional,
        build_optimizer=partial(torch.optim.Adam, lr=3e-3, fused=True),
        loss=F.cross_entropy,
        metric=digits.wrong_share,
        constant_metric=digits.commonest_wrong_share,
        metric_name="test_error",
        batch_size=128,
        epochs=8,
        quick_epochs=0,
        same_relative=0.1,
        same_absolute=0.02,  # 7 of 360 images; the binomial standard deviation at 2 % error is 0.7 points
        more_regimes=HALF_WEIGHTS,
    )


def _digits_sgd_task() -> Task:
    return replace(
        _digits_task(),
        name="digits-sgd",
        # Not fused: torch 2.13's fused SGD leaves the momentum of a skipped first step uninitialised, which a loop
        # around torch's scaler turns into NaN. That is another mistake than those shown here, and not the loop's.
        build_optimizer=partial(torch.optim.SGD, lr=2e-3, momentum=0.9),
        loss=partial(F.cross_entropy, reduction="sum"),
        build_scheduler=partial(warmup_then_cosine, num_warmup_steps=10),
        clip_norm=64.0,  # half a unit per image of the batch
        in_full=False,
        regimes=("fp32", "fp16-dynamic", *WRONG_REGIMES),
    )


def _finetune_task() -> Task:
    return Task(
        name="digits-finetune",
        build_data=digits.classification_data,
        build_model=digits.trained_perceptron,
        build_optimizer=partial(torch.optim.Adam, lr=1e-4, fused=True),
        loss=F.cross_entropy,
        metric=digits.nats_per_image,
        constant_metric=digits.nats_of_frequencies,
        metric_name="nats_per_image",
        batch_size=64,
        epochs=14,  # 308 steps
        quick_epochs=0,
        same_relative=0.0,
        # Nats, as in `text`: weights in bf16 without masters end 0.05 above fp32, all others within 0.001 of it.
        same_absolute=0.01,
        regimes=("fp32", "bf16-master", "bf16-true", "fp16-split", *STORAGES),
    )


def _no_gradient_error(_: Data) -> float:
    return 1.0  # the distance of a gradient of zero from the true one, relative to that one's length


def _accumulation_task() -> Task:
    return Task(
        name="accumulation",
        build_data=digits.classification_data,
        build_model=digits.perceptron,
        build_optimizer=partial(torch.optim.SGD, lr=0.5, momentum=0.9, fused=True),
        loss=F.cross_entropy,
        metric=None,
        constant_metric=_no_gradient_error,
        metric_name="sum_error",
        batch_size=256,
        epochs=2,
        quick_epochs=0,
        same_relative=0.0,
        # A sum is to be no worse than its terms, which bf16 rounds by up to 2**-8 of themselves.
        same_absolute=BF16.epsilon / 2,
        has_log_curve=True,
        in_full=False,
        regimes=("fp32", "fp16-master", "bf16-master", "wrong-sums-in-16-bits"),
        num_micro_batches=256,
    )


HALF_WEIGHTS = ("fp16-master", "bf16-master", "bf16-true")
STORAGES = (
    "bf16-split",
    "bf16-split8",
    "bf16-stochastic",
    "bf16-split-bf16",
    "bf16-split8-int8",
    "bf16-split8-int8-released",
)
WRONG_REGIMES = ("wrong-clip-before-unscale", "wrong-update-between", "wrong-schedule-on-skip")
TEXT_REGIMES = ("fp32", "fp16-unscaled", "fp16-dynamic", "bf16", *HALF_WEIGHTS, *STORAGES, *WRONG_REGIMES)


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
        # The weights of normalisations are near 1, where bf16's neighbours are 2**-7 apart. Read through bf16, with all
        # arithmetic in fp32, they alone cost 0.003 nats with seed 2, and all the other weights together 0.002.
        keep_fp32=("*norm*",),
        build_scheduler=warmup_then_cosine,
        clip_norm=1.0,
    )


def _attention_task(name: str, attend: Attend) -> Task:
    return Task(
        name=name,
        build_data=_line_data,
        build_model=partial(ByteGpt, 2, 32, 2, context=LINE, attend=attend),
        build_optimizer=partial(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.99), eps=1e-8, fused=True),
        loss=line_loss,
        metric=_line_nats_per_byte,
        constant_metric=_line_frequency_nats_per_byte,
        metric_name="nats_per_byte",
        batch_size=LINE_BATCH,
        epochs=1,
        quick_epochs=0,
        same_relative=0.0,
        # Nats, as in `text`: masters of both formats end within 0.002 of fp32 with the same seed.
        same_absolute=0.01,
        regimes=("fp32", "fp16-master", "bf16-master"),
        build_scheduler=partial(warmup_then_cosine, num_warmup_steps=20),
        clip_norm=1.0,
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _linear_task("linear", 1.0),
        _linear_task("linear-small-units", SMALL_UNIT),
        _autoencoder_task("autoencoder", digits.DEEP, nn.Sigmoid, 200),
        # fp32 leaves the plateau between steps 224 and 280 of 440; the deep one needs 660 of its 2200.
        _autoencoder_task("autoencoder-short", digits.SHORT, nn.Sigmoid, 40, is_for_lecture=True),
        _autoencoder_task("autoencoder-tanh", digits.DEEP, nn.Tanh, 20),
        _autoencoder_task("autoencoder-relu", digits.DEEP, nn.ReLU, 20),
        _digits_task(),
        _digits_sgd_task(),
        _finetune_task(),
        _accumulation_task(),
        _attention_task("attention", stable_attention),
        _attention_task("attention-naive", naive_attention),
        _text_task("text", 1e-3),
        _text_task("text-small-lr", 1e-4),
    )
}
