"""The modules of apex.contrib that scripts still use."""

from __future__ import annotations

__all__: list[str] = []
