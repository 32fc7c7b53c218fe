"""The user's hooks that prefetch batches ahead of their steps, and what the hooks must not read then."""

from __future__ import annotations

from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from fabricamp.state import RunState


def reads(hook: Callable[..., Any], name: str) -> bool:
    """Whether the code of ``hook`` uses an attribute or a global called ``name``.

    >>> reads(lambda trainer: [trainer.global_step for _ in range(2)], "global_step")
    True
    """
    code = getattr(hook, "__code__", None)
    return isinstance(code, CodeType) and _names(code, name)


def watched(prepare: Callable[[Any], Any] | None, state: RunState) -> Callable[[Any], Any] | None:
    """Returns ``prepare``, wrapped to set ``state.ahead`` while it runs ahead of the step."""
    if prepare is None:
        return None

    def ahead(batch: Any) -> Any:
        state.ahead = True
        try:
            return prepare(batch)
        finally:
            state.ahead = False

    return ahead


def _names(code: CodeType, name: str) -> bool:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return name in code.co_names or any(_names(one, name) for one in inner)
