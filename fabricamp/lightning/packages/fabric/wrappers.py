"""Asks whether an object is one of those that Fabric wraps."""


def is_wrapped(obj: object) -> bool:
    """Returns False: only Fabric wraps modules, optimizers and loaders, and it is not offered."""
    return False
