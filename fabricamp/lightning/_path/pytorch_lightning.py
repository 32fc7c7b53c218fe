"""Imported by processes that a script under ``python -m fabricamp.lightning`` spawns."""

from fabricamp.lightning.names import take_over

take_over(__name__)
