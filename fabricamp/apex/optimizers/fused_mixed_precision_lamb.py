"""apex's FusedMixedPrecisionLamb."""

from fabricamp import optimizers


class FusedMixedPrecisionLamb(optimizers.FusedMixedPrecisionLamb):
    """:class:`fabricamp.optimizers.FusedMixedPrecisionLamb` under apex's name."""
