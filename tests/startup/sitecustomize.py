"""Makes the start of interpreters that tests start short: half of it is what they never use.

Python imports this module at its start, because ``tests/conftest.py`` puts its folder into PYTHONPATH.

torch imports ``torch._dynamo``, which takes 2.5 s of a processor, at the first call of a function that is not to be traced: an
optimizer's constructor and its ``step``.  While the module is not loaded nothing traces, and the function itself is called; when it
is loaded, torch's own wrapper is called.  DDP's constructor imports it to read one setting, which has its default until then.

``import torch`` executes modules for export, for shapes of fake tensors, and for kernels written in Python: these are executed at
the first use of one of their names.  The garbage collector waits until torch is imported, as nothing of it is garbage.

torchmetrics, and with it Lightning, imports transformers, matplotlib and scipy for metrics of text, plots and audio, which no test
uses: it is told that they are not installed.
"""

import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
import types

_WRAPPERS = {
    "torch._compile": "_disable_dynamo",
    "torch._subclasses.fake_tensor": "FakeTensorMode",
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.optim.optimizer": "_use_grad_for_differentiable",
}
"""Modules, and the name in each that is wrapped by the function of the same name here."""
_LATER = {"torch._meta_registrations", "torch._native", "torch.export"}
"""Modules that are executed at the first use of one of their names."""
_AFTER_SHAPES = {"torch._decomp", "torch._dynamo", "torch._prims", "torch._refs", "torch.utils._content_store"}
"""Modules that import each other in a circle, which ends well where ``torch._meta_registrations`` has imported them first."""


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


_DEFAULTS = types.SimpleNamespace(utils=types.SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
"""What DDP's constructor reads of ``torch._dynamo`` while nobody has imported it."""


def DistributedDataParallel(torchs):  # noqa: N802 - as torch calls it
    """Returns the class, whose constructor imports no compiler."""
    begins = torchs.__init__

    @functools.wraps(begins)
    def init(module, *args, **kwargs):
        torch = sys.modules["torch"]
        if not _loaded():
            torch._dynamo = _DEFAULTS
        try:
            begins(module, *args, **kwargs)
        finally:
            if vars(torch).get("_dynamo") is _DEFAULTS:
                del torch._dynamo

    torchs.__init__ = init
    return torchs


def FakeTensorMode(torchs):  # noqa: N802 - as torch calls it
    """Returns the class, whose instances need the shapes that ``torch._meta_registrations`` registers."""
    begins = torchs.__init__

    @functools.wraps(begins)
    def init(mode, *args, **kwargs):
        _execute("torch._meta_registrations")
        begins(mode, *args, **kwargs)

    torchs.__init__ = init
    return torchs


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        name = _WRAPPERS[module.__name__]
        setattr(module, name, globals()[name](getattr(module, name)))


class _TorchLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        gc.disable()
        try:
            super().exec_module(module)
        finally:
            gc.freeze()
            gc.enable()
        if hasattr(
            module._C, "_set_generator_metaclass"
        ):  # torch 2.13 makes no generator before the shapes' modules have called it
            base = importlib.import_module("torch._opaque_base")
            module._C._set_generator_metaclass(base.OpaqueBaseMeta)


class _Later(types.ModuleType):
    """A module that is not executed yet; its dunder names, which whoever looks through all modules reads, do not execute it."""

    def __getattr__(self, name):
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        _execute(self.__name__)
        return getattr(self, name)

    def __dir__(self):
        _execute(self.__name__)
        return super().__dir__()


_EXECUTES = threading.RLock()


def _execute(name):
    """Executes a module of ``_LATER`` that is not executed yet."""
    module = sys.modules.get(name)
    with _EXECUTES:
        if type(module) is _Later:
            module.__class__ = types.ModuleType
            module.__loader__.executes(module)


class _LaterLoader(importlib.machinery.SourceFileLoader):
    def create_module(self, spec):
        return _Later(spec.name)

    def exec_module(self, module):
        """Leaves the module as it is."""

    def executes(self, module):
        super().exec_module(module)


class _LoadedLoader(importlib.abc.Loader):
    """Of a module that has been imported meanwhile: executes nothing, and gives it its own loader again."""

    def create_module(self, spec):
        return sys.modules[spec.name]

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__


def _loaded_meanwhile(module):
    """Returns the spec of a loaded module with a loader that does not execute it again."""
    module.__spec__.loader = _LoadedLoader()
    return module.__spec__


class _MetricsLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        installed = importlib.import_module("lightning_utilities.core.imports")
        available = installed.package_available
        installed.package_available = lambda name: name != "scipy" and available(name)
        try:
            super().exec_module(module)
        finally:
            installed.package_available = available


class _MetricsImportsLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        for name in vars(module):
            if name.startswith(("_MATPLOTLIB_", "_SCIPI_", "_SCIPY_", "_TRANSFORMERS_")):
                setattr(module, name, False)


_LOADERS = (
    dict.fromkeys(_WRAPPERS, _Loader)
    | dict.fromkeys(_LATER, _LaterLoader)
    | {
        "torch": _TorchLoader,
        "torchmetrics": _MetricsLoader,
        "torchmetrics.utilities.imports": _MetricsImportsLoader,
    }
)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of ``_LOADERS`` alone."""

    def find_spec(self, fullname, path, target=None):
        parent = fullname.rpartition(".")[0]
        first = "torch._meta_registrations" if fullname in _AFTER_SHAPES else parent
        if first in _LATER:
            _execute(first)
            if fullname in sys.modules:
                return _loaded_meanwhile(sys.modules[fullname])
        if fullname not in _LOADERS:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found is not None:
            found.loader = _LOADERS[fullname](found.loader.name, found.loader.path)
        return found


sys.meta_path.insert(0, _Finder())
