"""``focal_loss`` where apex had it."""

from fabricamp.ops import focal_loss


class FocalLoss:
    """``FocalLoss.apply(...)``, with the arguments of :func:`focal_loss`."""

    apply = staticmethod(focal_loss)
