"""What ``lightning.__about__`` says."""

from fabricamp.lightning.packages.__about__ import *  # noqa: F403
