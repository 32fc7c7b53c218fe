"""apex's FusedSGD."""

from fabricamp import optimizers
from fabricamp.apex._extensions import amp_C
from fabricamp.apex.optimizers._layout import OverflowBuffer


class FusedSGD(OverflowBuffer, optimizers.FusedSGD):
    """:class:`fabricamp.optimizers.FusedSGD` with the attributes that scripts read."""

    multi_tensor_sgd = staticmethod(amp_C.multi_tensor_sgd)
