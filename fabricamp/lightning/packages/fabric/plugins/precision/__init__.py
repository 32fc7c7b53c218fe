# Written by tools/write_aliases.py
"""The names of ``lightning.fabric.plugins.precision``."""

from fabricamp.lightning.packages.fabric.plugins.precision.precision import Precision as Precision
from fabricamp.lightning.refused import Refused

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

    _lightnings_name = "plugins.precision.BitsandbytesPrecision"


class DeepSpeedPrecision(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.precision.DeepSpeedPrecision"


class DoublePrecision(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.precision.DoublePrecision"


class FSDPPrecision(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.precision.FSDPPrecision"


class HalfPrecision(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.precision.HalfPrecision"


class MixedPrecision(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.precision.MixedPrecision"


class TransformerEnginePrecision(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.precision.TransformerEnginePrecision"


class XLAPrecision(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.precision.XLAPrecision"
