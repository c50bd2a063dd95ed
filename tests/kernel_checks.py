"""The Triton kernels against the definition: run by test_triton_interpreter.py, natively or through the interpreter.

Triton decides when it is imported whether it interprets, so the interpreter needs a process of its own::

    TRITON_INTERPRET=1 pytest tests/kernel_checks.py
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings

from opcases import Case, cases, listed
from sliceout import Slice
from sliceout.ops import kernels, reference, views

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
CASES = [c for c in listed() if DEVICE == "cuda" or torch.Size(c.shape).numel() < 100_000]


def compare(case: Case) -> None:
    """take and put of one case, into memory that holds NaN before."""
    case.to(DEVICE)
    full = case.full(DEVICE, coarse=DEVICE == "cpu")  # the interpreter truncates to bfloat16 where the GPU rounds
    small = kernels.take(full, *case.args, case.target)
    interpreted = {"truncates": DEVICE == "cpu"}
    case.check_small(small, full, "kernels.take", **interpreted)
    assert small.is_contiguous(memory_format=views.memory_format(full))

    grad = torch.randn(small.shape, dtype=torch.float64).to(case.result_dtype).to(DEVICE)
    for layout in ("contiguous", case.layout):  # a gradient may arrive in either
        grad = Case(case.shape, None, None, layout).lay_out(grad)
        nan = torch.full_like(full, torch.nan, memory_format=views.memory_format(full))
        case.check_full(kernels.put(grad, nan, *case.args), grad, f"kernels.put from {layout}", **interpreted)


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(repr, CASES))
def test_kernels_agree_with_the_definition_on_listed_cases(number):
    compare(CASES[number])


bf16 = torch.bfloat16


@settings(max_examples=60)
@given(case=cases(dtypes=[(torch.float64, None), (torch.float32, None), (torch.float32, bf16), (bf16, None)]))
def test_kernels_agree_with_the_definition(case):
    torch.manual_seed(0)
    compare(case)


@settings(max_examples=30)
@given(case=cases(dtypes=[(torch.float32, None)]))
def test_store_replaces_the_kept_entries_and_no_others(case):
    torch.manual_seed(0)
    axis = case.rows or case.cols
    Case((axis.size,), axis, None).to(DEVICE)
    before, small = torch.randn(axis.size, device=DEVICE), torch.randn(axis.width, device=DEVICE)
    full = before.clone()
    kernels.store_(full, small, axis.slice.start, axis.geometry)
    assert torch.equal(full, reference.store(before, small, axis.slice.start, axis.geometry))


def test_every_start_of_a_ring_lands_where_it_should():
    """The kernel reads the start from memory: one launch configuration, every draw."""
    s = Slice(12, 0.5)
    case = Case((12, 12), s.axis(), s.axis(), scale_rows=True).to(DEVICE)
    full = case.full(DEVICE)
    for start in s.starts:
        s.start.fill_(start)
        s.start_on_host = start
        small = kernels.take(full, *case.args)
        case.check_small(small, full, f"start {start}")
        case.check_full(kernels.put(small, torch.full_like(full, torch.nan), *case.args), small, f"start {start}")


def test_nan_outside_the_slice_never_leaks():
    for case in CASES:
        case.to(DEVICE)
        kept = case.put(torch.ones(views.small_shape(torch.Size(case.shape), *case.args[2:4]))) != 0
        full = case.lay_out(torch.where(kept.to(DEVICE), case.full(DEVICE), torch.nan))
        assert kernels.take(full, *case.args, case.target).isfinite().all(), case


def test_empty_tensors_are_left_alone():
    case = Case((0, 8), None, Slice(8).axis()).to(DEVICE)
    full = case.full(DEVICE)
    small = kernels.take(full, *case.args)
    assert small.shape == (0, 4)
    assert kernels.put(small, torch.empty_like(full), *case.args).shape == (0, 8)
