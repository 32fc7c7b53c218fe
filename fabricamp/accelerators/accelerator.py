"""Lightning's path to ``Accelerator``."""

from fabricamp.launch.accelerators import Accelerator as Accelerator
