# Written by tools/write_aliases.py
"""Lightning's path to DDPStrategy."""

from fabricamp.strategies import DDP as DDP
from fabricamp.strategies import DDPStrategy as DDPStrategy
