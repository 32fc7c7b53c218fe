"""apex's path to ``focal_loss``."""

from fabricamp.ops import focal_loss


class FocalLoss:
    """``FocalLoss.apply(...)``, with the arguments of :func:`focal_loss`."""

    apply = staticmethod(focal_loss)
