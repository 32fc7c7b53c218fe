"""Lightning's names for the classes that a user subclasses; docs/from-lightning.md has a table of such names."""

from fabricamp.core.datamodule import LightningDataModule as LightningDataModule
from fabricamp.core.module import LightningModule as LightningModule


def __getattr__(name: str) -> object:
    from fabricamp.arguments.not_offered import part_of

    return part_of(__name__, name)
