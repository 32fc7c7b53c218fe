"""apex's FusedMixedPrecisionLamb."""

from __future__ import annotations

from fabricamp import optimizers

__all__ = ["FusedMixedPrecisionLamb"]


class FusedMixedPrecisionLamb(optimizers.FusedMixedPrecisionLamb):
    """:class:`fabricamp.optimizers.FusedMixedPrecisionLamb` by apex's name."""
