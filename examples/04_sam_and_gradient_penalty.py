"""More than one backward pass for a step: SAM, and a loss that is made of gradients.

Both need true gradients under a loss scale of 16384. Run: python examples/04_sam_and_gradient_penalty.py
(11 s on one core of an AMD EPYC)
"""

import torch
import torch.nn.functional as F
from torch import nn

import halfstep


def stepper_of(model: nn.Module, lr: float, init_scale: float = 2.0**14) -> halfstep.Stepper:
    """fp16 arithmetic, dynamic scale, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    scale = halfstep.DynamicScale(init_scale=init_scale)
    return halfstep.Stepper(model, optimizer, policy="fp16-mixed", scale=scale, on_overflow="ignore")


# -- SAM ---------------------------------------------------------------------------------------------------------------


def train_with_wrong_labels(rho: float) -> tuple[float, float]:
    """A classifier on 200 points, 50 of them labelled wrong; rho 0 is plain training.

    Returns:
        The share of wrong labels that it learned by heart, and how often it is right on 4000 new points.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 2))
    x, new_x = torch.randn(200, 10), torch.randn(4000, 10)
    y, new_y = (x[:, 0] > 0).long(), (new_x[:, 0] > 0).long()
    y[:50] = 1 - y[:50]
    stepper = stepper_of(model, lr=1e-2)

    def add_gradient() -> None:
        with stepper.forward():
            loss = F.cross_entropy(model(x), y)
        stepper.backward(loss)

    for _ in range(150):
        add_gradient()
        if rho > 0:
            gradients = stepper.take_gradients()  # {parameter: true fp32 gradient}
            norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
            with stepper.perturbed({p: rho * gradient / norm for p, gradient in gradients.items()}):
                add_gradient()  # at the shifted weights, which then return bit for bit
        stepper.step()

    with torch.no_grad():
        by_heart = (model(x[:50]).argmax(1) == y[:50]).float().mean().item()
        return by_heart, (model(new_x).argmax(1) == new_y).float().mean().item()


# -- gradient penalty --------------------------------------------------------------------------------------------------


def train_critic(penalty_weight: float) -> float:
    """A Wasserstein critic between two clouds; returns the mean norm of its gradient, which should come near 1."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(2, 64), nn.Softplus(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1))
    stepper = stepper_of(critic, lr=3e-3, init_scale=2.0**10)
    for _ in range(200):
        real, fake = torch.randn(64, 2) + 2, torch.randn(64, 2)
        share = torch.rand(64, 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        with stepper.forward():
            gradient = stepper.grad(critic(between).sum(), between)  # scaled, unscaled, with a graph
            penalty = (gradient.norm(dim=1) - 1).square().mean()
            loss = critic(fake).mean() - critic(real).mean() + penalty_weight * penalty
        stepper.backward(loss)
        stepper.step()
    return gradient.norm(dim=1).mean().item()


def main() -> dict[str, float]:
    """Show what each technique is for."""
    result = {}
    for name, rho in (("plain", 0.0), ("SAM", 1.0)):
        by_heart, result[name] = train_with_wrong_labels(rho)
        print(f"{name}: {by_heart:.0%} of the wrong labels learned by heart, {result[name]:.1%} of new points right")
    for name, weight in (("no penalty", 0.0), ("penalty", 10.0)):
        result[name] = train_critic(weight)
        print(f"critic with {name}: mean norm of its gradient {result[name]:.2f}")
    return result


if __name__ == "__main__":
    main()
