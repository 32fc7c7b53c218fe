"""The Trainer, its arguments, and what it lets others see."""

from fabricamp.trainer.trainer import Trainer as Trainer
