"""The paper's appendices as code: who is kept how often, how many networks are sampled, which moments survive.

Nothing is sampled here. Slices are few, so expectations are sums over all starts; standard and controlled dropout,
which have too many masks to go through, are given by their closed forms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sliceout.schemes.subset import Subset
from sliceout.slices import Slice


def architectures(*slices: Slice) -> int:
    """How many distinct networks these slices sample from together (appendix C).

    One sliced layer makes it linear in the width, two consecutive ones quadratic: every pair of starts is another mask
    of the weight between them. (The appendix writes ``n (1 - p)`` for the slices of a layer; those that fit are
    ``n p + 1``.)

    Example:
        >>> one, two = Slice(10, 0.4, sampling="window"), Slice(20, 0.5, sampling="window")
        >>> architectures(one), architectures(one, two)
        (5, 55)
        >>> architectures(Subset(10, 0.4))
        210
    """
    return math.prod(math.comb(s.size, s.width) if isinstance(s, Subset) else len(s.starts) for s in slices)


def masks(s: Slice, scaled: bool = True) -> Tensor:
    """The mask of every start, one to a row (float64); with the normalisation multiplied in, unless told otherwise."""
    starts, units = torch.tensor(s.starts), torch.arange(s.size)
    kept = ((units - starts[:, None]) % s.size < s.width).double()
    return kept * s.scale.cpu() if scaled and s.scale is not None else kept


@dataclass(frozen=True)
class Moments:
    """First and second moment of a layer's output ``y``, over the draws."""

    mean: Tensor
    second: Tensor
    """``E[y y^T]``."""

    def errors(self, full: Moments) -> tuple[float, float]:
        """Relative distance of both moments from those of another layer."""
        return _relative(self.mean, full.mean), _relative(self.second, full.second)


def moments(weight: Tensor, x: Tensor, into: Slice | None = None, out: Slice | None = None) -> Moments:
    """Moments of ``weight @ x`` (appendix B) when its input or output units are sliced, or both.

    Exact: the two slices are drawn independently, so the expectation over pairs is a product.

    Example:
        >>> w, x, s = torch.randn(3, 10).double(), torch.randn(10).double(), Slice(10, 0.4, sampling="window")
        >>> torch.allclose(moments(w, x, into=s).mean, w @ x)
        True
    """
    weight, x = weight.double(), x.double()
    columns = torch.ones(1, len(x), dtype=torch.float64) if into is None else masks(into)
    rows = torch.ones(1, len(weight), dtype=torch.float64) if out is None else masks(out)
    outputs = weight @ (columns * x).t()
    mean = rows.mean(0) * outputs.mean(1)
    return Moments(mean, (rows.t() @ rows / len(rows)) * (outputs @ outputs.t() / outputs.shape[1]))


def dropout_moments(weight: Tensor, x: Tensor, rate: float) -> Moments:
    """The same under standard dropout of the input units: every mask, by its closed form."""
    weight, x = weight.double(), x.double()
    y = weight @ x
    return Moments(y, torch.outer(y, y) + (weight * (x.square() * rate / (1 - rate))) @ weight.t())


def controlled_moments(weight: Tensor, x: Tensor, s: Subset) -> Moments:
    """The same under controlled dropout: two units are kept together a little less often than independently."""
    weight, x = weight.double(), x.double()
    y = weight @ x
    n, w = s.size, s.width
    together = (w - 1) * n / (w * (n - 1)) if n > 1 else 1.0
    single = (weight * x.square()) @ weight.t()
    return Moments(y, together * torch.outer(y, y) + (n / w - together) * single)


@dataclass(frozen=True)
class Line:
    """One row of :func:`compare`."""

    scheme: str
    norm: str
    networks: int
    mean_error: float
    second_error: float


def compare(size: int, rate: float, align: int | None = None, outputs: int = 64, seed: int = 0) -> list[Line]:
    """How many networks each scheme samples from, and how far it moves the moments of a random layer that reads it.

    The layer has Gaussian weights and reads rectified Gaussian units, so its input has a mean, as behind a ReLU.
    """
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, size, generator=random, dtype=torch.float64) / math.sqrt(size)
    x = torch.randn(size, generator=random, dtype=torch.float64).relu()
    full = moments(weight, x)
    lines = []
    for sampling, norm in (("window", "flow"), ("window", "probabilistic"), ("circular", "probabilistic")):
        s = Slice(size, rate, sampling=sampling, norm=norm, align=align)
        lines.append(Line(sampling, norm, architectures(s), *moments(weight, x, into=s).errors(full)))
    subset = Subset(size, rate, align=align)
    controlled = controlled_moments(weight, x, subset)
    lines.append(Line("controlled", "either", architectures(subset), *controlled.errors(full)))
    standard = dropout_moments(weight, x, rate)
    lines.append(Line("standard", "either", 2**size, *standard.errors(full)))
    return lines


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())
