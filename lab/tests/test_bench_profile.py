"""Profiles say where time and memory go: what they count is right, and they run where there is no GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sliceout.cli.cases import Case
from sliceout_lab import cli
from sliceout_lab.bench import profile
from sliceout_lab.bench.networks import PaperWork as build
from sliceout_lab.bench.worker import tune
from sliceout_lab.report import performance as page
from sliceout_lab.report import profiles as profile_page

CPU = torch.device("cpu")
BASE = Case("mlp-2x64", 8, "sliceout", precision="fp32")
FULL = 4 * (784 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10)
KEPT = 4 * (784 * 32 + 32 + 32 * 32 + 32 + 32 * 10 + 10)


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", profile.PRODUCTS),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", profile.PRODUCTS),
        ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad>", profile.PRODUCTS),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", profile.PRODUCTS),
        ("void pytorch_flash::flash_fwd_kernel<...>", profile.PRODUCTS),
        ("void cudnn::bn_fw_tr_1C11_kernel_NHWC<__nv_bfloat16>", profile.NORMS),
        ("triton_red_fused__native_batch_norm_legit_functional_convolution_relu_3", profile.NORMS),
        ("triton_poi_fused__to_copy_convolution_backward_7", profile.POINTWISE),
        ("triton_per_fused_convert_element_type_sum_2", profile.POINTWISE),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", profile.POINTWISE),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", profile.OPTIMIZER),
        ("_adam_kernel", profile.OPTIMIZER),
        ("take_kernel", profile.SLICES),
        ("Memcpy DtoD (Device -> Device)", profile.COPIES),
        ("Memset (Device)", profile.COPIES),
        ("aten::addmm", profile.PRODUCTS),
        ("aten::mkldnn_convolution", profile.PRODUCTS),
        ("aten::add_", profile.POINTWISE),
    ],
)
def test_kernels_are_told_apart_by_their_names(name: str, kind: str) -> None:
    assert profile.kind_of(name, profile.our_kernels()) == kind


def test_the_librarys_kernels_are_known() -> None:
    names = profile.our_kernels()
    assert {"take_kernel", "put_kernel", "_adam_kernel", "_sgd_kernel"} <= names
    assert all(name.endswith("_kernel") for name in names), "no helper that a kernel calls"


def test_times_are_summed_by_kind_per_step() -> None:
    n = profile.STEPS
    kernels = [("a_gemm", 2000.0 * n, 2 * n), ("add", 500.0 * n, n), ("b_gemm", 1000.0 * n, n)]
    found = profile.summed(kernels, frozenset())
    assert found["kinds"][profile.PRODUCTS] == {"ms": pytest.approx(3.0), "kernels": pytest.approx(3.0)}
    assert found["busy_ms"] == pytest.approx(3.5)
    assert [e["name"] for e in found["longest"]] == ["a_gemm", "b_gemm", "add"]


def test_gaps_are_where_nothing_runs() -> None:
    spans = [("b", 5.0, 9.0), ("a", 0.0, 4.0), ("inside", 6.0, 7.0), ("c", 12.0, 13.0)]
    assert profile.gaps(spans)["idle_ms"] == pytest.approx((1 + 3) / 1000 / profile.STEPS)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "grads", "parameters", "gradients"),
    [("standard", "dense", FULL, FULL), ("floor", "dense", KEPT, KEPT), ("sliceout", "dense", FULL, FULL),
     ("sliceout", "compact", FULL, KEPT)],
)  # fmt: skip
def test_what_can_be_counted_is_counted(scheme: str, grads: str, parameters: int, gradients: int) -> None:
    found = profile.look(build(replace(BASE, scheme=scheme, grads=grads), CPU), 8)
    counted = found["memory"]["counted"]
    assert counted["parameters"] == parameters
    assert counted["gradients"] == gradients
    assert counted["optimizer state"] == 2 * parameters + 6 * 4  # Adam's step counts
    assert counted["batch"] == 8 * (784 * 4 + 8)
    assert found["memory"]["max_allocated"] == sum(counted.values()) + found["memory"]["rest"]
    assert found["memory"]["rest"] > 0
    assert found["time"]["kinds"][profile.PRODUCTS]["kernels"] >= 8
    assert found["exactly"]["parameters"] == parameters
    assert found["exactly"]["kept"] == (KEPT if scheme == "sliceout" else None)


def test_copies_are_those_of_sliced_layers_in_the_dtype_of_the_products() -> None:
    assert profile.exact(build(BASE, CPU))["copies"] == KEPT
    assert profile.exact(build(replace(BASE, precision="bf16"), CPU))["copies"] == KEPT // 2 + (32 + 32 + 10) * 2
    wide = profile.exact(build(Case("wrn-10-1", 2, "sliceout", precision="fp32"), CPU))
    assert wide["copies"] < wide["kept"] < wide["parameters"]  # the stem and the head are not sliced


def entry(action: str, address: int, size: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size}


def test_the_memory_of_graphs_is_followed_step_by_step() -> None:
    """A trial in the first step takes a workspace; later ones do not. Memory of another pool is not this one's."""
    segments = [
        {"segment_pool_id": (0, 1), "address": 1000, "total_size": 500, "allocated_size": 100},
        {"segment_pool_id": (0, 1), "address": 3000, "total_size": 400, "allocated_size": 0},
        {"segment_pool_id": (0, 0), "address": 9000, "total_size": 80, "allocated_size": 80},
    ]
    first = [
        entry("segment_alloc", 1000, 500), entry("alloc", 1000, 100), entry("alloc", 3000, 400),
        entry("free_requested", 3000), entry("free_completed", 3000), entry("alloc", 9000, 80),
    ]  # fmt: skip
    second = [entry("alloc", 1200, 50), entry("free_requested", 1200), entry("alloc", 1000, 90), entry("alloc", 7, 9)]
    ordinary, graph = profile.by_pool(segments, [first, second])
    assert (ordinary["pool"], ordinary["highest_by_step"]) == ([0, 0], [80, 80])
    assert (graph["reserved"], graph["allocated"], graph["segments"]) == (900, 100, 2)
    assert graph["highest_by_step"] == [500, 150]  # the second began with the 100 that stayed
    assert graph["largest_at_highest"] == [400, 100]
    assert profile.by_pool([], [first]) == []


def test_tuning_first_leaves_the_model_as_it_was() -> None:
    work = build(replace(BASE, model="wrn-10-1", batch=2), CPU)
    before = {k: v.clone() for k, v in work.net.named_parameters()}
    tune(work, 2)
    assert all(torch.equal(before[k], p) and p.grad is None for k, p in work.net.named_parameters())


# -- from the command to the page --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_profile_from_the_command_to_the_page(tmp_path: Path, capsys) -> None:
    words = ["mlp-2x64", "--schemes", "standard,floor,sliceout", "--grads", "dense,compact", "--device", "cpu"]
    out = tmp_path / "results" / "profile"
    out.parent.mkdir()
    assert cli.main(["bench", *words, "--batch", "8", "--profile", "--prepare", "4", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    (path,) = out.glob("*.json")
    data = json.loads(path.read_text())
    assert [r["error"] for r in data["cases"]] == [None] * 4
    least = (3 * FULL + 24 + KEPT) / (4 * FULL + 24)
    section = page.page(tmp_path).split("## Where the time and the memory go")[1].split("## Layer by layer")[0]
    for text in (printed, section):
        assert f"gradients of the slices' size: {least:.1%} of the" in text
        assert text.count("from shapes alone") == 1
        assert "| mlp-2x64 b8 eager, sliceout p=0.5 compact | 0.2 |" in text


def test_what_lives_at_once_says_what_is_out_of_reach() -> None:
    def row(scheme: str, outside: int, recorded: int) -> dict[str, Any]:
        counted = {"parameters": outside << 19, "optimizer state": outside << 19, "gradients": 7 << 30}
        pools = [
            {"pool": [0, 0], "reserved": 1, "highest_by_step": [9 << 30] * 3, "largest_at_highest": []},
            {"pool": [0, 1], "reserved": 1, "highest_by_step": [9 << 30, recorded << 20, 1], "largest_at_highest": []},
        ]
        memory = {"counted": {**counted, "buffers": 0, "batch": 0}, "rest": None, "max_allocated": 1, "pools": pools}
        case = replace(BASE, scheme=scheme, mode="compiled").as_dict()
        exactly = {"parameters": 1, "kept": None, "copies": None}
        return {**case, "error": None, "memory": memory, "time": {"error": "none"}, "exactly": exactly}

    rows = [row("standard", 40, 60), row("floor", 20, 30), row("sliceout", 40, 32)]
    text = "\n".join(profile_page.tables(rows))
    for told in ("standard p=0.5 100 MiB (100.0%)", "floor p=0.5 50.0 MiB (50.0%)", "sliceout p=0.5 72.0 MiB (72.0%)"):
        assert told in text
    assert "leave 70.0% at the least" in text
    assert "at the least" not in "\n".join(profile_page.tables(rows[::2]))
    assert "lived" not in "\n".join(profile_page.tables(rows[1:]))


def test_what_failed_is_told() -> None:
    case = BASE.as_dict()
    memory = {"counted": {"parameters": 1 << 20, "optimizer state": 0}, "rest": 0, "max_allocated": 1 << 20}
    good = {**case, "error": None, "memory": memory, "time": {"error": "no CUPTI"},
            "exactly": {"parameters": 1 << 20, "kept": None, "copies": None}}  # fmt: skip
    text = "\n".join(profile_page.tables([good, {**case, "error": "out of memory"}]))
    assert "failed, out of memory" in text
    assert "the time was not profiled, no CUPTI" in text
    assert "| time |" not in text


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", ["eager", "compiled", "captured"])
def test_a_profile_on_the_gpu_adds_up(mode: str) -> None:
    found = profile.look(build(Case("mlp-2x512", 256, "sliceout", mode=mode, grads="dense"), torch.device("cuda")), 256)
    memory, time = found["memory"], found["time"]
    assert "error" not in time
    assert time["kinds"][profile.PRODUCTS]["kernels"] >= 8
    assert time["kinds"][profile.SLICES]["kernels"] >= 1
    assert time["kinds"][profile.OPTIMIZER]["kernels"] >= 1
    assert sum(p["reserved"] for p in memory["pools"]) <= memory["max_reserved"]
    graphs = [p for p in memory["pools"] if any(p["pool"])]
    assert bool(graphs) == (mode != "eager")
    assert any(any(p["highest_by_step"]) for p in graphs) == bool(graphs)
    assert memory["counted"]["parameters"] <= memory["max_allocated"] <= memory["max_reserved"]
