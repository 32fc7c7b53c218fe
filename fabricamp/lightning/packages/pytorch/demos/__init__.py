# Written by tools/write_aliases.py
"""The names of ``lightning.pytorch.demos``."""

from fabricamp.lightning.packages.pytorch.demos.boring_classes import BoringDataModule as BoringDataModule
from fabricamp.lightning.packages.pytorch.demos.boring_classes import BoringModel as BoringModel
from fabricamp.lightning.packages.pytorch.demos.boring_classes import DemoModel as DemoModel
from fabricamp.lightning.refused import Refused

__all__ = [
    "BoringDataModule",
    "BoringModel",
    "DemoModel",
    "LightningLSTM",
    "LightningTransformer",
    "SequenceSampler",
    "SimpleLSTM",
    "Transformer",
    "WikiText2",
]


class LightningLSTM(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "demos.LightningLSTM"


class LightningTransformer(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "demos.LightningTransformer"


class SequenceSampler(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "demos.SequenceSampler"


class SimpleLSTM(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "demos.SimpleLSTM"


class Transformer(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "demos.Transformer"


class WikiText2(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "demos.WikiText2"
