"""Lightning's path to RichModelSummary, which is ModelSummary: that is a table already."""

from fabricamp.callbacks.model_summary import ModelSummary as RichModelSummary

__all__ = ["RichModelSummary"]
