"""apex's fused optimizers: fabricamp's, with apex's state layout in addition, and the attributes that scripts read."""

from fabricamp.apex.optimizers.fused_adagrad import FusedAdagrad as FusedAdagrad
from fabricamp.apex.optimizers.fused_adam import FusedAdam as FusedAdam
from fabricamp.apex.optimizers.fused_lamb import FusedLAMB as FusedLAMB
from fabricamp.apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb as FusedMixedPrecisionLamb
from fabricamp.apex.optimizers.fused_novograd import FusedNovoGrad as FusedNovoGrad
from fabricamp.apex.optimizers.fused_sgd import FusedSGD as FusedSGD

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedMixedPrecisionLamb", "FusedNovoGrad", "FusedSGD"]
