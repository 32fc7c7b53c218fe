"""Lightning's path to the table of a module's layers, for code that makes one by itself."""

from fabricamp.callbacks.model_summary import LayerSummary, summarize

ModelSummary = summarize
"""``ModelSummary(module, max_depth=1)`` is at this path no callback, but what is shown."""

__all__ = ["LayerSummary", "ModelSummary", "summarize"]
