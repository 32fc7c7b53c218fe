# Written by tools/write_aliases.py
"""Lightning's path to the error for a wrong argument or combination of arguments."""

from fabricamp.utilities.exceptions import MisconfigurationException as MisconfigurationException
