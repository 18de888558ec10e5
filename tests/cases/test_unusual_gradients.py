"""MP-37: sparse gradients whose duplicates overflow are missed. MP-52: bf16 gradients with an enabled scaler."""

import math

import pytest
import torch
from torch import nn

import halfstep
from halfstep.kernels.inspect import inspect

pytestmark = [
    pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled"),  # torch.optim.Adagrad's own
]
SGD = torch.optim.SGD
CPU = torch.device("cpu")


def embedding(sparse, dtype=torch.float32, rows=6, width=3):
    table = nn.Embedding(rows, width, sparse=sparse)
    with torch.no_grad():
        table.weight.copy_(torch.arange(rows * width, dtype=torch.float32).view(rows, width) / 16)
    return table.to(dtype)


def test_MP_37_the_reported_duplicates_are_added_in_fp32(make_scaler):
    """Two fp16 values of 40000 in one row: 80000 is finite in fp32, and so is the step of 0.1 * 80000."""
    e = nn.Embedding(4, 1, sparse=True).half()
    before = e.weight.detach().clone()
    optimizer, scaler = SGD([e.weight], 0.1), make_scaler(init_scale=1.0)
    loss = (e(torch.tensor([1, 1])) * torch.full((2, 1), 40000.0).half()).sum()
    scaler.scale(loss).backward()
    assert e.weight.grad.is_sparse
    scaler.step(optimizer)
    assert e.weight.isfinite().all()
    moved = not torch.equal(e.weight.detach(), before)
    assert scaler.was_step_applied(optimizer) is moved
    if moved:
        assert e.weight[1].item() == pytest.approx(before[1].item() - 8000.0, abs=4.0)  # ulp of fp16 there
        assert torch.equal(e.weight[[0, 2, 3]], before[[0, 2, 3]])
    else:  # judged in fp16: 80000 is an overflow, and must never be missed
        assert scaler.outcome(optimizer).culprit.kind == "inf"
    scaler.update()
    assert scaler.skipped_steps == int(not moved)


@pytest.mark.parametrize("value", [3e38, -3e38])
def test_MP_37_duplicates_that_overflow_are_never_missed(make_scaler, value):
    e = embedding(sparse=True)
    before = e.weight.detach().clone()
    optimizer, scaler = SGD([e.weight], 1e-30), make_scaler(init_scale=1.0)
    (e(torch.tensor([1, 1, 2])) * value).sum().backward()
    scaler.scale(torch.tensor(1.0))
    assert e.weight.grad._values().isfinite().all(), "each stored value is finite; only their sum is not"
    scaler.step(optimizer)
    assert scaler.outcome(optimizer).kind == "skipped"
    assert scaler.outcome(optimizer).culprit.kind == "inf"
    assert torch.equal(e.weight.detach(), before)
    scaler.update()
    assert scaler.get_scale() == 0.5


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_MP_37_one_bad_stored_value_skips_the_step(make_scaler, bad):
    e = embedding(sparse=True)
    before = e.weight.detach().clone()
    optimizer, scaler = SGD([e.weight], 0.1), make_scaler(init_scale=8.0)
    factors = torch.tensor([1.0, bad, 1.0]).unsqueeze(1)
    scaler.scale((e(torch.tensor([0, 5, 0])) * factors).sum()).backward()
    scaler.step(optimizer)
    assert scaler.outcome(optimizer).kind == "skipped"
    assert torch.equal(e.weight.detach(), before)


@pytest.mark.parametrize("make_optimizer", [
    lambda ps: SGD(ps, 0.5),
    lambda ps: torch.optim.Adagrad(ps, 0.5),
    lambda ps: torch.optim.SparseAdam(list(ps), 0.5),
], ids=["sgd", "adagrad", "sparse adam"])  # fmt: skip
@pytest.mark.parametrize("clips", [False, True], ids=["step", "unscale_ and step"])
def test_MP_37_sparse_steps_equal_unscaled_sparse_steps(make_scaler, make_optimizer, clips):
    """A scale of a power of two changes no bit."""
    scaled, plain = embedding(sparse=True), embedding(sparse=True)
    optimizer, reference, scaler = (
        make_optimizer(scaled.parameters()),
        make_optimizer(plain.parameters()),
        make_scaler(),
    )
    for step in range(4):
        rows = torch.tensor([0, 3, 3, step])
        weights = torch.linspace(0.1, 1.0, 4).unsqueeze(1)
        optimizer.zero_grad()
        reference.zero_grad()
        scaler.scale((scaled(rows).pow(2) * weights).sum()).backward()
        (plain(rows).pow(2) * weights).sum().backward()
        if clips:
            indices = scaled.weight.grad._indices().clone()
            scaler.unscale_(optimizer)
            assert scaled.weight.grad.is_sparse
            assert torch.equal(scaled.weight.grad._indices(), indices)
            assert torch.equal(scaled.weight.grad.to_dense(), plain.weight.grad.to_dense())
        scaler.step(optimizer)
        scaler.update()
        reference.step()
        assert torch.equal(scaled.weight, plain.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_MP_37_sparse_equals_dense(make_scaler, dtype):
    tables = [embedding(sparse, dtype) for sparse in (True, False)]
    for table in tables:
        optimizer, scaler = SGD(table.parameters(), 2.0**-6), make_scaler(init_scale=2.0**4)
        for rows in ([0, 3, 3], [5, 5, 5], [1, 2, 3]):
            optimizer.zero_grad()
            scaler.scale((table(torch.tensor(rows)).float() * 1.5).sum()).backward()
            scaler.step(optimizer)
            assert scaler.was_step_applied(optimizer)
            scaler.update()
    assert torch.equal(tables[0].weight, tables[1].weight)


def test_MP_37_the_norm_counts_a_row_once_not_its_parts():
    i, v = torch.tensor([[1, 1, 2]]), torch.tensor([[3.0], [1.0], [3.0]])
    g = torch.sparse_coo_tensor(i, v, (4, 1))
    assert inspect([g]).total_norm(CPU).item() == 5.0  # rows 4 and 3
    assert inspect([g]).total_norm(CPU).item() == g.to_dense().norm().item()


def test_MP_52_the_reported_bf16_model_steps(make_scaler):
    m = nn.Linear(2, 1).bfloat16()
    before = m.weight.detach().clone()
    optimizer, scaler = SGD(m.parameters(), 0.5), make_scaler()
    scaler.scale(m(torch.ones(1, 2).bfloat16()).sum()).backward()
    assert m.weight.grad.dtype == torch.bfloat16
    scaler.step(optimizer)
    assert scaler.was_step_applied(optimizer)
    scaler.update()
    assert torch.equal(m.weight.detach(), (before.float() - 0.5).bfloat16())
    assert scaler.get_scale() == 65536.0


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]


def one_of_each(values=(1.0, -0.5, 3.0)):
    return [nn.Parameter(torch.tensor(values).to(dtype)) for dtype in DTYPES]


def weighted(parameters, factor=1.0):
    """A loss whose gradient is 0.75 for every real weight, whatever its dtype."""
    return sum((torch.view_as_real(p).sum() if p.is_complex() else p.float().sum()) * 0.75 * factor for p in parameters)


@pytest.mark.parametrize("make_optimizer", [
    lambda ps: SGD(ps, 0.25),
    lambda ps: SGD(ps, 0.25, foreach=True),
    lambda ps: SGD(ps, 0.25, momentum=0.5),
    lambda ps: torch.optim.Adam(ps, 0.25, foreach=False),
], ids=["sgd", "sgd foreach", "sgd momentum", "adam"])  # fmt: skip
def test_MP_52_all_dtypes_in_one_optimizer_are_unscaled_alike(make_scaler, make_optimizer):
    mixed, wide = (
        one_of_each(),
        [nn.Parameter(p.detach().to(torch.promote_types(p.dtype, torch.float32))) for p in one_of_each()],
    )
    optimizer, reference, scaler = make_optimizer(mixed), make_optimizer(wide), make_scaler(init_scale=2.0**10)
    for _ in range(2):
        optimizer.zero_grad()
        reference.zero_grad()
        scaler.scale(weighted(mixed)).backward()
        weighted(wide).backward()
        scaler.step(optimizer)
        assert scaler.was_step_applied(optimizer)
        scaler.update()
        reference.step()
    for p, expected in zip(mixed, wide, strict=True):
        rounding = 0 if p.dtype in (torch.float64, torch.complex64) else 2 * torch.finfo(p.dtype).eps
        torch.testing.assert_close(p.detach().to(expected.dtype), expected.detach(), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("bad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_MP_52_one_bad_gradient_of_any_dtype_skips_the_whole_optimizer(make_scaler, bad_dtype, bad):
    parameters = one_of_each()
    before = [p.detach().clone() for p in parameters]
    optimizer, scaler = SGD(parameters, 0.25), make_scaler(init_scale=2.0**10)
    scaler.scale(weighted(parameters)).backward()
    position = DTYPES.index(bad_dtype)
    parameters[position].grad[1] = bad
    scaler.step(optimizer)
    outcome = scaler.outcome(optimizer)
    assert (outcome.kind, outcome.culprit.kind, outcome.culprit.num_bad) == (
        "skipped",
        "nan" if bad != bad else "inf",
        1,
    )
    assert outcome.culprit.name == f"parameter {position} of group 0"
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))


def test_MP_52_unscale_in_place_takes_bf16_and_refuses_fp16_with_the_remedy(make_scaler):
    p, q = nn.Parameter(torch.ones(2).bfloat16()), nn.Parameter(torch.ones(2).half())
    scaler = make_scaler(init_scale=2.0**10)
    scaler.scale(weighted([p, q])).backward()
    first, second = SGD([p], 0.1), SGD([q], 0.1)
    scaler.unscale_(first)
    assert torch.equal(p.grad, torch.full_like(p, 0.75))
    grad = q.grad.clone()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients") as refusal:
        scaler.unscale_(second)
    assert "fix:" in str(refusal.value)
    assert torch.equal(q.grad, grad), "nothing is half-changed"


def test_MP_52_a_bf16_policy_scales_by_one_and_still_checks(make_scaler):
    assert not halfstep.Policy.parse("bf16-mixed").needs_scaling
    assert halfstep.Policy.parse("fp16-mixed").needs_scaling
    p = nn.Parameter(torch.ones(2).bfloat16())
    optimizer, scaler = SGD([p], 0.5), make_scaler(scale=halfstep.NoScale())
    assert scaler.get_scale() == 1.0
    scaler.scale((p * math.nan).float().sum()).backward()
    scaler.step(optimizer)
    assert scaler.outcome(optimizer).kind == "skipped"
    assert torch.equal(p.detach(), torch.ones(2).bfloat16())
    scaler.update()
    assert scaler.get_scale() == 1.0
