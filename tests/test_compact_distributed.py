"""Compact gradients over two processes: what training in one computes, and only slices travel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import compact_jobs as jobs
from networks import build
from ranks import Ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    both = Ranks()
    yield both
    both.stop()


def assert_trained_alike(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """The ranks agree bit for bit with each other, and with one process on the joint batch up to rounding."""
    first, second = results
    assert first["starts"] == second["starts"] == expected["starts"]
    assert first["losses"] == second["losses"]  # norms of the gradients before clipping
    np.testing.assert_allclose(first["losses"], expected["losses"], rtol=1e-10)
    for key, value in first["state"].items():
        assert (value == second["state"][key]).all(), key
        np.testing.assert_allclose(value, expected["state"][key], rtol=1e-9, atol=1e-11, err_msg=key)


OPTIONS = [
    {}, {"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True},
    {"broadcast_buffers": False},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ["mlp", "norms", "inside"])
def test_data_parallel_equals_one_process_on_the_joint_batch(ranks, name, options, float64):
    settings = {"sampling": "window"}
    results = ranks(jobs.ddp, name, options, settings)
    assert_trained_alike(results, jobs.alone(name, **settings))
    assert results[0]["kinds"] == {"SlicedGrad", "Tensor"}
    last = {"mlp": "4.bias", "norms": "down.bias", "inside": "net.4.bias"}[name]
    assert results[0]["ours"]
    assert last not in results[0]["ours"]  # its gradient is dense


@pytest.mark.parametrize("mode", ["accumulating", "checkpointed", "checkpointed, reentrant"])
def test_accumulation_without_synchronisation_and_checkpointing(ranks, mode, float64):
    options = {"static_graph": True} if "reentrant" in mode else {}
    assert_trained_alike(ranks(jobs.ddp, "mlp", options, {}, None, mode), jobs.alone("mlp"))


@pytest.mark.parametrize("settings", [{}, {"sampling": "prefix"}, {"sampling": "prefix", "grads": "dense"}], ids=str)
def test_tail_with_slices_off(ranks, settings, float64):
    """In a prefix, units enter then."""
    assert_trained_alike(ranks(jobs.ddp, "mlp", {}, settings, 2), jobs.alone("mlp", off_at=2, **settings))


@pytest.mark.parametrize("order", ["compile the wrapper", "wrap the compiled"])
@pytest.mark.parametrize(("name", "dense"), [("mlp", ()), ("no bias", ("2.weight",))])
def test_compiled_graphs(ranks, order, name, dense, float64):
    """In "no bias" all gradients could be slice-sized, so that one is left to DDP, which waits for a dense one."""
    assert_trained_alike(ranks(jobs.ddp_compiled, order, name), jobs.alone(name, dense=dense))


def test_one_parameter_is_left_to_ddp_where_all_are_slice_sized(ranks, float64):
    """DDP refuses a module without parameters; what it averages densely is stepped over as a slice all the same."""
    results = ranks(jobs.ddp, "no bias", {}, {})
    assert_trained_alike(results, jobs.alone("no bias"))
    assert results[0]["ours"] == ["0.weight"]


def test_only_slices_travel(ranks, float64):
    dense = ranks(jobs.traffic, "mlp", {})[0]
    compact = ranks(jobs.traffic, "mlp", {"grads": "compact"})[0]
    assert dense == (0, 6 * 16 + 16 + 16 * 12 + 12 + 12 * 3 + 3)
    assert compact == (6 * 8 + 8 + 8 * 6 + 6 + 6 * 3, 3)


def test_ranks_that_leave_out_the_sliced_network(ranks, float64):
    skipping = [[False, False], [True, False], [False, True], [True, True], [False, False]]
    first, second = ranks(jobs.unused, skipping)
    expected = jobs.unused_alone(skipping)
    for key, value in first["state"].items():
        assert (value == second["state"][key]).all(), key
        np.testing.assert_allclose(value, expected["state"][key], rtol=1e-9, atol=1e-11, err_msg=key)


def test_ranks_that_draw_different_slices_are_left_to_ddp(ranks, float64):
    first, second = ranks(jobs.different_slices)
    assert first["ours"] == second["ours"] == []
    for a, b in zip(first["grads"], second["grads"], strict=True):
        np.testing.assert_array_equal(a, b)


def test_converted_model_and_what_is_left_after_revert(ranks, float64):
    first, second = ranks(jobs.converted_and_reverted)
    assert first["groups"] > 1
    assert first["ours"] == second["ours"] == ["fc1.bias", "fc1.weight", "fc2.weight", "proj.weight"]
    for key, value in first["grads"].items():
        np.testing.assert_array_equal(value, second["grads"][key], err_msg=key)


def test_copied_wrapper_averages_too(ranks, float64):
    first, second = ranks(jobs.copied)
    assert len(first) == 5
    for key, value in first.items():
        np.testing.assert_array_equal(value, second[key], err_msg=key)


def test_uneven_inputs_are_refused(ranks):
    assert all("grads='dense'" in message for message in ranks(jobs.joined))


@pytest.mark.parametrize("name", ["mlp", "norms"])
def test_fully_sharded_is_refused_at_the_first_step(ranks, name):
    """Its gradients are dense, so that every unit would be updated: trained on, it would end elsewhere."""
    for message in ranks(jobs.fsdp, name):
        assert message.startswith("grads='compact': a parameter of ")
        assert message.endswith("Convert with grads='dense', or use DistributedDataParallel")


def test_wrapping_needs_no_process_group_until_it_is_wrapped():
    assert build("mlp", grads="compact")(jobs.sample("mlp").float()).shape == (8, 3)
