from fabricamp.callbacks.model_summary import ModelSummary as RichModelSummary

__all__ = ["RichModelSummary"]
