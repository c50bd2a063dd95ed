"""Data parallel and fully sharded training over two processes equals training in one, with the same slices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rank_jobs as jobs
import sliceout
from networks import NETWORKS, build, starts_due
from ranks import Ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"),
]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    both = Ranks()
    yield both
    both.stop()


def assert_trained_alike(results: list[dict[str, Any]], expected: dict[str, Any], statistics: bool = True) -> None:
    """The ranks agree with each other bit for bit, and with one process on the joint batch up to rounding."""
    first, second = results
    assert first["starts"] == second["starts"] == expected["starts"]
    assert first["step"] == second["step"] == expected["step"]
    assert list(first["state"]) == list(expected["state"])
    for key, value in first["state"].items():
        if statistics or "running" not in key:
            torch.testing.assert_close(value, second["state"][key], rtol=0, atol=0)
            torch.testing.assert_close(value, expected["state"][key], msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", NETWORKS)
def test_draws_are_the_same_on_every_rank_and_alone(ranks, name):
    first, second = ranks(jobs.draws_only, name, 8)
    assert first == second
    model = build(name)
    assert first[0] == starts_due(model, 0)
    assert len({tuple(s) for s in first[:-1]}) > 4


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("name", ["mlp", "norms"])
def test_data_parallel_equals_one_process_on_the_joint_batch(ranks, name, options, float64):
    settings = {"sampling": "window"}
    assert_trained_alike(ranks(jobs.ddp, name, options, settings), jobs.alone(name, **settings))


def test_data_parallel_convolutions_with_batch_norm(ranks):
    """Batch norm sees each rank's batch by itself, so one process is no oracle; the ranks must still agree."""
    first, second = ranks(jobs.ddp, "convnet", {}, {})
    assert first["starts"] == second["starts"]
    assert first["step"] == second["step"] == jobs.STEPS
    for key, value in first["state"].items():
        if "running" not in key:
            torch.testing.assert_close(value, second["state"][key], rtol=0, atol=0)


@pytest.mark.parametrize("order", ["compile the wrapper", "wrap the compiled"])
def test_data_parallel_and_compiled(ranks, order, float64):
    results = ranks(jobs.ddp_compiled, "mlp", order)
    expected = jobs.alone("mlp")
    expected["starts"] = expected["starts"][1:]  # the first step compiles
    assert_trained_alike(results, expected)


def test_data_parallel_accumulating_without_synchronisation(ranks, float64):
    assert_trained_alike(ranks(jobs.ddp_accumulating, "mlp"), jobs.alone("mlp"))


def test_optimizer_state_sharded_over_ranks(ranks, float64):
    assert_trained_alike(ranks(jobs.ddp_with_zero, "mlp"), jobs.alone("mlp"))


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("name", ["mlp", "norms"])
def test_fully_sharded_equals_one_process_on_the_joint_batch(ranks, name, options, float64):
    settings = {"sampling": "window"}
    assert_trained_alike(ranks(jobs.fsdp, name, options, settings), jobs.alone(name, **settings))


def test_fully_sharded_convolutions(ranks):
    first, second = ranks(jobs.fsdp, "convnet", {}, {})
    assert first["starts"] == second["starts"]
    assert first["step"] == second["step"] == jobs.STEPS


def test_layers_may_be_sliced_after_sharding(ranks):
    first, second = ranks(jobs.fsdp_then_slice)
    assert first["starts"] == second["starts"]
    assert first["step"] == second["step"] == jobs.STEPS


def test_fully_sharded_accumulation_is_no_false_alarm(ranks):
    first, second = ranks(jobs.fsdp_accumulating, "mlp", 6)
    assert first["starts"] == second["starts"]
    assert [len({tuple(s) for s in first["starts"][i : i + 6]}) for i in (0, 6)] == [1, 1]
    assert first["step"] == 2


def test_fully_sharded_and_checkpointed(ranks, float64):
    assert_trained_alike(ranks(jobs.fsdp_checkpointed, "mlp"), jobs.alone("mlp"))


def test_fully_sharded_mixed_precision(ranks):
    first, second = ranks(jobs.fsdp_mixed_precision, "mlp")
    assert first == second
    assert first["dtypes"] == {"torch.bfloat16", "torch.float32"}
    assert first["step"] == jobs.STEPS


def test_fully_sharded_state_dict_resumes_and_has_the_plain_keys(ranks, float64):
    results = ranks(jobs.fsdp_resume, "mlp")
    expected = jobs.fsdp_alone("mlp")
    for result in results:
        assert result["keys"] == result["plain"]
        assert result["step"] == 4
        for key, value in result["state"].items():
            torch.testing.assert_close(value, expected["state"][key], msg=lambda m, key=key: f"{key}: {m}")


def test_the_parts_of_all_ranks_are_spread_together(ranks, float64):
    """Two ranks with two parts each train as one process does with four parts of the joint batch."""
    first, second = ranks(jobs.by_parts)
    expected = jobs.alone("mlp", parts=4)
    for key, value in first["state"].items():
        torch.testing.assert_close(value, second["state"][key], rtol=0, atol=0)
        torch.testing.assert_close(value, expected["state"][key], msg=lambda m, key=key: f"{key}: {m}")
    whole = build("mlp", parts=4)
    sliceout.slices(whole).seek_(jobs.STEPS)
    together = [a + b for a, b in zip(first["parts"], second["parts"], strict=True)]
    assert together == [list(s.starts_on_host) for s in sliceout.slices(whole)]


def test_fully_sharded_parts_are_spread_together(ranks, float64):
    first, second = ranks(jobs.fsdp, "mlp", {}, {"parts": 2})
    expected = jobs.alone("mlp", parts=4)
    for key, value in first["state"].items():
        torch.testing.assert_close(value, second["state"][key], rtol=0, atol=0)
        torch.testing.assert_close(value, expected["state"][key], msg=lambda m, key=key: f"{key}: {m}")


def test_ranks_may_draw_equal_parts(ranks, float64):
    first, second = ranks(jobs.by_parts, "equal")
    assert first["parts"] == second["parts"]
    alone = build("mlp", parts=2)
    sliceout.slices(alone).seek_(jobs.STEPS)
    assert first["parts"] == [list(s.starts_on_host) for s in sliceout.slices(alone)]


def test_ranks_that_seed_torch_differently_slice_alike(ranks):
    """``seed=None`` follows torch: that of rank 0, on every rank. Parts are spread from there."""
    first, second = ranks(jobs.convert_seeds, {})
    assert first == second
    assert first["seeds"] == [20]
    first, second = ranks(jobs.convert_seeds, {"parts": 2})
    assert first["seeds"] == second["seeds"] == [20]
    assert first["starts"] != second["starts"]
    assert [r["seeds"] for r in ranks(jobs.convert_seeds, {"seed": 5})] == [[5], [5]]


def test_ranks_that_converted_before_they_met_agree_when_they_are_wrapped(ranks):
    first, second = ranks(jobs.wrapped_seeds, {})
    assert (first["before"], second["before"]) == ([20], [21])
    assert first["seeds"] == second["seeds"] == [20]
    assert first["starts"] == second["starts"]
    assert [r["seeds"] for r in ranks(jobs.wrapped_seeds, {"seed": 5})] == [[5], [5]]
