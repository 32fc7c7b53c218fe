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

    _lightnings_name = "plugins.environments.ClusterEnvironment"


class KubeflowEnvironment(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.environments.KubeflowEnvironment"


class LSFEnvironment(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.environments.LSFEnvironment"


class LightningEnvironment(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.environments.LightningEnvironment"


class MPIEnvironment(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.environments.MPIEnvironment"


class SLURMEnvironment(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.environments.SLURMEnvironment"


class TorchElasticEnvironment(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.environments.TorchElasticEnvironment"


class XLAEnvironment(Refused):
    """Not offered: constructing it raises."""

    _lightnings_name = "plugins.environments.XLAEnvironment"
