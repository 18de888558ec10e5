"""Model, optimizer and scaler of one run, and one step of it.

Purpose: the loop body that a user would write around ``halfstep.GradScaler``. Method: fp32 weights, autocast around
the forward pass, scaled backward, ``step`` and ``update``. Where the CPU has no native arithmetic for the format,
forward and backward run inside ``halfstep.emulate``. Not here: what is recorded on the way (train.py), time
(timing.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from halfstep.compare.regimes import Regime
from halfstep.compare.tasks import Data, Task
from halfstep.emulation import emulate
from halfstep.formats import FloatFormat
from halfstep.hardware import probe
from halfstep.scaling.grad_scaler import GradScaler


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


@dataclass
class Trainer:
    """Model, optimizer and scaler of one run, and one step of it."""

    task: Task
    regime: Regime
    seed: int
    device: torch.device
    data: Data = field(init=False)
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    scaler: GradScaler = field(init=False)

    def __post_init__(self) -> None:
        # The first weights are drawn on the CPU: a seed means the same weights on every device.
        torch.manual_seed(self.seed)
        self.model = self.task.build_model().to(self.device)
        self.data = self.task.build_data().to(self.device)
        self.optimizer = self.task.build_optimizer(self.model.parameters())
        self.scaler = GradScaler(self.device.type, scale=self.regime.build_scale(), model=self.model)
        self.precision = Precision(self.regime, self.device)

    def batches(self, num_epochs: int) -> Iterator[Tensor]:
        """Indices of each batch, reshuffled at each epoch, in an order that depends on the seed alone.

        The examples that would make a shorter last batch wait for the next epoch, so that all steps are alike.
        """
        generator = torch.Generator().manual_seed(self.seed)
        num_batches = len(self.data.train_x) // self.task.batch_size
        for _ in range(num_epochs):
            order = torch.randperm(len(self.data.train_x), generator=generator)
            yield from order[: num_batches * self.task.batch_size].to(self.device).chunk(num_batches)

    def backward(self, batch: Tensor) -> None:
        """Forward and backward; leaves scaled gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.precision.arithmetic():
            with self.precision.autocast():
                loss = self.task.loss(self.model(self.data.train_x[batch]), self.data.train_y[batch])
            self.scaler.scale(loss).backward()

    def step(self) -> bool:
        """Unscale, step, update the scale; returns whether the step was applied."""
        self.scaler.step(self.optimizer)
        applied = self.scaler.was_step_applied(self.optimizer)
        self.scaler.update()
        return applied

    @torch.no_grad()
    def evaluate(self, step: int) -> CurvePoint:
        """Errors on the test data, in the regime's own arithmetic."""
        self.model.eval()
        with self.precision.arithmetic(), self.precision.autocast():
            output = self.model(self.data.test_x)
            loss = float(self.task.loss(output, self.data.test_y))
        self.model.train()
        return CurvePoint(step, loss, self.task.metric(self.model, output, self.data))

    def gradients(self) -> list[Tensor]:
        """Gradients as they are, in the order of the parameters."""
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
