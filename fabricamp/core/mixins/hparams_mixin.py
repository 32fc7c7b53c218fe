"""Lightning's path to ``save_hyperparameters``."""

from fabricamp.hyperparameters import HyperparametersMixin as HyperparametersMixin
