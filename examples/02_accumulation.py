"""Accumulation: micro-batches of unequal size, a short last window, and a padded language, with the true mean.

Run: python examples/02_accumulation.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import halfstep

PADDING = 0


def sentences() -> list[torch.Tensor]:
    """Ten micro-batches of four sentences each, 3 to 20 words long, padded; each word follows from the one before."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(10):
        lengths = torch.randint(3, 21, (4,), generator=generator)
        words = (torch.randint(1, 30, (4, 1), generator=generator) + 7 * torch.arange(20)) % 29 + 1
        found.append(torch.where(torch.arange(20) < lengths[:, None], words, PADDING))
    return found


def loss_of(model: nn.Module, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss of all words that are no padding, and how many they are."""
    targets = words[:, 1:].flatten()
    loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), targets, ignore_index=PADDING)
    return loss, (targets != PADDING).sum()


def train(accumulate: int, data: list[torch.Tensor], epochs: int, *, weighted: bool = True) -> list[torch.Tensor]:
    """Weights after some epochs; prints the last epoch's windows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 32), nn.Linear(32, 30))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0, fused=True)
    stepper = halfstep.Stepper(model, optimizer, policy="fp32", accumulate=accumulate)
    sizes = []
    for _ in range(epochs):
        for words in data:
            with stepper.forward():
                loss, num_words = loss_of(model, words)
            # num_words is a tensor: on a GPU nobody waits to read it.
            stepper.backward(loss, weight=num_words if weighted else None)
            outcome = stepper.step()  # "accumulating" until the window is full
            if outcome.is_applied:
                sizes.append(outcome.num_micro_batches)
        if (outcome := stepper.flush()) is not None:  # the rest of the epoch: a shorter window, by its own mean
            sizes.append(outcome.num_micro_batches)
    with torch.no_grad():
        loss, _ = loss_of(model, torch.cat(data))
    print(f"  windows of the last epoch: {sizes[-len(sizes) // epochs :]}, loss over all words {loss.item():.4f}")
    return [p.detach().clone() for p in model.parameters()]


def largest_difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Between two models, over all weights."""
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def main() -> dict[str, float]:
    """Compare three ways to feed the same data."""
    data = sentences()
    words = [(micro_batch[:, 1:] != PADDING).sum().item() for micro_batch in data]
    print(f"words to predict in each micro-batch: {words}")

    print("one big batch for each step: 16, 16 and 8 sentences")
    big = train(1, [torch.cat(data[:4]), torch.cat(data[4:8]), torch.cat(data[8:])], epochs=20)
    print("windows of four micro-batches, weighted by their words:")
    weighted = train(4, data, epochs=20)
    print("the same, every micro-batch counted alike:")
    alike = train(4, data, epochs=20, weighted=False)

    result = {"weighted": largest_difference(big, weighted), "alike": largest_difference(big, alike)}
    print(f"largest difference to one big batch: weighted {result['weighted']:.0e}, alike {result['alike']:.0e}")
    return result


if __name__ == "__main__":
    main()
