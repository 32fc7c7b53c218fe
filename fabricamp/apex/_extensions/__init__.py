"""apex's compiled modules, such as ``amp_C``, ``apex_C`` and ``syncbn``, implemented with fabricamp's ops.

:func:`fabricamp.apex.install` makes them importable without a package, and puts this folder on the path for spawned processes.
"""
