"""``import lightning`` in a process that a script under ``python -m fabricamp.lightning`` has spawned.

The folder is on the child's path, so Python finds this file by its name; the file replaces itself by fabricamp's module.
"""

from fabricamp.lightning.names import take_over

take_over(__name__)
