"""The modules that apex compiled: ``amp_C``, ``apex_C``, ``syncbn`` and the like, over fabricamp's ops.

:func:`fabricamp.apex.install` makes them importable without a package, and puts this folder on the path for spawned processes.
"""
