"""Sliced classes that are made on the fly: a plain class, the sliced classes in front of it, a few class attributes.

No module holds them by name, so they cannot be pickled by name. Each remembers what it was made from instead, and
``Sliced.__reduce_ex__`` puts that into the pickle: attributes are values that can be hashed and pickled. What else a
class needs (properties, code), ``__init_subclass__`` makes from them.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn


def sliced_subclass(plain: type[nn.Module], *sliced: type, **attributes: Any) -> type[nn.Module]:
    """The subclass of ``plain`` that puts ``sliced`` in front of it; the same one whenever it is asked for.

    Args:
        plain: the class that ``plain_`` returns to.
        sliced: subclasses of ``Sliced``, in the order in which Python shall look methods up.
        attributes: further class attributes.
    """
    return _make(plain, sliced, tuple(attributes.items()))  # type: ignore[arg-type]


@functools.cache
def _make(plain: Any, sliced: Any, attributes: Any) -> type[nn.Module]:
    body = {"_plain": plain, "_made_from": (plain, sliced, attributes), "__doc__": plain.__doc__, **dict(attributes)}
    return type(f"{sliced[0]._name_prefix}{plain.__name__}", (*sliced, plain), body)


def empty_layer(*made_from: Any) -> nn.Module:
    """A layer of the class that was made from these, for ``pickle`` to fill."""
    made = _make(*made_from)
    return made.__new__(made)
