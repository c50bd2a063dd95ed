"""What the numbers say, in words that are made from them: no sentence here knows a result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .compare import CIRCULAR, Cell, Compared
from .groups import Group, name_of, scaling_in_words
from .stats import Difference, difference
from .tables import Speeds
from .timing import Step

DATA = {
    "fashion-mnist": "FashionMNIST", "mnist": "MNIST", "cifar-10": "CIFAR-10", "cifar-100": "CIFAR-100",
    "imagenet": "ImageNet", "lm1b": "LM1B", "wikitext-2": "WikiText-2", "english-books": "English books",
}  # fmt: skip


def findings(
    compared: Sequence[Compared],
    groups: Sequence[Group],
    speeds: Speeds,
    steps: Sequence[Step],
) -> list[str]:
    """Sentences: schemes against standard dropout, our numbers against the paper's, and time and memory."""
    whole = [c for c in compared if c.table["name"] != "transformer"]  # all of it stands in the detailed one
    return [*_schemes(groups), *_against_paper(whole), *_orders(whole), *_times(speeds), *_losses(steps)]


def _families(groups: Sequence[Group]) -> dict[tuple[str, str, str, str], list[Group]]:
    """Groups that differ in their scheme and its rate only."""
    found: dict[tuple[str, str, str, str], list[Group]] = {}
    for group in groups:
        key = (str(group.declared("data")), str(group.config["model"]), scaling_in_words(group.scaled), group.device)
        found.setdefault(key, []).append(group)
    return found


def statistic_of(data: str) -> str:
    """Which accuracy the paper uses: the highest of all epochs for the small networks, the last elsewhere."""
    return "best" if data in ("mnist", "fashion-mnist") else "last"


def _schemes(groups: Sequence[Group]) -> Iterator[str]:
    """Each scheme against standard dropout at the same rate, or at the rate of standard that does best."""
    for (data, model, scaled, _), same in _families(groups).items():
        statistic = statistic_of(data)
        base = {g.rate: s for g in same if g.scheme == "standard" and (s := g.score(statistic))}
        none = next((s for g in same if g.scheme == "none" and (s := g.score(statistic))), None)
        if not base:
            continue
        lower = same[0].metric == "perplexity"
        unit = "of perplexity" if lower else "points"
        sides = {"more": "higher, so worse", "less": "lower, so better"} if lower else {}
        best_rate = (min if lower else max)(base, key=lambda r: base[r].mean)
        where = f"{DATA.get(data, data)}, {model}{f' (scaled down: {scaled})' if scaled else ''}"
        which = "highest accuracy of all epochs" if statistic == "best" else "after the last epoch"
        parts: dict[str, list[str]] = {}
        for group in sorted(same, key=lambda g: g.rate):
            score = group.score(statistic)
            if score is None or group.scheme in ("standard", "none"):
                continue
            rate = group.rate if group.rate in base else best_rate
            words = difference(score, base[rate]).words(unit, **sides)
            other = "" if rate == group.rate else f" (standard at its best rate, {rate:g})"
            parts.setdefault(name_of(group.config), []).append(f"rate {group.rate:g}: {words}{other}")
        said = [f"*{name[0].upper()}{name[1:]}*: {'; '.join(each)}." for name, each in parts.items()]
        if none is not None:
            words = difference(base[best_rate], none).words(unit, **sides)
            said.append(f"*Standard dropout* at its best rate here ({best_rate:g}) against *no dropout*: {words}.")
        yield "\n".join([f"**{where}, against standard dropout** ({which}):", *said])


def _against_paper(compared: Sequence[Compared]) -> Iterator[str]:
    """How far our numbers lie from the paper's where the setting is the paper's."""
    for one in compared:
        cells = [c for c in one.cells if c.difference is not None and c.metric in ("accuracy", "perplexity")]
        if not cells:
            continue
        gaps = [c.difference for c in cells if c.difference is not None]
        within = sum(abs(gap) <= 2 * c.error for gap, c in zip(gaps, cells, strict=True))
        mean = sum(gaps) / len(gaps)
        unit = "points" if cells[0].metric == "accuracy" else "perplexity"
        side = "above" if mean > 0 else "below"
        yield (
            f"**Against the paper, {one.table['section']}.** {len(cells)} of its numbers were run in its setting: "
            f"{within} agree "
            f"within two standard errors; ours are {abs(mean):.2f} {unit} {side} it on average "
            f"(from {min(gaps):+.2f} to {max(gaps):+.2f})."
        )


def _orders(compared: Sequence[Compared]) -> Iterator[str]:
    """Where the paper's order of SliceOut and standard dropout is not ours, or is."""
    for one in compared:
        base = next(
            (i for i, c in enumerate(one.columns) if c["match"].get("scheme") == "standard" and c["metric"] != "time"),
            None,
        )
        if base is None:
            continue
        agree: list[str] = []
        against: list[str] = []
        open_: list[str] = []
        for title, cells in one.rows:
            for i, cell in enumerate(cells):
                if i == base or cell.metric != cells[base].metric or cell.match.get("sampling") == CIRCULAR["sampling"]:
                    continue
                if (verdict := _verdict(cell, cells[base])) is not None:
                    words = (
                        f"{one.columns[i]['title']} at {title}: paper {verdict[1]:+.1f}, ours {verdict[0].value:+.2f}"
                    )
                    (agree if verdict[2] is True else against if verdict[2] is False else open_).append(words)
        section = one.table["section"]
        if against:
            yield (
                f"**Disagrees with the paper, {section}.** Against standard dropout, the sign is the other one "
                f"beyond chance: {'; '.join(against)}."
            )
        if agree:
            yield (
                f"**Agrees with the paper, {section}.** Against standard dropout, the sign is the paper's beyond "
                f"chance: {'; '.join(agree)}."
            )
        if open_:
            yield (
                f"**Undecided, {section}.** Too few runs or too small a difference to confirm or refute the "
                f"paper's sign: {'; '.join(open_)}."
            )


def _verdict(cell: Cell, base: Cell) -> tuple[Difference, float, bool | None] | None:
    """Ours, the paper's difference, and whether the signs agree (None: undecided); None where nothing is claimed."""
    if not (cell.paper and base.paper and cell.ours and base.ours and cell.comparable and base.comparable):
        return None
    theirs = cell.paper.value - base.paper.value
    if abs(theirs) < 0.05:  # level in the paper: it claims nothing
        return None
    got = difference(cell.ours, base.ours)
    return got, theirs, (got.value > 0) == (theirs > 0) if got.clear else None


def _times(speeds: Speeds) -> Iterator[str]:
    """All networks in one sentence; the table has them one by one."""
    known = [(model, pair, floor, theirs) for model, pair, floor, theirs in speeds if pair and not pair.step.scaled]
    if not known:
        return
    times = sorted((pair.time, model) for model, pair, _, _ in known)
    if len(known) == 1:
        text = f"**Time of a step, {times[0][1]}.** With SliceOut {times[0][0]:.0f} % of the time without."
    else:
        text = (
            f"**Time of a step, {len(known)} networks.** With SliceOut, in the mode in which the baseline is fastest: "
            f"from {times[0][0]:.0f} % ({times[0][1]}) to {times[-1][0]:.0f} % ({times[-1][1]}) of the time without."
        )
    if both := [(pair.time, theirs, model) for model, pair, _, theirs in known if theirs]:
        more, less, level = (
            [m for t, p, m in both if (p - t > 1, t - p > 1) == case]
            for case in ((True, False), (False, True), (False, False))
        )
        text += (
            f" Against the paper, more is saved in {_named(more)}; less in {_named(less)}; as much in {_named(level)}."
        )
    if floors := [100 * pair.step.ms / floor.ms for _, pair, floor, _ in known if floor]:
        text += f" Of the floor, a plain narrow network, it takes {min(floors):.0f} to {max(floors):.0f} %."
    if memory := [pair.memory for _, pair, _, _ in known if pair.memory]:
        text += f" Memory held: {min(memory):.0f} to {max(memory):.0f} %."
    yield text


def _losses(steps: Sequence[Step]) -> Iterator[str]:
    """Where SliceOut is slower than its baseline, in whichever mode."""
    lost: dict[str, list[tuple[float, float]]] = {}
    for step in (s for s in steps if s.scheme == "sliceout"):
        same = [s for s in steps if s.model == step.model and s.setting == step.setting]
        base = min((s for s in same if s.scheme == "standard"), key=lambda s: abs(s.rate - step.rate), default=None)
        base = base or next((s for s in same if s.scheme == "none"), None)
        if base and step.ms > 1.01 * base.ms:
            where = f"{step.model}, {step.where}" + (f" (scaled down: {step.scaled})" if step.scaled else "")
            lost.setdefault(where, []).append((step.rate, 100 * step.ms / base.ms))
    for where, cases in lost.items():
        each = []
        for rate in sorted({r for r, _ in cases}):
            times = sorted({f"{t:.0f}" for r, t in cases if r == rate}, key=float)
            each.append(f"rate {rate:g}: {' to '.join(dict.fromkeys((times[0], times[-1])))} % of the time")
        yield f"**Slower than without SliceOut:** {where}: {'; '.join(each)}."


def _named(models: Sequence[str]) -> str:
    return f"{len(models)} ({', '.join(models)})" if models else "none"
