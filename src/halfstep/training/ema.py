"""An exponential moving average of a model's weights, in fp32 whatever the model's dtype.

After every applied step ``average += (1 - decay) * (weight - average)``. With decay .999 a step moves the average by a
thousandth of its distance to the weight. The neighbours of 1.0 in bf16 are 2**-8 (below) and 2**-7 (above) away, and
rounding drops whatever is under half of that: a bf16 average at 1.0 stays there until its weight is 2 to 4 away. So
averages are fp32 (fp64 of fp64 weights, complex64 of complex32); only what goes into a model is rounded.

What it does not do. fp32 stalls too, only later: within about 2**-24 / (1 - decay) of the weight, relative to it (6e-5
at .999, 6e-4 at .9999). There is no warm-up and no bias correction: the average begins at the weights that the model
has when the EMA is built. Weights of opposite sign whose difference passes 3.4e38 overflow it.

Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, SIAM J. Control Optim. 30 (1992),
for averaging at all; the exponential form is that of Tarvainen and Valpola, arXiv:1703.01780, section 2.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._compat import is_host, local_part, moved
from halfstep.errors import ArgumentError, CallOrderError, warn
from halfstep.training.ema_parts import (
    Own,
    check_model,
    check_state,
    checked_found_inf,
    copy_,
    differences,
    fsdp_modules,
    groups,
    in_our_words,
    is_decay,
    lerp_,
    loaded,
    no_model,
    paired,
    reshard,
    slots,
    state_error,
    wider,
    write,
    zipped,
)

__all__ = ["EMA"]


class EMA:
    """An exponential moving average of a model's weights, kept in fp32 and swapped in for evaluation.

    Attached to a Stepper (``Stepper(..., ema=ema)``) it is updated on applied steps only. In a loop of your own, call
    :meth:`update` after each optimizer step.

    - **Parameters that require a gradient** are averaged: 4 bytes each (8 if fp64 or complex). Tied ones once. One
      frozen later goes on being averaged. Parameters added to the model later are not averaged: build a new EMA.
    - **Frozen parameters** are not stored: their average is their value. One that is unfrozen later begins its average
      at the first update() after that, with the value it has then.
    - **Persistent buffers** (what torch's ``state_dict()`` saves: BatchNorm's statistics and counter) are copied, never
      averaged, in their own dtype. Running statistics are an average already, and averaging a variance that still
      falls from its initial 1 would lag behind twice; an integer has no average. torch's AveragedModel does not
      average them either.
    - **Non-persistent buffers** (a rotary cache, a mask) are not stored: the model's own are used.

    Sharded parameters (FSDP2, DTensor) work on each rank's own part. Names are those of the bare model, without what
    DistributedDataParallel and torch.compile put before them, so that a state fits wrapped and bare models alike. A
    deep copy or a pickle of an EMA holds its model too; copy both in one call to keep them together.

    Args:
        model: the model to follow, on any device; it may be moved or cast later, and the averages follow.
        decay: share of the old average that a step keeps, from 0 (the weights themselves) to below 1. About
            ``1 / (1 - decay)`` steps count.

    Raises:
        ArgumentError: ``model`` is no Module, has no parameter to average or one without values; ``decay`` is outside.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False).bfloat16()
        >>> ema = EMA(model, decay=0.999)
        >>> start = model.weight.item()
        >>> with torch.no_grad():
        ...     _ = model.weight.add_(1)
        >>> for _ in range(1000):
        ...     ema.update()
        >>> with ema.swapped():
        ...     moved_by = model.weight.item() - start
        >>> abs(moved_by - (1 - 0.999**1000)) < 0.01  # a 16-bit average would not have moved
        True
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        check_model(model, "EMA of")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise no_model(f"EMA of a {type(model).__name__}", "none of its parameters requires a gradient")
        self.decay = decay
        self._fsdp_modules = fsdp_modules(model)
        self._parameters = dict(slots(model, "_parameters"))
        self._buffers = dict(slots(model, "_buffers"))
        self._averages: dict[str, Tensor] = {}
        self._begin_averages()
        with torch.inference_mode(False):
            self._copies = {
                name: slot.tensor.detach().clone()
                for name, slot in self._buffers.items()
                if slot.tensor is not None and slot.is_saved
            }
        self._num_known_updates = 0
        self._num_device_updates: Tensor | None = None  # 0-dim int64: counted where found_inf is
        self._is_swapped = False

    def __repr__(self) -> str:
        return f"EMA(decay={self.decay}, {len(self._averages)} averages, {self.num_bytes} bytes)"

    def __getstate__(self) -> dict[str, Any]:
        # A copy made inside swapped() would hold the averages as the model's weights, and nothing to put back.
        self._refuse_while_swapped("a copy or pickle of the EMA")
        return self.__dict__

    @property
    def decay(self) -> float:
        """Share of the old average that a step keeps; may be set at any time."""
        return self._decay

    @decay.setter
    def decay(self, value: float) -> None:
        if not is_decay(value):
            raise ArgumentError(
                asked=f"decay={value!r}",
                true="decay is the share of the old average that a step keeps: a number from 0 to below 1",
                why="at 1 the average would never move; outside, or not finite, it would run away from the weights",
                fix="pass a number such as 0.999",
            )
        self._decay = float(value)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the averages and the copied buffers take (on this rank)."""
        return sum(local_part(t).nbytes for t in [*self._averages.values(), *self._copies.values()])

    @property
    def num_updates(self) -> int:
        """How many updates took effect; waits for the device if found_inf came from one."""
        return self._num_known_updates + (0 if self._num_device_updates is None else int(self._num_device_updates))

    @property
    def is_swapped(self) -> bool:
        """Whether the model holds the averages now, inside :meth:`swapped`."""
        return self._is_swapped

    def follows(self, model: nn.Module) -> bool:
        """Whether every parameter that is averaged is this model's, wrapped or not."""
        own = {id(parameter) for parameter in model.parameters()}
        return all(slot.tensor is None or id(slot.tensor) in own for slot in self._parameters.values())

    @torch.no_grad()
    def update(self, found_inf: Tensor | None = None) -> None:
        """Move every average one step towards its weight, and copy the buffers; or do nothing on a skipped step.

        Args:
            found_inf: 1 if the optimizer's step was skipped, else 0; one element. On an accelerator it is not read:
                the averages of a skipped step are selected there, bit for bit. None: the step was applied.

        Raises:
            ArgumentError: ``found_inf`` is no tensor of one element.
            CallOrderError: inside :meth:`swapped`, where the model holds the averages themselves.
            UnsupportedError: a parameter or buffer of the model has gone, or has another shape.
        """
        self._refuse_while_swapped("update()")
        skip = checked_found_inf(found_inf)
        if skip is not None and is_host(skip.device):
            if skip:
                return
            skip = None
        self._begin_averages()
        weight = 1.0 - self._decay
        for averages, values in groups(self._pairs()):
            lerp_(averages, values, weight, None if skip is None else moved(skip, averages[0].device))
        for copy, buffer in self._buffer_pairs():
            copy_(copy, buffer, None if skip is None else moved(skip, copy.device))
        self._count(skip)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Within this context the model holds the averages and the copied buffers; at exit its own values, bit for bit.

        Values are copied into the model's own tensors, so optimizers, DistributedDataParallel and compiled graphs keep
        theirs. Casts to fp16 and bf16 saturate. It does not switch to ``eval()``. What is done to the model inside is
        undone at exit, after an exception too.

        While it lasts it takes a copy of the averaged parameters and of all buffers in the model's dtype: 4 bytes per
        fp32 parameter, 2 per 16-bit one.

        Raises:
            CallOrderError: inside another ``swapped()``.
            UnsupportedError: a parameter or buffer of the model has gone, or has another shape.
        """
        self._refuse_while_swapped("swapped()")
        pairs, buffer_pairs = self._pairs(), self._buffer_pairs()
        own = self._own_values()  # of all, before the first is written: two may share their memory
        self._is_swapped = True
        try:
            write(pairs, buffer_pairs)
            yield
        finally:
            reshard(self._fsdp_modules)
            with torch.no_grad():
                for kept in own:
                    kept.put_back()
            torch.clear_autocast_cache()
            self._is_swapped = False

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Write what :meth:`swapped` shows into another model of the same architecture, for good.

        Averages, frozen parameters and persistent buffers, cast to that model's dtypes (saturating); all or nothing.

        Args:
            model: a model with the same names and shapes, wrapped or not, in any dtype and on any device.

        Raises:
            ArgumentError: names or shapes differ.
            UnsupportedError: one of the two models is sharded (DTensor) and the other is not.
        """
        check_model(model, "copy_to()")
        reshard([*self._fsdp_modules, *fsdp_modules(model)])
        parameters = {name: slot.tensor for name, slot in slots(model, "_parameters")}
        buffers = {name: slot.tensor for name, slot in slots(model, "_buffers") if slot.is_saved}
        mine = self._shown()
        if found := differences({**parameters, **buffers}, {**mine, **self._copies}, ()):
            raise ArgumentError(
                asked=f"copy_to() a {type(model).__name__} that does not fit",
                true=found,
                why="averages are written by name into a model of the same architecture; nothing was written",
                fix="build that model with the same code and settings as the one that the EMA follows",
            )
        write(zipped(mine, parameters), zipped(self._copies, buffers))

    def state_dict(self) -> dict[str, Any]:
        """Everything that a later run needs, in plain dicts that ``torch.load`` reads with its safe default.

        Returns:
            ``decay``, ``num_updates``, ``averages`` (name -> fp32 tensor) and ``buffers`` (name -> tensor). The tensors
            are the EMA's own, as in torch's modules: save or deep-copy them before the next update.
        """
        return {
            "decay": self._decay,
            "num_updates": self.num_updates,
            "averages": dict(self._averages),
            "buffers": dict(self._copies),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state whole, in the dtypes it was saved with or wider; or nothing of it.

        The saved decay replaces this EMA's, so that a resumed run is the same run; a warning says so if they differ.
        The state of a torch.optim.swa_utils.AveragedModel of the same model is read too; it knows no decay. Averages
        of parameters that are frozen here are taken too: they were unfrozen when the state was saved.

        Raises:
            StateError: names are missing or unexpected; a shape or kind of dtype differs; an average is not finite;
                decay or num_updates is out of range. The EMA is as it was.
            UnsupportedError: the state is sharded (DTensor) and the model is not, or the other way round.
            CallOrderError: inside :meth:`swapped`.
        """
        self._refuse_while_swapped("load_state_dict()")
        state = in_our_words(state, self._parameters, self._copies, self._decay)
        check_state(state)
        reshard(self._fsdp_modules)
        frozen = [name for name in self._parameters if name not in self._averages]
        averages = loaded(state["averages"], self._shown(), "averages", optional=frozen)
        averages = {name: average.to(wider(torch.float32, average.dtype)) for name, average in averages.items()}
        copies = loaded(state["buffers"], self._copies, "buffers")
        for name, average in averages.items():
            if not local_part(average).isfinite().all():
                raise state_error(f"averages[{name!r}] holds inf or NaN", "an average of weights is finite")
        self._averages, self._copies = averages, copies
        self._num_known_updates, self._num_device_updates = state["num_updates"], None
        if state["decay"] != self._decay:
            warn(
                f"The saved average has decay {state['decay']:g} and this EMA was built with {self._decay:g}: the "
                "saved one is used, so that a resumed run is the same run. To change it, set ema.decay after loading."
            )
        self.decay = state["decay"]

    def _refuse_while_swapped(self, asked: str) -> None:
        if self._is_swapped:
            raise CallOrderError(
                asked=f"{asked} inside swapped()",
                true="the model holds the averages now, and its own weights wait to be put back",
                why="the averages would be taken for the model's own weights",
                fix="leave the swapped() context first",
            )

    def _begin_averages(self) -> None:
        """Give every parameter that requires a gradient, and has no average yet, one that equals it."""
        reshard(self._fsdp_modules)
        for name, slot in self._parameters.items():
            value = slot.tensor
            if name not in self._averages and value is not None and value.requires_grad:
                with torch.inference_mode(False):
                    self._averages[name] = value.detach().to(wider(torch.float32, value.dtype), copy=True)

    def _shown(self) -> dict[str, Tensor | None]:
        """The average of every parameter; of a frozen one that is its value."""
        return {name: self._averages.get(name, slot.tensor) for name, slot in self._parameters.items()}

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Every average with its parameter."""
        reshard(self._fsdp_modules)
        return paired(self._averages, self._parameters)

    def _buffer_pairs(self) -> list[tuple[Tensor, Tensor]]:
        for name, slot in self._buffers.items():
            if name in self._copies and slot.tensor is not None and slot.tensor.shape != self._copies[name].shape:
                self._copies[name] = slot.tensor.detach().clone()  # it is copied whole anyway: let it grow
        return paired(self._copies, self._buffers)

    def _own_values(self) -> list[Own]:
        slots = [*(self._parameters[name] for name in self._averages), *self._buffers.values()]
        return [Own(s, s.tensor, s.tensor.detach().clone()) for s in slots if s.tensor is not None]

    def _count(self, skip: Tensor | None) -> None:
        if skip is None:
            self._num_known_updates += 1
            return
        if self._num_device_updates is None:
            self._num_device_updates = torch.zeros((), dtype=torch.int64, device=skip.device)
        self._num_device_updates += ~skip
