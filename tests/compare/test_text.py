"""The language-model task: its text is fixed and split cleanly, its model and schedule are what they are called."""

import hashlib
import math
import sysconfig
from pathlib import Path

import pytest
import torch

from halfstep import emulate
from halfstep.compare import text
from halfstep.compare.text import (
    CONTEXT,
    MODULES,
    ByteGpt,
    byte_loss,
    frequency_loss,
    library_text,
    warmup_then_cosine,
    windows,
)
from halfstep.errors import UnsupportedError

# ---- the text -------------------------------------------------------------------------------------------------------


def test_the_text_is_the_modules_in_the_order_of_their_names():
    folder = Path(sysconfig.get_path("stdlib"))
    whole = "".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in sorted(MODULES)).encode()
    ours = library_text()
    assert ours.train + ours.held_out == whole
    assert len(set(MODULES)) == len(MODULES)
    assert 2e6 < len(whole) < 4e6  # 2.79 MB in 3.10.13, 3.05 MB in 3.13.0


def test_the_last_twentieth_is_held_out():
    ours = library_text()
    assert len(ours.held_out) / len(ours.train + ours.held_out) == pytest.approx(0.05, abs=1e-6)


def test_the_hash_is_that_of_the_text_and_the_same_when_it_is_read_again():
    first = library_text()
    library_text.cache_clear()
    second = library_text()
    assert first is not second
    assert first.sha256 == second.sha256 == hashlib.sha256(first.train + first.held_out).hexdigest()
    assert f"sha256 {first.sha256[:16]}" in first.source
    assert first.source.startswith(f"{len(MODULES)} modules of ")


def test_another_text_has_another_hash():
    ours = library_text()
    assert text.Text(ours.train, ours.held_out[:-1] + b"#").sha256 != ours.sha256


def library_of(folder, monkeypatch, *, content=b"pass\n", without=()):
    """A standard library with these files, for the text to be read from."""
    for name in set(MODULES) - set(without):
        (folder / f"{name}.py").write_bytes(content)
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(folder))
    return library_text.__wrapped__  # past the cache


def test_the_line_ends_of_windows_make_no_other_text(tmp_path, monkeypatch):
    read = library_of(tmp_path, monkeypatch, content=b"import os\r\nimport sys\r\n")
    assert read().train[:21] == b"import os\nimport sys\n"


def test_a_library_without_sources_is_refused(tmp_path, monkeypatch):
    read = library_of(tmp_path, monkeypatch, without=("ast", "typing"))
    with pytest.raises(UnsupportedError) as caught:
        read()
    assert caught.value.asked == "a language model of the standard library's source text"
    assert caught.value.true == f"2 of its {len(MODULES)} files are not in {str(tmp_path)!r}, such as ast.py"
    assert "nothing is downloaded" in caught.value.why
    assert "leave --task text out" in caught.value.fix


@pytest.mark.parametrize(("length", "num_windows"), [(256, 2), (1000, 7), (65 * 11, 11)])
def test_windows_lie_apart_and_targets_are_inputs_shifted_by_one(length, num_windows):
    content = bytes(i % 251 for i in range(length))
    inputs, targets = windows(content, num_windows)
    assert inputs.shape == targets.shape == (num_windows, CONTEXT)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    distance = (length - CONTEXT - 1) // (num_windows - 1)
    assert distance > CONTEXT  # so no byte is in two windows, targets included
    for i in range(num_windows):
        piece = content[i * distance : i * distance + CONTEXT + 1]
        assert bytes(inputs[i].tolist()) + bytes([int(targets[i, -1])]) == piece
    assert (num_windows - 1) * distance + CONTEXT + 1 > length - num_windows  # the last window ends near the end


def test_windows_that_would_overlap_are_our_own_bug():
    with pytest.raises(AssertionError):
        windows(bytes(CONTEXT * 10), 11)


# ---- the model ------------------------------------------------------------------------------------------------------


def test_the_number_of_parameters():
    layer = 96 * 288 + 288 + 96 * 96 + 96 + 96 * 384 + 384 + 384 * 96 + 96 + 4 * 96
    assert sum(p.numel() for p in ByteGpt().parameters()) == 256 * 96 + 64 * 96 + 2 * layer + 2 * 96 == 254592


def test_first_weights():
    torch.manual_seed(0)
    for name, parameter in ByteGpt().named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert bool((parameter == 1).all()), name
        else:  # the standard deviation of n draws is within 4 sigma of 0.02; sigma = 0.02 / sqrt(2 n)
            assert parameter.std().item() == pytest.approx(0.02, abs=4 * 0.02 / (2 * parameter.numel()) ** 0.5), name


def test_a_logit_depends_on_its_own_and_earlier_bytes_only():
    torch.manual_seed(0)
    model = ByteGpt()
    tokens = torch.randint(0, 256, (1, CONTEXT))
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 256
    differs = (model(tokens) != model(changed)).any(-1)[0]
    assert not differs[:20].any()
    assert bool(differs[20:].all())


def test_the_attention_is_the_textbooks():
    torch.manual_seed(0)
    block = text._Block(8, 2, text.causal_attention).double()
    stream, tokens = torch.randn(3, 5, 8, dtype=torch.float64), torch.zeros(3, 5, dtype=torch.int64)
    query, key, value = block.query_key_value(stream).split(8, -1)
    seen = torch.empty_like(stream)
    for b in range(3):
        for head in (slice(0, 4), slice(4, 8)):
            for t in range(5):
                scores = key[b, : t + 1, head] @ query[b, t, head] / 4**0.5
                seen[b, t, head] = scores.softmax(0) @ value[b, : t + 1, head]
    torch.testing.assert_close(block._mix(stream, tokens), block.output(seen), rtol=1e-12, atol=1e-14)


def test_the_residual_stream_stays_fp32_under_autocast():
    dtypes = []
    model = ByteGpt()
    for module in (*model.blocks, model.norm):
        module.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
    with emulate("fp16"), torch.autocast("cpu", torch.float16):
        logits = model(torch.zeros(2, CONTEXT, dtype=torch.int64))
    assert dtypes == [torch.float32] * 3
    assert logits.dtype == torch.float16


def test_three_steps_learn_a_text_of_one_byte():
    torch.manual_seed(0)
    model, tokens = ByteGpt(), torch.full((4, CONTEXT), 65)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = byte_loss(model(tokens), tokens)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    assert losses == sorted(losses, reverse=True)
    assert losses[3] < losses[0] - 1


# ---- errors and learning rate ---------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_all_bytes_in_fp32():
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 3, 256), torch.randint(0, 256, (2, 3))
    direct = -sum(logits[b, t].double().log_softmax(0)[targets[b, t]] for b in range(2) for t in range(3)) / 6
    assert byte_loss(logits, targets).item() == pytest.approx(direct.item(), rel=1e-6)
    half = byte_loss(logits.half(), targets)
    assert half.dtype == torch.float32
    assert half.item() == pytest.approx(direct.item(), abs=2e-3)  # logits up to 4 are rounded by at most 2**-9 of them


def test_frequency_loss_is_what_counting_by_hand_gives():
    train, held_out = torch.tensor([[65, 65], [65, 66]]), torch.tensor([65, 66, 67])
    # 4 bytes and 256 more, one of each value: 4/260, 2/260, 1/260.
    by_hand = -(math.log(4 / 260) + math.log(2 / 260) + math.log(1 / 260)) / 3
    assert frequency_loss(train, held_out) == pytest.approx(by_hand, rel=1e-12)


def test_the_learning_rate_rises_in_equal_steps_and_falls_along_a_cosine():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule, rates = warmup_then_cosine(optimizer, 600), []
    for _ in range(602):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates[:51] == pytest.approx([0.01 * (step + 1) for step in range(50)] + [0.5])
    assert rates[50:600] == pytest.approx([0.25 * (1 + math.cos(math.pi * i / 550)) for i in range(550)])
    assert rates[599] > 0
    assert rates[600] == rates[601] == 0


def test_a_run_shorter_than_the_warm_up_ends_during_it():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = warmup_then_cosine(optimizer, 3)
    for step in range(3):
        assert optimizer.param_groups[0]["lr"] == pytest.approx((step + 1) / 50)
        optimizer.step()
        schedule.step()


def test_the_schedule_continues_from_its_state():
    def build():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        return optimizer, warmup_then_cosine(optimizer, 100)

    optimizer, schedule = build()
    for _ in range(70):
        optimizer.step()
        schedule.step()
    resumed, resumed_schedule = build()
    resumed.load_state_dict(optimizer.state_dict())
    resumed_schedule.load_state_dict(schedule.state_dict())
    for pair in ((optimizer, schedule), (resumed, resumed_schedule)):
        pair[0].step()
        pair[1].step()
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] != 1.0
