# Written by tools/write_aliases.py
"""The names of ``lightning.fabric.plugins.environments``."""

from fabricamp.lightning.refused import Refused

__all__ = [
    "ClusterEnvironment",
    "KubeflowEnvironment",
    "LSFEnvironment",
    "LightningEnvironment",
    "MPIEnvironment",
    "SLURMEnvironment",
    "TorchElasticEnvironment",
    "XLAEnvironment",
]


class ClusterEnvironment(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.ClusterEnvironment"


class KubeflowEnvironment(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.KubeflowEnvironment"


class LSFEnvironment(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.LSFEnvironment"


class LightningEnvironment(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.LightningEnvironment"


class MPIEnvironment(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.MPIEnvironment"


class SLURMEnvironment(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.SLURMEnvironment"


class TorchElasticEnvironment(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.TorchElasticEnvironment"


class XLAEnvironment(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "fabric.XLAEnvironment"
