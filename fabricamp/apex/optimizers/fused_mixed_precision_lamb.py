"""apex's FusedMixedPrecisionLamb."""

from fabricamp import optimizers

__all__ = ["FusedMixedPrecisionLamb"]


class FusedMixedPrecisionLamb(optimizers.FusedMixedPrecisionLamb):
    """:class:`fabricamp.optimizers.FusedMixedPrecisionLamb` by apex's name."""
