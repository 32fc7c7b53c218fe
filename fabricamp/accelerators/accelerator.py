"""Lightning's path to ``Accelerator``."""

from fabricamp.launch.devices import Accelerator as Accelerator
