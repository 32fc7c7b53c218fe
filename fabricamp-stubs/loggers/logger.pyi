from fabricamp.loggers.base import Logger as Logger
from fabricamp.loggers.dummy import DummyLogger as DummyLogger
from fabricamp.loggers.dummy import rank_zero_experiment as rank_zero_experiment
