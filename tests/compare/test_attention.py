"""The two attentions are one function in fp32, and only one of them survives fp16."""

import dataclasses
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep import ops
from halfstep.compare.attention import (
    LINE,
    PADDING,
    line_loss,
    lines,
    naive_attention,
    stable_attention,
    visible,
)
from halfstep.compare.regimes import REGIMES
from halfstep.compare.rows import make_row
from halfstep.compare.task import Task
from halfstep.compare.tasks import TASKS
from halfstep.compare.text import library_text
from halfstep.compare.train import train
from halfstep.compare.trainer import Trainer
from halfstep.compare.verdict import Verdict

TOKENS = torch.tensor([[PADDING, PADDING, 65, 66], [67, 68, 69, 70]])
FULL_ROWS = (0, slice(0, 2))  # batch and queries that see nothing


def inputs(dtype=torch.float32, *, requires_grad=False):
    torch.manual_seed(0)
    shape = (2, 2, 4, 8)  # [batch, heads, time, size]
    return [torch.randn(shape).to(dtype).requires_grad_(requires_grad) for _ in range(3)]


# ---- what is seen ---------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_a_byte_sees_its_line_up_to_itself_and_a_filling_sees_nothing(is_text):
    tokens = torch.tensor([[65 if text else PADDING for text in is_text]])
    seen = visible(tokens)[0, 0]
    for query in range(len(is_text)):
        for key in range(len(is_text)):
            assert bool(seen[query, key]) is (key <= query and is_text[query] and is_text[key])


def test_lines_are_filled_on_the_left_and_each_target_is_the_next_byte():
    text = b"import os\n\n" + b"x" * 40 + b"\ny = 1\n"  # the empty line and the long one do not fit
    given_lines, targets = lines(text, 2)
    assert [bytes(row.tolist()) for row in given_lines] == [
        b"import os".rjust(LINE, b"\0"),
        b"y = 1".rjust(LINE, b"\0"),
    ]
    assert [bytes(row.tolist()) for row in targets] == [b"mport os\n".rjust(LINE, b"\0"), b" = 1\n".rjust(LINE, b"\0")]


def test_the_lines_of_the_task_lie_all_over_the_text_and_most_are_filled():
    data, text = TASKS["attention"].build_data(), library_text()
    assert PADDING not in text.train + text.held_out
    for x, y, part in ((data.train_x, data.train_y, text.train), (data.test_x, data.test_y, text.held_out)):
        first, last = (bytes(row[row != PADDING].tolist()) for row in (x[0], x[-1]))
        assert part.index(first) < len(part) / 20
        assert part.rindex(last) > len(part) * 0.8
        inside = x[:, :-1] != PADDING
        assert torch.equal(x[:, 1:][inside], y[:, :-1][inside])  # a target is the byte after its input
        shares = (x == PADDING).any(1).float().mean()
        assert shares > 0.9  # a full row in nearly every line
    assert data.source == text.source


def test_the_loss_leaves_fillings_out():
    logits, targets = torch.randn(2, 4, 256), torch.tensor([[PADDING, PADDING, 65, 66], [PADDING, 1, 2, 3]])
    kept = logits[targets != PADDING].log_softmax(-1).gather(1, targets[targets != PADDING][:, None])
    assert line_loss(logits, targets).item() == pytest.approx(-kept.mean().item(), rel=1e-6)


# ---- one function in fp32 -------------------------------------------------------------------------------------------


def test_in_fp32_the_two_are_one_function_with_one_gradient():
    results, gradients = [], []
    for attend in (naive_attention, stable_attention):
        given_inputs = inputs(requires_grad=True)
        result = attend(*given_inputs, TOKENS)
        result.square().sum().backward()
        results.append(result)
        gradients.append([tensor.grad for tensor in given_inputs])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
    for result in results:
        assert not result[FULL_ROWS[0], :, FULL_ROWS[1]].any()
        assert result[1].all()


def test_both_are_attention_in_fp64():
    query, key, value = (tensor.double() for tensor in inputs())
    scores = (query @ key.mT / math.sqrt(8)).masked_fill(~visible(TOKENS), -math.inf)
    exact = scores.softmax(-1).nan_to_num(0.0) @ value
    for attend in (naive_attention, stable_attention):
        torch.testing.assert_close(attend(*inputs(), TOKENS).double(), exact, rtol=1e-5, atol=1e-6)


# ---- and not in fp16 ------------------------------------------------------------------------------------------------


def test_in_fp16_the_naive_one_is_nan_where_nothing_is_seen_and_only_there():
    result = naive_attention(*inputs(torch.float16), TOKENS)
    assert result[FULL_ROWS[0], :, FULL_ROWS[1]].isnan().all()
    assert result[0, :, 2:].isfinite().all()
    assert result[1].isfinite().all()


def test_in_fp16_large_scores_are_nan_without_any_filling():
    """exp(11.1) is beyond fp16's 65504, and the weight is inf/inf."""
    query = torch.full((1, 1, 2, 4), 2.5).half()  # scores of 12.5
    tokens = torch.tensor([[65, 66]])
    assert naive_attention(query, query, query, tokens).isnan().all()
    assert torch.equal(stable_attention(query, query, query, tokens), query)
    assert torch.allclose(naive_attention(*[query.float()] * 3, tokens), query.float())


def test_the_three_numbers_that_fp16_lacks():
    assert torch.tensor(-1e9).half() == -math.inf
    assert torch.tensor(1e-9).half() == 0
    assert torch.tensor(11.1).half().exp() == math.inf
    assert torch.tensor(11.0).half().exp().isfinite()
    for number in (-1e9, 1e-9):
        assert torch.tensor(number).bfloat16().item() == pytest.approx(number, rel=2**-8)
    assert math.isfinite(ops.mask_value("fp16"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_stable_one_is_right_in_16_bits_with_finite_gradients(dtype):
    given_inputs = inputs(dtype, requires_grad=True)
    result = stable_attention(*given_inputs, TOKENS)
    result.float().square().sum().backward()
    assert not result[FULL_ROWS[0], :, FULL_ROWS[1]].any()
    assert all(tensor.grad.isfinite().all() for tensor in given_inputs)
    exact = stable_attention(*(tensor.detach().float() for tensor in given_inputs), TOKENS)
    torch.testing.assert_close(result.float(), exact, rtol=0, atol=4 * torch.finfo(dtype).eps)


# ---- the tasks ------------------------------------------------------------------------------------------------------


def test_the_two_tasks_differ_in_their_attention_only():
    ours, naive = TASKS["attention"], TASKS["attention-naive"]
    differing = {
        field.name for field in dataclasses.fields(Task) if getattr(ours, field.name) != getattr(naive, field.name)
    } - {"build_optimizer", "build_scheduler"}  # partial objects, compared below
    assert differing == {"name", "build_model"}
    for part in ("build_optimizer", "build_scheduler"):
        assert repr(getattr(ours, part)) == repr(getattr(naive, part))
    models = [Trainer(task, REGIMES["fp32"], 0, torch.device("cpu"), 1).model for task in (ours, naive)]
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
    assert [model.blocks[0].attend for model in models] == [stable_attention, naive_attention]
    assert sum(p.numel() for p in models[0].parameters()) == 34688
    assert pickle.loads(pickle.dumps(naive)).build_model().blocks[1].attend is naive_attention


def short(name):
    """Six steps on a few lines."""
    task = TASKS[name]
    data = task.build_data()
    few = dataclasses.replace(
        data, train_x=data.train_x[:192], train_y=data.train_y[:192], test_x=data.test_x[:16], test_y=data.test_y[:16]
    )
    return dataclasses.replace(task, build_data=lambda: few)


@pytest.fixture(scope="module")
def runs():
    wanted = {
        "attention": ("fp32", "fp16-master", "bf16-master"),
        "attention-naive": ("fp32", "fp16-master", "bf16-master"),
    }
    return {
        (name, regime): train(short(name), REGIMES[regime], 0, num_epochs=1)
        for name, regimes in wanted.items()
        for regime in regimes
    }


def test_in_fp16_the_naive_net_is_nan_from_the_start_and_never_takes_a_step(runs):
    lost = runs["attention-naive", "fp16-master"]
    assert all(math.isnan(point.loss) for point in lost.curve)
    assert lost.skipped == tuple(range(6))
    assert lost.moved_share == 0.0
    row = make_row(short("attention-naive"), [lost], [runs["attention-naive", "fp32"]], step_time_ratio=None)
    assert row.verdict is Verdict.DIVERGES


def test_in_fp16_the_stable_net_follows_fp32(runs):
    kept, reference = runs["attention", "fp16-master"], runs["attention", "fp32"]
    assert kept.skipped == ()
    assert kept.is_finite
    assert reference.metric < reference.curve[0].metric - 0.05
    assert abs(kept.metric - reference.metric) < 2e-3
    assert make_row(short("attention"), [kept], [reference], step_time_ratio=None).verdict is not Verdict.DIVERGES


def test_in_fp32_and_bf16_the_naive_net_is_no_worse_than_the_stable_one(runs):
    assert abs(runs["attention-naive", "fp32"].metric - runs["attention", "fp32"].metric) < 1e-5
    assert abs(runs["attention-naive", "bf16-master"].metric - runs["attention", "fp32"].metric) < 0.02
