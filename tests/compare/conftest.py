"""One small study that many tests read: seconds, not minutes, because the autoencoder is trained for a single epoch."""

import dataclasses

import pytest

from halfstep.compare.run import Study, compare
from halfstep.compare.settings import choose

SMALL = ["fp32", "fp16-unscaled", "fp16-static-1024", "bf16"]


def small_settings():
    settings = choose(["linear-small-units", "autoencoder"], SMALL, num_jobs=1, device="cpu")
    tasks = tuple(
        dataclasses.replace(task, epochs=1) if task.name == "autoencoder" else task for task in settings.tasks
    )
    return dataclasses.replace(settings, tasks=tasks)


@pytest.fixture(scope="session")
def study() -> Study:
    return compare(small_settings())
