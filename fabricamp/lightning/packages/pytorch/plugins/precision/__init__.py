# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.plugins.precision``."""

from fabricamp.lightning.refused import Refused
from fabricamp.precision import Precision as Precision

__all__ = [
    "BitsandbytesPrecision",
    "DeepSpeedPrecision",
    "DoublePrecision",
    "FSDPPrecision",
    "HalfPrecision",
    "MixedPrecision",
    "Precision",
    "TransformerEnginePrecision",
    "XLAPrecision",
]


class BitsandbytesPrecision(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.BitsandbytesPrecision"


class DeepSpeedPrecision(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.DeepSpeedPrecision"


class DoublePrecision(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.DoublePrecision"


class FSDPPrecision(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.FSDPPrecision"


class HalfPrecision(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.HalfPrecision"


class MixedPrecision(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.MixedPrecision"


class TransformerEnginePrecision(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.TransformerEnginePrecision"


class XLAPrecision(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.XLAPrecision"
