"""Shared by all tests: devices, seeds, hypothesis, and torchvision beside a torch without its compiled ops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

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


def _declare_torchvision_ops() -> torch.library.Library | None:
    """Let ``import torchvision`` (and timm) work where its compiled ops cannot be loaded, as beside a CPU torch.

    torchvision registers meta kernels for ops that its extension defines, and fails if the extension is missing.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
    except ImportError:
        return None
    else:
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


_torchvision_ops = _declare_torchvision_ops()  # the ops exist as long as this object does


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
