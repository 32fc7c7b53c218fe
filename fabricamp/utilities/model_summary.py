"""Lightning's path to the table of a module's layers, for code that makes one by itself."""

from fabricamp.callbacks.model_summary import LayerSummary, ModelSummary, summarize

__all__ = ["LayerSummary", "ModelSummary", "summarize"]
