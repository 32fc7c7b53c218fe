"""The version of Lightning whose names and arguments the alias has."""

from fabricamp.lightning.packages.__version__ import version as version
