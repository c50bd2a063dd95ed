"""The zoo: does ``sliceout.convert_`` work on one small member of every model family?

    python benchmarks/zoo.py choose              # once: list timm's models by family and size
    python benchmarks/zoo.py timm                # the smallest member of every family  -> results/zoo-timm.json, .md
    python benchmarks/zoo.py hf                  # text architectures, tiny configs     -> results/zoo-hf.json, .md
    python benchmarks/zoo.py members             # more members of every timm family    -> results/zoo-members.json, .md
    python benchmarks/zoo.py timm resnet vgg     # only these families; prints, and writes nothing without --update

Each model: convert at rate 0.5, train two steps, compare eval outputs bit for bit before and after conversion, revert,
load the state_dict into an unconverted model, and compare the sliced training forward in float64 with the masked-dense
oracle: with one slice for the batch, and with two parts of the batch that have slices of their own. The other members
are converted on the meta device: their own code runs at the sliced widths.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import multiprocessing
import sys
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import sliceout
from sliceout_lab.oracle import masked_dense_, quiet_, randomise_
from zoo_models import (
    HF,
    MEMBERS,
    build_hf,
    build_timm,
    build_timm_on_meta,
    choose_timm,
    prepare_hf_,
    timm_families,
)

RESULTS = Path(__file__).parent.parent / "results"
TOLERANCE = 1e-4
"""Of the oracle, relative: many models compute parts in float32 whatever their dtype. A wrong group errs far more."""


# -- one model ---------------------------------------------------------------------------------------------------------


def call(model: nn.Module, x: Any) -> list[Tensor]:
    """All floating point tensors that the model returns."""
    out = model(**x) if isinstance(x, dict) else model(x)
    out = dict(out) if isinstance(out, dict) else out
    return [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]


def loss_of(model: nn.Module, x: Any) -> Tensor:
    return torch.stack([t.float().square().mean() for t in call(model, x)]).sum()


def in_eval(model: nn.Module, x: Any) -> list[Tensor]:
    model.eval()
    torch.manual_seed(0)
    with torch.no_grad():
        out = [t.clone() for t in call(model, x)]
    model.train()
    return out


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(a, b, strict=True))


def check(model: nn.Module, x: Any) -> dict[str, Any]:
    """Everything that must hold for a model; failures are listed under ``failed``."""
    original = copy.deepcopy(model)
    classes = {n: type(m) for n, m in model.named_modules()}
    keys = list(model.state_dict())
    before = in_eval(model, x)
    started = time.perf_counter()
    try:
        report = sliceout.convert_(model, rate=0.5)
    except ValueError as error:
        return {"converted": 0, "reason": str(error), "seconds": round(time.perf_counter() - started, 2), "failed": []}
    row: dict[str, Any] = {"converted": report.converted, "seconds": round(time.perf_counter() - started, 2)}
    row["flops"] = round(report.flop_saving, 4)
    row["activations"] = round(report.activation_saving, 4)
    row["kinds"] = dict(collections.Counter(r.group.kind for r in report.rows if r.slice is not None))
    row["skipped"] = dict(collections.Counter(str(r.reason) for r in report.skipped).most_common(5))
    failed = row["failed"] = []
    if not same(before, in_eval(model, x)):
        failed.append("eval output changed by conversion")
    row["oracle"] = oracle(original, x)
    if not row["oracle"] < TOLERANCE:
        failed.append(f"masked-dense oracle is off by {row['oracle']:.1e}")
    row["parts"], row["oracle_parts"] = oracle_by_parts(original, x)
    if row["oracle_parts"] is None:
        del row["oracle_parts"]
    elif not row["oracle_parts"] < TOLERANCE:
        failed.append(f"masked-dense oracle is off by {row['oracle_parts']:.1e} with two parts")
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for _ in range(2):
        loss = loss_of(model, x)
        if not loss.isfinite():
            failed.append("loss is not finite")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if report.slices.step != 2:
        failed.append(f"{report.slices.step} draws in 2 steps")
    trained = in_eval(model, x)
    if list(model.state_dict()) != keys:
        failed.append("state_dict keys changed")
    original.load_state_dict(model.state_dict(), strict=True)
    if not same(trained, in_eval(original, x)):
        failed.append("state_dict round trip changed the output")
    sliceout.revert_(model)
    if {n: type(m) for n, m in model.named_modules()} != classes:
        failed.append("classes are not restored by revert_")
    if not same(trained, in_eval(model, x)):
        failed.append("eval output changed by revert_")
    return row


def in_float64(original: nn.Module, x: Any) -> tuple[nn.Module, Any]:
    """A copy of the model with random weights and without dropout, and the input."""
    full = randomise_(quiet_(copy.deepcopy(original)).double()).train()
    prepare_hf_(full)
    wide = tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, x)
    try:
        call(copy.deepcopy(full), wide)
        return full, wide
    except RuntimeError:  # code that makes float32 tensors of its own
        return full.float(), x


def oracle_by_parts(original: nn.Module, x: Any) -> tuple[int, float | None]:
    """How many groups have a slice for each part of the batch, and the largest error of the training forward.

    Each half of the batch is compared with the masked network of its own slices; ``None`` where that says nothing, as
    samples meet in the plain network too.
    """
    full, x = in_float64(original, x)
    sliced = copy.deepcopy(full)
    report = sliceout.convert_(sliced, rate=0.5, seed=3, parts=2)
    sliceout.draw_(sliced)
    slices, masked = list(report.slices), []
    if all(s.parts == 1 for s in slices):
        return 0, None
    starts = [s.starts_on_host for s in slices]
    for part in range(2):
        for s, of_parts in zip(slices, starts, strict=True):
            s.starts_on_host = [of_parts[part % len(of_parts)]] * s.parts
        masked.append(masked_dense_(copy.deepcopy(full), report))
    for s, of_parts in zip(slices, starts, strict=True):
        s.starts_on_host = of_parts
    error = by_halves(sliced, masked, x) if by_halves(full, [copy.deepcopy(full)] * 2, x) < TOLERANCE else None
    return sum(s.parts > 1 for s in slices), error


def by_halves(whole: nn.Module, each: list[nn.Module], x: Any) -> float:
    """The largest difference between a network on a batch and one for each half of it, relative to the largest output.

    Batch norms are frozen: their statistics would be those of the whole batch and of half of it.
    """
    outputs = []
    for part, model in enumerate((whole, *each)):
        for module in model.modules():
            if "BatchNorm" in type(module).__name__ or isinstance(module, nn.modules.batchnorm._NormBase):
                module.eval()
        half = tree_map(lambda t, part=part: t.chunk(2)[part - 1] if isinstance(t, Tensor) and part else t, x)
        torch.manual_seed(0)
        with torch.no_grad():
            outputs.append(call(model, half))
    errors = [0.0]
    for got, *halves in zip(*outputs, strict=True):
        if got.dim() and got.shape[0] == sum(h.shape[0] for h in halves):
            expected = torch.cat(halves)
            error = (expected - got).abs().max() / expected.abs().max().clamp_min(1e-9)
            errors.append(float(error.nan_to_num(nan=float("inf"))))
    return max(errors)


def oracle(original: nn.Module, x: Any) -> float:
    """Largest error of the sliced training forward, relative to the largest output, over two draws (or one)."""
    full, x = in_float64(original, x)
    sliced = copy.deepcopy(full)
    report = sliceout.convert_(sliced, rate=0.5, seed=3)
    errors = []
    for _ in range(2 if sum(p.numel() for p in full.parameters()) < 2e7 else 1):
        sliceout.draw_(sliced)
        expected, got = [], []
        for model, out in ((masked_dense_(copy.deepcopy(full), report), expected), (copy.deepcopy(sliced), got)):
            torch.manual_seed(0)
            with torch.no_grad():
                out += call(model, x)
        for e, g in zip(expected, got, strict=True):
            error = (e - g).abs().max() / e.abs().max().clamp_min(1e-9)
            errors.append(float(error.nan_to_num(nan=float("inf"))))
    return max(errors)


def check_member(name: str) -> dict[str, Any]:
    """Convert on the meta device: the dry run executes the model's code at the sliced widths."""
    model = build_timm_on_meta(name)
    started = time.perf_counter()
    try:
        report = sliceout.convert_(model, rate=0.5)
    except ValueError as error:
        return {"converted": 0, "reason": str(error), "seconds": round(time.perf_counter() - started, 2), "failed": []}
    seconds = round(time.perf_counter() - started, 2)
    return {"converted": report.converted, "flops": round(report.flop_saving, 4), "seconds": seconds, "failed": []}


# -- all models --------------------------------------------------------------------------------------------------------


def work(kind: str, name: str, queue: Any) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    try:
        if kind == "members":
            queue.put(check_member(name))
        else:
            queue.put(check(*(build_timm if kind == "timm" else build_hf)(name)))
    except BaseException as error:
        lines = traceback.format_exc().strip().splitlines()
        where = next((line.strip() for line in reversed(lines) if "/sliceout/" in line), "")
        queue.put({"converted": 0, "failed": [f"crash: {type(error).__name__}: {str(error)[:300]} {where}"]})


def in_child(kind: str, name: str, timeout: float) -> dict[str, Any]:
    """One model in a forked process that cannot take the others down."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=work, args=(kind, name, queue))
    child.start()
    try:
        return queue.get(timeout=timeout)
    except Exception:
        return {"converted": 0, "failed": [f"no answer within {timeout:.0f} s"]}
    finally:
        child.join(1)
        if child.is_alive():
            child.kill()


def targets(kind: str, only: list[str], count: int) -> list[tuple[str, str]]:
    """``(family, model)`` pairs to look at."""
    if kind == "hf":
        return [(name, name) for name in HF if not only or name in only]
    found = []
    for family, names in timm_families().items():
        if only and family not in only and not set(only) & set(names):
            continue
        named = [n for n in names if n in only]
        if kind == "timm":
            found += [(family, n) for n in named or names[:1]]
        else:  # spread over the sizes, the smallest left out
            others = names[1:]
            picks = [others[round(i * (len(others) - 1) / max(count - 1, 1))] for i in range(count)] if others else []
            found += [(family, n) for n in named or dict.fromkeys(picks)]
    return found


def line(row: dict[str, Any]) -> str:
    if row["failed"]:
        return "FAILED: " + "; ".join(row["failed"])
    if not row["converted"]:
        return f"not converted: {row['reason']}"
    saved = f"{row['converted']} groups, {-100 * row['flops']:.0f} % FLOPs, {row['seconds']} s"
    by_parts = f", {row['parts']} with parts" if "parts" in row else ""
    by_parts += f": {row['oracle_parts']:.0e}" if "oracle_parts" in row else ""
    return saved + (f", oracle {row['oracle']:.0e}" if "oracle" in row else "") + by_parts


def markdown(kind: str, rows: list[dict[str, Any]]) -> str:
    done, failed = [r for r in rows if r["converted"]], [r for r in rows if r["failed"]]
    page = [
        f"# Zoo: {kind}",
        "",
        f"Written by `python benchmarks/zoo.py {kind}` from `zoo-{kind}.json`, with torch {torch.__version__}. "
        "Rate 0.5, defaults otherwise; savings are the report's expectation for one training step.",
        "",
        f"**{len(rows)} models, {len(done)} with at least one group converted ({100 * len(done) / len(rows):.0f} %), "
        f"{len(failed)} failed a check.**",
        "",
        "| family | model | groups | FLOPs | activations | oracle error | parts | their error | seconds | remark |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        saved = [f"{-100 * r[k]:.0f} %" if k in r else "" for k in ("flops", "activations")]
        errors = [f"{r[key]:.0e}" if key in r else "" for key in ("oracle", "oracle_parts")]
        remark = "; ".join(r["failed"]) or ("" if r["converted"] else r["reason"])
        parts = [errors[0], r.get("parts", ""), errors[1]]
        cells = [r["family"], r["model"], r["converted"], *saved, *parts, r.get("seconds", ""), remark]
        page.append("| " + " | ".join(str(c).replace("|", "/") for c in cells) + " |")
    return "\n".join(page) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("choose", "timm", "hf", "members"))
    parser.add_argument("only", nargs="*", help="families or models; the results are then only printed")
    parser.add_argument("--update", action="store_true", help="put what was looked at into the existing results")
    parser.add_argument("--count", type=int, default=3, help="members per family")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one model")
    args = parser.parse_args()
    if args.kind == "choose":
        rows = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in choose_timm().items()]
        MEMBERS.write_text("{\n" + ",\n".join(rows) + "\n}\n")
        return 0
    import timm  # noqa: F401  # the children inherit the imports
    import transformers  # noqa: F401

    torch.set_num_threads(1)

    def look(target: tuple[str, str]) -> dict[str, Any]:
        family, name = target
        row = {"family": family, "model": name, **in_child(args.kind, name, args.timeout)}
        print(f"{family:22} {name:34} {line(row)}", flush=True)
        return row

    with ThreadPoolExecutor(args.jobs) as pool:
        rows = list(pool.map(look, targets(args.kind, args.only, args.count)))
    print(f"{len(rows)} models, {sum(bool(r['converted']) for r in rows)} converted, "
          f"{sum(bool(r['failed']) for r in rows)} failed")  # fmt: skip
    if args.update:
        old = json.loads((RESULTS / f"zoo-{args.kind}.json").read_text())
        new = {r["model"]: r for r in rows}
        rows = [new.pop(r["model"], r) for r in old] + list(new.values())
    if args.update or not args.only:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"zoo-{args.kind}.json").write_text(json.dumps(rows, indent=1) + "\n")
        (RESULTS / f"zoo-{args.kind}.md").write_text(markdown(args.kind, rows))
    return int(any(r["failed"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
