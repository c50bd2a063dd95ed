"""Sliced classes that are made on the fly: a plain class, what slices it, and a few class attributes.

A class that no module holds by name cannot be pickled by name. So each remembers what it was made of, and a pickle of
one of its layers (see ``Sliced.__reduce_ex__``) holds that: the attributes must be hashable and can be pickled
themselves. What else a class needs (properties, code) is made from them in ``__init_subclass__``.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

MadeFrom = tuple[type[nn.Module], tuple[type, ...], tuple[tuple[str, Any], ...]]
"""What a class was made of: its plain class, the sliced classes in front of it, its attributes."""


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


def made_from(made: type) -> MadeFrom | None:
    """What a class was made of; ``None`` if it was written by hand."""
    return vars(made).get("_made_from")


def empty_layer(*parts: Any) -> nn.Module:
    """A layer of the class made from these, without a state: for ``pickle`` to fill."""
    made = _make(*parts)
    return made.__new__(made)
