"""What every case shares: a parameter of given values, and a scaler on the CPU."""

import pytest
import torch
from torch import nn

import halfstep


@pytest.fixture
def param():
    """A parameter holding these values, in this dtype."""

    def make(values, dtype=torch.float32):
        return nn.Parameter(torch.tensor(values, dtype=dtype))

    return make


@pytest.fixture
def make_scaler():
    """halfstep's scaler on the CPU, built like torch's."""

    def make(**options):
        return halfstep.GradScaler("cpu", **options)

    return make


HALVES = {"fp16-master": torch.float16, "bf16-master": torch.bfloat16}


class HalfRun:
    """16-bit weights whose masters a MasterWeights holds, stepped by a GradScaler or by a Stepper: one loop for both.

    Args:
        by: ``"scaler"`` or ``"stepper"``.
        policy: ``"fp16-master"`` or ``"bf16-master"``.
        model: module with fp32 weights; they are cast, and kept whole in the masters.
        make_optimizer: from parameters to a torch optimizer.
        scale: a halfstep scale; None is what the policy asks for.
        options: of the Stepper or the GradScaler.
    """

    def __init__(self, by, policy, model, make_optimizer, *, scale=None, **options):
        self.model = model
        self.optimizer = halfstep.MasterWeights(make_optimizer(model.parameters()), HALVES[policy])
        self.dtype, self._by = HALVES[policy], by
        if by == "stepper":
            self.engine = halfstep.Stepper(model, self.optimizer, policy=policy, scale=scale, **options)
        else:
            chosen = halfstep.DynamicScale() if policy == "fp16-master" else halfstep.NoScale()
            self.engine = halfstep.GradScaler("cpu", scale=scale or chosen, model=model, **options)

    def step(self, *losses):
        """One window: each loss is a function. Returns what happened: ``"applied"``, ``"skipped"``, ..."""
        if self._by == "stepper":
            for loss_of in losses:
                with self.engine.forward():
                    loss = loss_of()
                self.engine.backward(loss)
                outcome = self.engine.step()
            return outcome.kind
        (loss_of,) = losses
        self.optimizer.zero_grad()
        self.engine.scale(loss_of()).backward()
        self.engine.step(self.optimizer)
        self.engine.update()
        return self.engine.outcome(self.optimizer).kind

    @property
    def scale(self):
        return self.engine.scale.get() if self._by == "stepper" else self.engine.get_scale()

    def master(self, parameter):
        return self.optimizer.state[parameter]["master"]

    def everything(self):
        """Weights, masters, moments, counters and buffers, copied: what a skipped step must leave alone."""
        state = {f"{i}.{k}": v for i, s in enumerate(self.optimizer.state.values()) for k, v in s.items()}
        return {name: v.detach().clone() for name, v in {**self.model.state_dict(), **state}.items()}

    def is_as(self, before):
        now = self.everything()
        return now.keys() == before.keys() and all(torch.equal(now[name], value) for name, value in before.items())


@pytest.fixture(params=HALVES)
def half_policy(request):
    """Both policies of 16-bit weights with fp32 masters, one after the other."""
    return request.param


@pytest.fixture(params=["scaler", "stepper"])
def half_run(request, half_policy):
    """A maker of runs with 16-bit weights: ``half_run(model, make_optimizer, scale=..., ...)``."""

    def make(model, make_optimizer, **options):
        return HalfRun(request.param, half_policy, model, make_optimizer, **options)

    return make


@pytest.fixture
def half_stepper(half_policy):
    """The same, by a Stepper alone."""

    def make(model, make_optimizer, **options):
        return HalfRun("stepper", half_policy, model, make_optimizer, **options)

    return make
