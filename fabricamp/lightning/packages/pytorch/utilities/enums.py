"""Names of arguments' values, as enums."""

from __future__ import annotations

from lightning_utilities.core.enums import StrEnum as LightningEnum


class GradClipAlgorithmType(LightningEnum):
    """The values of ``gradient_clip_algorithm``."""

    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(val: str) -> bool:
        """Returns whether there is such a value."""
        return val in GradClipAlgorithmType.supported_types()

    @staticmethod
    def supported_types() -> list[str]:
        """Returns the values."""
        return [one.value for one in GradClipAlgorithmType]


__all__ = ["GradClipAlgorithmType", "LightningEnum"]
