"""Scaler states of other libraries: the same scale sequence after the move as without it.

The oracles are the peers' algorithms, written here as plain references from their published sources. A run is cut
anywhere, its state is moved, and both go on through the same overflows: every scale must be the same.
"""

import copy
import math
import types
import warnings

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import halfstep
from halfstep.errors import ArgumentError, HalfstepError, HalfstepWarning, StateError
from halfstep.scaling.interchange import convert, detect_format, read_scaler_state, write_scaler_state

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepWarning")
FIVE = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 3}
ROOMY = {"max_scale": 2.0**120}  # the peers have no upper bound


# -- the peers, as their sources describe them ------------------------------------------------------------------------


class Apex:
    """apex/amp/scaler.py, LossScaler.update_scale with loss_scale="dynamic"."""

    def __init__(self, window):
        self.window, self.scale, self.unskipped = window, 2.0**16, 0

    def update(self, overflow):
        if overflow:
            self.scale, self.unskipped = self.scale / 2, 0
        else:
            self.unskipped += 1
        if self.unskipped == self.window:
            self.scale, self.unskipped = min(self.scale * 2, 2.0**24), 0

    def state(self):
        return {"loss_scaler0": {"loss_scale": self.scale, "unskipped": self.unskipped}}


class Megatron:
    """megatron/core/optimizer/grad_scaler.py, DynamicGradScaler.update."""

    def __init__(self, window, hysteresis):
        self.window, self.hysteresis = window, hysteresis
        self.scale, self.growth_tracker, self.hysteresis_tracker = 2.0**10, 0, hysteresis

    def update(self, overflow):
        if overflow:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(self.scale * 0.5, 1.0)
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.window:
            self.growth_tracker, self.hysteresis_tracker, self.scale = 0, self.hysteresis, self.scale * 2

    def state(self):
        trackers = {"growth_tracker": self.growth_tracker, "hysteresis_tracker": self.hysteresis_tracker}
        return {"scale": torch.tensor([self.scale]), **trackers}

    def load(self, state):
        self.scale = state["scale"].item()
        self.growth_tracker, self.hysteresis_tracker = state["growth_tracker"], state["hysteresis_tracker"]


class DeepSpeed:
    """deepspeed/runtime/fp16: DynamicLossScaler.update_scale (not late) and FP16_Optimizer._update_scale (late)."""

    def __init__(self, window, hysteresis=1, consecutive=False, *, late=False, factor=2.0):
        self.late = late
        self.cur_scale, self.cur_iter, self.last_overflow_iter = 2.0**10, 0, -1
        self.scale_factor, self.scale_window, self.min_scale = factor, window, 1.0
        self.delayed_shift = self.cur_hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive
        self.dynamic = True

    @property
    def scale(self):
        return self.cur_scale

    def update(self, overflow):
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            since = self.cur_iter - self.last_overflow_iter - (1 if self.late else 0)
            if since > 0 and since % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def state(self):
        """What FP16_Optimizer saves; the ZeRO optimizer saves the object."""
        names = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "cur_hysteresis")
        return {"dynamic_loss_scale": True, **{name: getattr(self, name) for name in names}}


def torch_scales(state, faults):
    """torch's own kernel, on torch's own state."""
    scale, tracker = torch.tensor(state["scale"]), torch.tensor(state["_growth_tracker"], dtype=torch.int32)
    for fault in faults:
        factors = (state["growth_factor"], state["backoff_factor"], state["growth_interval"])
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(fault)), *factors)
        yield scale.item()


def peer_scales(peer, faults):
    for fault in faults:
        peer.update(fault)
        yield peer.scale


def halfstep_scales(scaler, faults):
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=0.0)
    for fault in faults:
        optimizer.zero_grad()
        scaler.scale((p * (math.inf if fault else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        yield scaler.get_scale()


def loaded(state):
    scaler = halfstep.GradScaler("cpu")
    scaler.load_state_dict(state)
    return scaler


def silently(function, *arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HalfstepWarning)
        return function(*arguments)


def run(peer, faults):
    for _ in peer_scales(peer, faults):
        pass


faults_of_any_kind = st.lists(st.booleans(), max_size=25) | st.lists(
    st.sampled_from([False, False, False, True]), max_size=25
)
windows = st.integers(1, 6)
counts = st.integers(1, 4)
moderately = settings(max_examples=40, deadline=None)


# -- reading: the move changes no scale -------------------------------------------------------------------------------


@moderately
@given(windows, faults_of_any_kind, faults_of_any_kind)
def test_a_torch_run_goes_on(window, before, after):
    start = {**FIVE, "growth_interval": window, "_growth_tracker": 0}
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=window)
    for _ in halfstep_scales(scaler, before):  # drives torch's class just as well
        pass
    state = scaler.state_dict()
    read = read_scaler_state(state)
    assert read == state
    expected = list(torch_scales(start, [*before, *after]))[len(before) :]
    assume(all(2.0**-14 <= scale <= 2.0**24 for scale in expected))  # torch has no bounds, the loading scaler has
    assert list(halfstep_scales(loaded(read), after)) == expected


@moderately
@given(windows, faults_of_any_kind, faults_of_any_kind)
def test_an_apex_run_goes_on(window, before, after):
    peer = Apex(window)
    run(peer, before)
    state = silently(read_scaler_state, peer.state(), {"growth_interval": window, "min_scale": 2.0**-100})
    assert list(halfstep_scales(loaded(state), after)) == list(peer_scales(peer, after))


@moderately
@given(windows, counts, faults_of_any_kind, faults_of_any_kind, st.booleans())
def test_a_megatron_run_goes_on(window, hysteresis, before, after, is_wrapped):
    peer = Megatron(window, hysteresis)
    run(peer, before)
    state = {"grad_scaler": peer.state(), "optimizer": {}} if is_wrapped else peer.state()
    known = {"growth_interval": window, "hysteresis": hysteresis, **ROOMY}
    state = silently(read_scaler_state, state, known)
    assert list(halfstep_scales(loaded(state), after)) == list(peer_scales(peer, after))


@moderately
@given(
    windows, counts, st.booleans(), faults_of_any_kind, faults_of_any_kind, st.sampled_from(["object", "dict", "bare"])
)
def test_a_deepspeed_zero_run_goes_on(window, hysteresis, consecutive, before, after, form):
    peer = DeepSpeed(window, hysteresis, consecutive)
    run(peer, before)
    saved = copy.copy(peer)
    state = {"loss_scaler": saved if form == "object" else vars(saved), "dynamic_loss_scale": True, "overflow": False}
    state = silently(read_scaler_state, saved if form == "bare" else state, ROOMY)
    assert list(halfstep_scales(loaded(state), after)) == list(peer_scales(peer, after))


@moderately
@given(windows, st.sampled_from([2.0, 4.0]), faults_of_any_kind, faults_of_any_kind)
def test_an_mmcv_run_goes_on(window, factor, before, after):
    peer = DeepSpeed(window, factor=factor)
    run(peer, before)
    state = {k: v for k, v in peer.state().items() if k not in ("cur_hysteresis", "dynamic_loss_scale")}
    state = silently(read_scaler_state, {**state, "mode": "dynamic"}, ROOMY)
    assert list(halfstep_scales(loaded(state), after)) == list(peer_scales(peer, after))


@moderately
@given(windows, counts, faults_of_any_kind, st.integers(0, 20), st.integers(0, 6))
def test_a_deepspeed_run_without_zero_goes_on_until_the_next_overflows(window, hysteresis, before, clean, overflows):
    """It grows one step late after an overflow, which halfstep does not imitate; until then every scale is the same."""
    peer = DeepSpeed(window, hysteresis, late=True)
    run(peer, before)
    assume(not before or not before[-1])
    assume(before)
    after = [False] * clean + [True] * overflows
    state = silently(read_scaler_state, peer.state(), {"hysteresis": hysteresis, **ROOMY})
    assert list(halfstep_scales(loaded(state), after)) == list(peer_scales(peer, after))


def test_right_after_an_overflow_late_growth_comes_one_step_sooner_and_that_is_said():
    peer = DeepSpeed(3, late=True)
    run(peer, [True])
    moved = convert(peer.state(), settings={"hysteresis": 1, **ROOMY})
    assert list(halfstep_scales(loaded(moved.state), [False] * 4)) == [512.0, 512.0, 1024.0, 1024.0]
    assert list(peer_scales(peer, [False] * 4)) == [512.0, 512.0, 512.0, 1024.0]
    assert any("grows 3 + 1 clean steps after an overflow" in note for note in moved.notes)


@moderately
@given(windows, faults_of_any_kind, st.integers(0, 20))
def test_late_growth_can_be_said_of_a_zero_scaler(window, before, clean):
    peer = DeepSpeed(window, late=True)
    run(peer, before)
    assume(before)
    assume(not before[-1])
    state = silently(read_scaler_state, copy.copy(peer), {"late_growth": True, **ROOMY})
    assert list(halfstep_scales(loaded(state), [False] * clean)) == list(peer_scales(peer, [False] * clean))


# -- writing: the other library goes on as halfstep would have --------------------------------------------------------


def run_of_halfstep(window, hysteresis, consecutive, before):
    scale = halfstep.DynamicScale(
        2.0**10, growth_interval=window, min_scale=1.0, max_scale=2.0**120, hysteresis=hysteresis,
        consecutive_hysteresis=consecutive and hysteresis > 1,
    )  # fmt: skip
    scaler = halfstep.GradScaler("cpu", scale=scale)
    for _ in halfstep_scales(scaler, before):
        pass
    return scaler


@moderately
@given(windows, faults_of_any_kind, faults_of_any_kind)
def test_torch_goes_on_with_a_halfstep_run(window, before, after):
    scaler = run_of_halfstep(window, 1, False, before)
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(silently(write_scaler_state, scaler.state_dict(), "torch"))
    assume(not any(scale == 1.0 for scale in halfstep_scales(copy.deepcopy(scaler), after)))  # torch has no floor
    assert list(halfstep_scales(other, after)) == list(halfstep_scales(scaler, after))


@moderately
@given(windows, counts, faults_of_any_kind, faults_of_any_kind)
def test_megatron_goes_on_with_a_halfstep_run(window, hysteresis, before, after):
    scaler = run_of_halfstep(window, hysteresis, False, before)
    other = Megatron(window, hysteresis)
    other.load(silently(write_scaler_state, scaler.state_dict(), "megatron"))
    assert list(peer_scales(other, after)) == list(halfstep_scales(scaler, after))


@moderately
@given(windows, counts, st.booleans(), faults_of_any_kind, faults_of_any_kind)
def test_deepspeed_zero_goes_on_with_a_halfstep_run(window, hysteresis, consecutive, before, after):
    scaler = run_of_halfstep(window, hysteresis, consecutive, before)
    other = DeepSpeed(999, 9)
    vars(other).update(silently(write_scaler_state, scaler.state_dict(), "deepspeed-zero")["loss_scaler"])
    assert list(peer_scales(other, after)) == list(halfstep_scales(scaler, after))


@moderately
@given(windows, counts, faults_of_any_kind, st.integers(0, 20), st.integers(0, 6))
def test_deepspeed_without_zero_goes_on_until_the_next_overflows(window, hysteresis, before, clean, overflows):
    scaler = run_of_halfstep(window, hysteresis, False, before)
    written = silently(write_scaler_state, scaler.state_dict(), "deepspeed")
    other = DeepSpeed(window, hysteresis, late=True)
    vars(other).update(written)
    after = [False] * clean + [True] * overflows
    assert list(peer_scales(other, after)) == list(halfstep_scales(scaler, after))


@moderately
@given(windows, counts, faults_of_any_kind, st.sampled_from(["deepspeed", "deepspeed-zero", "megatron"]))
def test_there_and_back_again(window, hysteresis, before, target):
    """What the target saves comes back, and what it does not save can be passed as settings."""
    state = run_of_halfstep(window, hysteresis, False, before).state_dict()
    written = convert(state, target).state
    known = {
        "deepspeed": {"hysteresis": hysteresis, "min_scale": 1.0},
        "deepspeed-zero": {},
        "megatron": {"growth_interval": window, "hysteresis": hysteresis, "min_scale": 1.0},
    }[target]
    back = convert(written, settings={**known, **ROOMY}).state
    same = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
    assert {key: back[key] for key in same} == {key: state[key] for key in same}
    for key in ("min_scale", "max_scale", "hysteresis", "hysteresis_tracker", "consecutive_hysteresis"):
        assert back["halfstep"][key] == state["halfstep"][key], key


# -- other kinds, notes, warnings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [
    halfstep.NoScale(),
    halfstep.StaticScale(128.0),
    halfstep.AdaptiveScale(2.0**8, margin_log2=3.0),
    halfstep.DynamicScale(12.0, 3.0, 0.25, 7, min_scale=2.0, max_scale=99.0, hysteresis=3, tolerance=0.25),
], ids=lambda scale: scale.kind)  # fmt: skip
def test_halfsteps_own_state_comes_back_whole(scale):
    scaler = halfstep.GradScaler("cpu", scale=scale)
    for _ in halfstep_scales(scaler, [False, True, False, False, True]):
        pass
    state = scaler.state_dict()
    assert state["halfstep"]["skipped_steps"] == 2
    read = convert(state)
    assert read.state == state
    assert read.notes == ()


@pytest.mark.parametrize(("state", "scale"), [
    ({"dynamic_loss_scale": False, "cur_scale": 128.0, "cur_iter": 17}, 128.0),
    ({"loss_scaler": {"cur_scale": 1.0, "dynamic": False}, "dynamic_loss_scale": False}, 1.0),
    (types.SimpleNamespace(cur_scale=4.0, dynamic=False), 4.0),
])  # fmt: skip
def test_deepspeeds_static_scale_stays_static(state, scale):
    read = convert(state)
    assert (read.state["halfstep"]["kind"], read.state["scale"], read.notes) == ("static", scale, ())
    scaler = halfstep.GradScaler("cpu", scale=halfstep.StaticScale(7.0))
    scaler.load_state_dict(read.state)
    assert list(halfstep_scales(scaler, [True, False, True])) == [scale] * 3


@pytest.mark.parametrize(("scale", "target", "expected"), [
    (halfstep.StaticScale(128.0), "deepspeed", {"dynamic_loss_scale": False, "cur_scale": 128.0, "cur_iter": 0}),
    (halfstep.NoScale(), "deepspeed-zero",
     {"loss_scaler": {"cur_scale": 1.0, "dynamic": False}, "dynamic_loss_scale": False}),
])  # fmt: skip
def test_a_scale_that_does_not_move_is_written_where_there_is_a_form_for_it(scale, target, expected):
    written = convert(halfstep.GradScaler("cpu", scale=scale).state_dict(), target)
    assert (written.state, written.notes) == (expected, ())


@pytest.mark.parametrize("scale", [halfstep.StaticScale(128.0), halfstep.AdaptiveScale(128.0)], ids=lambda s: s.kind)
def test_a_kind_that_torch_does_not_know_is_named(scale):
    written = convert(halfstep.GradScaler("cpu", scale=scale).state_dict(), "torch")
    assert written.state["scale"] == 128.0
    assert f"the {scale.kind} scale becomes a dynamic one that starts at 128" in written.notes[0]


def test_a_static_scale_has_no_megatron_state():
    with pytest.raises(StateError, match="--loss-scale 128"):
        convert(halfstep.GradScaler("cpu", scale=halfstep.StaticScale(128.0)).state_dict(), "megatron")


def test_what_is_assumed_is_said_once():
    with pytest.warns(HalfstepWarning) as caught:
        state = read_scaler_state({"scale": 256.0, "growth_tracker": 5, "hysteresis_tracker": 2})
    assert len(caught) == 1
    text = str(caught[0].message)
    for assumed in ("growth_factor=2.0", "backoff_factor=0.5", "growth_interval=1000", "hysteresis=2", "min_scale=1.0"):
        assert assumed in text
    assert state["growth_interval"] == 1000
    assert state["halfstep"]["max_scale"] == 2.0**24


def test_what_is_known_is_not_assumed():
    known = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1000, "hysteresis": 2}
    known |= {"min_scale": 1.0, "max_scale": 2.0**24}
    assert convert({"scale": 256.0, "growth_tracker": 5, "hysteresis_tracker": 2}, settings=known).notes == ()


def test_what_is_dropped_is_said():
    scale = halfstep.DynamicScale(
        64.0, 4.0, 0.5, 7, min_scale=2.0, max_scale=128.0, hysteresis=3, consecutive_hysteresis=True, tolerance=0.25
    )
    scaler = halfstep.GradScaler("cpu", scale=scale)
    list(halfstep_scales(scaler, [True]))
    everything = {
        "min_scale=2.0", "max_scale=128.0", "hysteresis=3", "consecutive_hysteresis=True", "tolerance=0.25",
        "backoff_factor=0.5", "growth_factor=4.0", "skipped_steps=1",
    }  # fmt: skip
    dropped = {
        "torch": everything - {"growth_factor=4.0", "backoff_factor=0.5"},
        "deepspeed": everything - {"growth_factor=4.0"},  # which divides by scale_factor=4 on overflow
        "deepspeed-zero": {"max_scale=128.0", "tolerance=0.25", "backoff_factor=0.5", "skipped_steps=1"},
        "megatron": everything - {"min_scale=2.0", "hysteresis=3", "backoff_factor=0.5"},
    }
    for target, names in dropped.items():
        notes = convert(scaler.state_dict(), target).notes
        listed = notes[-1].split("no place for it: ")[1].split(", ")
        assert set(listed) == names, target
    assert (
        "--loss-scale-window 7 --hysteresis 3 --min-loss-scale 2.0" in convert(scaler.state_dict(), "megatron").notes[0]
    )
    with pytest.warns(HalfstepWarning, match="dropped.*skipped_steps=1"):
        write_scaler_state(scaler.state_dict(), "torch")


def test_torch_to_torch_and_to_deepspeed_is_silent():
    assert convert(FIVE, "torch").notes == ()
    assert convert(FIVE, "deepspeed-zero").notes == ()


def test_a_scale_beyond_halfsteps_usual_bounds_is_kept():
    huge, tiny = {**FIVE, "scale": 2.0**32}, {"scale": 2.0**-20, "growth_tracker": 0, "hysteresis_tracker": 0}
    assert loaded(read_scaler_state(huge)).get_scale() == 2.0**32
    state = silently(read_scaler_state, tiny)
    assert (state["scale"], state["halfstep"]["min_scale"]) == (2.0**-20, 2.0**-20)


# -- what is refused --------------------------------------------------------------------------------------------------

MEGATRON = {"scale": 256.0, "growth_tracker": 5, "hysteresis_tracker": 2}
DEEPSPEED = DeepSpeed(5, 2).state()
APEX = {"loss_scaler0": {"loss_scale": 256.0, "unskipped": 3}}


@pytest.mark.parametrize(("state", "name"), [
    (halfstep.GradScaler("cpu").state_dict(), "halfstep"),
    (FIVE, "torch"),
    (MEGATRON, "megatron"),
    ({"grad_scaler": MEGATRON}, "megatron"),
    (DEEPSPEED, "deepspeed"),
    ({"loss_scaler": DeepSpeed(5)}, "deepspeed-zero"),
    (DeepSpeed(5), "deepspeed-zero"),
    (APEX, "apex"),
])  # fmt: skip
def test_the_format_is_found_by_its_keys(state, name):
    assert detect_format(state) == name


def without(state, key):
    return {k: v for k, v in state.items() if k != key}


bad_scales = [0.0, -1.0, math.inf, math.nan, 1e-60, 1e60, "256", None, True, torch.ones(2)]
bad_counts = [-1, 1.5, math.nan, math.inf, "3", None, True]


@pytest.mark.parametrize("state", [
    *({**FIVE, "scale": bad} for bad in bad_scales),
    *({**FIVE, "growth_factor": bad} for bad in (1.0, 0.5, math.inf, math.nan, None)),
    *({**FIVE, "backoff_factor": bad} for bad in (1.0, 0.0, -0.5, math.nan, None)),
    *({**FIVE, "growth_interval": bad} for bad in (0, *bad_counts)),
    *({**FIVE, "_growth_tracker": bad} for bad in bad_counts),
    *({**MEGATRON, "scale": bad} for bad in bad_scales),
    *({**MEGATRON, "growth_tracker": bad} for bad in bad_counts),
    *({**MEGATRON, "hysteresis_tracker": bad} for bad in (1.5, math.nan, "2", None)),
    *({**DEEPSPEED, "cur_scale": bad} for bad in bad_scales),
    *({**DEEPSPEED, "cur_iter": bad} for bad in bad_counts),
    *({**DEEPSPEED, "last_overflow_iter": bad} for bad in (-2, 0, 7, *bad_counts[1:])),  # cur_iter is 0
    *({**DEEPSPEED, "scale_window": bad} for bad in (0, *bad_counts)),
    *({**DEEPSPEED, "scale_factor": bad} for bad in (1.0, 0.5, math.nan, math.inf, None)),
    *({**DEEPSPEED, "cur_hysteresis": bad} for bad in (0, *bad_counts)),
    *(without(DEEPSPEED, key) for key in ("scale_factor", "scale_window", "last_overflow_iter")),
    {"loss_scaler": {**vars(DeepSpeed(5, 2)), "cur_hysteresis": 3}},
    {"loss_scaler": 256.0},
    *({"loss_scaler0": {**APEX["loss_scaler0"], "loss_scale": bad}} for bad in bad_scales),
    *({"loss_scaler0": {**APEX["loss_scaler0"], "unskipped": bad}} for bad in bad_counts),
    {"loss_scaler0": 256.0},
    {"loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}, "loss_scaler1": {"loss_scale": 4.0, "unskipped": 1}},
    {**FIVE, "halfstep": {"kind": "dynamic"}},
    {**FIVE, "halfstep": {"kind": "magic"}},
    {**FIVE, "halfstep": None},
    {},
    {"weights": 1},
    None,
    [FIVE],
    *(without(FIVE, key) for key in FIVE),
    *(without(MEGATRON, key) for key in ("growth_tracker", "hysteresis_tracker")),
], ids=repr)  # fmt: skip
def test_a_state_that_no_run_can_have_is_refused_whole(state):
    before = repr(state)
    with pytest.raises(StateError) as refusal:
        convert(state)
    parts = refusal.value
    assert all((parts.asked, parts.true, parts.why, parts.fix))
    assert repr(state) == before


def test_the_nearest_format_is_named():
    with pytest.raises(StateError, match="nearest is torch, without _growth_tracker"):
        detect_format(without(FIVE, "_growth_tracker"))
    with pytest.raises(StateError, match="nearest is megatron, without hysteresis_tracker"):
        detect_format(without(MEGATRON, "hysteresis_tracker"))
    with pytest.raises(StateError, match="ConstantGradScaler save no scale"):
        detect_format({})


def test_differing_apex_scalers_are_told_apart_from_equal_ones():
    one = APEX["loss_scaler0"]
    assert convert({"loss_scaler0": one, "loss_scaler1": dict(one)}).state["scale"] == 256.0
    with pytest.raises(StateError, match="one scaler has one scale"):
        convert({"loss_scaler0": one, "loss_scaler1": {**one, "unskipped": 4}})


@pytest.mark.parametrize(("state", "given", "text"), [
    (MEGATRON, {"late_growth": True}, "a megatron state leaves open: backoff_factor, growth_factor"),
    (FIVE, {"min_scale": 1.0}, "a torch state leaves open: nothing"),
    (APEX, {"hysterysis": 2}, "settings with 'hysterysis'"),
    (MEGATRON, {"hysteresis": "two"}, "hysteresis is a number"),
    ({"loss_scaler": DeepSpeed(5)}, {"min_scale": 8.0}, "the deepspeed-zero state itself says 1.0"),
    (without(DEEPSPEED, "cur_hysteresis"), {"hysteresis": 2}, "settings with 'hysteresis'"),
])  # fmt: skip
def test_a_setting_that_cannot_take_effect_is_refused(state, given, text):
    with pytest.raises(ArgumentError, match=text):
        convert(state, settings=given)


def test_an_impossible_setting_is_refused_by_what_it_would_do():
    with pytest.raises(HalfstepError, match="growth_interval"):
        convert(MEGATRON, settings={"growth_interval": 0})
    with pytest.raises(HalfstepError, match="hysteresis=1"):
        convert(MEGATRON, settings={"hysteresis": 1})


def test_an_unknown_target_is_refused():
    with pytest.raises(
        ArgumentError, match="states can be written for halfstep, torch, deepspeed, deepspeed-zero, megatron"
    ):
        convert(FIVE, "apex")


@pytest.mark.parametrize("target", ["halfstep", "torch", "deepspeed", "deepspeed-zero", "megatron"])
@pytest.mark.parametrize("state", [
    halfstep.GradScaler("cpu").state_dict(),
    FIVE,
    MEGATRON,
    {"grad_scaler": MEGATRON},
    DEEPSPEED,
    APEX,
    {"loss_scaler": vars(DeepSpeed(5, 2))},
], ids=["halfstep", "torch", "megatron", "megatron wrapped", "deepspeed", "apex", "deepspeed-zero"])  # fmt: skip
def test_every_format_is_written_as_every_other_and_the_input_stays_as_it_was(state, target):
    before = copy.deepcopy(state)
    written = convert(state, target)
    assert state == before
    assert detect_format(written.state) in (target, "torch")
    assert convert(written.state).state["scale"] == convert(state).state["scale"]
