"""The table of dtypes is found by running: against torch's documented lists, and with operations made for the test."""

import json

import pytest
import torch
import torch.nn.functional as F

from halfstep import ops
from halfstep.autocast_cases import ALL_CASES, HALFSTEP, OpCase
from halfstep.autocast_ops import OpKind, OpRun, ops_table
from halfstep.errors import ArgumentError, UnsupportedError
from halfstep.policy import Policy

# torch's documentation, "CPU Op-Specific Behavior", as far as the table has them.
TO_HALF = {
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "bmm", "mm", "linear"),
    *("matmul", "addmm", "addbmm", "baddbmm", "scaled_dot_product_attention"),
}
TO_FP32 = {
    *("avg_pool3d", "binary_cross_entropy", "grid_sample", "mse_loss", "cosine_embedding_loss", "nll_loss", "ctc_loss"),
    *("kl_div", "cdist", "prod", "l1_loss", "huber_loss", "smooth_l1_loss", "poisson_nll_loss", "triplet_margin_loss"),
    *("inv", "svdvals", "cholesky", "eigvalsh", "qr"),
}
TO_WIDEST = ["cat", "stack", "index_copy"]
UNLISTED = ["exp", "log", "relu", "softmax", "layer_norm", "sum", "cumsum", "max_pool2d", "embedding", "dropout"]


def by_name(policy, cases=ALL_CASES):
    """name -> entry, torch's operations before halfstep's functions of the same name."""
    return {op.name: op for op in reversed(ops_table(policy, "cpu", cases=cases))}


@pytest.fixture(scope="module")
def mixed():
    return {name: by_name(f"{name}-mixed") for name in ("bf16", "fp16")}


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("names", "kind"),
    [(TO_HALF, OpKind.HALF), (TO_FP32, OpKind.FP32), (TO_WIDEST, OpKind.WIDEST), (UNLISTED, OpKind.FOLLOWS)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_table_is_torchs_documented_one_for_the_cpu(mixed, half, names, kind):
    assert {name: mixed[half][name].kind for name in names} == dict.fromkeys(names, kind)


def test_every_run_says_what_went_in_and_what_came_out(mixed):
    matmul = mixed["bf16"]["matmul"]
    assert matmul.runs == tuple(OpRun(given, ("bf16",), ("bf16",)) for given in ("fp32", "bf16", "bf16+fp32"))
    assert [run.given for run in mixed["fp16"]["exp"].runs] == ["fp32", "fp16"]


def test_what_a_kernel_reads_is_seen_where_the_result_does_not_tell(mixed):
    rms_norm = mixed["bf16"]["rms_norm"]
    assert rms_norm.kind is OpKind.FP32
    assert rms_norm.runs[1] == OpRun("bf16", ("fp32",), ("bf16",))
    assert rms_norm.notes == ("bf16: gives bf16",)


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_halfsteps_functions_round_once(half):
    found = {op.name: op.rounds_once for op in ops_table(f"{half}-mixed", "cpu") if op.family == HALFSTEP}
    assert found.pop("attention") in (True, False)  # torch's kernel: probabilities are rounded for the second product
    assert len(found) >= 12
    assert set(found.values()) == {True}
    assert set(found) | {"attention"} <= set(ops.__all__)


def test_the_error_counts_every_rounding():
    half = torch.bfloat16
    cases = [
        OpCase("once", "x", lambda x: x * 3),
        OpCase("twice", "x", lambda x: x * 3 * 5),
        OpCase("never", "x", lambda x: -x),
    ]
    found = by_name(Policy(compute_dtype=half), cases)
    assert 0.3 < found["once"].error_ulp <= 0.5
    assert 0.5 < found["twice"].error_ulp < 2
    assert found["never"].error_ulp == 0
    assert [found[name].rounds_once for name in ("once", "twice", "never")] == [True, False, True]
    assert found["twice"].runs[0].kernels == ("fp32",)


def test_a_fake_list_is_classified_by_what_it_does():
    def down(x):
        return x.bfloat16() * 2

    def refuses(x):
        raise RuntimeError("unsafe to autocast\nuse another")

    cases = [
        OpCase("down", "x", down),
        OpCase("up", "x", lambda x: x.float() * 2),
        OpCase("follows", "x", lambda x: x * 2),
        OpCase("widest", "x", lambda a, b: a * b, ((4,), (4,))),
        OpCase("strict", "x", torch.dot, ((4,), (4,))),
        OpCase("refuses", "x", refuses),
        OpCase("moves", "x", lambda x: x.reshape(8, 4).clone()),
    ]
    found = by_name("bf16-mixed", cases)
    assert [found[case.name].kind for case in cases] == [
        OpKind.HALF, OpKind.FP32, OpKind.FOLLOWS, OpKind.WIDEST, OpKind.FOLLOWS, OpKind.REFUSED, OpKind.FOLLOWS,
    ]  # fmt: skip
    assert found["refuses"].notes == ("fp32: unsafe to autocast", "bf16: unsafe to autocast")
    assert found["strict"].runs[2].error.startswith("dot : expected both vectors to have same dtype")
    assert found["moves"].runs[0].kernels == ()


def test_a_broken_operation_does_not_break_the_table():
    def broken(x):
        raise ValueError

    def half_broken(x):
        assert x.dtype == torch.float32, "no kernel"
        return x + 1

    cases = [OpCase("broken", "x", broken), OpCase("half", "x", half_broken), OpCase("relu", "x", F.relu)]
    found = by_name("bf16-mixed", cases)
    assert (found["broken"].kind, found["broken"].runs[0].error) == (OpKind.REFUSED, "ValueError")
    assert (found["half"].kind, found["half"].notes) == (OpKind.FP32, ("bf16: no kernel",))
    assert found["half"].error_ulp is None
    assert found["relu"].kind is OpKind.FOLLOWS


def test_without_autocast_operations_run_in_their_tensors_dtype():
    with pytest.warns(match="keeps no masters"):
        found = by_name("bf16-true")
    for name in ("add", "cat"):
        assert found[name].kind is OpKind.WIDEST
    for name in ("softmax", "matmul", "sum"):
        assert found[name].kind is OpKind.FOLLOWS, "torch casts nothing"
    assert found["linear"].runs[1].dtype == "bf16"
    assert found["linear"].runs[0].error, "fp32 activations meet bf16 weights"
    assert found["mse_loss"].runs[1].dtype == "bf16", "under autocast this would be fp32"


def test_a_policy_in_fp32_runs_in_fp32():
    found = ops_table("fp32", "cpu")
    assert {op.kind for op in found} == {OpKind.FP32}
    assert {len(op.runs) for op in found} == {1}
    assert {op.error_ulp for op in found} == {None}


def test_master_policies_answer_without_their_machinery():
    found = by_name("bf16-master,master=split", [OpCase("linear", "x", F.linear, ((4, 8),), ((8, 8), (8,)))])
    assert found["linear"].runs[1] == OpRun("bf16", ("bf16",), ("bf16",))


def test_autocast_around_the_call_changes_nothing():
    cases = [case for case in ALL_CASES if case.name in ("matmul", "mse_loss")]
    with torch.autocast("cpu", torch.float16):
        assert ops_table("bf16-mixed", "cpu", cases=cases) == ops_table("bf16-mixed", "cpu", cases=cases)
        assert {op.kind for op in ops_table("fp32", "cpu", cases=cases)} == {OpKind.FP32}


def test_the_random_state_and_grad_mode_are_left_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.no_grad():
        ops_table("bf16-mixed", "cpu", cases=[case for case in ALL_CASES if case.is_random])
        assert not torch.is_grad_enabled()
    assert torch.equal(before, torch.get_rng_state())


def test_names_are_unique_within_a_family():
    assert len({(case.family, case.name) for case in ALL_CASES}) == len(ALL_CASES) >= 100


def test_as_dict_is_json(mixed):
    plain = [op.as_dict() for op in mixed["bf16"].values()]
    [matmul] = [op for op in json.loads(json.dumps(plain)) if op["name"] == "matmul"]
    assert matmul["kind"] == "runs in 16 bits"
    assert matmul["runs"][0] == {"given": "fp32", "kernels": ["bf16"], "outputs": ["bf16"], "error": None}


@pytest.mark.parametrize(
    ("policy", "device", "error", "words"),
    [
        ("bf17", "cpu", ArgumentError, "the policy 'bf17'"),
        ("bf16-mixed", "gpu", ArgumentError, "the device 'gpu'"),
        ("bf16-mixed", "cuda:77", UnsupportedError, "to probe the device"),
        ("bf16-mixed", "meta", UnsupportedError, "the dtypes of operations on 'meta'"),
        ("tf32", "cpu", UnsupportedError, "the policy tf32"),
    ],
)
def test_bad_input(policy, device, error, words):
    with pytest.raises(error, match=words):
        ops_table(policy, device)
