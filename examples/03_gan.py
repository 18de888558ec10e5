"""A GAN: two networks, two optimizers, a stepper each; and an overflow in one of them that does not touch the other.

The data is a ring of eight spots in the plane. Run: python examples/03_gan.py (13 s on one core of an AMD EPYC, which
has no fp16 instructions)
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import halfstep


def real_samples(number: int) -> torch.Tensor:
    """Points near eight spots on a circle of radius 2."""
    angle = torch.randint(0, 8, (number,)) * (2 * math.pi / 8)
    return 2 * torch.stack([angle.cos(), angle.sin()], dim=1) + 0.1 * torch.randn(number, 2)


class Gan:
    """Both networks and their steppers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2))
        self.critic.append(nn.Linear(64, 1))
        # Each pass runs both networks in training mode, so each stepper guards the buffers of both.
        self.both = nn.ModuleList([self.generator, self.critic])
        self.critic_stepper = self.stepper_of(self.critic)
        self.generator_stepper = self.stepper_of(self.generator)

    def stepper_of(self, network: nn.Module) -> halfstep.Stepper:
        """The optimizer says whose weights move."""
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, betas=(0.5, 0.999), fused=True)
        return halfstep.Stepper(self.both, optimizer, policy="fp16-mixed", on_overflow="ignore")

    def critic_step(self, real: torch.Tensor) -> halfstep.Outcome:
        """Tell real points from made ones."""
        with self.critic_stepper.forward():
            with torch.no_grad():
                fake = self.generator(torch.randn(len(real), 8))
            # softplus(-s) and softplus(s) are the two halves of binary cross-entropy with logits.
            loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()
        self.critic_stepper.backward(loss)
        return self.critic_stepper.step()

    def generator_step(self, number: int) -> halfstep.Outcome:
        """Make points that the critic takes for real."""
        with self.generator_stepper.forward():
            loss = F.softplus(-self.critic(self.generator(torch.randn(number, 8)))).mean()
        # inputs: the critic needs no gradients here. Without it they would be left there, and dropped later.
        self.generator_stepper.backward(loss, inputs=list(self.generator.parameters()))
        return self.generator_stepper.step()

    @torch.no_grad()
    def distance(self) -> float:
        """Mean distance of made points from the nearest spot."""
        self.generator.eval()
        made = self.generator(torch.randn(512, 8))
        self.generator.train()
        angle = torch.arange(8) * (2 * math.pi / 8)
        spots = 2 * torch.stack([angle.cos(), angle.sin()], dim=1)
        return torch.cdist(made, spots).min(dim=1).values.mean().item()


def bits(model: nn.Module) -> list[torch.Tensor]:
    """Weights and buffers, copied."""
    return [tensor.clone() for tensor in model.state_dict().values()]


def main() -> dict[str, object]:
    """Train, then give the critic a bad batch."""
    gan = Gan()
    start = gan.distance()
    for step in range(600):
        outcomes = gan.critic_step(real_samples(64)), gan.generator_step(64)
        if step % 200 == 0:
            print(f"critic {outcomes[0]}; generator {outcomes[1]}")
    end = gan.distance()
    print(f"distance of made points from the nearest spot: {start:.2f} at first, now {end:.2f}")

    print("a bad batch for the critic:")
    before = bits(gan.both)
    bad = real_samples(64)
    bad[0, 0] = float("inf")
    critic_outcome = gan.critic_step(bad)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, bits(gan.both), strict=True))
    print(f"  critic {critic_outcome}; both networks as before: {unchanged}")
    generator_outcome = gan.generator_step(64)
    print(f"  generator {generator_outcome}")
    scales = gan.critic_stepper.scale.get(), gan.generator_stepper.scale.get()
    print(f"  scales: critic {scales[0]:g}, generator {scales[1]:g}")
    kinds = critic_outcome.kind, generator_outcome.kind
    return {"start": start, "end": end, "unchanged": unchanged, "kinds": kinds, "scales": scales}


if __name__ == "__main__":
    main()
