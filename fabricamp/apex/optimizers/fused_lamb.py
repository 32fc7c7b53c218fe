"""apex's FusedLAMB."""

from fabricamp import optimizers
from fabricamp.apex._extensions import amp_C
from fabricamp.apex.optimizers._layout import StepInGroup


class FusedLAMB(StepInGroup, optimizers.FusedLAMB):
    """:class:`fabricamp.optimizers.FusedLAMB` with apex's layout."""

    multi_tensor_l2norm = staticmethod(amp_C.multi_tensor_l2norm)
    multi_tensor_lamb = staticmethod(amp_C.multi_tensor_lamb)
