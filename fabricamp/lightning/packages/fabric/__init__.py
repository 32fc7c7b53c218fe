"""The names of ``lightning.fabric``."""

from fabricamp import seed_everything
from fabricamp.lightning import aliases
from fabricamp.lightning.packages.__about__ import *  # noqa: F403
from fabricamp.lightning.packages.fabric.__version__ import version as __version__  # noqa: F401 - read as fabric.__version__
from fabricamp.lightning.packages.fabric.fabric import Fabric
from fabricamp.lightning.packages.fabric.wrappers import is_wrapped

__path__ = aliases.path_of(__name__)

__all__ = ["Fabric", "is_wrapped", "seed_everything"]
