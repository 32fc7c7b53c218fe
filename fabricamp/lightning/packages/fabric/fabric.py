"""The class Fabric, for type hints and ``isinstance``."""

from fabricamp.lightning.refused import Refused


class Fabric(Refused):
    """Lightning's loop by hand, which is not offered: no object is one, and constructing it raises what to write."""

    _lightnings_name = "Fabric"
