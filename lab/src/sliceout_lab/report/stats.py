"""Is a difference more than chance? Welch's t-test, because two or four seeds are few, and words that follow it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.stats import ttest_ind_from_stats

from .groups import Estimate

LIMIT = 0.05


@dataclass(frozen=True)
class Difference:
    """``a - b``, with its standard error and the probability of one as large by chance, where they are known."""

    value: float
    se: float | None
    p: float | None
    n: tuple[int, int]

    @property
    def clear(self) -> bool:
        return self.p is not None and self.p < LIMIT

    def words(self, unit: str = "points", *, more: str = "above", less: str = "below") -> str:
        """What one may say about it: direction only where there is one, chance where it may be chance."""
        size = f"{abs(self.value):.2f} {unit}"
        side = more if self.value > 0 else less
        if abs(self.value) < 0.005:
            return f"equal to {size}" + (f" (s.e. {self.se:.2f})" if self.se is not None else "")
        if self.p is None:
            few = "one run each tells no error" if min(self.n) == 1 else "no spread among so few runs"
            return f"{size} {side} (n={self.n[0]} and {self.n[1]}: {few})"
        details = f"s.e. {self.se:.2f}, p{_p(self.p)}"
        return f"{size} {side} ({details})" if self.clear else f"{size} {side}, which may be chance ({details})"


def difference(a: Estimate, b: Estimate) -> Difference:
    """Of two means over independent runs.

    Example:
        >>> d = difference(Estimate(91.0, 0.1, 4), Estimate(90.0, 0.1, 4))
        >>> round(d.se, 3), round(d.p, 4)
        (0.141, 0.0004)
    """
    n = (a.n, b.n)
    if a.se is None or b.se is None:
        return Difference(a.mean - b.mean, None, None, n)
    se = math.hypot(a.se, b.se)
    if se == 0:
        return Difference(a.mean - b.mean, 0.0, None, n)
    spreads = a.se * math.sqrt(a.n), b.se * math.sqrt(b.n)
    test = ttest_ind_from_stats(a.mean, spreads[0], a.n, b.mean, spreads[1], b.n, equal_var=False)
    return Difference(a.mean - b.mean, se, float(test.pvalue), n)


def _p(p: float) -> str:
    return "<0.001" if p < 0.001 else f"={p:.3f}" if p < 0.1 else f"={p:.2f}"
