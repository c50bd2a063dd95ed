"""The Triton kernels compile for the GPUs that we measure on.

No GPU is needed for that; and the interpreter, which runs them elsewhere, accepts more than the compiler does.
"""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from sliceout.compact import kernels as updates  # noqa: E402
from sliceout.ops import kernels, multi_tensor  # noqa: E402

SIZES = {"WIDE": False, "FIELDS": multi_tensor.FIELDS, "VECTOR": kernels.VECTOR, "BLOCK": multi_tensor.BLOCK}
PLAIN = {"FULL": tl.float32, "SMALL": tl.bfloat16, **SIZES}
UPDATE = {
    **PLAIN, "STATE": tl.float32, "LR_LIVES_ON_DEVICE": True, "FOUND_INF": True, "GRAD_SCALE": True, "MAXIMIZE": False,
}  # fmt: skip
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "take": (kernels.take_kernel, PLAIN),
    "put": (kernels.put_kernel, PLAIN),
    "put in float64": (kernels.put_kernel, {**PLAIN, "FULL": tl.float64, "SMALL": tl.float64, "WIDE": True}),
    "adam": (
        updates._adam_kernel,
        {**UPDATE, "STEP_LIVES_ON_DEVICE": True, "WHOLE": True, "DECOUPLED": True, "AMSGRAD": True},
    ),
    "sgd": (updates._sgd_kernel, {**UPDATE, "WHOLE": False, "MOMENTUM": True, "NESTEROV": True}),
}
POINTERS = {"table": "*i64", "owner": "*i64", "lr": "*fp32", "found_inf": "*fp32", "grad_scale": "*fp32"}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_for_hopper(name: str) -> None:
    kernel, constants = CASES[name]
    names = kernel.arg_names
    assert constants.keys() <= set(names)
    signature = {n: "constexpr" if n in constants else POINTERS.get(n, "fp32") for n in names}
    source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert made.asm["cubin"]
