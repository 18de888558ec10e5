"""The stable functions on 16-bit tensors beside torch's own on fp32 tensors of the same size, in one process, in turn.

    python benchmarks/bench_ops.py                              # 2048 x 1024 elements, one thread, bf16
    python benchmarks/bench_ops.py --dtype float16 --threads 2
    python benchmarks/bench_ops.py --device cuda --rows 32768 --columns 4096

Every round times forward plus backward of each pair once, in alternating order; the medians of the rounds are printed,
and their ratio, ours / torch's. Target: at most 1.15.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from clock import synchronize
from torch import Tensor

from halfstep import ops

TARGET = 1.15


def cases(rows: int, columns: int, device: str) -> dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]]:
    """Pairs of functions of one tensor ``[rows, columns]``: ours, and torch's."""
    labels = torch.randint(0, columns, (rows,), device=device)
    soft = torch.rand(rows, columns, device=device)
    targets = {dtype: soft.to(dtype) for dtype in (torch.float16, torch.bfloat16)}  # of the dtype of what they judge
    weight = torch.ones(columns, device=device)
    cos, sin = ops.rotary_embedding(torch.arange(rows, device=device), columns)

    def dice(x: Tensor, t: Tensor) -> Tensor:
        return 1 - (2 * (x * t).sum() + 1e-5) / (x.sum() + t.sum() + 1e-5)

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def heads(x: Tensor) -> Tensor:
        return x.view(-1, 4, 256, 64)

    return {
        "softmax": (ops.softmax, lambda x: F.softmax(x, -1)),
        "log_softmax": (ops.log_softmax, lambda x: F.log_softmax(x, -1)),
        "cross_entropy": (lambda x: ops.cross_entropy(x, labels), lambda x: F.cross_entropy(x, labels)),
        "cross_entropy, smoothed": (
            lambda x: ops.cross_entropy(x, labels, label_smoothing=0.1),
            lambda x: F.cross_entropy(x, labels, label_smoothing=0.1),
        ),
        "binary_cross_entropy": (
            lambda x: ops.binary_cross_entropy(x, targets[x.dtype]),
            lambda x: F.binary_cross_entropy(x, soft),
        ),
        "binary_cross_entropy_with_logits": (
            lambda x: ops.binary_cross_entropy_with_logits(x, targets[x.dtype]),
            lambda x: F.binary_cross_entropy_with_logits(x, soft),
        ),
        "dice_loss": (lambda x: ops.dice_loss(x, targets[x.dtype]), lambda x: dice(x, soft)),
        "layer_norm": (
            lambda x: ops.layer_norm(x, columns, weight),
            lambda x: F.layer_norm(x, (columns,), weight),
        ),
        "rms_norm": (
            lambda x: ops.rms_norm(x, columns, weight, 1e-6),
            lambda x: F.rms_norm(x, (columns,), weight, 1e-6),
        ),
        "normalize": (ops.normalize, lambda x: F.normalize(x, dim=-1)),
        "norm of all": (ops.norm, torch.linalg.vector_norm),
        "norm of rows": (lambda x: ops.norm(x, -1), lambda x: torch.linalg.vector_norm(x, dim=-1)),
        "sum of all": (ops.sum, torch.sum),
        "sum of rows": (lambda x: ops.sum(x, -1), lambda x: torch.sum(x, -1)),
        "attention": (
            lambda x: ops.attention(heads(x), heads(x), heads(x)),
            lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x)),
        ),
        "apply_rotary": (lambda x: ops.apply_rotary(x, cos, sin), rotate),
    }


def timed(device: str, function: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Seconds of one forward and backward."""
    x = x.detach().requires_grad_()
    synchronize(device)
    start = time.perf_counter()
    y = function(x)
    y.backward(torch.ones_like(y))
    synchronize(device)
    return time.perf_counter() - start


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--columns", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", default="", help="part of a name")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    narrow = torch.rand(options.rows, options.columns, device=options.device).to(getattr(torch, options.dtype))
    wide = narrow.float()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {vars(options)}")
    print(f"{'function':34} {'ours 16-bit':>12} {'torch fp32':>12} {'ratio':>7} {'spread':>13}")
    for name, (ours, torchs) in cases(options.rows, options.columns, options.device).items():
        if options.only not in name:
            continue
        taken: tuple[list[float], list[float]] = ([], [])
        for number in range(options.rounds + 2):
            pairs = [(0, ours, narrow), (1, torchs, wide)]
            for which, function, x in pairs if number % 2 else reversed(pairs):
                seconds = timed(options.device, function, x)
                if number >= 2:  # two rounds of warm-up
                    taken[which].append(seconds)
        a, b = (statistics.median(seconds) for seconds in taken)
        ratios = sorted(x / y for x, y in zip(*taken, strict=True))
        spread = f"{ratios[len(ratios) // 4]:.2f}-{ratios[-1 - len(ratios) // 4]:.2f}"
        mark = "" if a / b <= TARGET else "  above target"
        print(f"{name:34} {a * 1e3:9.2f} ms {b * 1e3:9.2f} ms {a / b:7.2f} {spread:>13}{mark}")


if __name__ == "__main__":
    main()
