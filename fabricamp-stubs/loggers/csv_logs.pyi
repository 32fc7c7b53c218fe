from fabricamp.loggers.csv import CSVLogger as CSVLogger
