"""The Trainer, its arguments, and its properties for callbacks, loggers and users."""

from fabricamp.trainer.trainer import Trainer as Trainer


def __getattr__(name: str) -> object:
    from fabricamp.arguments.not_offered import part_of

    return part_of(__name__, name)
