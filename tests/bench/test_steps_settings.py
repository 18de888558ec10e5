"""What is asked for is checked before anything is allocated, in four parts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.bench import checks, steps_settings
from halfstep.bench.steps_settings import choose
from halfstep.bench.steps_storages import DEFAULTS, MOMENTS, WEIGHTS, Storage
from halfstep.bench.steps_tensors import CASES, in_words, read_tensors
from halfstep.errors import ArgumentError, UnsupportedError
from halfstep.hardware import Hardware
from halfstep.kernels.storage import GROUP


def test_the_defaults_are_every_rule_storage_and_executor():
    chosen = choose(device="cpu")
    assert [rule.name for rule in chosen.rules] == ["adamw", "adam", "sgd", "lion"]
    assert tuple(map(str, chosen.storages)) == DEFAULTS
    assert chosen.executors == ("numba", "torch")
    assert [name for name, _ in chosen.missing] == ["triton"]
    assert chosen.num_params == pytest.approx(10e6, rel=0.02)
    assert len(chosen.shapes) == 150
    recipes = chosen.recipes(chosen.rules[0])
    assert len(recipes) == 2 * len(DEFAULTS) == len({(recipe.storage, recipe.executor) for recipe in recipes})
    assert {recipe.half_dtype for recipe in recipes} == {torch.bfloat16}


def test_what_is_asked_for_twice_is_measured_once():
    chosen = choose(
        ["SGD", "sgd"], ["split", "split+fp32"], executors=["torch", "torch"], device="cpu", half_dtype="half"
    )
    assert ([rule.name for rule in chosen.rules], chosen.executors, chosen.half_dtype) == (
        ["sgd"], ("torch",), torch.float16,
    )  # fmt: skip
    assert chosen.storages == (Storage("split"),)


@pytest.mark.parametrize(
    ("options", "error", "asked", "fix"),
    [
        ({"rules": ["muon"]}, ArgumentError, "the rule 'muon'", "choose one of these"),
        ({"storages": ["split16"]}, ArgumentError, "the storage 'split16'", "--storage split8+int8"),
        ({"storages": ["split+"]}, ArgumentError, "the storage 'split+'", "--storage split8+int8"),
        ({"storages": ["int8"]}, ArgumentError, "the storage 'int8'", "--storage split8+int8"),
        ({"executors": ["auto"]}, ArgumentError, "the executor 'auto'", "leave --executor out"),
        ({"executors": ["c++"]}, ArgumentError, "executor='c++'", "leave executor out"),
        ({"executors": ["triton"]}, UnsupportedError, "executor='triton'", "leave executor out"),
        ({"half_dtype": "fp32"}, ArgumentError, "the dtype 'fp32'", "--dtype bf16"),
        ({"half_dtype": "int4"}, ArgumentError, "the dtype 'int4'", "--dtype bf16"),
        ({"num_params": 5}, ArgumentError, "params=5 in 150 tensors", "--params 1e+07"),
        ({"num_params": float("nan")}, ArgumentError, "params=nan", "--params 1e+07"),
        (
            {"num_params": 1e6, "tensors": "10x100"},
            ArgumentError,
            "params=1e+06 and tensors='10x100'",
            "leave --params",
        ),
        ({"tensors": "0"}, ArgumentError, "tensors='0'", "10000x1000"),
        ({"tensors": "10x0"}, ArgumentError, "tensors='10x0'", "2048x16K"),
        ({"tensors": "many"}, ArgumentError, "tensors='many'", "2048x16K"),
        ({"tensors": "-3"}, ArgumentError, "tensors='-3'", "2048x16K"),
        ({"num_threads": 0}, ArgumentError, "threads=0", "--threads 1 to"),
        ({"seconds": -1}, ArgumentError, "seconds=-1", "--seconds 60"),
        ({"device": "meta"}, ArgumentError, "to measure on 'meta'", "--device cpu"),
    ],
)
def test_bad_input(options, error, asked, fix):
    with pytest.raises(error) as caught:
        choose(**{"device": "cpu", **options})
    assert caught.value.asked.startswith(asked)
    assert fix in caught.value.fix


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("moments", MOMENTS)
def test_a_storage_reads_what_it_says(weights, moments):
    storage = Storage(weights, moments)
    assert Storage.parse(str(storage)) == Storage.parse(f"{weights}+{moments}") == storage
    assert (storage.weight_dtype(torch.float16) == torch.float32) == (weights == "fp32")


def test_the_cases_of_many_small_tensors():
    assert [in_words(read_tensors(case)) for case in CASES] == [
        "33.6 M parameters in 2048 tensors",
        "10 M parameters in 10000 tensors",
    ]
    assert read_tensors("2048x16K")[0] == (128, 128)
    rows, columns = read_tensors("10000x1000")[0]
    assert rows * columns == 1000
    assert rows * -(-columns // GROUP) == 32, "as few groups as 1000 elements need"


@given(st.integers(1, 5000))
def test_a_size_is_kept_exactly_in_the_fewest_groups(size):
    [(rows, columns)] = read_tensors(f"1x{size}")
    assert rows * columns == size
    fewest = min(size // width * -(-width // GROUP) for width in range(1, size + 1) if size % width == 0)
    assert rows * -(-columns // GROUP) == fewest


@given(st.integers(1, 300), st.floats(1e4, 1e9))
def test_mixed_tensors_have_about_as_many_parameters(number, num_params):
    shapes = read_tensors(str(number), num_params)
    assert len(shapes) == number
    total = sum(rows * columns for rows, columns in shapes)
    assert 0.5 * num_params < total <= num_params
    if num_params / number > 1e5:
        assert total > 0.9 * num_params
        assert shapes[0][1] % GROUP == 0
    assert all(9 < large[0] / rows < 21 for large, (rows, _) in zip(shapes[::2], shapes[1::2], strict=False))


def test_what_does_not_fit_is_refused_before_it_is_allocated(monkeypatch):
    monkeypatch.setattr(checks, "probe", lambda device: Hardware("cpu", "small", memory_bytes=2**30))
    monkeypatch.setattr(torch, "randn", lambda *_, **__: pytest.fail("allocated"))
    options = {"storages": ["split8+int8"], "executors": ["torch"], "device": "cpu"}
    with pytest.raises(ArgumentError) as caught:
        choose(["adamw"], num_params=52.5e6, **options)
    assert caught.value.asked == "52.4 M parameters in 1 storages on 1 executors"
    # 7.125 bytes of ours, 16 of torch's recipe, 4 of the probe, half of the memory
    assert "the device has 1 GiB, of which bench takes at most 50%" in caught.value.true
    assert "they take 1.32 GiB together" in caught.value.true
    assert "--params up to 2e+07" in caught.value.fix
    largest = 2**29 / (7.125 + 16 + 4)
    assert largest == pytest.approx(2e7, rel=0.02)
    choose(["adamw"], num_params=1.97e7, **options)


def test_threads_are_refused_where_they_change_nothing():
    with pytest.raises(ArgumentError, match="threads=2 on cuda:0"):
        checks.checked_threads(2, torch.device("cuda:0"))
    assert steps_settings.DEFAULT_SECONDS <= 90
