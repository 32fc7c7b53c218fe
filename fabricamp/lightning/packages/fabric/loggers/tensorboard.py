# Written by tools/write_aliases.py
"""Lightning's path to the TensorBoardLogger."""

from fabricamp.loggers import TensorBoardLogger as TensorBoardLogger
