"""Residual branches, found in the flow of a forward pass: ``x + branch(x)``, whatever the code around it looks like.

An add of two activations is a residual connection if one of them, the *stream*, went into the other. The branch is what
lies between. Samples are taken where the stream enters a module of the branch, and put back where a module hands over
what is added. Everything in between sees a smaller batch, so nothing there may mix samples or meet a full batch.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.utils._pytree import KeyPath

from .reasons import Reason, Skip
from .trace import Dim, Trace, expand, identify, size
from .trace.flow import Call, Flow, Op

_BATCH_NORMS = ("_native_batch_norm_legit", "native_batch_norm", "cudnn_batch_norm", "_batch_norm_with_update",
                "miopen_batch_norm")  # fmt: skip
"""They see the samples that come through, as with any smaller batch."""
_KEEPS_ZEROS = ("mul", "div", "view", "_unsafe_view", "permute", "transpose", "clone", "_to_copy", "native_dropout",
                "unsqueeze", "squeeze", "alias", "detach", "neg")  # fmt: skip
"""Ops between the last module of a branch and the add, of which samples of zeros come out as zeros."""

Place = tuple[str, KeyPath]
"""A module, and where a tensor lies in its arguments or in its output."""


@dataclass(eq=False)
class Branch:
    """One residual branch."""

    name: str
    block: str
    """The module whose code adds."""
    stream: int
    added: list[int]
    """The values that are added to the stream."""
    adds: set[int]
    """The ops that do it."""
    values: set[int] = field(default_factory=set)
    """What was computed from the stream on the way to what is added."""
    calls: list[Call] = field(default_factory=list)
    """The calls of modules that lie in the branch, and in no other such call."""
    takes: list[Place] = field(default_factory=list)
    """Where samples of the stream are taken."""
    extras: list[Place] = field(default_factory=list)
    """Where samples are taken of other tensors that have them, such as masks."""
    puts: list[Place] = field(default_factory=list)
    drop_paths: list[str] = field(default_factory=list)
    """Modules that drop whole samples of the branch."""
    reason: Reason | None = None
    """Why it is left alone."""

    def inside(self, flow: Flow) -> list[str]:
        """The modules that run in the branch, in order."""
        found = (c.module for c in flow.calls if any(o is c or o.encloses(c) for o in self.calls))
        return list(dict.fromkeys(found))


class _Left(Exception):
    """Why a branch is left alone."""

    def __init__(self, reason: Reason) -> None:
        self.reason = reason


def find_branches(trace: Trace, drop_paths: Iterable[str]) -> list[Branch]:
    """All residual branches in the order in which they run, those that cannot be sliced with a reason."""
    assert trace.flow is not None
    for one, other, _ in trace.adds:  # masks are added to scores sample by sample
        identify(one, other)
    flow, batch = trace.flow.finish(), expand(trace.batch)
    if not batch or {a for d in trace.attends for a in expand(d)} & set(batch):
        return []
    found: list[Branch] = []
    for terms, adds in _sums(flow):
        branch = _branch(flow, terms, adds)
        if branch is not None and not any(_within(flow, inner, branch) for inner in found):
            _judge(branch, flow, batch)
            found.append(branch)
    _agree(found, flow)
    dropping = set(drop_paths)
    for branch in found:
        branch.drop_paths = [c.module for c in flow.calls if c.module in dropping and _has(c.outputs, branch.values)]
    _name(found, flow)
    return found


def _within(flow: Flow, inner: Branch, outer: Branch) -> bool:
    """Whether one branch lies in another, as under a skip over many blocks: the inner ones are sliced."""
    return any(
        flow.descends(v, outer.stream) and any(v == t or flow.descends(t, v) for t in outer.added) for v in inner.added
    )


# -- sums of activations -----------------------------------------------------------------------------------------------


def _is_sum(flow: Flow, op: Op) -> bool:
    return (
        op.name == "add"
        and len(op.reads) == 2
        and not flow.fixed.intersection(op.reads)
        and all(len(flow.dims[v]) == len(flow.dims[op.writes[0]]) for v in op.reads)
    )


def _sums(flow: Flow) -> list[tuple[list[int], list[int]]]:
    """The terms of every sum of activations, and its adds. ``a + b + c`` is one sum if ``a + b`` has no other use."""
    sums = {i for i, op in enumerate(flow.ops) if _is_sum(flow, op)}

    def part_of_another(add: int) -> bool:
        readers = flow.readers[flow.ops[add].writes[0]]
        return len(readers) == 1 and readers[0] in sums and flow.ops[add].writes[0] not in flow.outputs

    def terms(value: int, adds: list[int]) -> list[int]:
        add = flow.producer.get(value, -1)
        if add in sums and part_of_another(add):
            adds.append(add)
            return [t for v in flow.ops[add].reads for t in terms(v, adds)]
        return [value]

    found = []
    for add in sorted(sums):
        if not part_of_another(add):
            adds = [add]
            found.append(([t for v in flow.ops[add].reads for t in terms(v, adds)], adds))
    return found


def _branch(flow: Flow, terms: list[int], adds: list[int]) -> Branch | None:
    """The branch of a sum; ``None`` if it is no residual connection."""
    block = flow.ops[max(adds)].module
    stream = next((t for t in terms if all(flow.descends(v, t) for v in terms if v != t)), None)
    if stream is None:
        arguments = (v for c in flow.calls if c.module == block and c.holds(adds[0]) for _, v in c.args)
        alike = (v for v in arguments if len(flow.dims[v]) == len(flow.dims[terms[0]]))
        shared = next((v for v in alike if all(flow.descends(t, v) for t in terms)), None)
        if shared is None:
            return None
        left = Branch("", block, shared, terms, set(adds))
        left.reason = Skip.NOT_RESIDUAL("the shortcut is computed as well (projected or pooled), from all samples")
        return left
    added = [t for t in terms if t != stream]
    behind = functools.reduce(operator.or_, (flow.before[v] for v in added), 0)
    start = flow.producer.get(stream, -1)
    ops = flow.ops[start + 1 : max(adds)]
    values = {v for op in ops for v in op.writes if behind >> v & 1 and flow.descends(v, stream)}
    made = sorted(flow.producer[v] for v in values)
    window = [c for c in flow.calls if start < c.start and c.end <= max(adds) and not any(map(c.holds, adds))]
    calls = [c for c in window if any(map(c.holds, made)) or (c.start == c.end and _has(c.outputs, values))]
    outer = [c for c in calls if not any(o.encloses(c) for o in window)]
    return Branch("", block, stream, added, set(adds), values, outer) if added and outer else None


def _has(places: list[tuple[KeyPath, int]], values: Iterable[int]) -> bool:
    return bool({v for _, v in places}.intersection(values))


# -- whether a branch can do with fewer samples ------------------------------------------------------------------------


def _judge(branch: Branch, flow: Flow, batch: Dim) -> None:
    """Find where samples are taken and put back, or the reason why not."""
    if branch.reason is not None:
        return
    try:
        _check_samples(branch, flow, batch)
        branch.puts = [place for v in branch.added for place in _puts(branch, v, flow, set())]
        entries = _entries(branch, flow, batch)
        branch.takes = [place for place, v in entries.items() if v == branch.stream]
        branch.extras = [place for place, v in entries.items() if v != branch.stream]
    except _Left as left:
        branch.reason = left.reason


def _check_samples(branch: Branch, flow: Flow, batch: Dim) -> None:
    for v in (branch.stream, *branch.added):
        first = expand(flow.dims[v][0]) if flow.dims[v] else []
        if first != batch:
            raise _Left(Skip.NOT_SAMPLES("dimension 0 of what it adds is not the samples, or not they alone"))
    samples = set(batch)
    made = {flow.producer[v] for v in branch.values}
    for i in sorted(made):
        op = flow.ops[i]
        if op.name not in _BATCH_NORMS and any(samples & set(expand(dim)) for dim in op.mixes):
            raise _Left(Skip.MIXES_SAMPLES(f"{op.name} in {op.module or 'the model'} mixes samples"))
    within = {i for c in branch.calls for i in range(c.start, c.end)}
    for v in {*branch.values, *(v for i in within for v in flow.ops[i].writes if _carries(flow.dims[v], batch))}:
        reads = set(flow.readers[v]) - made - within - branch.adds
        reads = {i for i in reads if flow.live.intersection(flow.ops[i].writes)}
        if v in flow.outputs or reads:
            what = (
                "is an output of the model" if v in flow.outputs else f"is used again in {flow.ops[min(reads)].module}"
            )
            raise _Left(Skip.ESCAPES(f"what {_where(flow, v)} computes {what}"))


def _where(flow: Flow, value: int) -> str:
    return flow.ops[flow.producer[value]].module or "the model"


def _puts(branch: Branch, value: int, flow: Flow, avoid: set[str]) -> list[Place]:
    """The last modules that hand over ``value``, or what is computed from their outputs by ops that keep zeros."""
    for call in reversed(branch.calls):
        path = next((p for p, v in call.outputs if v == value), None)
        if path is not None and call.module not in avoid:
            return [(call.module, path)]
    op = flow.ops[flow.producer[value]] if value in branch.values else None
    before = [] if op is None else [v for v in op.reads if v in branch.values and v not in flow.shaped]
    linear = op is not None and len(before) == (2 if op.name == "add" else op.name in _KEEPS_ZEROS)
    if op is None or not linear or not before or (op.name == "div" and op.reads[0] not in before):
        name = op.module if op is not None else branch.block
        raise _Left(Skip.NO_MODULE(f"no module of its own hands over what is added, but code in {name or 'the model'}"))
    for v in before:
        if expand(flow.dims[v][0])[:1] != expand(flow.dims[value][0])[:1]:
            raise _Left(Skip.NO_MODULE(f"{op.name} in {op.module} moves the samples to another dimension"))
    return [place for v in before for place in _puts(branch, v, flow, avoid)]


def _entries(branch: Branch, flow: Flow, batch: Dim) -> dict[Place, int]:
    """Where the stream enters modules of the branch, and other tensors that have samples: with their values."""
    found: dict[Place, int] = {}
    end = max(c.end for c in branch.calls if any(m == c.module for m, _ in branch.puts))
    needed = functools.reduce(operator.or_, (flow.before[v] for v in branch.added))
    for i, op in enumerate(flow.ops[:end]):  # behind the puts all samples are there
        around = next((c for c in branch.calls if c.holds(i)), None)
        if not any(needed >> v & 1 and (around or v in branch.values) for v in op.writes):
            continue
        for v in op.reads:
            known = v in branch.values or v in flow.fixed or (v != branch.stream and not _carries(flow.dims[v], batch))
            if known or (around is not None and around.start <= flow.producer.get(v, -1)):
                continue  # or made inside
            for path in _paths(branch, around, v, flow, batch, op):
                found[around.module, path] = v  # type: ignore[union-attr]
    return found


def _carries(dims: list[Dim], batch: Dim) -> bool:
    return any(set(batch) & set(expand(dim)) for dim in dims)


def _paths(branch: Branch, call: Call | None, value: int, flow: Flow, batch: Dim, op: Op) -> list[KeyPath]:
    """Through which arguments of a call a value from outside comes in."""
    paths = [] if call is None else [p for p, v in call.args if v == value]
    if call is None or not paths:
        what = "the stream" if value == branch.stream else "a tensor with samples"
        raise _Left(Skip.NO_MODULE(f"{op.name} in the code of {op.module or 'the model'} reads {what} itself"))
    if expand(flow.dims[value][0]) != batch:
        raise _Left(Skip.NOT_SAMPLES(f"{call.module} is given a tensor whose samples do not lie in dimension 0"))
    return paths


# -- modules that several branches share -------------------------------------------------------------------------------


def _agree(found: list[Branch], flow: Flow) -> None:
    """A module does one thing whenever it is called: branches that want different things of it are left alone."""
    for branch in [b for b in found if b.reason is None]:
        if elsewhere := _called_elsewhere(branch, found, flow):
            with contextlib.suppress(_Left):  # such as one DropPath for two branches: the module in front of it does it
                branch.puts = [place for v in branch.added for place in _puts(branch, v, flow, elsewhere)]
    for branch in [b for b in found if b.reason is None]:
        if elsewhere := _called_elsewhere(branch, found, flow):
            branch.reason = Skip.SHARED_MODULE(f"{min(elsewhere)} is called elsewhere as well, with all samples")


def _called_elsewhere(branch: Branch, found: list[Branch], flow: Flow) -> set[str]:
    """The modules of a branch that have other calls than those of this code."""
    wanted = [b for b in found if b.reason is None]
    alike = sum(_same(branch, b) for b in wanted)
    others = {m for b in wanted if not _same(branch, b) for m in _modules(b)}
    return {m for m in _modules(branch) if m in others or flow.times_called[m] != alike}


def _modules(branch: Branch) -> set[str]:
    return {m for m, _ in (*branch.takes, *branch.extras, *branch.puts)}


def _same(one: Branch, other: Branch) -> bool:
    """Whether it is the same code that runs again, as where layers are shared."""
    return (one.takes, one.extras, one.puts) == (other.takes, other.extras, other.puts)


def _name(found: list[Branch], flow: Flow) -> None:
    """A branch is called like its block, or like the module with most weights where a block has several."""
    for branch in found:
        alone = sum(b.block == branch.block for b in found) == 1
        weights = {c.module: sum(_weights(op, flow) for op in flow.ops[c.start : c.end]) for c in branch.calls}
        branch.name = branch.block if alone or not weights else max(weights, key=lambda name: weights[name])


def _weights(op: Op, flow: Flow) -> int:
    return sum(math.prod(map(size, flow.dims[v])) for v in op.reads if v in flow.fixed)
