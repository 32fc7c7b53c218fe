"""apex's FusedMixedPrecisionLamb, which fabricamp's is as it stands."""

from __future__ import annotations

from fabricamp.optimizers import FusedMixedPrecisionLamb

__all__ = ["FusedMixedPrecisionLamb"]
