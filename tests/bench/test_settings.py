"""What is asked for is checked before anything is allocated, in four parts."""

import os

import pytest
import torch

from halfstep.bench import checks, settings
from halfstep.bench.products import Product
from halfstep.bench.settings import alignment_sizes, choose, read_sizes
from halfstep.errors import ArgumentError, UnsupportedError
from halfstep.formats import BF16, FP16, FP32, TF32
from halfstep.hardware import Hardware


def test_the_defaults_are_all_that_the_device_has():
    chosen = choose(device="cpu")
    assert chosen.formats == (FP32, FP16, BF16)
    assert chosen.sizes == (128, 256, 512, 1024, 2048)
    assert chosen.num_threads == torch.get_num_threads()


def test_fp32_is_added_and_names_are_halfsteps():
    assert choose(["half", "torch.bfloat16", "half"], device="cpu").formats == (FP32, FP16, BF16)
    assert choose(["fp32"], [64, 8, 64], device="cpu").sizes == (8, 64)


@pytest.mark.parametrize(
    ("hardware", "expected"),
    [
        (Hardware("cuda", "H200", capability=(9, 0)), (FP32, TF32, FP16, BF16)),
        (Hardware("cuda", "V100", capability=(7, 0)), (FP32, FP16, BF16)),
    ],
)
def test_tf32_is_measured_where_the_device_has_it(hardware, expected):
    assert settings._formats((), hardware) == expected


@pytest.mark.parametrize(
    ("options", "error", "asked", "fix"),
    [
        ({"formats": ["fp64"]}, ArgumentError, "the dtype 'fp64'", "choose one of these"),
        ({"formats": ["fp8_e5m2"]}, ArgumentError, "the dtype 'fp8_e5m2'", "choose one of these"),
        ({"formats": ["tf32"]}, UnsupportedError, "products in tf32", "leave tf32 out"),
        ({"sizes": [0]}, ArgumentError, "size=0", "--sizes 256"),
        ({"sizes": [64, -1]}, ArgumentError, "size=-1", "--sizes 256"),
        ({"num_threads": 0}, ArgumentError, "threads=0", "--threads 1 to"),
        ({"num_threads": 10**6}, ArgumentError, "threads=1000000", "--threads 1 to"),
        ({"seconds": 0}, ArgumentError, "seconds=0", "--seconds 25"),
        ({"seconds": float("nan")}, ArgumentError, "seconds=nan", "--seconds 25"),
        ({"device": "meta"}, ArgumentError, "to measure on 'meta'", "--device cpu"),
        ({"device": "cuda:99"}, UnsupportedError, "to probe the device", "pass a device"),
        ({"device": "gpu"}, ArgumentError, "the device 'gpu'", '"cpu"'),
    ],
)
def test_bad_input(options, error, asked, fix):
    with pytest.raises(error) as caught:
        choose(**{"device": "cpu", **options})
    assert caught.value.asked.startswith(asked)
    assert fix in caught.value.fix


@pytest.mark.parametrize("text", ["", "1,x", "1.5", "1,,2"])
def test_sizes_that_are_no_numbers(text):
    with pytest.raises(ArgumentError, match="whole numbers with commas"):
        read_sizes(text)
    assert read_sizes("8, 16") == (8, 16)


def test_threads_are_refused_where_they_change_nothing():
    with pytest.raises(ArgumentError, match="threads=2 on cuda:0"):
        checks.checked_threads(2, torch.device("cuda:0"))
    assert checks.checked_threads(1, torch.device("cpu")) == 1
    assert checks.checked_threads(os.cpu_count(), torch.device("cpu")) == os.cpu_count()


def test_what_does_not_fit_is_refused_with_the_figure_before_it_is_allocated(monkeypatch):
    monkeypatch.setattr(checks, "probe", lambda device: Hardware("cpu", "small", memory_bytes=2**20))
    monkeypatch.setattr(torch, "randn", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(ArgumentError) as caught:
        choose(["fp32"], [2**14], device="cpu")
    assert "3.0 GiB" in caught.value.true
    largest = int(caught.value.fix.split()[-1])
    assert Product(FP32, largest).num_bytes <= 2**19 < Product(FP32, largest + 1).num_bytes
    assert choose(["fp32"], [largest], device="cpu").sizes == (largest,)
    with pytest.raises(ArgumentError):
        choose(["fp32"], [largest + 1], device="cpu")


def test_alignment_is_measured_at_multiples_of_8_from_the_largest_down():
    assert alignment_sizes(choose(sizes=[100, 1024, 2048], device="cpu")) == (1024, 96)
    assert alignment_sizes(choose(sizes=[3], device="cpu")) == (8,)
    assert alignment_sizes(choose(sizes=[4096], device="cpu")) == (4096,)
