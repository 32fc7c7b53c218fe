"""Lightning's path to the error that a wrong argument, or combination of arguments, raises."""

from fabricamp.errors import ConfigError as MisconfigurationException

__all__ = ["MisconfigurationException"]
