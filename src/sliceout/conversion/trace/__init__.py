"""Which dimensions of which parameters are the same units? Found by watching one forward pass without data.

A copy of the model runs on the meta device, so nothing is computed and no statistics or caches of the real model are
touched. Every dimension of every tensor is a product of :class:`Atom` s, indivisible runs of units. Each ATen op says
how the atoms of its inputs and outputs correspond:

- pointwise ops, norms and products identify atoms (rows of one weight with columns of the next);
- ``view`` and ``chunk`` split an atom: 3 x heads x dims in a fused qkv weight, channels x pixels behind a flatten;
- ``cat``, ``softmax``, indexing and anything unknown *block* an atom, with a :class:`~..reasons.Reason`.

What remains unblocked is a set of units that can be sliced together. Whether the model's Python code copes with the
smaller tensors is not decided here: ``convert_`` tries it on the same meta copy.
"""

from . import arithmetic, shapes  # noqa: F401  # they register their rules
from .atoms import Atom, Dim, block, expand, identify, size
from .tracer import Cost, RuleError, Trace, meta_copy, trace

__all__ = ["Atom", "Cost", "Dim", "RuleError", "Trace", "block", "expand", "identify", "meta_copy", "size", "trace"]
