"""Model and optimizers of one run, and one step of it.

Purpose: the loop body that a user would write around ``halfstep.Stepper``. Method: the regime says under which policy
and scale the Stepper runs, or which mistaken loop takes its place. Where the CPU has no native arithmetic for the
format, forward and backward run inside ``halfstep.emulate``. Not here: what is recorded on the way (train.py), time
(timing.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from halfstep.casting import cast_model
from halfstep.compare.measure import storage_bytes
from halfstep.compare.mistakes import Mistake, MistakenLoop
from halfstep.compare.optimizers import build_optimizer
from halfstep.compare.regimes import Regime, Weights
from halfstep.compare.released import ReleasedLoop
from halfstep.compare.sums import ExactSums
from halfstep.compare.task import Data, Task
from halfstep.emulation import emulate
from halfstep.formats import FloatFormat
from halfstep.hardware import probe
from halfstep.kernels.gradients import gradient_of
from halfstep.optim.packed import PackedOptimizer
from halfstep.training.stepper import Stepper


@dataclass(frozen=True)
class CurvePoint:
    """Errors on the test data after a number of steps."""

    step: int
    loss: float
    metric: float


@dataclass(frozen=True)
class Precision:
    """How a regime's forward and backward pass run on a device."""

    regime: Regime
    device: torch.device

    @property
    def is_emulated(self) -> bool:
        """Whether the device is a CPU without native arithmetic for the regime's format."""
        return self.device.type == "cpu" and not _is_native_on_cpu(self.regime.format)

    def arithmetic(self) -> AbstractContextManager[object]:
        """Surrounds forward and backward."""
        return emulate(self.regime.format.name) if self.is_emulated else nullcontext()

    def autocast(self) -> AbstractContextManager[object]:
        """Surrounds forward alone."""
        dtype = self.regime.autocast_dtype
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, as in the worker processes: matrices this small lose by being shared out."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@cache
def _is_native_on_cpu(fmt: FloatFormat) -> bool:
    return fmt.name in probe("cpu").native_formats


class StepperLoop:
    """Forward, backward and step of one micro-batch on halfstep's Stepper."""

    def __init__(self, stepper: Stepper) -> None:
        self.stepper = stepper

    def backward(self, loss_of: Callable[[], Tensor]) -> None:
        """Forward and backward of one micro-batch; leaves scaled gradients, added to those of its window so far."""
        if self.stepper.num_micro_batches > 0:
            self.stepper.step()  # ends the micro-batch before
        with self.stepper.forward():
            loss = loss_of()
        self.stepper.backward(loss)

    def step(self) -> bool:
        """Clip, step, choose the next scale; returns whether the step was applied."""
        return self.stepper.step().is_applied

    def scale(self) -> float:
        """The scale of the next loss."""
        return self.stepper.scale.get()


@dataclass
class Trainer:
    """Model and optimizers of one run, and one step of it."""

    task: Task
    regime: Regime
    seed: int
    device: torch.device
    num_steps: int
    data: Data = field(init=False)
    model: nn.Module = field(init=False)
    optimizers: Sequence[torch.optim.Optimizer] = field(init=False)

    def __post_init__(self) -> None:
        self._sums: ExactSums | None = None
        self._sum_error = math.nan  # of the latest window
        # The first weights are drawn on the CPU: a seed means the same weights on every device.
        torch.manual_seed(self.seed)
        self.model = self.task.build_model().to(self.device)
        self._drawn: dict[Tensor, Tensor] = {}
        if self.has_masters:
            self._drawn.update((parameter, parameter.detach().clone()) for parameter in self.model.parameters())
        if self.regime.has_half_weights:
            kept = self.task.keep_fp32 if self.has_masters else ()
            cast_model(self.model, self.regime.policy, keep_fp32=kept)
        self.data = self.task.build_data().to(self.device)
        self.precision = Precision(self.regime, self.device)
        self._loop = self._build_loop()
        self._drawn.clear()

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer keeps masters of 16-bit weights."""
        return self.regime.weights is Weights.MASTER

    def _build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return build_optimizer(self.task, self.regime, parameters, drawn=self._drawn, seed=self.seed)

    def _build_loop(self) -> StepperLoop | MistakenLoop | ReleasedLoop:
        if self.regime.mistake is not None:
            return self._mistaken_loop(self.regime.mistake)
        optimizer = self._build_optimizer(self.model.parameters())
        self.optimizers = [optimizer]
        scheduler = self._build_scheduler(optimizer) if self.task.build_scheduler else None
        if self.regime.is_released:
            assert isinstance(optimizer, PackedOptimizer)
            return ReleasedLoop(self.model, optimizer, scheduler, self.task.clip_norm)
        stepper = Stepper(
            *(self.model, optimizer),
            policy=self.regime.policy,
            scale=self.regime.build_scale(),
            clip_norm=self.task.clip_norm,
            accumulate=self.task.num_micro_batches,
            scheduler=scheduler,
            on_overflow="ignore",
            on_repeat="ignore",
        )
        return StepperLoop(stepper)

    def _mistaken_loop(self, mistake: Mistake) -> MistakenLoop:
        loop = MistakenLoop(
            mistake,
            self.model.parameters(),
            build_optimizer=self._build_optimizer,
            build_scheduler=self._build_scheduler if self.task.build_scheduler else None,
            clip_norm=self.task.clip_norm,
            autocast=self.precision.autocast,
            num_micro_batches=self.task.num_micro_batches,
        )
        self.optimizers = loop.optimizers
        return loop

    def _build_scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        assert self.task.build_scheduler is not None
        return self.task.build_scheduler(optimizer, self.num_steps)

    def batches(self, num_epochs: int) -> Iterator[Tensor]:
        """Indices of each batch, reshuffled at each epoch, in an order that depends on the seed alone.

        The examples that would make a shorter last batch wait for the next epoch, so that all steps are alike.
        """
        generator = torch.Generator().manual_seed(self.seed)
        num_batches = len(self.data.train_x) // self.task.batch_size
        for _ in range(num_epochs):
            order = torch.randperm(len(self.data.train_x), generator=generator)
            yield from order[: num_batches * self.task.batch_size].to(self.device).chunk(num_batches)

    def watch_sums(self) -> None:
        """From now on know how far off each window's gradient is; for a task that is judged by that."""
        self._sums = ExactSums(self.model.parameters())

    def backward(self, batch: Tensor, *, around_first: AbstractContextManager[object] | None = None) -> None:
        """Forward and backward of a window; leaves scaled gradients.

        Args:
            batch: indices of its examples.
            around_first: surrounds its first micro-batch.
        """
        if self._sums is not None:
            self._sums.clear()
        first, *others = batch.chunk(self.task.num_micro_batches)
        with self.precision.arithmetic():
            with around_first or nullcontext():
                self._loop.backward(partial(self._loss_of, first))
            for part in others:
                self._loop.backward(partial(self._loss_of, part))
        if self._sums is not None:
            self._sum_error = self._sums.error()

    def _loss_of(self, batch: Tensor) -> Tensor:
        return self._loss(self.data.train_x[batch], self.data.train_y[batch])[0]

    def step(self) -> bool:
        """Step, and choose the next scale; returns whether the step was applied."""
        return self._loop.step()

    def scale(self) -> float:
        """The scale of the next loss."""
        return self._loop.scale()

    def _loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and output. A model with 16-bit weights casts its inputs itself; its loss is fp32, as under autocast."""
        output = self.model(x)
        output = output.float() if self.regime.has_half_weights else output
        return self.task.loss(output, y), output

    @torch.no_grad()
    def evaluate(self, step: int) -> CurvePoint:
        """Errors on the test data, in the regime's own arithmetic."""
        self.model.eval()
        with self.precision.arithmetic(), self.precision.autocast():
            loss, output = self._loss(self.data.test_x, self.data.test_y)
        self.model.train()
        if self.task.metric is None:
            return CurvePoint(step, float(loss), self._sum_error)
        return CurvePoint(step, float(loss), self.task.metric(self.model, output, self.data))

    def gradients(self) -> list[Tensor]:
        """Gradients as they are, in the order of the parameters; a window's fp32 sums where it has some.

        Where they are released, copies of what was there.
        """
        parameters = self.model.parameters()
        if isinstance(self._loop, ReleasedLoop):
            return [self._loop.gradients[p] for p in parameters if p in self._loop.gradients]
        return [gradient for gradient in map(gradient_of, parameters) if gradient is not None]

    def gradient_bytes(self) -> int:
        """Bytes of the gradients that are there; where they are released, the most that were at once so far."""
        return self._loop.gradient_bytes if isinstance(self._loop, ReleasedLoop) else storage_bytes(self.gradients())


def num_steps(task: Task, num_epochs: int) -> int:
    """Optimizer steps of a run."""
    return len(task.build_data().train_x) // task.batch_size * num_epochs
