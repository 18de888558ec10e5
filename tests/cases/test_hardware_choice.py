"""MP-35: old cards say yes to bf16 and then emulate it, very slowly. The choice is a function of plain facts."""

import pytest
import torch

from halfstep.errors import PrecisionWarning
from halfstep.hardware import Hardware, check_dtype, choose_dtype

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def cuda(name, *capability):
    return Hardware("cuda", name, capability=capability)


@pytest.mark.parametrize(("hardware", "dtype", "needs_scaling", "reason"), [
    (cuda("Tesla V100-SXM2-16GB", 7, 0), FP16, True, "multiplies fp16 natively but not bf16"),
    (cuda("Tesla T4", 7, 5), FP16, True, "multiplies fp16 natively but not bf16"),
    (cuda("NVIDIA GeForce RTX 2080 Ti", 7, 5), FP16, True, "multiplies fp16 natively but not bf16"),
    (cuda("NVIDIA A100-SXM4-40GB", 8, 0), BF16, False, "no loss scaling needed"),
    (cuda("NVIDIA GeForce RTX 3090", 8, 6), BF16, False, "no loss scaling needed"),
    (cuda("NVIDIA H100 80GB HBM3", 9, 0), BF16, False, "no loss scaling needed"),
    (cuda("NVIDIA B200", 10, 0), BF16, False, "no loss scaling needed"),
    (cuda("NVIDIA GeForce GTX 1080 Ti", 6, 1), FP32, False, "fp16 is slower here"),
    (cuda("NVIDIA GeForce GTX 980", 5, 2), FP32, False, "fp16 is slower here"),
    (cuda("Tesla K80", 3, 7), FP32, False, "fp16 is slower here"),
    (cuda("NVIDIA GeForce GTX 1650", 7, 5), FP32, False, "NaN"),
    (cuda("NVIDIA GeForce GTX 1660 Ti", 7, 5), FP32, False, "NaN"),
    (Hardware("cpu", features=("avx2", "avx512", "avx512_bf16")), BF16, False, "bf16 natively"),
    (Hardware("cpu", features=("avx2", "avx512", "amx_bf16")), BF16, False, "bf16 natively"),
    (Hardware("cpu", features=("neon", "arm_bf16")), BF16, False, "bf16 natively"),
    (Hardware("cpu", features=("avx2",)), FP32, False, "slower than fp32"),
    (Hardware("cpu", features=("avx2", "avx512")), FP32, False, "slower than fp32"),
    (Hardware("cpu"), FP32, False, "slower than fp32"),
], ids=lambda value: getattr(value, "name", None))  # fmt: skip
def test_MP_35_the_choice_follows_from_the_facts(hardware, dtype, needs_scaling, reason):
    choice = choose_dtype(hardware)
    assert (choice.dtype, choice.needs_scaling) == (dtype, needs_scaling)
    assert reason in choice.reason


def test_MP_35_nothing_is_asked_of_the_machine(monkeypatch):
    def asked(*_, **__):
        raise AssertionError("the choice depends on the facts it was given, and on nothing else")

    for name in ("is_bf16_supported", "is_available", "get_device_capability", "get_device_properties", "device_count"):
        monkeypatch.setattr(torch.cuda, name, asked)
    assert choose_dtype(cuda("Tesla V100-SXM2-16GB", 7, 0)).dtype is FP16
    assert choose_dtype(cuda("NVIDIA H100 80GB HBM3", 9, 0)).dtype is BF16


def test_MP_35_the_reason_names_the_query_that_misleads():
    reason = choose_dtype(cuda("NVIDIA GeForce GTX 1080 Ti", 6, 1)).reason
    assert "torch.cuda.is_bf16_supported() counts that as support" in reason


@pytest.mark.parametrize(("dtype", "hardware"), [
    ("bf16", cuda("Tesla V100-SXM2-16GB", 7, 0)),
    (BF16, cuda("Tesla T4", 7, 5)),
    ("fp16", cuda("NVIDIA GeForce GTX 1080 Ti", 6, 1)),
    ("fp16", cuda("NVIDIA GeForce GTX 1660 Ti", 7, 5)),
    ("bf16", Hardware("cpu", features=("avx2",))),
], ids=str)  # fmt: skip
def test_MP_35_the_users_own_choice_wins_with_a_warning(dtype, hardware):
    with pytest.warns(PrecisionWarning, match="was chosen by name and is used"):
        choice = check_dtype(dtype, hardware)
    assert choice.dtype is {"bf16": BF16, "fp16": FP16}.get(dtype, dtype)


def test_MP_35_the_users_own_choice_is_taken_silently_where_it_pays():
    assert check_dtype("bf16", cuda("NVIDIA H100 80GB HBM3", 9, 0)).dtype is BF16
    assert check_dtype("fp32", Hardware("cpu")).dtype is FP32
