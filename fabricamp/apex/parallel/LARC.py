"""apex's module of LARC: as in apex, ``apex.parallel.LARC`` is this module."""

from fabricamp import optimizers


class LARC(optimizers.LARC):
    """:class:`fabricamp.optimizers.LARC` under apex's name."""
