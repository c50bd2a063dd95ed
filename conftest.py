"""Shared by all tests: devices, seeds, hypothesis, and torchvision beside a torch without its compiled ops."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from sliceout.cli.models import make_torchvision_importable

settings.register_profile(
    "sliceout",
    deadline=None,  # a first call may compile or import for seconds
    max_examples=40,
    derandomize=True,  # the same examples everywhere: a failure on one machine is a failure on all
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("sliceout")

cuda_param = pytest.param(
    "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
)
devices = pytest.mark.parametrize("device", ["cpu", cuda_param])
"""Run the test on the CPU, and on a GPU where there is one."""

cuda_only = pytest.mark.parametrize("device", [cuda_param])


with contextlib.suppress(ModuleNotFoundError):  # timm and torchvision, where its compiled ops cannot be loaded
    make_torchvision_importable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes minutes in one process goes first, so that no worker waits for it at the end."""
    items.sort(key=lambda item: not item.name.endswith("through_the_interpreter"))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled yet, and no graphs are counted."""
    from torch._dynamo.utils import counters  # not for tests that compile nothing: it takes a second

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Every test starts from the same random state, and leaves torch's defaults as they were."""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture
def float64(seeded: None) -> None:
    """Layers and data of this test are float64."""
    torch.set_default_dtype(torch.float64)
