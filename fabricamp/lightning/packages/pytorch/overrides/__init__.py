# Written by tools/write_aliases.py
"""The package ``lightning.pytorch.overrides``."""

from fabricamp.lightning.packages.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler as UnrepeatedDistributedSampler,
)
