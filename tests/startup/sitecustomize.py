"""Keeps the interpreters that tests start from importing ``torch._dynamo`` where they compile nothing: half of a start's time.

Python imports this module at its start, because ``tests/conftest.py`` puts its folder into PYTHONPATH.  torch imports
``torch._dynamo``, which takes 2.7 s of a processor, at the first call of a function that is not to be traced: an optimizer's
constructor and its ``step``, and in the constructor of its DistributedDataParallel.  While the module is not loaded nothing
traces, and the function itself is called; when it is loaded, torch's own wrapper is called.

torchmetrics imports ``transformers``, two seconds, for metrics of texts that no test uses.
"""

import functools
import importlib.abc
import importlib.machinery
import sys

_WRAPPERS = {
    "torch._compile": "_disable_dynamo",
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.optim.optimizer": "_use_grad_for_differentiable",
}
"""Modules, and the function or class of each that imports ``torch._dynamo``."""
_FLAGS = {"torchmetrics.utilities.imports": "_TRANSFORMERS_GREATER_EQUAL_4_4"}
"""Modules, and the name in each that says whether ``transformers`` is installed."""


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


class _Settings:
    """Stands for ``torch._dynamo`` while DistributedDataParallel reads a setting; all else is the module's."""

    class utils:
        @staticmethod
        def get_optimize_ddp_mode():
            return "ddp_optimizer"  # the default, as nobody can have set another without the import

    def __getattr__(self, name):
        return getattr(importlib.import_module("torch._dynamo"), name)


def DistributedDataParallel(torchs):  # noqa: N802 - as torch's class
    """Returns torch's class; its constructor imports nothing to read the compiler's setting."""
    construct = torchs.__init__

    @functools.wraps(construct)
    def init(*args, **kwargs):
        if _loaded():
            construct(*args, **kwargs)
            return
        torch = sys.modules["torch"]
        torch._dynamo = settings = _Settings()
        try:
            construct(*args, **kwargs)
        finally:
            if vars(torch).get("_dynamo") is settings:
                del torch._dynamo

    torchs.__init__ = init
    return torchs


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        if module.__name__ in _FLAGS:
            setattr(module, _FLAGS[module.__name__], False)
            return
        name = _WRAPPERS[module.__name__]
        setattr(module, name, globals()[name](getattr(module, name)))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of ``_WRAPPERS`` and ``_FLAGS`` alone."""

    def find_spec(self, fullname, path, target=None):
        if fullname not in _WRAPPERS and fullname not in _FLAGS:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found is not None:
            found.loader = _Loader(found.loader.name, found.loader.path)
        return found


sys.meta_path.insert(0, _Finder())
