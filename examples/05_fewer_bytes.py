"""Fewer bytes: bf16 weights with 24-bit masters and 8-bit moments, beside fp32; and a checkpoint resumed bit for bit.

The data are scikit-learn's handwritten digits, which come with it (pip install '.[cli]').
Run: python examples/05_fewer_bytes.py
"""

import tempfile

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import halfstep

FP32: dict[str, str] = {}
PACKED = {"policy": "bf16-master", "master": "split8", "moments": "int8"}


def build(storage: dict[str, str]) -> tuple[nn.Module, halfstep.optim.AdamW]:
    """The same network every time, and its optimizer; a policy casts the weights to bf16, in place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, halfstep.optim.AdamW(model.parameters(), lr=1e-3, **storage)


class Digits:
    """1797 images of 64 pixels from 0 to 1, shuffled; the first 1437 are trained on."""

    def __init__(self) -> None:
        digits, order = load_digits(), torch.randperm(1797, generator=torch.Generator().manual_seed(0))
        self.x, self.y = torch.tensor(digits.data).float()[order] / 16, torch.tensor(digits.target)[order]

    def train(self, model: nn.Module, optimizer: halfstep.optim.AdamW, epochs: range) -> None:
        """An epoch's order follows from its number, so that a resumed run sees what the first one saw."""
        x = self.x.to(next(model.parameters()).dtype)  # bf16 weights want bf16 inputs
        for epoch in epochs:
            for batch in torch.randperm(1437, generator=torch.Generator().manual_seed(epoch)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]).float(), self.y[batch]).backward()
                optimizer.step()  # in fp32; looks at the gradients, and skips where one is inf or NaN

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Share of the last 360 images that are read right."""
        x = self.x[1437:].to(next(model.parameters()).dtype)
        return (model(x).argmax(1) == self.y[1437:]).float().mean().item()


def bytes_per_parameter(model: nn.Module, optimizer: halfstep.optim.AdamW) -> tuple[float, float]:
    """Of the weights, and of what the optimizer keeps beside them: masters, moments, scales, counters."""
    number = sum(p.numel() for p in model.parameters())
    return sum(p.nbytes for p in model.parameters()) / number, optimizer.num_bytes / number


def bits(model: nn.Module, optimizer: halfstep.optim.AdamW) -> list[torch.Tensor]:
    """All weights and all state."""
    return [*model.parameters(), *(t for p in model.parameters() for t in optimizer.state[p].values())]


def main() -> dict[str, object]:
    """Train in both storages; then once more, with a checkpoint half-way."""
    data, result = Digits(), dict[str, object]()
    for name, storage in (("fp32", FP32), ("packed", PACKED)):
        model, optimizer = build(storage)
        data.train(model, optimizer, range(12))
        (weights, state), accuracy = bytes_per_parameter(model, optimizer), data.accuracy(model)
        result[name] = weights, state, accuracy
        print(f"{name:6}  bytes per parameter: weights {weights:.2f}, state {state:.2f}; {accuracy:.1%} right")

    interrupted, its_optimizer = build(PACKED)
    data.train(interrupted, its_optimizer, range(6))
    with tempfile.TemporaryFile() as file:
        torch.save({"model": interrupted.state_dict(), "optimizer": its_optimizer.state_dict()}, file)
        print(f"checkpoint: {file.tell() / sum(p.numel() for p in model.parameters()):.2f} bytes per parameter")
        file.seek(0)
        saved = torch.load(file)

    resumed, its_optimizer = build(PACKED)
    resumed.load_state_dict(saved["model"])
    its_optimizer.load_state_dict(saved["optimizer"])
    data.train(resumed, its_optimizer, range(6, 12))
    pairs = zip(bits(resumed, its_optimizer), bits(model, optimizer), strict=True)
    result["is_same"] = all(torch.equal(a, b) for a, b in pairs)
    print(f"resumed half-way, weights and state of the whole run, bit for bit: {result['is_same']}")
    return result


if __name__ == "__main__":
    main()
