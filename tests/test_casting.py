"""cast_model: what is cast, what stays and why, and inputs on their way in."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep.casting import cast_model
from halfstep.errors import ArgumentError, PrecisionWarning

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.PrecisionWarning")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.router = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(4.0) / 4))
        self.register_buffer("ids", torch.arange(4))
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def forward(self, ids, timestep=None, scale=None):
        x = self.router(self.norm(self.embed(ids)))
        self.seen = (timestep, scale)
        return self.head(x)


@pytest.mark.parametrize("preset", ["bf16-master", "fp16-master", "bf16-true"])
def test_floating_weights_are_cast_and_nothing_else(preset):
    model = Model()
    before = {id(p) for p in model.parameters()}
    cast_model(model, preset)
    dtype = FP16 if preset.startswith("fp16") else BF16
    dtypes = {name: t.dtype for name, t in [*model.named_parameters(), *model.named_buffers()]}
    assert {id(p) for p in model.parameters()} == before, "the same Parameter objects"
    assert model.head.weight is model.embed.weight
    assert dtypes["embed.weight"] == dtypes["router.weight"] == dtypes["router.bias"] == dtype
    assert dtypes["norm.weight"] == dtypes["norm.running_var"] == dtypes["inv_freq"] == FP32
    assert (dtypes["ids"], dtypes["mask"], dtypes["phase"]) == (torch.int64, torch.bool, torch.complex64)
    assert dtypes["norm.num_batches_tracked"] == torch.int64
    assert model(torch.arange(6)).dtype == dtype


def test_it_says_what_it_did():
    records = {cast.name: cast for cast in cast_model(Model(), "bf16-master", keep_fp32=["router"])}
    assert str(records["embed.weight"]) == "parameter embed.weight: float32 -> bfloat16 (the policy's weights)"
    assert str(records["norm.bias"]) == "parameter norm.bias: float32 (a norm with running statistics)"
    assert str(records["inv_freq"]) == "buffer inv_freq: float32 (a buffer, which keeps its dtype)"
    assert str(records["router"]) == "module router: float32 (runs in fp32, named in keep_fp32)"
    assert {name for name, cast in records.items() if cast.is_changed} == {"embed.weight"}


def test_mixed_policies_cast_no_weights():
    model = Model()
    assert not any(cast.is_changed for cast in cast_model(model, "bf16-mixed"))
    assert {p.dtype for p in model.parameters()} == {FP32, torch.complex64}


@pytest.mark.parametrize(("policy", "half"), [("fp16", "fp16"), (FP16, "fp16"), ("fp16-mixed", "fp16"),
                                              ("bf16", "bf16"), (BF16, "bf16"), ("bf16-mixed", "bf16")])  # fmt: skip
def test_a_mixed_policy_that_casts_nothing_says_so(policy, half):
    with pytest.warns(PrecisionWarning, match=f'keeps fp32 weights, and nothing was cast.*"{half}-master"'):
        cast_model(nn.Linear(2, 2), policy)


@pytest.mark.parametrize(("model", "policy", "keep"), [
    (nn.Linear(2, 2), "fp32", []),
    (nn.Linear(2, 2), "fp16-master", []),
    (nn.Sequential(nn.Linear(2, 2)), "fp16-mixed", ["0"]),
    (nn.Linear(2, 2).half(), "fp16-mixed", []),
])  # fmt: skip
def test_a_policy_that_does_what_it_says_does_not(model, policy, keep):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cast_model(model, policy, keep_fp32=keep)


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("policy", ["bf16-master", "fp16-master", "bf16-mixed"])
@pytest.mark.parametrize("keep", [[], ["1"]])
def test_statistics_of_a_model_that_was_16_bit_already_are_raised_with_their_weights(dtype, policy, keep):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(dtype)
    model[1].running_var.fill_(0.5)
    records = {cast.name: cast for cast in cast_model(model, policy, keep_fp32=keep)}
    norm = model[1]
    assert {t.dtype for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var)} == {FP32}
    assert torch.equal(norm.running_var, torch.full((4,), 0.5)), "16 bits hold it exactly, and so does fp32"
    assert records["1.running_var"].is_changed
    assert torch.isfinite(model(torch.randn(8, 4))).all()
    assert norm.num_batches_tracked.dtype == torch.int64


def test_buffers_are_cast_only_when_asked_and_never_those_of_kept_modules():
    model = Model()
    cast_model(model, "p=bf16,c=bf16,buffer=bf16,master=fp32")
    assert model.inv_freq.dtype == BF16
    assert model.norm.running_var.dtype == FP32


@pytest.mark.parametrize("autocast", [False, True])
def test_a_kept_module_runs_in_fp32_under_autocast_too(autocast):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    cast_model(model, "bf16-mixed" if autocast else "bf16-master", keep_fp32=["1"])
    seen = {}
    for i, layer in enumerate(model):
        layer.register_forward_hook(lambda m, a, o, i=i: seen.__setitem__(i, (a[0].dtype, o.dtype)))
    x = torch.randn(2, 4)
    with torch.autocast("cpu", dtype=BF16, enabled=autocast):
        y = model(x)
        assert torch.is_autocast_enabled("cpu") is autocast, "as it was"
    assert seen[1][1] == (FP32 if autocast else BF16) or not autocast
    with torch.no_grad():
        hidden = F.linear(x.bfloat16(), model[0].weight.bfloat16(), model[0].bias.bfloat16())
        exact = F.linear(hidden.float(), model[1].weight, model[1].bias)
        rough = F.linear(hidden, model[1].weight.bfloat16(), model[1].bias.bfloat16())
        end = F.linear(exact.bfloat16(), model[2].weight.bfloat16(), model[2].bias.bfloat16())
    assert not torch.equal(exact.bfloat16(), rough), "the test would prove nothing"
    assert torch.equal(y, end)


def test_an_exception_in_a_kept_module_leaves_autocast_as_it_was():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            raise KeyError

    model = nn.Sequential(Broken())
    cast_model(model, "bf16-mixed", keep_fp32=["0"])
    with torch.autocast("cpu", dtype=BF16):
        for _ in range(2):
            with pytest.raises(KeyError):
                model(torch.ones(1))
            assert torch.is_autocast_enabled("cpu")


def test_patterns_match_the_outermost_modules():
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), "b": nn.Linear(1, 1)})
    records = cast_model(model, "bf16-master", keep_fp32=["a*"])
    assert [cast.name for cast in records if cast.kind == "module"] == ["a"]
    assert model["a"][1].weight.dtype == FP32
    assert model["b"].weight.dtype == BF16


def test_timesteps_stay_when_named_and_are_warned_about_when_not():
    """MP-58: 998.39 becomes 1000 before the time embedding."""
    timestep = torch.tensor([998.3897, 988.4937, 937.0])
    assert timestep.bfloat16().tolist() == [1000.0, 988.0, 936.0], "plain PyTorch"
    model = Model()
    cast_model(model, "bf16-master", keep_fp32_inputs=["timestep"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.arange(6), timestep=timestep, scale=torch.randn(1000))
    assert model.seen[0] is timestep
    assert model.seen[1].dtype == BF16
    model = Model()
    cast_model(model, "bf16-master")
    for call in (1, 2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.arange(6), timestep)
        assert len(caught) == (call == 1), "once"
        if caught:
            assert issubclass(caught[0].category, PrecisionWarning)
            assert "'timestep'" in str(caught[0].message)
            assert 'keep_fp32_inputs=["timestep"]' in str(caught[0].message)


@pytest.mark.parametrize("value", [torch.tensor([998.39]), torch.full((3,), 257.0), torch.arange(4096.0) + 4096])
def test_inputs_that_lose_their_meaning_are_warned_about(value):
    model = Model()
    cast_model(model, "bf16-master")
    with pytest.warns(PrecisionWarning, match="'scale'"):
        model(torch.arange(6), scale=value)


@pytest.mark.parametrize("value", [torch.rand(10_000), torch.randn(10_000), torch.zeros(3), torch.empty(0),
                                   torch.arange(5), torch.tensor([float("inf"), 1.0])])  # fmt: skip
def test_ordinary_inputs_are_not(value):
    model = Model()
    cast_model(model, "bf16-master")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.arange(6), scale=value)


def test_inputs_stay_where_the_policy_says_so():
    model = Model()
    cast_model(model, "bf16-master,cast_inputs=false")
    model(torch.arange(6), scale=torch.ones(2))
    assert model.seen[1].dtype == FP32


def test_gradients_that_exist_follow_their_weights():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    cast_model(model, "bf16-master")
    assert model.weight.grad.dtype == BF16
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 2), 2.0, dtype=BF16))


def test_a_cast_model_can_be_copied_and_pickled():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    cast_model(model, "bf16-master", keep_fp32=["1"])
    x = torch.randn(2, 4)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))


def test_refusals():
    with pytest.raises(ArgumentError, match=r"keep_fp32='hed'.*\n.*\n.*matches none of them"):
        cast_model(Model(), "bf16-master", keep_fp32=["hed"])
    with pytest.raises(ArgumentError, match="there is no argument time"):
        cast_model(Model(), "bf16-master", keep_fp32_inputs=["time"])
    model = Model()
    with pytest.raises(ArgumentError, match=r"tied to embed.weight.*\n.*\n.*keep 'embed'"):
        cast_model(model, "bf16-master", keep_fp32=["head"])
    assert model.head.weight.dtype == FP32
    assert model.router.weight.dtype == FP32, "nothing was cast"
    cast_model(model, "bf16-master", keep_fp32=["head", "embed"])
    assert model(torch.arange(6)).dtype == BF16
    assert model.embed.weight.dtype == FP32
    with pytest.raises(ArgumentError, match=r"a model is a torch\.nn\.Module"):
        cast_model(torch.ones(1), "bf16-master")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (torch.arange(4096.0), "moves whole numbers by up to"),
        (torch.tensor([998.3897, 998.4, 998.5]), "of its spread"),
        (torch.tensor([1e39, 1.0], dtype=torch.float64), "makes infinities"),
    ],
)
def test_MP_58_inputs_that_a_cast_would_move_are_named(values, says):
    class Model(nn.Linear):
        def forward(self, x, timestep):
            return super().forward(x)

    model = Model(2, 1)
    cast_model(model, "bf16-master")
    with pytest.warns(PrecisionWarning, match=f"'timestep'.*{says}"):
        model(torch.ones(1, 2), values)


def test_MP_58_images_and_small_whole_numbers_are_cast_in_silence():
    model = nn.Linear(2, 1)
    cast_model(model, "bf16-master")
    model(torch.rand(8, 2))
    model(torch.tensor([[3.0, 200.0]]))
