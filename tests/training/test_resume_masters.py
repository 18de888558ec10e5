"""Invariant 4 with 16-bit weights: 40 windows = 20, save, load in a new process, 20, bit for bit.

As test_resume, and with what 16-bit weights add: masters, windows of three micro-batches of unequal weight summed in
fp32, norms that stay fp32 in the same optimizer. By ``torch.save`` and by torch.distributed.checkpoint (DCP), in one
process and in two under DistributedDataParallel, where each rank saves what is its own.
"""

import copy
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import halfstep
from halfstep.errors import CallOrderError

# By path: the tests are no package.
_spec = importlib.util.spec_from_file_location("resume_fp32", Path(__file__).with_name("test_resume.py"))
resume = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(resume)

WINDOWS, CUT, SIZE = resume.WINDOWS, resume.CUT, 3
BAD = {3: 0, 18: 1, 19: 2, 20: 1, 27: 0, 39: 2}  # window -> the micro-batch of it whose loss is inf
WAYS = ("torch", "dcp")
OPTIMIZERS = {  # one that skips in its kernel, one that is told
    "fp16-master": lambda groups: torch.optim.AdamW(groups, 1e-2, fused=True),
    "bf16-master": lambda groups: torch.optim.NAdam(groups, 1e-2, weight_decay=0.01),
}


class Run(resume.Run):
    """A run with masters. Under DistributedDataParallel each rank has data and random state of its own."""

    def __init__(self, policy):
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(0)
        bare = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.25), nn.Linear(16, 3, bias=False)
        )
        halfstep.cast_model(bare, policy)
        self.model = nn.parallel.DistributedDataParallel(bare) if dist.is_initialized() else bare
        torch.manual_seed(self.rank)
        groups = [{"params": [*bare[0].parameters(), *bare[1].parameters()]}, {"params": [bare[4].weight], "lr": 3e-3}]
        self.optimizer = halfstep.MasterWeights(OPTIMIZERS[policy](groups))
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 12))
        self.ema = halfstep.EMA(self.model, decay=0.9)
        self.repeats, self.overflows, self.record = [], [], []
        self.stepper = halfstep.Stepper(
            self.model,
            self.optimizer,
            policy=policy,
            clip_norm=0.5,
            accumulate=SIZE,
            scheduler=self.scheduler,
            ema=self.ema,
            scale=halfstep.DynamicScale(2.0**10, growth_interval=3) if policy == "fp16-master" else None,
            on_overflow=lambda outcome: self.overflows.append((outcome.step, outcome.culprit.name)),
            on_repeat=lambda culprit, step: self.repeats.append((step, culprit.name)),
            repeat_after=3,
        )

    def micro_batch(self, window, number):
        source = torch.Generator().manual_seed(100 * window + 10 * number + self.rank)
        x, y = torch.randn(8, 6, generator=source), torch.randint(3, (8,), generator=source)
        with self.stepper.forward():
            loss = F.cross_entropy(self.model(x).float(), y)
            if BAD.get(window) == number:
                loss = loss * float("inf")
        self.stepper.backward(loss, weight=number + 1)
        return self.stepper.step()

    def train(self, start, stop):
        outcomes = [[self.micro_batch(window, number) for number in range(SIZE)][-1] for window in range(start, stop)]
        self.note(outcomes)

    def note(self, outcomes):
        self.record += [
            (o.kind, o.step, o.scale, None if o.is_skipped else (o.grad_norm, o.clip_coefficient)) for o in outcomes
        ]

    @property
    def bare(self):
        return self.model.module if dist.is_initialized() else self.model

    def checkpoint(self):
        return super().checkpoint() | {"model": self.bare.state_dict()}

    def load(self, checkpoint):
        self.bare.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.stepper.load_state_dict(checkpoint["stepper"])
        torch.set_rng_state(checkpoint["random"])

    def save_to(self, path, way):
        if way == "torch":
            torch.save(self.checkpoint(), f"{path}-{self.rank}.pt")
            return
        state = {**self.checkpoint(), "optimizer": get_optimizer_state_dict(self.model, self.optimizer)}
        dcp.save({f"rank{self.rank}": state}, checkpoint_id=f"{path}.dcp", no_dist=not dist.is_initialized())

    def load_from(self, path, way):
        if way == "torch":
            self.load(torch.load(f"{path}-{self.rank}.pt", weights_only=True))
            return
        own = {**self.checkpoint(), "optimizer": get_optimizer_state_dict(self.model, self.optimizer)}
        state = {f"rank{self.rank}": own}
        dcp.load(state, checkpoint_id=f"{path}.dcp", no_dist=not dist.is_initialized())
        read = state[f"rank{self.rank}"]
        self.bare.load_state_dict(read["model"])
        set_optimizer_state_dict(self.model, self.optimizer, read["optimizer"])
        self.stepper.load_state_dict(read["stepper"])
        torch.set_rng_state(read["random"])


# -- one process and its successor, alone or as one of two ranks ------------------------------------------------------


def begin(folder):
    """The whole runs, and the first halves with their checkpoints."""
    for policy in OPTIMIZERS:
        whole = Run(policy)
        whole.train(0, WINDOWS)
        torch.save(whole.result(), folder / f"{policy}-whole-{whole.rank}.pt")
        first = Run(policy)
        first.train(0, CUT)
        for way in WAYS:
            first.save_to(folder / f"{policy}-{way}-cut", way)


def resume_all(folder):
    """The second halves, in another process."""
    for policy in OPTIMIZERS:
        for way in WAYS:
            run = Run(policy)
            run.load_from(folder / f"{policy}-{way}-cut", way)
            run.train(CUT, WINDOWS)
            torch.save(run.result(), folder / f"{policy}-{way}-end-{run.rank}.pt")


def in_new_processes(folder, phase, num_ranks):
    command = [sys.executable, "-W", "error", __file__, folder, phase]
    ranks = [
        subprocess.Popen([*map(str, (*command, rank, num_ranks))], stderr=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]
    for process in ranks:
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err[-3000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """``runs(num_ranks)``: the folder with what one process, or two ranks, and their successors have left."""
    done = {}

    def folder_of(num_ranks):
        if num_ranks not in done:
            folder = done[num_ranks] = tmp_path_factory.mktemp(f"ranks{num_ranks}")
            in_new_processes(folder, "begin", num_ranks)
            in_new_processes(folder, "resume", num_ranks)
        return done[num_ranks]

    return folder_of


def without_names(result):
    """DCP writes a tuple of hyperparameters as a list: not a bit of difference."""
    groups = [
        {k: list(v) if isinstance(v, tuple) else v for k, v in g.items()} for g in result["optimizer"]["param_groups"]
    ]
    return result | {"optimizer": result["optimizer"] | {"param_groups": groups}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", OPTIMIZERS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_invariant_4_new_processes_continue_bit_for_bit(runs, num_ranks, policy, way):
    folder = runs(num_ranks)
    for rank in range(num_ranks):
        whole, resumed = (
            torch.load(folder / f"{policy}-{which}-{rank}.pt", weights_only=True) for which in ("whole", f"{way}-end")
        )
        resume.assert_same(without_names(resumed), without_names(resume.rest_of(whole)))


@pytest.mark.parametrize("policy", OPTIMIZERS)
def test_ranks_agree_on_weights_and_masters_and_have_random_states_of_their_own(runs, policy):
    """The two ranks' runs are one run, on data and dropout of their own: the equality above is not one rank's twice."""
    first, second = (torch.load(runs(2) / f"{policy}-whole-{rank}.pt", weights_only=True) for rank in range(2))
    alone = torch.load(runs(1) / f"{policy}-whole-0.pt", weights_only=True)
    for part in ("optimizer", "model"):
        mine, theirs, other = (resume.flat(one[part]) for one in (first, second, alone))
        names = [name for name in mine if "running" not in name]  # statistics are each rank's
        assert [name for name in names if mine[name] != theirs[name]] == []
        assert any(mine[name] != other[name] for name in names)
    assert not torch.equal(first["random"], second["random"])
    assert first["noted"]["record"] == second["noted"]["record"]


@pytest.mark.parametrize("policy", OPTIMIZERS)
def test_the_whole_run_is_what_it_is_meant_to_be(delay, policy):
    """Skips on both sides of the cut and across it, a scale that moves, masters with more bits than their weights."""
    run = Run(policy)
    run.train(0, WINDOWS)
    whole = run.result()
    record = whole["noted"]["record"]
    assert [i for i, (kind, *_) in enumerate(record) if kind == "skipped"] == sorted(BAD)
    assert [step for step, _ in whole["noted"]["overflows"]] == [window + 1 for window in sorted(BAD)]
    assert [step for step, _ in whole["noted"]["repeats"]] == [21]
    scales = [scale for _, _, scale, _ in record]
    assert (len(set(scales)) > 3 and scales[20] == scales[18] / 4) if policy == "fp16-master" else set(scales) == {1.0}
    assert any(numbers[1] < 1 for *_, numbers in record if numbers)
    counts = whole["stepper"]["counts"]
    assert (counts["steps"], counts["skipped_steps"], counts["skips_in_a_row"]) == (40, 6, 1)
    assert whole["stepper"]["ema"]["num_updates"] == whole["stepper"]["schedulers"][0]["last_epoch"] == 34
    assert {int(state["step"]) for state in whole["optimizer"]["state"].values()} == {34}
    half = halfstep.Policy.parse(policy).param_dtype
    assert [p.dtype for p in run.bare.parameters()] == [half, half, torch.float32, torch.float32, half]
    masters = [state["master"] for state in whole["optimizer"]["state"].values() if "master" in state]
    assert len(masters) == 3
    assert all(m.dtype == torch.float32 and (m != m.to(half).float()).any() for m in masters)
    assert run.optimizer.adopted_weights == 0


@pytest.mark.parametrize("cut", [2, 17, CUT])
@pytest.mark.parametrize("policy", OPTIMIZERS)
def test_invariant_4_on_both_paths(delay, policy, cut):
    """In one process, so that the device's path, whose numbers are on their way when the state is asked for, is run."""
    first, second, whole = Run(policy), Run(policy), Run(policy)
    whole.train(0, WINDOWS)
    wanted = copy.deepcopy(whole.result())
    torch.manual_seed(0)
    first.train(0, cut)
    second.load(copy.deepcopy(first.checkpoint()))
    second.train(cut, WINDOWS)
    resume.assert_same(second.result(), resume.rest_of(wanted, cut))


def lose(name):
    def change(checkpoint, fresh):
        *outer, last = name.split("/")
        target, source = (one[outer[0]] if outer else one for one in (checkpoint, fresh))
        target[last] = source[last]

    return change


def lose_masters(checkpoint, _):
    """What a checkpoint of 16-bit weights alone knows of the masters."""
    for state in checkpoint["optimizer"]["state"].values():
        if "master" in state:
            state["master"] = state["master"].bfloat16().float()


PARTS = ("model", "optimizer", "random", "stepper/scale", "stepper/counts", "stepper/schedulers", "stepper/ema")


@pytest.mark.parametrize("loss", [*map(lose, PARTS), lose_masters], ids=[*PARTS, "the masters' lower bits"])
def test_a_part_that_is_not_saved_is_missed(loss):
    """The comparison can fail: leave any one part behind, the masters' lower bits too, and the runs differ."""
    first = Run("fp16-master")
    first.train(0, CUT)
    checkpoint = copy.deepcopy(first.checkpoint())
    first.train(CUT, WINDOWS)
    second = Run("fp16-master")
    loss(checkpoint, copy.deepcopy(second.checkpoint()))
    second.load(checkpoint)
    second.train(CUT, WINDOWS)
    with pytest.raises(AssertionError):
        resume.assert_same(second.result(), resume.rest_of(first.result()))


# -- in the middle of a window ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", OPTIMIZERS)
def test_a_state_inside_a_window_is_refused_and_the_window_goes_on(delay, policy):
    """Its fp32 sums are in no state. Asking changes nothing: not the sums, not the masters, not the rest of the run."""
    run, whole = Run(policy), Run(policy)
    torch.manual_seed(0)
    whole.train(0, 8)
    torch.manual_seed(0)
    run.train(0, 5)
    good, masters = copy.deepcopy(run.checkpoint()), resume.flat(run.optimizer.state_dict())
    outcomes = []
    for number in range(SIZE):
        outcomes.append(run.micro_batch(5, number))
        if number == SIZE - 1:
            break
        for call in (run.stepper.state_dict, lambda: run.stepper.load_state_dict(good["stepper"])):
            with pytest.raises(CallOrderError) as refusal:
                call()
            text = str(refusal.value)
            held = f"{number + 1} micro-batch{'es' * (number > 0)}"
            assert f"the window holds {held} whose gradients are in no state" in text
            assert "save after a step; at the end of an epoch call flush() first; discard() drops the window" in text
        assert resume.flat(run.optimizer.state_dict()) == masters, "the optimizer is as the last step left it"
    run.note(outcomes[-1:])
    run.train(6, 8)
    resume.assert_same(run.result(), whole.result())


@pytest.mark.parametrize("policy", OPTIMIZERS)
@pytest.mark.parametrize("way", ["flush", "discard"])
def test_the_two_ways_to_save_inside_a_window(delay, policy, way):
    """flush() steps with the true mean of a shorter window, discard() drops it: both lead to a run that resumes."""

    def begun():
        run = Run(policy)
        torch.manual_seed(0)
        run.train(0, 5)
        run.micro_batch(5, 0)
        if way == "flush":
            run.note([run.stepper.flush()])
        else:
            run.stepper.discard()
        return run

    first, second = begun(), Run(policy)
    checkpoint = copy.deepcopy(first.checkpoint())
    before = len(first.record)
    assert before == first.stepper.steps == (6 if way == "flush" else 5)
    first.train(6, 22)
    second.load(checkpoint)
    second.train(6, 22)
    resume.assert_same(second.result(), resume.rest_of(first.result(), before))
    assert {kind for kind, *_ in second.record} == {"applied", "skipped"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP's, in a single process
    folder, phase, rank, num_ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    if num_ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder / phase}", rank=rank, world_size=num_ranks)
    {"begin": begin, "resume": resume_all}[phase](folder)
    if num_ranks > 1:
        dist.destroy_process_group()
