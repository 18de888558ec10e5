"""Handwritten digits: the images inside scikit-learn's package, the models that read them, and their errors.

Purpose: real data that every machine has. Method: 1797 images of 8 by 8 pixels in one fixed order; the first four
fifths are trained on. Not here: optimizers and tolerances (tasks.py).

Source of the data: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI; the copy inside scikit-
learn.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep.compare._extras import missing
from halfstep.compare.task import Data

NUM_TRAIN_DIGITS = 1437  # of 1797: four fifths, as in most published splits of this set


# ---- images ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def images_and_labels() -> tuple[Tensor, Tensor]:
    """Images [1797, 64] in 0..1 and labels [1797], in an order fixed by seed 0."""
    table = digits_table()
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(0))]
    return table[:, :64].float() / 16, table[:, 64]  # the pixels are whole numbers from 0 to 16


def digits_table() -> Tensor:
    """Pixels and label of each image, [1797, 65], as scikit-learn's package holds them.

    The file is read past ``sklearn.datasets.load_digits``, whose import takes two seconds in each worker process.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise missing("sklearn", "the handwritten digits of scikit-learn")
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as lines:
        return torch.tensor([[round(float(number)) for number in line.split(",")] for line in lines])


def reconstruction_data() -> Data:
    """Images as their own targets."""
    train, test = images_and_labels()[0].tensor_split([NUM_TRAIN_DIGITS])
    return Data(train, train, test, test)


def classification_data() -> Data:
    """Images [examples, 1, 8, 8] and the digits that they show."""
    images, labels = images_and_labels()
    train_x, test_x = images.reshape(-1, 1, 8, 8).tensor_split([NUM_TRAIN_DIGITS])
    train_y, test_y = labels.tensor_split([NUM_TRAIN_DIGITS])
    return Data(train_x, train_y, test_x, test_y)


# ---- models ---------------------------------------------------------------------------------------------------------

DEEP = (64, 256, 128, 64, 32, 8)  # ten layers, there and back
SHORT = (64, 128, 64, 32, 8)  # eight


def autoencoder(encoder: Sequence[int], activation: Callable[[], nn.Module]) -> nn.Module:
    """Linear layers of these sizes and back again, the activation between them, a linear output."""
    layers: list[nn.Module] = []
    for num_in, num_out in pairwise([*encoder, *reversed(encoder[:-1])]):
        linear = nn.Linear(num_in, num_out)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1])


def convolutional() -> nn.Module:
    """Two convolutions with batch normalisation, and a linear layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),  # [batch, 8, 8, 8]
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),  # [batch, 16, 4, 4]
        *(nn.Flatten(), nn.Linear(16 * 4 * 4, 10)),
    )


def perceptron() -> nn.Module:
    """Two linear layers, without a normalisation over the batch: a micro-batch has one image."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


NUM_EPOCHS_BEFORE, BATCH_BEFORE, LR_BEFORE = 5, 64, 1e-3


def trained_perceptron() -> nn.Module:
    """Three linear layers that have read the images five times in fp32, then rounded to bf16: what one fine-tunes.

    Rounded, so that bf16 weights and fp32 weights begin as the same numbers.
    """
    layers = (nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    model = nn.Sequential(nn.Flatten(), *layers)
    data = classification_data()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR_BEFORE, fused=True)
    for _ in range(NUM_EPOCHS_BEFORE):
        for batch in torch.randperm(len(data.train_x)).split(BATCH_BEFORE):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            F.cross_entropy(model(data.train_x[batch]), data.train_y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


# ---- errors ---------------------------------------------------------------------------------------------------------


def squared_error(_: nn.Module, output: Tensor, data: Data) -> float:
    """Mean squared error of reconstructed test images."""
    return float(F.mse_loss(output.float(), data.test_y))


def mean_squared_error(data: Data) -> float:
    """The same of the mean training image."""
    return float(F.mse_loss(data.train_y.mean(0).expand_as(data.test_y), data.test_y))


def wrong_share(_: nn.Module, output: Tensor, data: Data) -> float:
    """Share of the test images that are misread; NaN outputs count as NaN, not as a guess."""
    if not bool(torch.isfinite(output).all()):
        return float("nan")
    return float((output.argmax(1) != data.test_y).float().mean())


def commonest_wrong_share(data: Data) -> float:
    """The share that is misread by always answering with the commonest digit."""
    return float((data.test_y != data.train_y.mode().values).float().mean())


def nats_per_image(_: nn.Module, output: Tensor, data: Data) -> float:
    """Cross-entropy on the test images."""
    return float(F.cross_entropy(output.float(), data.test_y))


def nats_of_frequencies(data: Data) -> float:
    """The same under the frequencies of the training labels."""
    counts = data.train_y.bincount().double()
    return float(-(counts / counts.sum()).log()[data.test_y].mean())
