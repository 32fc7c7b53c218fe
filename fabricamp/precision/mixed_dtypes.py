"""The error of a step that gives a function fp32 values together with half weights, as a tied head outside of any forward does."""

from __future__ import annotations

import ast
import linecache
import re
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor, nn

from fabricamp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import FrameType, TracebackType

    from fabricamp.precision.opt_levels import Level

_REFUSALS: Final = re.compile(r"(?i)mixed dtype|(?=.*\bfloat(32|tensor)?\b).*(half|bfloat16|\bfloat16)", re.DOTALL)
"""What torch's operations say of tensors of two dtypes, one of which is fp32."""


def explained(
    error: RuntimeError, module: nn.Module, bounded: Collection[nn.Module], level: Level
) -> ConfigError | None:
    """Returns the error that explains torch's ``error``; None if that came from a forward, or tells of something else.

    ``bounded``: the modules that return fp32 to the step of ``module``.
    """
    if not _REFUSALS.search(str(error)):
        return None
    code, weights = "", []
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") in bounded:
            return None
        if not frame.f_globals.get("__name__", "").startswith(("torch.", "fabricamp.")):
            code = _code_of(trace)
            weights = _half_weights(code, frame, module, level)
        trace = trace.tb_next
    dtype = str(level.cast_model_type)
    halves = f"the {dtype} weights {', '.join(weights)}" if weights else f"{dtype} values"
    place = f"`{code}`" if code else "the step"
    return ConfigError(
        f"precision {level.name!r}: {place} mixes fp32 values with {halves}: modules that a step calls return fp32, and their "
        "weights are half. Call the module as a whole, as self(batch) does: within its forward all values are half. Or let the "
        f"step see half values: OptLevel({level.name!r}, cast_model_outputs={dtype})"
    )


def _code_of(trace: TracebackType) -> str:
    """Returns the expression at which ``trace`` stands, in one line; empty if the source is not known."""
    code = trace.tb_frame.f_code
    line, end, column, end_column = list(code.co_positions())[trace.tb_lasti // 2]
    if line is None or end is None or column is None or end_column is None:
        return linecache.getline(code.co_filename, trace.tb_lineno).strip()
    lines = [linecache.getline(code.co_filename, number).encode() for number in range(line, end + 1)]
    lines[-1] = lines[-1][:end_column]
    lines[0] = lines[0][column:]
    return " ".join(b"".join(lines).decode().split())


def _half_weights(code: str, frame: FrameType, module: nn.Module, level: Level) -> list[str]:
    """Returns the names of the half parameters of ``module`` that an expression in ``frame`` names."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return []
    named = [_value_of(node, frame) for node in ast.walk(tree)]
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.dtype == level.cast_model_type and any(value is parameter for value in named)
    ]


def _value_of(node: ast.AST, frame: FrameType) -> Any:
    """Returns the tensor or module of a name with attributes, without running code of theirs; None for all else."""
    if isinstance(node, ast.Name):
        found = frame.f_locals.get(node.id)
    elif isinstance(node, ast.Attribute):
        owner = _value_of(node.value, frame)
        if not isinstance(owner, nn.Module):
            return None
        found = owner._parameters.get(node.attr, owner._modules.get(node.attr, vars(owner).get(node.attr)))
    else:
        return None
    return found if isinstance(found, (Tensor, nn.Module)) else None
