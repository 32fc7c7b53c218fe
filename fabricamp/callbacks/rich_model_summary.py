"""Lightning's path to the summary that its RichModelSummary prints: ours is a table already."""

from __future__ import annotations

from fabricamp.callbacks.model_summary import ModelSummary as RichModelSummary

__all__ = ["RichModelSummary"]
