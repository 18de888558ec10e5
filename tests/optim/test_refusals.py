"""What is refused, in four parts, with nothing changed."""

import pytest
import torch
from torch import nn

from halfstep.errors import ArgumentError, CallOrderError, UnsupportedError
from halfstep.optim.export import fp32_state_dict
from halfstep.optim.masters import MasterWeights

SGD = torch.optim.SGD


def half(*size, dtype=torch.bfloat16):
    return nn.Parameter(torch.ones(*(size or (2,)), dtype=dtype))


def refused(call, error, *texts):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    for text in (*texts, "true:", "why:", "fix:"):
        assert text in message, message


def test_no_optimizer():
    refused(lambda: MasterWeights(nn.Linear(1, 1)), ArgumentError, "MasterWeights(Linear)")


def test_wrapping_twice():
    inner = SGD([half()], lr=0.1)
    optimizer = MasterWeights(inner)
    for again in (inner, optimizer):
        refused(lambda again=again: MasterWeights(again), ArgumentError, "undo the other's step")
    optimizer.to_torch()
    MasterWeights(inner, "bf16")


def test_a_scheduler_made_before():
    inner = SGD([half()], lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
    refused(lambda: MasterWeights(inner), ArgumentError, "wrap first, then make the scheduler")


def test_differentiable():
    inner = SGD([half()], lr=0.1, differentiable=True)
    refused(lambda: MasterWeights(inner), UnsupportedError, "rounding has no derivative")


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.float8_e5m2, "fp8_e4m3fn", "nonsense", 16])
def test_dtypes_that_no_weight_has(dtype):
    weight = nn.Parameter(torch.ones(2))
    refused(lambda: MasterWeights(SGD([weight], lr=0.1), dtype), ArgumentError, "stored in fp16 or bf16")
    assert weight.dtype == torch.float32


def test_weights_that_are_16_bit_in_another_dtype():
    weight = nn.Parameter(torch.ones(2))
    inner = SGD([weight, half(dtype=torch.float16)], lr=0.1)
    refused(lambda: MasterWeights(inner, "bf16"), ArgumentError, "is torch.float16 already")
    assert weight.dtype == torch.float32


def test_casting_a_weight_that_has_a_gradient():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    refused(lambda: MasterWeights(SGD([weight], lr=0.1), "bf16"), CallOrderError, "zero_grad() before wrapping")


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e5m2])
def test_parameters_that_no_master_stands_for(dtype):
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float32).to(dtype))
    refused(lambda: MasterWeights(SGD([weight], lr=0.1)), ArgumentError, str(dtype), "an fp32 master cannot hold it")
    optimizer = MasterWeights(SGD([half()], lr=0.1))
    refused(lambda: optimizer.add_param_group({"params": [weight]}), ArgumentError, str(dtype))
    assert len(optimizer.param_groups) == len(optimizer.inner.param_groups) == 1


@pytest.mark.filterwarnings("ignore")
def test_DTensor():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = nn.Parameter(distribute_tensor(torch.ones(2).bfloat16(), mesh))
        refused(lambda: MasterWeights(SGD([weight], lr=0.1)), UnsupportedError, "DTensor", "FSDP2")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_memory_that_two_parameters_share(dtype):
    flat = torch.ones(6) if dtype else torch.ones(6).bfloat16()
    weights = [nn.Parameter(flat[:4]), nn.Parameter(flat[2:])]
    refused(lambda: MasterWeights(SGD(weights, lr=0.1), dtype), UnsupportedError, "overlap in memory")
    apart = [nn.Parameter(flat[:3]), nn.Parameter(flat[3:])]
    assert len(MasterWeights(SGD(apart, lr=0.1), dtype).state) == 2


@pytest.mark.parametrize("wrong", [torch.float32, torch.float16])
def test_a_parameter_cast_after_wrapping(wrong):
    model = nn.Linear(2, 2)
    optimizer = MasterWeights(SGD(model.parameters(), lr=0.1), "bf16")
    model.to(wrong)
    refused(
        optimizer.step, CallOrderError, "torch.bfloat16 on cpu when MasterWeights took it in", f"{wrong} on cpu now"
    )


def test_a_model_cast_after_wrapping_its_fp32_weights():
    model = nn.Linear(2, 2)
    optimizer = MasterWeights(SGD(model.parameters(), lr=0.1))
    model.half()
    refused(optimizer.step, CallOrderError, "cast and move the model first")


def test_no_closure():
    refused(MasterWeights(torch.optim.LBFGS([half()])).step, CallOrderError, "LBFGS evaluates the loss itself")


def test_after_the_way_out():
    optimizer = MasterWeights(SGD([half()], lr=0.1))
    optimizer.to_torch()
    for call in (optimizer.step, optimizer.state_dict, optimizer.adopt_weights, optimizer.to_torch):
        refused(call, CallOrderError, "after to_torch()")
    refused(lambda: optimizer.load_state_dict({}), CallOrderError, "after to_torch()")
    refused(lambda: optimizer.add_param_group({"params": [half()]}), CallOrderError, "after to_torch()")


def test_exporting_without_masters():
    model = nn.Linear(1, 1)
    plain = SGD(model.parameters(), lr=0.1)
    refused(lambda: fp32_state_dict(model, plain), ArgumentError, "fp32_state_dict(model, SGD)")
    refused(lambda: fp32_state_dict(nn.Linear(1, 1), MasterWeights(plain, "bf16")), ArgumentError, "no masters of this")
