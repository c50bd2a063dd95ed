"""The compute-efficacy frontier: accuracy against training time for a family of sizes, with and without SliceOut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import paper
from .figures import COLOURS, Drawn, colour, legend, panel
from .groups import Group, name_of, scaling_in_words
from .paper import Number
from .plots import DASHED, HOLLOW


def papers() -> list[Drawn]:
    """The paper's own points: EfficientNets with its times; Wide ResNets with an estimate, as its table has no times
    across sizes."""
    out: list[Drawn] = []
    for table, data, largest in (("efficientnet-imagenet", None, "B3"), ("efficientnet-cifar", "cifar-100", "B2")):
        source = paper.read(table)
        where = "ImageNet" if data is None else "CIFAR-100"
        rows = [r for r in source["rows"] if data is None or r["match"]["data"] == data]
        sizes = len(source["columns"]) // 2
        title = f"Paper: EfficientNets on {where}"
        with panel(
            f"frontier-paper-{table}",
            title,
            f"The paper's table, one point a size (B0 to {largest}); time relative to plain {largest}.",
            out,
            title=title,
        ) as axes:
            for row in rows:
                points = [(100 + row["cells"][sizes + i], row["cells"][i]) for i in range(sizes)]
                rate = row["match"].get("rate")
                shade = COLOURS["sliceout-probabilistic"] if rate else COLOURS["none"]
                style = {None: "-", 0.3: (0, (1, 1)), 0.4: (0, (4, 2)), 0.5: (0, (6, 1, 1, 1))}[rate]
                axes.plot(
                    *zip(*points, strict=True),
                    color=shade,
                    linestyle=style,
                    linewidth=1.3,
                    **HOLLOW,
                    label=f"SliceOut, rate {rate}" if rate else "without SliceOut",
                )
            axes.set_xlabel(f"training time, % of plain {largest}")
            axes.set_ylabel("test accuracy, %")
            legend(axes)
    source = paper.read("wide-resnet-sizes")
    rows = [r for r in source["rows"] if r["match"]["data"] == "cifar-100"]
    work = [wrn_flops(*map(int, r["match"]["model"].split("-")[1:])) for r in rows]
    title = "Paper: Wide ResNets on CIFAR-100"
    caption = (
        "The paper's accuracies and savings, one point a size (28x6 to 52x14). Its table has no times across "
        "sizes: the "
        "time of a size is *estimated* here by its multiplications, relative to 52x14."
    )
    with panel("frontier-paper-wide-resnet", title, caption, out, title=title) as axes:
        plain = [(100 * w / work[-1], r["cells"][0]) for w, r in zip(work, rows, strict=True)]
        sliced = [(x * (1 + r["cells"][2] / 100), r["cells"][1]) for (x, _), r in zip(plain, rows, strict=True)]
        axes.plot(*zip(*plain, strict=True), color=COLOURS["standard"], **DASHED, **HOLLOW, label="standard dropout")
        axes.plot(
            *zip(*sliced, strict=True),
            color=COLOURS["sliceout-probabilistic"],
            **DASHED,
            **HOLLOW,
            label="SliceOut, rate 0.5",
        )
        axes.set_xlabel("estimated training time, % of 52x14")
        axes.set_ylabel("test accuracy, %")
        legend(axes)
    return out


def wrn_flops(depth: int, width: int) -> float:
    """Multiplications of a Wide ResNet for one 32x32 image, of its 3x3 convolutions (nearly all there is).

    Example:
        >>> round(wrn_flops(28, 10) / 1e9, 1)
        5.2
    """
    blocks, total, channels, side = (depth - 4) // 6, 3 * 16 * 9 * 32 * 32, 16, 32
    for group in range(3):
        outputs = 16 * width * 2**group
        side = 32 // 2**group
        for _ in range(blocks):
            total += 9 * side * side * (channels * outputs + outputs * outputs)
            channels = outputs
    return float(total)


def family(model: str) -> str:
    """The part of a model's name before its size.

    Example:
        >>> family("wrn-28-10"), family("efficientnet-b0"), family("lm-1024"), family("mlp")
        ('wrn', 'efficientnet', 'lm', 'mlp')
    """
    return model.split("-")[0]


def ours(groups: Sequence[Group]) -> list[Drawn]:
    """Our runs that had the device for themselves, one picture for each data set, family and device."""
    found: dict[tuple[str, ...], list[tuple[Group, float, float]]] = {}
    for group in groups:
        seconds, score = group.number("seconds"), group.score("last")
        if seconds and score and seconds.mean > 0:
            key = (
                str(group.config["data"]),
                family(group.config["model"]),
                group.device,
                group.metric,
                scaling_in_words(group.scaled),
            )
            found.setdefault(key, []).append((group, seconds.mean, score.mean))
    out: list[Drawn] = []
    for (data, kind, device, metric, scaled), points in found.items():
        if len(points) < 2:
            continue
        sizes = {g.config["model"] for g, _, _ in points}
        title = f"Ours: {kind} on {data}"
        caption = (
            f"Accuracy after the last epoch against seconds of training on {device}; "
            if metric == "accuracy"
            else f"Perplexity against seconds of training on {device}; "
        )
        caption += (
            "one size only: a point for each scheme, not yet a frontier." if len(sizes) == 1 else f"{len(sizes)} sizes."
        )
        caption += f" Scaled down: {scaled}." if scaled else ""
        lines: dict[str, list[tuple[float, float, Any]]] = {}
        for group, seconds_, score_ in points:
            label = name_of(group.config) + (f", rate {group.rate:g}" if group.rate else "")
            lines.setdefault(label, []).append((seconds_, score_, group))
        name = "-".join(["frontier", kind, data, *([_slug(scaled)] if scaled else [])])
        name += f"-{len(out)}" if any(d.name == name for d in out) else ""
        with panel(name, title, caption, out, title=title) as axes:
            for label, line in lines.items():
                line.sort(key=lambda p: p[0])
                axes.plot(
                    [p[0] for p in line], [p[1] for p in line], color=colour(line[0][2].config), marker="o", label=label
                )
            if len(sizes) > 1:
                for seconds_, score_, group in max(lines.values(), key=len):
                    axes.annotate(
                        group.config["model"].removeprefix(f"{kind}-"),
                        (seconds_, score_),
                        textcoords="offset points",
                        xytext=(5, -9),
                        fontsize=7.5,
                    )
            axes.set_xlabel("seconds of training")
            axes.set_ylabel("test accuracy, %" if metric == "accuracy" else "test perplexity")
            axes.margins(0.1)
            legend(axes)
    return out


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.replace("→", "to"))[:40].strip("-")


__all__ = ["Number", "family", "ours", "papers", "wrn_flops"]
