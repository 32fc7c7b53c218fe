# Written by tools/write_aliases.py
"""Lightning's path to the CSVLogger."""

from fabricamp.loggers import CSVLogger as CSVLogger
