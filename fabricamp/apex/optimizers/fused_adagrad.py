"""apex's FusedAdagrad."""

from fabricamp import optimizers
from fabricamp.apex._extensions import amp_C
from fabricamp.apex.optimizers._layout import OverflowBuffer


class FusedAdagrad(OverflowBuffer, optimizers.FusedAdagrad):
    """:class:`fabricamp.optimizers.FusedAdagrad` with the attributes that scripts read."""

    multi_tensor_adagrad = staticmethod(amp_C.multi_tensor_adagrad)
