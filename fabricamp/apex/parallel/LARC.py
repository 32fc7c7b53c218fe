"""LARC where apex had it: in a module of its own name, which is what ``apex.parallel.LARC`` is."""

from fabricamp import optimizers


class LARC(optimizers.LARC):
    """:class:`fabricamp.optimizers.LARC` by apex's name."""
