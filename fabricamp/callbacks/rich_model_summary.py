"""Lightning's path to RichModelSummary, an alias of ModelSummary, which shows a table already."""

from fabricamp.callbacks.model_summary import ModelSummary as RichModelSummary

__all__ = ["RichModelSummary"]
