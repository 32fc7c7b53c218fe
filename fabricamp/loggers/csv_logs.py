"""Lightning's path to the CSVLogger."""

from fabricamp.loggers.csv import CSVLogger as CSVLogger
