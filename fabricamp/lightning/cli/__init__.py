"""Parts of LightningCLI, which stands on jsonargparse; the class itself is in ``fabricamp.lightning.packages.pytorch.cli``."""
