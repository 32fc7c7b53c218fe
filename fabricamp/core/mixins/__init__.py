"""Lightning's path to ``save_hyperparameters``."""

from fabricamp.checkpoint.hyperparameters import HyperparametersMixin as HyperparametersMixin
