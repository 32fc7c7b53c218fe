"""Lightning's path to the table of a module's layers, for code that builds one itself."""

from fabricamp.callbacks.model_summary import LayerSummary, summarize

ModelSummary = summarize
"""At this path, ``ModelSummary(module, max_depth=1)`` is not the callback but the table that it shows."""

__all__ = ["LayerSummary", "ModelSummary", "summarize"]
