import argparse
import contextlib
import os
import sys

import pytest

from tests.cuda_on_cpu.compiler import kernel_device

__all__ = ["kernel_device"]


@pytest.fixture
def as_found():
    """Restores modules, path, command line, environment and argparse after an `install`."""
    with kept():
        yield


@contextlib.contextmanager
def kept():
    modules, path, argv, environment = dict(sys.modules), list(sys.path), list(sys.argv), dict(os.environ)
    finders = list(sys.meta_path)
    parse = argparse.ArgumentParser.parse_known_args
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    try:
        yield
    finally:
        sys.modules["__main__"] = modules["__main__"]
        for name in [name for name in sys.modules if name not in modules]:
            # Modules of torch and fabricamp stay imported: another import would create a second copy of each class.
            if name.split(".")[0] in NAMES:
                del sys.modules[name]
        for name in [name for name in sys.modules if name.startswith("fabricamp.apex")]:
            for one in vars(sys.modules[name]).values():
                if isinstance(one, type) and one.__module__.split(".")[0] == "apex":
                    one.__module__ = f"fabricamp.{one.__module__}"
        sys.path[:], sys.argv[:], sys.meta_path[:] = path, argv, finders
        argparse.ArgumentParser.parse_known_args = parse
        os.environ.clear()
        os.environ.update(environment)


NAMES = {"apex", "amp_C", "apex_C", "syncbn", "fused_layer_norm_cuda", "fast_layer_norm", "xentropy_cuda", "mlp_cuda"}
