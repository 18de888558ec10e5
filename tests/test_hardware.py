"""The choice of dtype as a pure function of facts (MP-35), and the facts as they are read, for machines not at hand."""

import dataclasses
import doctest
import json
import re
import warnings
from types import SimpleNamespace

import pytest
import torch

from halfstep import _compat, hardware
from halfstep.errors import ArgumentError, PrecisionWarning, UnsupportedError
from halfstep.hardware import Choice, Hardware, check_dtype, choose_dtype, probe

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def nvidia(major: int, minor: int, name: str = "") -> Hardware:
    return Hardware("cuda", name, capability=(major, minor))


def amd(architecture: str) -> Hardware:
    return Hardware("cuda", "AMD Instinct", architecture=architecture)


def cpu(*features: str) -> Hardware:
    return Hardware("cpu", "some CPU", architecture="x86_64", features=features)


# --- the choice


@pytest.mark.parametrize(
    ("facts", "dtype", "reason"),
    [
        # NVIDIA, by capability
        (nvidia(9, 0, "NVIDIA H200"), BF16, "bf16: sm_90 multiplies bf16 natively; no loss scaling needed"),
        (nvidia(8, 0, "NVIDIA A100-SXM4-80GB"), BF16, "sm_80 multiplies bf16 natively"),
        (nvidia(8, 6, "NVIDIA GeForce RTX 3090"), BF16, "sm_86"),
        (nvidia(8, 9, "NVIDIA RTX 2000 Ada Generation"), BF16, "sm_89"),
        (nvidia(12, 0, "NVIDIA GeForce RTX 5090"), BF16, "sm_120"),
        (nvidia(7, 0, "Tesla V100-SXM2-16GB"), FP16, "sm_70 multiplies fp16 natively but not bf16; gradients"),
        (nvidia(7, 2, "Xavier"), FP16, "sm_72"),
        (nvidia(7, 5, "Tesla T4"), FP16, "sm_75 multiplies fp16 natively but not bf16; gradients need loss scaling"),
        (nvidia(7, 5, "Quadro RTX 4000"), FP16, "sm_75"),
        (nvidia(7, 5, "NVIDIA GeForce RTX 2080 Ti"), FP16, "sm_75"),
        (nvidia(7, 5, "NVIDIA GeForce GTX 1660 SUPER"), FP32, r"no Tensor Cores.*known to give NaN"),
        (nvidia(7, 5, "GeForce GTX 1650"), FP32, "GTX 1650 reports sm_75 like a T4 but has no Tensor Cores"),
        (nvidia(7, 5, "NVIDIA GeForce MX450"), FP32, "no Tensor Cores"),
        (nvidia(7, 5, "NVIDIA T600 Laptop GPU"), FP32, "no Tensor Cores"),
        (nvidia(6, 0, "Tesla P100-PCIE-16GB"), FP32, "fast fp16 arithmetic but no Tensor Cores.*memory, not"),
        (nvidia(6, 1, "GeForce GTX 1080 Ti"), FP32, "fp16 is slower here: sm_61 has 1/64 of fp32's rate"),
        (nvidia(6, 2), FP32, "no Tensor Cores"),
        (nvidia(5, 2), FP32, "fp16 is slower here: sm_52 has no fp16 arithmetic, only conversions"),
        (nvidia(3, 7, "Tesla K80"), FP32, "fp16 is slower here"),
        # AMD, by architecture
        (amd("gfx90a"), BF16, "gfx90a multiplies bf16 natively"),
        (amd("gfx942"), BF16, "gfx942"),
        (amd("gfx950"), BF16, "gfx950"),
        (amd("gfx908"), BF16, "gfx908"),
        (amd("gfx1100"), BF16, "gfx1100"),
        (amd("gfx1201"), BF16, "gfx1201"),
        (amd("gfx906"), FP32, "gfx906 has no matrix cores"),
        (amd("gfx1030"), FP32, "gfx1030 has no matrix cores"),
        # others
        (Hardware("mps", "Apple M4 Max"), FP32, "saves memory, not time.*by name"),
        (Hardware("xpu", "Intel Arc B580", features=("xmx",)), BF16, "this xpu device multiplies bf16 natively"),
        (Hardware("xpu", "Intel Graphics"), FP32, "no XMX"),
        (Hardware("hpu"), FP32, "does not know what this hpu device multiplies natively"),
        (Hardware("cuda"), FP32, "does not know what this cuda device"),
        # CPUs, by instruction set
        (cpu("avx2", "avx512", "avx512_bf16"), BF16, "this CPU multiplies bf16 natively"),
        (cpu("avx512", "amx_bf16"), BF16, "this CPU"),
        (cpu("neon", "arm_bf16"), BF16, "this CPU"),
        (cpu("sve", "sve_bf16"), BF16, "this CPU"),
        (cpu("avx2", "avx512"), FP32, r"no bf16 instructions.*51 to 62 times slower"),
        (cpu("neon", "arm_fp16"), FP32, "no bf16 instructions"),
        (cpu(), FP32, "no bf16 instructions"),
    ],
    ids=lambda value: (value.name or value.label) if isinstance(value, Hardware) else "",
)  # fmt: skip
def test_choice(facts, dtype, reason):
    choice = choose_dtype(facts)
    assert choice.dtype == dtype
    assert choice.needs_scaling == (dtype == FP16)
    name = {FP32: "fp32: ", FP16: "fp16: ", BF16: "bf16: "}[dtype]
    assert choice.reason.startswith(name)
    assert re.search(reason, choice.reason), choice.reason


@pytest.mark.parametrize(("major", "minor"), [(7, 0), (7, 2), (7, 5)])
def test_volta_and_turing_have_no_bf16(major, minor):
    """The common mistake: is_bf16_supported() counts emulation, and so says yes on a V100."""
    assert nvidia(major, minor).native_formats == ("fp32", "fp16")
    assert any("emulates" in note for note in nvidia(major, minor).notes)


def test_the_choice_asks_torch_nothing(monkeypatch):
    """Pure: no torch.cuda query, whatever it would say."""

    def forbidden(*args, **kwargs):
        raise AssertionError("the choice must not ask the machine")

    for name in ("is_bf16_supported", "is_available", "get_device_capability", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, forbidden)
    assert choose_dtype(nvidia(7, 0)).dtype == FP16


@pytest.mark.parametrize(
    ("facts", "native", "tensor_cores"),
    [
        (nvidia(9, 0), ("fp32", "tf32", "fp16", "bf16", "fp8_e4m3fn", "fp8_e5m2"), True),
        (nvidia(8, 6), ("fp32", "tf32", "fp16", "bf16"), True),
        (nvidia(7, 5, "Tesla T4"), ("fp32", "fp16"), True),
        (nvidia(7, 5, "NVIDIA GeForce GTX 1650"), ("fp32", "fp16"), False),
        (nvidia(6, 0), ("fp32", "fp16"), False),
        (nvidia(6, 1), ("fp32",), False),
        (amd("gfx942"), ("fp32", "tf32", "fp16", "bf16"), True),
        (amd("gfx90a"), ("fp32", "fp16", "bf16"), True),
        (amd("gfx1030"), ("fp32", "fp16"), False),
        (cpu("amx_bf16", "amx_fp16"), ("fp32", "fp16", "bf16"), True),
        (cpu("avx512_bf16"), ("fp32", "bf16"), False),
        (cpu("avx2"), ("fp32",), False),
    ],
    ids=lambda value: value.label if isinstance(value, Hardware) else "",
)  # fmt: skip
def test_what_is_native(facts, native, tensor_cores):
    assert facts.native_formats == native
    assert facts.has_tensor_cores is tensor_cores


def test_notes_say_what_a_yes_would_hide():
    assert any("26 to 62 times slower than fp32" in note for note in cpu("avx512_bf16").notes)
    assert cpu("avx512_bf16", "avx512_fp16").notes == (
        "fp16 training on a CPU with fp16 instructions has not been measured",
    )
    assert any("flush subnormals" in note for note in amd("gfx90a").notes)
    assert nvidia(9, 0).notes == ()


def test_facts_and_choice_are_plain_data():
    facts = nvidia(9, 0, "NVIDIA H200")
    plain = json.loads(json.dumps(facts.as_dict()))
    assert plain == facts.as_dict()
    assert set(plain) >= {field.name for field in dataclasses.fields(Hardware)}
    assert plain["capability"] == [9, 0]
    assert plain["tensor_cores"] is True
    assert "bf16" in plain["native_formats"]
    choice = choose_dtype(facts).as_dict()
    assert json.loads(json.dumps(choice)) == choice
    assert (choice["dtype"], choice["needs_scaling"]) == ("bf16", False)


# --- the user's own choice wins, with a warning


@pytest.mark.parametrize(
    ("dtype", "facts", "text"),
    [
        ("bf16", nvidia(7, 0), r"bf16 was chosen by name and is used, but sm_70 has no bf16: torch emulates it"),
        (BF16, nvidia(7, 5, "Tesla T4"), r"By itself halfstep chooses fp16: sm_75"),
        ("half", nvidia(6, 1), r"fp16 is slower here[\s\S]*halfstep chooses fp32"),
        (FP16, nvidia(7, 5, "GeForce GTX 1660"), r"known to give NaN"),
        ("bfloat16", cpu("avx2"), r"no bf16 instructions"),
        ("bf16", Hardware("mps"), r"saves memory, not time"),
    ],
)
def test_explicit_choice_wins_with_a_warning(dtype, facts, text):
    with pytest.warns(PrecisionWarning, match=text):
        choice = check_dtype(dtype, facts)
    assert choice.dtype == hardware.dtype_of(dtype)
    assert choice.needs_scaling == (choice.dtype == FP16)
    assert "chosen by name; but" in choice.reason


@pytest.mark.parametrize(
    ("dtype", "facts"),
    [
        ("fp32", nvidia(6, 1)),
        ("fp16", nvidia(9, 0)),
        ("bf16", nvidia(8, 0)),
        ("fp16", nvidia(7, 0)),
        ("bf16", cpu("amx_bf16")),
    ],
)
def test_a_choice_that_pays_warns_of_nothing(dtype, facts):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice = check_dtype(dtype, facts)
    assert choice == Choice(
        hardware.dtype_of(dtype), dtype == "fp16", f"{dtype}: chosen by name; {facts.label} multiplies it natively"
    )


def test_fp16_on_a_cpu_warns_of_fp16_even_where_bf16_pays():
    with pytest.warns(PrecisionWarning, match=r"fp16 was chosen.*26 to 62 times slower.*halfstep chooses bf16"):
        check_dtype("fp16", cpu("avx512_bf16"))


@pytest.mark.parametrize("dtype", ["fp8_e4m3fn", "tf32", torch.float8_e5m2])
def test_dtypes_that_nothing_trains_in_are_refused(dtype):
    with pytest.raises(
        ArgumentError, match=r"to train in [\s\S]*true: halfstep trains in fp32, fp16 or bf16[\s\S]*fix:"
    ):
        check_dtype(dtype, nvidia(9, 0))
    with pytest.raises(ArgumentError, match="halfstep knows fp32"):
        check_dtype("int8", nvidia(9, 0))


# --- reading the facts


def test_probe_of_this_machine():
    facts = probe("cpu")
    assert facts.device_type == "cpu"
    assert facts.name
    assert facts.memory_bytes > 2**28
    assert set(facts.features) <= set(hardware.CPU_FEATURES)
    assert probe(torch.device("cpu")) == facts
    if not torch.accelerator.is_available():
        assert probe() == facts
    json.dumps(facts.as_dict())
    choose_dtype(facts)


X86 = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) 8480+\nflags\t\t: avx2 avx512f avx512_bf16 amx_bf16 amx_tile\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd asimdhp sve i8mm bf16 svebf16\nCPU implementer\t: 0x41\n"


@pytest.mark.parametrize(
    ("text", "name", "features"),
    [
        (X86, "Intel(R) Xeon(R) 8480+", ("avx2", "avx512", "avx512_bf16", "amx_bf16")),
        (ARM, None, ("neon", "arm_bf16", "arm_fp16", "sve", "sve_bf16")),
        ("", None, ()),
        ("garbage without a colon\n: : :\n", None, ()),
    ],
)
def test_cpu_facts_from_cpuinfo(monkeypatch, tmp_path, text, name, features):
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    monkeypatch.setattr(hardware, "_CPUINFO", path)
    monkeypatch.setattr(_compat, "cpu_capabilities", dict)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    facts = probe("cpu")
    assert facts.features == features
    assert name is None or facts.name == name
    assert choose_dtype(facts).dtype == (BF16 if features else FP32)


def test_torchs_word_on_the_cpu_outranks_cpuinfo(monkeypatch, tmp_path):
    """The kernel lists what the chip has; torch's list also knows whether the system lets it be used."""
    path = tmp_path / "cpuinfo"
    path.write_text(X86)
    monkeypatch.setattr(hardware, "_CPUINFO", path)
    monkeypatch.setattr(_compat, "cpu_capabilities", lambda: {"avx2": True, "avx512_bf16": False, "amx_bf16": False})
    assert probe("cpu").features == ("avx2",)


def test_unknown_machine_never_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "_CPUINFO", tmp_path / "absent")
    monkeypatch.setattr(_compat, "cpu_capabilities", dict)
    monkeypatch.setattr(hardware.platform, "processor", str)
    monkeypatch.setattr(hardware.platform, "machine", str)
    monkeypatch.delattr(hardware.os, "sysconf")
    facts = probe("cpu")
    assert (facts.name, facts.features, facts.memory_bytes) == ("CPU", (), None)
    assert choose_dtype(facts).dtype == FP32


def test_bf16_instructions_that_torch_cannot_use_do_not_count(monkeypatch):
    """torch for macOS has no oneDNN: an M2's bf16 instructions help none of its matrix products."""
    monkeypatch.setattr(_compat, "cpu_capabilities", lambda: {"neon": True, "bf16": True, "fp16_arith": True})
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert probe("cpu").features == ("neon", "arm_bf16", "arm_fp16")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert probe("cpu").features == ("neon",)


def pretend(monkeypatch, module, count=1, **functions):
    monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(module, "device_count", lambda: count)
    for name, value in functions.items():
        monkeypatch.setattr(module, name, lambda *_, value=value: value)


def test_probe_reads_nvidia(monkeypatch):
    properties = SimpleNamespace(name="Tesla T4", major=7, minor=5, total_memory=15 * 2**30, gcnArchName="Tesla T4")
    pretend(monkeypatch, torch.cuda, count=2, get_device_properties=properties)
    assert probe("cuda:1") == Hardware("cuda", "Tesla T4", capability=(7, 5), memory_bytes=15 * 2**30)
    assert choose_dtype(probe("cuda")).dtype == FP16


def test_probe_reads_amd_by_architecture_not_by_capability(monkeypatch):
    """gfx906 reports 9.0, which on NVIDIA would mean Hopper."""
    properties = SimpleNamespace(
        name="AMD Radeon VII", major=9, minor=0, total_memory=16 * 2**30, gcnArchName="gfx906:sramecc+:xnack-"
    )
    pretend(monkeypatch, torch.cuda, get_device_properties=properties)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    facts = probe("cuda")
    assert (facts.architecture, facts.capability, facts.label) == ("gfx906", None, "gfx906")
    assert choose_dtype(facts).dtype == FP32


@pytest.mark.parametrize(("xmx", "dtype"), [(True, BF16), (False, FP32)])
def test_probe_reads_intel(monkeypatch, xmx, dtype):
    properties = SimpleNamespace(
        name="Intel(R) Arc(TM) B580", total_memory=2**33, has_subgroup_matrix_multiply_accumulate=xmx
    )
    pretend(monkeypatch, torch.xpu, get_device_properties=properties)
    facts = probe("xpu:0")
    assert facts == Hardware("xpu", "Intel(R) Arc(TM) B580", features=("xmx",) if xmx else (), memory_bytes=2**33)
    assert choose_dtype(facts).dtype == dtype


def test_probe_reads_apple(monkeypatch):
    pretend(monkeypatch, torch.mps, recommended_max_memory=2**34)
    facts = probe("mps")
    assert (facts.device_type, facts.memory_bytes) == ("mps", 2**34)
    assert facts.name


def test_probe_takes_the_current_accelerator(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, total_memory=1, gcnArchName="")
    pretend(monkeypatch, torch.cuda, get_device_properties=properties)
    pretend(monkeypatch, torch.accelerator, current_accelerator=torch.device("cuda"))
    assert probe().name == "NVIDIA A100"


def test_probe_of_an_unknown_kind_gives_no_facts():
    assert probe("meta") == Hardware("meta")
    assert "does not know" in choose_dtype(probe("meta")).reason


@pytest.mark.parametrize("device", ["cudaa", "cpu:x", 3.5])
def test_probe_refuses_what_is_no_device(device):
    with pytest.raises(ArgumentError, match=r"the device [\s\S]*true: torch knows no such device[\s\S]*fix:  pass"):
        probe(device)


def test_probe_refuses_a_device_that_is_not_there(monkeypatch):
    pretend(monkeypatch, torch.cuda, count=1)
    with pytest.raises(UnsupportedError, match=r"'cuda:1'\n  true: torch .* sees 1 devices of type 'cuda'"):
        probe("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match=r"sees 0 devices[\s\S]*why:[\s\S]*fix:.*by hand with"):
        probe("cuda")


def test_examples_in_docstrings():
    assert doctest.testmod(hardware).failed == 0
