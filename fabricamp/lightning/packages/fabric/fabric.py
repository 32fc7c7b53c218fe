"""The class Fabric, for type hints and ``isinstance``."""

from fabricamp.lightning.refused import Refused


class Fabric(Refused):
    """Lightning's class for hand-written loops, not offered: constructing it raises an error that says what to write instead."""

    _lightnings_name = "Fabric"
