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

from ...nn.base import Sliced, adopt
from ...slices import Slice


class ValuesApart(Sliced):
    """An attention layer whose values may have a width of their own."""

    _projection: str

    def bind(self, axes: Any) -> None:
        """Anything goes: the slice is that of the layer's own values."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (type(self)._plain, self._projection), self.__getstate__()  # type: ignore[attr-defined]

    def _by_head(self, values: Tensor, *shape: Any) -> Tensor:
        """``values.view(*shape)``, by heads of the width they have."""
        sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
        s = self.axes["unit"].slice
        if self.training and s.sliced and sizes[-1] == s.size:
            sizes[-1] = s.width
        return values.view(sizes)


def split_off_values_(module: Any, projection: str, s: Slice) -> bool:
    """Let the output of ``module.<projection>`` be viewed by the width of ``s``; false if the code forbids it."""
    made = _made(type(module), projection)  # type: ignore[arg-type]
    if made is None:
        return False
    module._projection = projection
    adopt(module, made, {"unit": s.axis()})
    return True


@functools.cache
def _made(plain: type[nn.Module], projection: str) -> type[nn.Module] | None:
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
    change = _Change(projection)
    change.visit(function)
    if change.count != 1:
        return None
    ast.fix_missing_locations(tree)
    made: dict[str, Any] = {}
    exec(compile(tree, inspect.getfile(forward), "exec"), forward.__globals__, made)
    body = {"forward": made["forward"], "_plain": plain, "__doc__": plain.__doc__}
    return type(f"Sliced{plain.__name__}", (ValuesApart, plain), body)


class _Change(ast.NodeTransformer):
    """``self.<projection>(...).view(...)`` -> ``self._by_head(self.<projection>(...), ...)``."""

    def __init__(self, projection: str) -> None:
        self.projection = projection
        self.count = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not (isinstance(node.func, ast.Attribute) and node.func.attr in ("view", "reshape")):
            return node
        inner = node.func.value
        if isinstance(inner, ast.Call) and ast.unparse(inner.func) == f"self.{self.projection}":
            self.count += 1
            method = ast.Attribute(ast.Name("self", ast.Load()), "_by_head", ast.Load())
            return ast.Call(method, [inner, *node.args], node.keywords)
        return node


def _rebuild(plain: type[nn.Module], projection: str) -> nn.Module:
    made = _made(plain, projection)  # type: ignore[arg-type]
    assert made is not None
    return made.__new__(made)
