"""Keeps the interpreters that tests start from importing ``torch._dynamo`` where they compile nothing: half of a start's time.

Python imports this module at its start, because ``tests/conftest.py`` puts its folder into PYTHONPATH.  torch imports
``torch._dynamo``, which takes 2.7 s of a processor, at the first call of a function that is not to be traced: an optimizer's
constructor and its ``step``.  While the module is not loaded nothing traces, and the function itself is called; when it is loaded,
torch's own wrapper is called.
"""

import functools
import importlib.abc
import importlib.machinery
import sys

_WRAPPERS = {"torch._compile": "_disable_dynamo", "torch.optim.optimizer": "_use_grad_for_differentiable"}
"""Modules, and the function of each whose wrapper imports ``torch._dynamo``."""


def _loaded():
    return "torch._dynamo" in sys.modules


def _disable_dynamo(torchs):
    """Returns ``torch._compile._disable_dynamo`` that imports nothing."""

    @functools.wraps(torchs)
    def decorate(fn=None, recursive=True):
        if fn is None:
            return functools.partial(decorate, recursive=recursive)
        not_traced = torchs(fn, recursive)

        @functools.wraps(fn)
        def inner(*args, **kwargs):
            return not_traced(*args, **kwargs) if _loaded() else fn(*args, **kwargs)

        return inner

    return decorate


def _use_grad_for_differentiable(torchs):
    """Returns the decorator of an optimizer's ``step`` that breaks no graph where none is traced."""

    @functools.wraps(torchs)
    def decorate(step):
        breaks_graphs = torchs(step)

        @functools.wraps(step)
        def inner(optimizer, *args, **kwargs):
            if _loaded():
                return breaks_graphs(optimizer, *args, **kwargs)
            torch = sys.modules["torch"]
            with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
                return step(optimizer, *args, **kwargs)

        return inner

    return decorate


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        name = _WRAPPERS[module.__name__]
        setattr(module, name, globals()[name](getattr(module, name)))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of ``_WRAPPERS`` alone."""

    def find_spec(self, fullname, path, target=None):
        if fullname not in _WRAPPERS:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found is not None:
            found.loader = _Loader(found.loader.name, found.loader.path)
        return found


sys.meta_path.insert(0, _Finder())
