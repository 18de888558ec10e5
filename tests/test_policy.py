"""Policies: names from everywhere, the round trip through strings, and what they refuse to be."""

import copy
import dataclasses
import doctest
import pickle
import warnings
from collections import OrderedDict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep import policy as policy_module
from halfstep.errors import ArgumentError, CallOrderError, HalfstepError, PrecisionWarning, UnsupportedError
from halfstep.hardware import Hardware
from halfstep.policy import Master, Moments, Policy, Scaling
from halfstep.tf32 import _Switches

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
PRESETS = ["fp32", "tf32", "fp16-mixed", "bf16-mixed", "fp16-master", "bf16-master", "fp16-true", "bf16-true"]
H200 = Hardware("cuda", "NVIDIA H200", capability=(9, 0))
V100 = Hardware("cuda", "Tesla V100-SXM2-16GB", capability=(7, 0))
GTX_1080 = Hardware("cuda", "GeForce GTX 1080", capability=(6, 1))


def parse(text, **options):
    """Parse, whatever it warns of: the warnings have tests of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        return Policy.parse(text, **options)


# --- presets


@pytest.mark.parametrize(
    ("name", "param", "compute", "autocast", "master", "scaling"),
    [
        ("fp32", FP32, FP32, None, Master.NONE, Scaling.NONE),
        ("tf32", FP32, FP32, None, Master.NONE, Scaling.NONE),
        ("fp16-mixed", FP32, FP16, FP16, Master.NONE, Scaling.DYNAMIC),
        ("bf16-mixed", FP32, BF16, BF16, Master.NONE, Scaling.NONE),
        ("fp16-master", FP16, FP16, None, Master.FP32, Scaling.DYNAMIC),
        ("bf16-master", BF16, BF16, None, Master.FP32, Scaling.NONE),
        ("fp16-true", FP16, FP16, None, Master.NONE, Scaling.DYNAMIC),
        ("bf16-true", BF16, BF16, None, Master.NONE, Scaling.NONE),
    ],
)
def test_presets(name, param, compute, autocast, master, scaling):
    policy = parse(name)
    assert (policy.param_dtype, policy.compute_dtype, policy.autocast_dtype) == (param, compute, autocast)
    assert (policy.master, policy.scaling, policy.moments) == (master, scaling, Moments.FP32)
    assert policy.needs_scaling == (scaling is Scaling.DYNAMIC)
    assert policy.is_mixed == (autocast is not None)
    assert policy.tf32 == (name == "tf32")
    assert str(policy) == name
    assert policy.reason == f"{name}: chosen by name"


@pytest.mark.parametrize(
    ("alias", "preset"),
    [
        # Lightning
        ("16-mixed", "fp16-mixed"), ("bf16-mixed", "bf16-mixed"), ("16-true", "fp16-true"), ("bf16-true", "bf16-true"),
        ("32-true", "fp32"), ("32", "fp32"), ("16", "fp16-mixed"),
        # Accelerate
        ("no", "fp32"), ("fp16", "fp16-mixed"), ("bf16", "bf16-mixed"),
        # Composer
        ("amp_fp16", "fp16-mixed"), ("amp_bf16", "bf16-mixed"), ("fp32", "fp32"),
        # Keras
        ("mixed_float16", "fp16-mixed"), ("mixed_bfloat16", "bf16-mixed"), ("float32", "fp32"),
        # Apex
        ("O0", "fp32"), ("O1", "fp16-mixed"), ("O2", "fp16-master"), ("O3", "fp16-true"),
        # jmp
        ("p=f32,c=bf16", "bf16-mixed"), ("p=f32,c=f16", "fp16-mixed"), ("p=f32,c=f32", "fp32"),
        ("p=f32,c=bf16,o=f32", "bf16-mixed,output=fp32"), ("params=float32,compute=bfloat16", "bf16-mixed"),
        ("params=full,compute=half,output=full,scaling=none", "fp16-mixed,output=fp32,scaling=none"),
        ("p=bf16,c=bf16", "bf16-true"), ("p=bf16", "bf16-true"), ("p=bf16,master=split", "bf16-master,master=split"),
        # dtypes
        (FP16, "fp16-mixed"), (BF16, "bf16-mixed"), (FP32, "fp32"),
        ("torch.bfloat16", "bf16-mixed"), ("half", "fp16-mixed"),
        # spelling
        (" BF16-Mixed ", "bf16-mixed"), ("fp16-mixed , scaling = Static", "fp16-mixed,scaling=static"),
    ],
)  # fmt: skip
def test_aliases(alias, preset):
    assert parse(alias) == parse(preset)
    assert str(parse(alias)) == preset


def test_an_alias_names_itself_in_the_reason():
    assert Policy.parse("amp_bf16").reason == "bf16-mixed: chosen by name, as 'amp_bf16'"
    assert Policy.parse("p=f32,c=bf16").reason == "bf16-mixed: chosen by name, as 'p=f32,c=bf16'"


def test_a_policy_parses_to_itself():
    policy = Policy.parse("bf16-mixed")
    assert Policy.parse(policy) is policy


# --- auto


@pytest.mark.parametrize(
    ("hardware", "preset", "reason"),
    [
        (H200, "bf16-mixed", "bf16: sm_90 multiplies bf16 natively; no loss scaling needed"),
        (V100, "fp16-mixed", "fp16: sm_70 multiplies fp16 natively but not bf16; gradients need loss scaling"),
        (GTX_1080, "fp32", "fp32: fp16 is slower here"),
        (Hardware("cpu", features=("avx512_bf16",)), "bf16-mixed", "bf16: this CPU multiplies bf16 natively"),
        (Hardware("cpu"), "fp32", "fp32: this CPU has no fp16 instructions"),
        (Hardware("strange"), "fp32", "fp32: halfstep does not know"),
    ],
    ids=["H200", "V100", "GTX 1080", "CPU with bf16", "CPU", "unknown"],
)
def test_auto_follows_the_hardware_and_says_why(hardware, preset, reason):
    policy = Policy.parse("auto", hardware=hardware)
    assert str(policy) == preset
    assert policy == Policy.parse(preset)
    assert policy.param_dtype == FP32, "auto never changes the weights' dtype"
    assert policy.reason.startswith(reason)


def test_auto_probes_by_itself(monkeypatch):
    monkeypatch.setattr(policy_module, "probe", lambda: V100)
    assert str(Policy.parse("auto")) == "fp16-mixed"
    monkeypatch.setattr(policy_module, "probe", lambda: H200)
    assert str(Policy.parse("Auto,output=fp32")) == "bf16-mixed,output=fp32"


def test_a_name_does_not_probe(monkeypatch):
    monkeypatch.setattr(policy_module, "probe", lambda: pytest.fail("a name needs no facts"))
    Policy.parse("bf16-mixed")


def test_a_name_wins_over_the_hardware_with_a_warning():
    with pytest.warns(PrecisionWarning, match=r"bf16 was chosen by name and is used, but sm_70 has no bf16"):
        policy = Policy.parse("bf16-mixed", hardware=V100)
    assert str(policy) == "bf16-mixed"
    assert policy.reason.startswith("bf16-mixed: chosen by name; but sm_70 has no bf16")
    assert Policy.parse("bf16-mixed", hardware=H200).reason == (
        "bf16-mixed: chosen by name; sm_90 multiplies it natively"
    )


# --- the round trip


def legal_policies():
    dtypes = st.sampled_from([None, FP32, FP16, BF16])

    @st.composite
    def build(draw):
        param = draw(st.sampled_from([FP32, FP16, BF16]))
        is_half = param != FP32
        compute = param if is_half else draw(st.sampled_from([FP32, FP16, BF16]))
        return Policy(
            param_dtype=param,
            compute_dtype=compute,
            tf32=compute == FP32 and draw(st.booleans()),
            output_dtype=draw(dtypes),
            reduce_dtype=draw(dtypes),
            grad_dtype=draw(st.sampled_from([None, FP32, param])) if is_half else draw(st.sampled_from([None, FP32])),
            buffer_dtype=draw(dtypes),
            cast_forward_inputs=draw(st.booleans()),
            master=draw(st.sampled_from(Master)) if is_half else Master.NONE,
            moments=draw(st.sampled_from(Moments)),
            scaling=draw(st.sampled_from(Scaling)) if compute == FP16 else Scaling.NONE,
            reason=draw(st.text()),
        )

    return build()


@given(policy=legal_policies())
def test_every_legal_policy_survives_the_round_trip(policy):
    text = str(policy)
    again = parse(text)
    assert again == policy
    assert hash(again) == hash(policy)
    assert str(again) == text
    assert parse(text.upper()) == policy


@given(policy=legal_policies())
def test_copy_and_pickle(policy):
    for again in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), dataclasses.replace(policy)):
        assert again == policy
        assert again.reason == policy.reason


@given(text=st.text(alphabet="fpb1632-mixedtruemasterauto=,none", max_size=30))
def test_any_text_parses_or_is_refused_in_four_parts(text):
    refusal = policy = None
    try:
        policy = parse(text, hardware=H200)
    except HalfstepError as error:
        refusal = str(error)
    if policy is None:
        assert all(f"\n  {part}:" in refusal for part in ("true", "why", "fix"))
    else:
        assert parse(str(policy)) == policy


def test_every_pair_of_presets_differs():
    assert len({parse(name) for name in PRESETS}) == len(PRESETS)


def test_the_reason_is_not_part_of_the_identity():
    assert Policy(reason="a") == Policy(reason="b")
    assert Policy(reason="a").reason == "a"


# --- made by hand


def test_names_and_values_are_the_same_thing():
    by_name = Policy(param_dtype="bfloat16", compute_dtype="bf16", master="split8", moments="int8", output_dtype="full")
    by_value = Policy(
        param_dtype=BF16, compute_dtype=BF16, master=Master.SPLIT8, moments=Moments.INT8, output_dtype=FP32
    )
    assert by_name == by_value
    assert by_name.output_dtype is FP32
    assert Policy(compute_dtype="half", scaling="static").scaling is Scaling.STATIC
    assert Policy(compute_dtype=FP16, scaling=None).scaling is Scaling.NONE


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().compute_dtype = FP16


def test_a_gradient_in_its_weights_dtype_is_the_default():
    explicit = Policy(param_dtype=BF16, compute_dtype=BF16, grad_dtype=BF16)
    assert explicit.grad_dtype is None
    assert explicit == Policy(param_dtype=BF16, compute_dtype=BF16)
    assert Policy(grad_dtype=FP32) == Policy()


@pytest.mark.parametrize(
    ("options", "asked", "fix"),
    [
        ({"master": "fp32"}, "master=fp32 with fp32 weights", 'the preset "fp16-master"'),
        ({"compute_dtype": "bf16", "master": "split"}, "master=split with fp32 weights", "leave master out"),
        ({"param_dtype": "bf16", "compute_dtype": "fp32"}, "compute_dtype=fp32 with param_dtype=bf16", "bf16"),
        ({"param_dtype": "bf16", "compute_dtype": "fp16"}, "compute_dtype=fp16 with param_dtype=bf16", "=fp32"),
        ({"tf32": True, "compute_dtype": "bf16"}, "tf32 with compute_dtype=bf16", "compute_dtype=fp32"),
        ({"compute_dtype": "bf16", "scaling": "dynamic"}, "scaling=dynamic with compute_dtype=bf16", "NoScale"),
        ({"scaling": "static"}, "scaling=static with compute_dtype=fp32", "leave scaling out"),
        ({"grad_dtype": "bf16"}, "grad_dtype=bf16 with param_dtype=fp32", "leave grad_dtype out"),
        (
            {"param_dtype": "bf16", "compute_dtype": "bf16", "grad_dtype": "fp16"},
            "grad_dtype=fp16 with param_dtype=bf16",
            "use fp32 with 16-bit weights",
        ),
    ],
)  # fmt: skip
def test_an_option_that_cannot_take_effect_is_refused(options, asked, fix):
    with pytest.raises(ArgumentError) as caught:
        Policy(**options)
    assert caught.value.asked == asked
    assert fix in caught.value.fix
    assert "cannot take effect" in caught.value.true


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compute_dtype": "fp8_e4m3fn"}, r"compute_dtype='fp8_e4m3fn' in a policy[\s\S]*fp32, fp16, bf16"),
        ({"compute_dtype": "float64"}, r"the float format 'float64'"),
        ({"compute_dtype": None}, r"the float format None"),
        ({"output_dtype": "tf32"}, r"the dtype of tf32[\s\S]*stored as fp32"),
        ({"moments": "int4"}, r"moments='int4' in a policy[\s\S]*moments is one of fp32, bf16, int8"),
        ({"master": "kahan"}, r"master='kahan'[\s\S]*none, fp32, split, split8, stochastic"),
        ({"scaling": "log"}, r"scaling='log'[\s\S]*none, static, dynamic, adaptive"),
        ({"tf32": 1}, r"tf32=1 in a policy[\s\S]*true, false"),
        ({"master": Moments.FP32}, r"master=<Moments.FP32: 'fp32'> in a policy"),
        ({"cast_forward_inputs": "maybe"}, r"cast_forward_inputs='maybe'[\s\S]*true, false"),
    ],
)
def test_unknown_values_are_refused(options, text):
    with pytest.raises(ArgumentError, match=text):
        Policy(**options)


# --- bad names


@pytest.mark.parametrize("name", ["", "fp17", "mixed", "bf16 mixed", "O4", 16, None, ["fp16"]])
def test_unknown_names_are_refused(name):
    with pytest.raises(ArgumentError, match=r"the policy [\s\S]*true: presets are fp32, tf32[\s\S]*why:[\s\S]*fix:"):
        Policy.parse(name)


@pytest.mark.parametrize("name", ["transformer-engine", "transformer-engine-float16", "fp8", "amp_fp8"])
def test_fp8_is_refused_by_name(name):
    with pytest.raises(
        UnsupportedError, match=rf"the policy '{name}'[\s\S]*scale per tensor[\s\S]*Transformer Engine or"
    ):
        Policy.parse(name)


@pytest.mark.parametrize("name", ["64", "64-true", "float64", "double"])
def test_fp64_is_refused_by_name(name):
    with pytest.raises(UnsupportedError, match=r"fp64 is more than full precision[\s\S]*use \"fp32\""):
        Policy.parse(name)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("bf16-mixed,mster=split", "names no option"),
        ("bf16-mixed,split", "names no option"),
        ("bf16-mixed,", "names no option"),
        ("bf16-mixed,c=fp16", "a preset fixes the dtypes"),
        ("fp16-mixed,scaling=none,scaling=static", "names no option"),
        ("p=f32,c=bf16,o=f32,output=f32", "names no option"),
        ("p=f32,params=f32", "a preset fixes"),
    ],
)
def test_malformed_options_are_refused(text, why):
    with pytest.raises(ArgumentError, match=rf"in the policy '{text}'[\s\S]*key=value[\s\S]*why:[\s\S]*{why}"):
        Policy.parse(text)
    with pytest.raises(ArgumentError, match="scaling='loud'"):
        Policy.parse("fp16-mixed,scaling=loud")


@pytest.mark.parametrize(("name", "lost"), [("bf16-true", "0.002 to 0.0039"), ("16-true", "0.00024 to 0.00049")])
def test_no_masters_only_by_name_and_with_a_warning(name, lost):
    with pytest.warns(PrecisionWarning, match=rf"keeps no masters: an update smaller than {lost} of its") as caught:
        Policy.parse(name)
    assert len(caught) == 1
    for quiet in ("fp32", "fp16-mixed", "bf16-mixed", "fp16-master", "bf16-master"):
        Policy.parse(quiet)  # warnings are errors here


def test_the_warnings_numbers_are_real():
    """bf16 weights of 1.0 and of just under 2 lose exactly the updates that the warning says."""
    for weight, share in ((1.0, 2.0**-8), (1.9921875, 2.0**-9)):
        kept = torch.tensor(weight, dtype=BF16) + torch.tensor(weight * share * 1.1)
        lost = torch.tensor(weight, dtype=BF16) + torch.tensor(weight * share * 0.9)
        assert kept.to(BF16) > weight
        assert lost.to(BF16) == weight


# --- what runs


@pytest.mark.parametrize(
    "name", ["fp32", "fp16-mixed", "bf16-mixed", "fp16-mixed,scaling=adaptive", "bf16-mixed,output=fp32"]
)
def test_runnable(name):
    Policy.parse(name).require_runnable()


@pytest.mark.parametrize(
    ("name", "missing", "instead"),
    [
        ("fp16-master", r"no fp32 masters \(halfstep.optim, MasterWeights\)", "fp16-mixed"),
        ("bf16-master,master=split", "no split masters", "bf16-mixed"),
        ("bf16-master,moments=int8", r"no fp32 masters .* and no int8 moments", "bf16-mixed"),
        ("bf16-master,grad=fp32", "no fp32 accumulation", "bf16-mixed"),
        ("bf16-true", "no casting of a model to 16-bit weights", "bf16-mixed"),
        ("16-true", "no casting of a model to 16-bit weights", "fp16-mixed"),
        ("bf16-mixed,reduce=fp32", "no choice of dtype for reduction across ranks", "bf16-mixed"),
        ("bf16-mixed,buffer=fp32", "no casting of buffers", "bf16-mixed"),
        ("fp32,moments=bf16", "no bf16 moments", "fp32"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_and_never_run_as_something_else(name, missing, instead):
    policy = parse(name)
    for run in (policy.require_runnable, lambda: policy.autocast("cpu")):
        with pytest.raises(UnsupportedError, match=missing) as caught:
            run()
        assert caught.value.asked == f"to run under the policy {policy}"
        assert f'use "{instead}"' in caught.value.fix


@pytest.mark.parametrize(("name", "dtype"), [("fp32", FP32), ("fp16-mixed", FP16), ("bf16-mixed", BF16)])
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"])
def test_autocast(name, dtype, device):
    x = torch.ones(4, 4)
    with Policy.parse(name).autocast(device):
        assert (x @ x).dtype == dtype
        assert torch.is_autocast_enabled("cpu") == (dtype != FP32)
        assert (x + x).dtype == FP32, "autocast leaves elementwise operations alone"
    assert not torch.is_autocast_enabled("cpu")


def test_fp32_switches_an_outer_autocast_off():
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=BF16):
        assert (x @ x).dtype == BF16
        with Policy.parse("fp32").autocast("cpu"):
            assert (x @ x).dtype == FP32


def test_autocast_without_the_device_is_an_error_not_fp32(monkeypatch):
    """torch warns, switches autocast off and goes on in fp32."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        UnsupportedError, match=r"autocast\('cuda'\) under bf16-mixed\n  true: torch .* sees no cuda device"
    ):
        Policy.parse("bf16-mixed").autocast()
    Policy.parse("fp32").autocast()  # nothing to cast, nothing to miss
    with pytest.raises(ArgumentError, match="torch knows no such device"):
        Policy.parse("bf16-mixed").autocast("gpu")


def test_tf32_needs_a_card_that_has_it_and_torchs_switch(monkeypatch):
    policy = Policy.parse("tf32")
    with pytest.raises(UnsupportedError, match=r"the policy tf32 on this CPU [\s\S]*products would be plain fp32"):
        policy.autocast("cpu")
    with pytest.raises(UnsupportedError, match=r"tf32 on sm_70 \(Tesla V100"):
        Policy.parse("tf32", hardware=V100)
    assert Policy.parse("tf32", hardware=H200) == policy
    monkeypatch.setattr(policy_module, "probe", lambda _: H200)
    before = _Switches.read()  # a switch that follows another one must go on following it
    try:
        torch.set_float32_matmul_precision("highest")
        with pytest.raises(
            CallOrderError, match=r"switch for TF32 products is off[\s\S]*(enable_tf32|set_float32_matmul_precision)"
        ):
            policy.autocast("cuda")
        torch.set_float32_matmul_precision("high")
        assert not policy.autocast("cuda")._enabled
    finally:
        before.write()


# --- casting inputs and outputs


Pair = namedtuple("Pair", ["first", "second"])


def test_outputs_are_cast_wherever_they_are():
    policy = Policy.parse("bf16-mixed,output=fp32")
    half, count = torch.ones(2, dtype=BF16, requires_grad=True), torch.ones(2, dtype=torch.int64)
    nested = {"a": [half, (count, "text", None)], "b": Pair(half, 3), "c": OrderedDict(d=half)}
    cast = policy.cast_output(nested)
    assert cast["a"][0].dtype == cast["b"].first.dtype == cast["c"]["d"].dtype == FP32
    assert cast["a"][1] == (count, "text", None)
    assert isinstance(cast["b"], Pair)
    assert isinstance(cast["c"], OrderedDict)
    assert nested["a"][0].dtype == BF16, "the caller's own structure stays"
    cast["b"].first.sum().backward()
    assert half.grad is not None


def test_without_an_output_dtype_nothing_is_touched():
    value = [torch.ones(2, dtype=FP16)]
    assert Policy.parse("fp16-mixed").cast_output(value) is value


def test_inputs_are_cast_to_the_weights_dtype():
    x = torch.ones(2, dtype=torch.float64)
    assert Policy.parse("fp16-mixed").cast_inputs(x).dtype == FP32
    assert parse("bf16-true").cast_inputs((x, 1))[0].dtype == BF16
    assert parse("bf16-true,cast_inputs=false").cast_inputs(x) is x


def test_examples_in_docstrings():
    assert doctest.testmod(policy_module).failed == 0
