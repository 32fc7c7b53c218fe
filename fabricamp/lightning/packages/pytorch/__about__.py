"""The attributes of ``lightning.__about__``."""

from fabricamp.lightning.packages.__about__ import *  # noqa: F403
