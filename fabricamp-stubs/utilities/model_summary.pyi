from fabricamp.callbacks.model_summary import LayerSummary as LayerSummary
from fabricamp.callbacks.model_summary import summarize as ModelSummary
from fabricamp.callbacks.model_summary import summarize as summarize

__all__ = ["LayerSummary", "ModelSummary", "summarize"]
