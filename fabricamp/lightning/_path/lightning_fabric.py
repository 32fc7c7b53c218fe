"""``import lightning_fabric`` in a process that a script under ``python -m fabricamp.lightning`` has spawned.

The folder is on the child's ``PYTHONPATH``, so Python finds this file by its name; it puts fabricamp's modules in its own place.
"""

from fabricamp.lightning.names import take_over

take_over(__name__)
