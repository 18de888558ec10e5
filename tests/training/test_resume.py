"""Invariant 4: train 40 windows = train 20, save, load in a new process, train 20, bit for bit.

Everything that a run has: AdamW (fused), clipping, windows of two micro-batches, dropout, BatchNorm, a scheduler, an
EMA, a scale that grows and backs off, skips on both sides of the cut and a row of skips that goes across it.
"""

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep

WINDOWS, CUT = 40, 20
BAD = {3: 0, 18: 1, 19: 0, 20: 1, 27: 0, 39: 1}  # window -> the micro-batch of it whose loss is inf


class Run:
    """A run, and a record of what it did in each window."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.25), nn.Linear(16, 3, bias=False)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, fused=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 12))
        self.ema = halfstep.EMA(self.model, decay=0.9)
        self.repeats, self.overflows, self.record = [], [], []
        self.stepper = halfstep.Stepper(
            self.model,
            self.optimizer,
            policy="fp16-mixed",
            clip_norm=0.5,
            accumulate=2,
            scheduler=self.scheduler,
            ema=self.ema,
            scale=halfstep.DynamicScale(2.0**10, growth_interval=3),
            on_overflow=lambda outcome: self.overflows.append((outcome.step, outcome.culprit.name)),
            on_repeat=lambda culprit, step: self.repeats.append((step, culprit.name)),
            repeat_after=3,
        )

    def train(self, start, stop):
        outcomes = []
        for window in range(start, stop):
            source = torch.Generator().manual_seed(window)  # the data's position is the loop's own business
            for number in range(2):
                x, y = torch.randn(8, 6, generator=source), torch.randint(3, (8,), generator=source)
                with self.stepper.forward():
                    loss = F.cross_entropy(self.model(x).float(), y)
                    if BAD.get(window) == number:
                        loss = loss * float("inf")
                self.stepper.backward(loss)
                outcome = self.stepper.step()
            outcomes.append(outcome)
        self.record += [
            (o.kind, o.step, o.scale, None if o.is_skipped else (o.grad_norm, o.clip_coefficient)) for o in outcomes
        ]

    def checkpoint(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "stepper": self.stepper.state_dict(),
            "random": torch.get_rng_state(),
        }

    def load(self, checkpoint):
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.stepper.load_state_dict(checkpoint["stepper"])
        torch.set_rng_state(checkpoint["random"])

    def result(self):
        noted = {"repeats": self.repeats, "overflows": self.overflows, "record": self.record}
        return self.checkpoint() | {"noted": noted, "lr": self.optimizer.param_groups[0]["lr"]}


def resume(source, target):
    """The second half, from a file to a file."""
    run = Run()
    run.load(torch.load(source, weights_only=True))
    run.train(CUT, WINDOWS)
    torch.save(run.result(), target)


def flat(value, path=""):
    """Every leaf of nested dicts and lists by its path; tensors as dtype, shape and bytes."""
    if isinstance(value, dict):
        return {k: v for key, one in value.items() for k, v in flat(one, f"{path}/{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, one in enumerate(value) for k, v in flat(one, f"{path}/{i}").items()}
    if isinstance(value, torch.Tensor):
        return {path: (value.dtype, tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).tolist())}
    return {path: (type(value), value)}


def assert_same(mine, theirs):
    mine, theirs = flat(mine), flat(theirs)
    assert mine.keys() == theirs.keys()
    assert [path for path in mine if mine[path] != theirs[path]] == []


def whole_run():
    run = Run()
    run.train(0, WINDOWS)
    return run.result()


def rest_of(whole, cut=CUT):
    """The result of the whole run, with what a run that was resumed there can have noted: the windows after the cut."""
    noted = whole["noted"]
    rest = {
        "repeats": [one for one in noted["repeats"] if one[0] > cut],
        "overflows": [one for one in noted["overflows"] if one[0] > cut],
        "record": noted["record"][cut:],
    }
    return whole | {"noted": rest}


def test_invariant_4_a_new_process_continues_bit_for_bit(tmp_path):
    first = Run()
    first.train(0, CUT)
    torch.save(first.checkpoint(), tmp_path / "cut.pt")
    torch.rand(1000)  # whatever happens here afterwards is of no concern to the new process
    subprocess.run(
        [sys.executable, "-W", "error", __file__, tmp_path / "cut.pt", tmp_path / "end.pt"], check=True, timeout=240
    )
    resumed, whole = torch.load(tmp_path / "end.pt", weights_only=True), whole_run()
    assert_same(resumed, rest_of(whole))


@pytest.mark.parametrize("cut", [2, 17, CUT])
def test_invariant_4_on_both_paths(delay, cut):
    """In one process, so that the device's path, whose numbers are on their way when the state is asked for, is run."""
    first = Run()
    first.train(0, cut)
    checkpoint = copy.deepcopy(first.checkpoint())
    second = Run()
    second.load(checkpoint)
    second.train(cut, WINDOWS)
    assert_same(second.result(), rest_of(whole_run(), cut))


def test_the_whole_run_is_what_it_is_meant_to_be(delay):
    """Skips where they were planned, growth between them, a row of three across the cut: no empty equality."""
    whole = whole_run()
    kinds = [kind for kind, *_ in whole["noted"]["record"]]
    assert [i for i, kind in enumerate(kinds) if kind == "skipped"] == sorted(BAD)
    assert [step for step, _ in whole["noted"]["overflows"]] == [window + 1 for window in sorted(BAD)]
    assert [step for step, _ in whole["noted"]["repeats"]] == [21]
    scales = [scale for _, _, scale, _ in whole["noted"]["record"]]
    assert len(set(scales)) > 3
    assert scales[20] == scales[18] / 4
    clipped = [numbers[1] for *_, numbers in whole["noted"]["record"] if numbers]
    assert any(coefficient < 1 for coefficient in clipped)
    counts = whole["stepper"]["counts"]
    assert (counts["steps"], counts["skipped_steps"], counts["skips_in_a_row"]) == (40, 6, 1)
    assert whole["stepper"]["ema"]["num_updates"] == whole["stepper"]["schedulers"][0]["last_epoch"] == 34
    assert int(whole["optimizer"]["state"][0]["step"]) == 34
    assert whole["model"]["1.num_batches_tracked"] == 68


@pytest.mark.parametrize(
    "part", ["model", "optimizer", "random", "stepper/scale", "stepper/counts", "stepper/schedulers", "stepper/ema"]
)
def test_a_part_that_is_not_saved_is_missed(part):
    """The comparison can fail: leave any one part behind, and the runs differ."""
    first = Run()
    first.train(0, CUT)
    checkpoint = copy.deepcopy(first.checkpoint())
    first.train(CUT, WINDOWS)
    second = Run()
    fresh = copy.deepcopy(second.checkpoint())
    *outer, name = part.split("/")
    target, source = (one[outer[0]] if outer else one for one in (checkpoint, fresh))
    target[name] = source[name]
    second.load(checkpoint)
    second.train(CUT, WINDOWS)
    with pytest.raises(AssertionError):
        assert_same(second.result(), rest_of(first.result()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    resume(*sys.argv[1:])
