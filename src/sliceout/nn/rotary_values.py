"""Values of rotary attention: their dims can be sliced although those of queries and keys cannot.

Attention code reshapes all three by the same number: ``self.v_proj(x).view(*shape, -1, self.head_dim)``. Where only the
values are sliced, that one number must differ. So the forward of the attention class is compiled again with this one
call replaced by ``self._by_head(self.v_proj(x), ...)``, which puts in the width of what it is given. Nothing else
changes: masks, caches, soft caps and norms are the model's own. A class whose code has no such call is left alone.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

from torch import Tensor, nn

from ..slices import Slice
from .base import Sliced, adopt, sliced_subclass


class RotaryValues(Sliced):
    """An attention layer whose values may have a width of their own."""

    _projection: str
    """The attribute that projects to values; a class whose forward is rewritten for it says so."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_projection" in vars(cls):
            cls.forward = _rewritten_forward(cls._plain, cls._projection)  # type: ignore[arg-type, attr-defined]

    def _by_head(self, values: Tensor, *shape: Any) -> Tensor:
        """``values.view(*shape)``, by heads of the width they have."""
        sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
        s = self.axes["unit"].slice
        if self.training and s.sliced and sizes[-1] == s.size:
            sizes[-1] = s.width
        return values.view(sizes)


def slice_rotary_values_(module: nn.Module, projection: str, s: Slice) -> bool:
    """Let the output of ``module.<projection>`` be viewed by the width of ``s``; false if the code forbids it."""
    plain: Any = type(module)
    if _rewritten_forward(plain, projection) is None:
        return False
    adopt(module, sliced_subclass(plain, RotaryValues, _projection=projection), {"unit": s.axis()})
    return True


@functools.cache
def _rewritten_forward(plain: Any, projection: str) -> Any:
    """The forward of ``plain`` with that one call replaced; ``None`` if it cannot be."""
    forward: Any = inspect.unwrap(plain.forward)
    if forward.__code__.co_freevars:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, SyntaxError):
        return None
    function: Any = tree.body[0]
    function.decorator_list, function.returns = [], None
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    calls = [node for node in ast.walk(function) if _views(node, projection)]
    if len(calls) != 1:
        return None
    call: Any = calls[0]
    call.args.insert(0, call.func.value)
    call.func = ast.Attribute(ast.Name("self", ast.Load()), "_by_head", ast.Load())
    ast.fix_missing_locations(tree)
    made: dict[str, Any] = {}
    exec(compile(tree, inspect.getfile(forward), "exec"), forward.__globals__, made)
    return made["forward"]


def _views(node: ast.AST, projection: str) -> bool:
    """Whether it is ``self.<projection>(...).view(...)``."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    inner = node.func.value
    projects = isinstance(inner, ast.Call) and ast.unparse(inner.func) == f"self.{projection}"
    return projects and node.func.attr in ("view", "reshape")
