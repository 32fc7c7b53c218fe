"""Found by processes that a script of ``python -m fabricamp.lightning`` spawns."""

from fabricamp.lightning.names import take_over

take_over(__name__)
