"""enable_tf32: every switch on inside, every switch as it was outside, whatever the user had set, in whatever API."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch

import halfstep.tf32 as module
from halfstep.errors import ArgumentError, CallOrderError, PrecisionWarning
from halfstep.hardware import Hardware
from halfstep.tf32 import enable_tf32

H200 = Hardware("cuda", "NVIDIA H200", capability=(9, 0))


def on():
    return enable_tf32(hardware=H200)


def precisions():
    """What holds for products, convolutions and recurrent layers, and what the older switches say."""
    new = (
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cudnn.rnn.fp32_precision,
    )
    return (*new, torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32)


ALL_ON = ("tf32", "tf32", "tf32", "high", True)
AS_TORCH_BEGINS = ("none", "tf32", "tf32", "highest", False)


@pytest.fixture(autouse=True)
def _clean():
    yield
    assert module._open == []
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.fp32_precision = "none"
    assert precisions() == AS_TORCH_BEGINS


def test_a_block():
    with on() as handle:
        assert precisions() == ALL_ON
        assert torch.backends.cudnn.allow_tf32
        assert torch.backends.mkldnn.matmul.fp32_precision == "none", "a CPU's products are left alone"
        assert handle.is_enabled
        assert handle.is_available
        assert handle.reason == "tf32: sm_90 multiplies it natively"
        assert repr(handle) == "TF32Switch(on: tf32: sm_90 multiplies it natively)"
    assert precisions() == AS_TORCH_BEGINS
    assert not handle.is_enabled


def test_after_an_error():
    with pytest.raises(ZeroDivisionError), on():
        raise ZeroDivisionError
    assert precisions() == AS_TORCH_BEGINS


def test_a_plain_call_acts_until_disable():
    handle = on()
    assert precisions() == ALL_ON
    handle.enable()
    handle.disable()
    assert precisions() == AS_TORCH_BEGINS
    handle.disable()
    with handle:
        assert precisions() == ALL_ON
    assert precisions() == AS_TORCH_BEGINS


def test_a_decorator_acts_while_the_function_runs():
    @on()
    def run(depth):
        """Doc."""
        assert precisions() == ALL_ON
        return run(depth - 1) + 1 if depth else 0

    assert precisions() == AS_TORCH_BEGINS
    assert (run(2), run.__name__, run.__doc__) == (2, "run", "Doc.")
    assert precisions() == AS_TORCH_BEGINS
    with pytest.raises(TypeError):
        run("one")
    assert precisions() == AS_TORCH_BEGINS


def test_nested_with_a_change_between():
    with on():
        torch.set_float32_matmul_precision("highest")
        with on():
            assert precisions() == ALL_ON
        assert precisions()[0] == "ieee"
        assert precisions()[3] == "highest"
    assert precisions() == AS_TORCH_BEGINS
    assert torch.backends.mkldnn.matmul.fp32_precision == "none"


def test_a_user_who_turns_it_off_inside():
    with on():
        torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert precisions() == AS_TORCH_BEGINS


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_closed_in_any_order(order):
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    handles = [on() for _ in range(3)]
    for place in order:
        assert precisions() == ALL_ON, "on until the last one is closed"
        handles[place].disable()
    assert precisions()[0] == "ieee"


def test_a_failure_on_the_way_in_leaves_nothing(monkeypatch):
    def fail(value):
        if value == "high":
            raise RuntimeError("frozen")

    monkeypatch.setattr(module, "_set_old_matmul", fail)
    with pytest.raises(RuntimeError, match="frozen"):
        on()
    assert precisions() == AS_TORCH_BEGINS


def test_cuda_is_not_started():
    with on():
        pass
    assert not torch.cuda.is_initialized()


# -- exactly as it was, whatever that was -----------------------------------------------------------------------------

EXHAUSTIVE = """
import itertools, torch
from halfstep.hardware import Hardware
from halfstep.tf32 import enable_tf32

B = torch.backends
OLD = {
    "none": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "cublas": lambda: setattr(B.cuda.matmul, "allow_tf32", True),
    "no cudnn": lambda: setattr(B.cudnn, "allow_tf32", False),
}

def reads(read):
    try:
        return read()
    except RuntimeError:
        return "raises"

def look():
    return (B.cuda.matmul.fp32_precision, B.cudnn.conv.fp32_precision, B.cudnn.rnn.fp32_precision,
            B.mkldnn.matmul.fp32_precision, B.cudnn.fp32_precision, B.fp32_precision,
            reads(torch.get_float32_matmul_precision), reads(lambda: B.cuda.matmul.allow_tf32),
            reads(lambda: B.cudnn.allow_tf32))

def look_under_every_parent(root, parent):
    # Two switches that hold the same now may follow different parents, so each parent is turned.
    seen = [look()]
    for B.fp32_precision, B.cudnn.fp32_precision in itertools.product(("none", "ieee", "tf32"), repeat=2):
        seen.append(look())
    B.fp32_precision, B.cudnn.fp32_precision = root, parent
    return seen

def forget():
    torch.set_float32_matmul_precision("highest")
    B.cudnn.allow_tf32 = True
    for owner in (B, B.cudnn, B.cuda.matmul, B.cudnn.conv, B.cudnn.rnn, B.mkldnn.matmul):
        owner.fp32_precision = "none"

count = 0
values = ("none", "ieee", "tf32")
for root, parent, old in itertools.product((*values, "bf16"), values, OLD):
    for matmul, conv, rnn in itertools.product((None, *values), (None, *values), (None, "ieee")):
        forget()
        OLD[old]()
        B.fp32_precision, B.cudnn.fp32_precision = root, parent
        for owner, value in ((B.cuda.matmul, matmul), (B.cudnn.conv, conv), (B.cudnn.rnn, rnn)):
            if value is not None:
                owner.fp32_precision = value
        before = look_under_every_parent(root, parent)
        with enable_tf32(hardware=Hardware("cuda", capability=(8, 0))):
            inside = look()
        case = (root, parent, old, matmul, conv, rnn)
        assert inside[:3] == ("tf32",) * 3, (case, inside)
        assert inside[7] is True and inside[8] is True, (case, inside)
        old_says, onednn = "medium" if old == "medium" else "high", inside[3]
        clash = onednn in ("tf32", "bf16") and onednn != {"high": "tf32", "medium": "bf16"}[old_says]
        assert inside[6] == ("raises" if clash else old_says), (case, before[0], inside)
        assert inside[3] == before[0][3], (case, "oneDNN")
        assert look_under_every_parent(root, parent) == before, case
        count += 1
print(count)
"""


IMPORTS = "import torch\nfrom halfstep.hardware import Hardware\nfrom halfstep.tf32 import enable_tf32\n"


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_state_that_a_user_can_make_comes_back():
    assert run_python(EXHAUSTIVE).strip() == str(4 * 3 * 5 * 4 * 4 * 2)


def test_switches_that_nobody_has_set_stay_unset():
    """torch's defaults for convolutions give way to a parent; a switch that was written would not."""
    look = "print(B.cudnn.conv.fp32_precision, B.cudnn.rnn.fp32_precision, B.cuda.matmul.fp32_precision)\n"
    begin = f"{IMPORTS}B = torch.backends\n"
    use = "with enable_tf32(hardware=Hardware('cuda', capability=(9, 0))): pass\n"
    after = "".join(f"B.{owner}fp32_precision = '{v}'\n{look}" for owner in ("", "cudnn.") for v in ("ieee", "none"))
    assert run_python(begin + use + look + after) == run_python(begin + look + after)


def test_convolutions_that_were_written_inside_come_back_on():
    code = (
        f"{IMPORTS}"
        "with enable_tf32(hardware=Hardware('cuda', capability=(9, 0))):\n"
        "    torch.backends.cudnn.allow_tf32 = False\n"
        "    torch.set_float32_matmul_precision('medium')\n"
        "print(torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.allow_tf32,\n"
        "      torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.fp32_precision)"
    )
    assert run_python(code).split() == ["tf32", "True", "highest", "none"]


# -- where there is none ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hardware", "reason"),
    [
        (Hardware("cuda", "Tesla V100", capability=(7, 0)), "fp32: sm_70 has no tf32, only fp32, fp16"),
        (Hardware("cpu"), "fp32: this CPU has no tf32, only fp32"),
        (Hardware("cuda", "MI250", architecture="gfx90a"), "fp32: gfx90a has no tf32, only fp32, fp16, bf16"),
        (Hardware("xpu", features=("xmx",)), "fp32: this xpu device has a switch of its own"),
    ],
)
def test_hardware_without_it(hardware, reason):
    with pytest.warns(PrecisionWarning, match="changes nothing here") as caught:
        handle = enable_tf32(hardware=hardware)
    assert caught[0].filename == __file__
    assert handle.reason.startswith(reason)
    assert not handle.is_available
    with handle:
        assert not handle.is_enabled
        assert precisions() == AS_TORCH_BEGINS


def test_amd_cards_that_have_it():
    with enable_tf32(hardware=Hardware("cuda", "MI300X", architecture="gfx942")) as handle:
        assert (handle.is_enabled, precisions()) == (True, ALL_ON)


def test_a_machine_without_cuda(monkeypatch):
    monkeypatch.setattr(module, "count_devices", lambda _: 0)
    with pytest.warns(PrecisionWarning, match="sees no CUDA device"), enable_tf32() as handle:
        assert not handle.is_enabled


def test_a_machine_whose_cuda_has_not_started_is_not_asked(monkeypatch):
    monkeypatch.setattr(module, "count_devices", lambda _: 1)
    monkeypatch.setattr(module, "probe", lambda _: pytest.fail("probe starts CUDA"))
    with enable_tf32() as handle:
        assert precisions() == ALL_ON
        assert "without asking the card" in handle.reason


def test_a_machine_whose_cuda_has_started_is_asked(monkeypatch):
    monkeypatch.setattr(module, "count_devices", lambda _: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(module, "probe", lambda _: Hardware("cuda", "T4", capability=(7, 5)))
    with pytest.warns(PrecisionWarning, match="sm_75 has no tf32"):
        enable_tf32()


# -- refusals ---------------------------------------------------------------------------------------------------------


def four_parts(error):
    return all(part in str(error.value) for part in ("\n  true: ", "\n  why:  ", "\n  fix:  "))


def test_hardware_that_is_none():
    with pytest.raises(ArgumentError, match="hardware='cuda'") as error:
        enable_tf32(hardware="cuda")
    assert four_parts(error)


def test_generators_and_coroutines():
    def generator():
        yield

    async def coroutine():
        pass

    for function in (generator, coroutine):
        with pytest.raises(ArgumentError, match=rf"around {function.__name__}\(\)") as error:
            on()(function)
        assert four_parts(error)
    assert precisions() == AS_TORCH_BEGINS


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies(copied):
    with on() as handle, pytest.raises(CallOrderError, match="put them back a second time") as error:
        copied(handle)
    assert four_parts(error)
