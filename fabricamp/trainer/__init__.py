"""The Trainer, its arguments, and what it lets others see."""

from fabricamp.trainer.trainer import Trainer as Trainer


def __getattr__(name: str) -> object:
    from fabricamp.not_offered import part_of

    return part_of(__name__, name)
