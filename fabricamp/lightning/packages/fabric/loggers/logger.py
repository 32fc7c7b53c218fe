# Written by tools/write_aliases.py
"""Lightning's path to the base of loggers."""

from fabricamp.loggers import Logger as Logger
from fabricamp.loggers.logger import rank_zero_experiment as rank_zero_experiment
