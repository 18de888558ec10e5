"""First steps: a small network in fp16 arithmetic with fp32 weights, and what happens when a batch overflows.

Run: python examples/01_first_steps.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import halfstep


def build() -> tuple[nn.Module, halfstep.Stepper]:
    """The same network every time, and a stepper around it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
    # On a GPU leave the policy out: "auto" asks the card. Most CPUs compute fp16 slowly, which does not matter here.
    stepper = halfstep.Stepper(
        model, optimizer, policy="fp16-mixed", clip_norm=1.0, scheduler=schedule, on_overflow="ignore"
    )
    return model, stepper


def batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Which of four inputs is the largest?"""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(64, 16, generator=generator) for _ in range(number)]
    return [(x, x[:, :4].argmax(1)) for x in inputs]


def train(model: nn.Module, stepper: halfstep.Stepper, data: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The whole loop: five lines of it are halfstep's."""
    for number, (x, y) in enumerate(data, 1):
        with stepper.forward():  # autocast; BatchNorm's statistics are remembered
            loss = F.cross_entropy(model(x), y)
        stepper.backward(loss)  # scales the loss
        outcome = stepper.step()  # looks for inf and NaN, clips, steps, drops the gradients
        if number % 20 == 1 or outcome.is_skipped:
            print(f"  loss {loss.item():.3f}  {outcome}")
    return loss.item()


def bits(model: nn.Module) -> list[torch.Tensor]:
    """Weights and BatchNorm's statistics, copied."""
    return [tensor.clone() for tensor in model.state_dict().values()]


def main() -> dict[str, object]:
    """Train, break a batch, and look at what it changed."""
    model, stepper = build()
    data = batches(60)
    print(f"policy {stepper.policy}: weights stay {next(model.parameters()).dtype}, products are fp16")
    loss = train(model, stepper, data)

    print("a batch with one inf in it:")
    x, y = data[0]
    x = x.clone()
    x[3, 5] = float("inf")
    before = bits(model)
    train(model, stepper, [(x, y)])
    unchanged = all(torch.equal(a, b) for a, b in zip(before, bits(model), strict=True))
    print(f"  weights and statistics as before, bit for bit: {unchanged}")
    print(f"  scale of the next step: {stepper.scale.get():g}; skipped so far: {stepper.skipped_steps}")

    print("and training goes on:")
    loss_after = train(model, stepper, data[:1])
    return {"loss": loss, "loss_after": loss_after, "unchanged": unchanged, "skipped": stepper.skipped_steps}


if __name__ == "__main__":
    main()
