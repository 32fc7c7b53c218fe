# Written by tools/write_aliases.py
"""Lightning's path to TorchElasticEnvironment."""

from fabricamp.lightning.packages.fabric.plugins.environments import TorchElasticEnvironment as TorchElasticEnvironment
