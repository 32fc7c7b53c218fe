"""Modules that are rows of aliases.toml have the names that they had as files; Python finds, lists and inspects them as files."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pickle
import pkgutil
import pydoc
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import fabricamp
from fabricamp.errors import ConfigError
from fabricamp.lightning import aliases
from tests.lightning.test_names import alias as alias  # noqa: PLC0414 - a fixture

LISTED = Path(__file__).with_name("alias_names.txt").read_text().splitlines()
"""What the modules had when a tool wrote a file for each: the docstring, the names, whether there is an ``__all__``."""


def expected():
    """Returns {module: (whether it is a package, its docstring, {name: where it is from}, whether it has an ``__all__``)}."""
    found = {}
    for line in LISTED:
        if not line.startswith(" "):
            name, _, doc = line.partition(": ")
            module, package, _ = name.partition(" (a package)")
            rows = found[module] = [bool(package), doc, {}, False]
        elif "__all__" in line:
            rows[3] = line.endswith("is there")
        else:
            name, *_, home = line.split()
            rows[2][name] = home
    return found


EXPECTED = expected()
BEHIND_THE_DOOR = {path: rows for path, rows in EXPECTED.items() if path.startswith(aliases.HOME)}
OWN = EXPECTED.keys() - BEHIND_THE_DOOR.keys()
"""Lightning's paths that programs with ``import fabricamp as pl`` import."""


def names_of(module):
    return {
        name: value
        for name, value in vars(module).items()
        if not (name.startswith("__") or isinstance(value, ModuleType))
    }


def named(homes):
    """Returns the values for names that come from a module; None for classes that are not offered."""
    values = {}
    for name, home in homes.items():
        module, _, there = home.partition(":")
        if not there:
            values[name] = None
        elif there == "*":
            origin = importlib.import_module(module)
            values.update({one: getattr(origin, one) for one in origin.__all__})
        else:
            values[name] = getattr(importlib.import_module(module), there)
    return values


def test_the_table_has_these_modules_and_no_others():
    assert aliases._rows().keys() == EXPECTED.keys()
    assert (len(BEHIND_THE_DOOR), len(OWN)) == (111, 23)


@pytest.mark.parametrize("through", ["no door", "lightning", "pytorch_lightning"])
def test_each_module_has_the_names_that_it_had_as_a_file(request, through):
    if through != "no door":
        request.getfixturevalue("alias")
    count = 0
    for path, (package, doc, homes, has_all) in (EXPECTED if through == "no door" else BEHIND_THE_DOOR).items():
        below = path.removeprefix(aliases.HOME)
        if through == "pytorch_lightning" and not below.startswith(".pytorch"):
            continue
        names = {"no door": path, "lightning": f"lightning{below}"}
        module = importlib.import_module(names.get(through, f"pytorch_lightning{below.removeprefix('.pytorch')}"))
        found, wanted = names_of(module), named(homes)
        assert found.keys() == wanted.keys(), path
        for name, value in wanted.items():
            if value is None:
                kind = found[name]
                assert (kind.__module__, kind.__qualname__, kind._lightnings_name) == (path, name, homes[name])
                assert inspect.getdoc(kind) == "Not offered: constructing it raises."
            else:
                assert found[name] is value, (path, name)
        assert (module.__doc__, hasattr(module, "__path__")) == (doc, package)
        assert sorted(vars(module).get("__all__", ())) == (sorted(found) if has_all else []), path
        count += len(found)
    assert count == {"no door": 374, "lightning": 334, "pytorch_lightning": 225}[through]


@pytest.mark.parametrize("package", [aliases.HOME, "lightning"])
def test_pkgutil_lists_each_module(alias, package):
    listed = {one.name: one.ispkg for one in pkgutil.walk_packages(alias(package).__path__, f"{package}.")}
    for path, (is_package, *_) in BEHIND_THE_DOOR.items():
        assert listed[package + path.removeprefix(aliases.HOME)] == is_package
    if package == "lightning":
        assert {path.replace("fabricamp", "lightning.pytorch", 1) for path in OWN} <= listed.keys()


def test_pkgutil_lists_rows_and_files_of_one_package_together():
    below = f"{aliases.HOME}.fabric.plugins.environments"
    path = importlib.import_module(below).__path__
    found = {one.name: one.ispkg for one in pkgutil.iter_modules(path)}
    assert found.keys() >= {"slurm", "lightning"}
    assert not any(found.values())
    assert found.keys() == {one.name.rpartition(".")[2] for one in pkgutil.iter_modules(path, f"{below}.")}


@pytest.mark.parametrize(
    "path", ["pytorch.callbacks", "pytorch.callbacks.pruning", "fabric.plugins.io", "fabric.utilities.spike"]
)
@pytest.mark.parametrize("package", [aliases.HOME, "lightning"])
def test_python_can_inspect_a_row(alias, package, path):
    name = f"{package}.{path}"
    module = alias(name)
    spec = importlib.util.find_spec(name)
    assert (spec.name, spec.origin, spec.has_location) == (name, aliases.TABLE, True)
    assert spec is module.__spec__
    assert module.__file__ == inspect.getfile(module) == aliases.TABLE
    assert module.__package__ == (name if hasattr(module, "__path__") else name.rpartition(".")[0])
    assert 'refused = ["ModelPruning"]' in inspect.getsource(module)
    assert pydoc.render_doc(module)
    if package == "lightning":  # a reload of the other makes its classes anew
        assert importlib.reload(module) is module


def test_python_can_inspect_a_class_that_is_not_offered(alias):
    kind = alias("lightning.pytorch.callbacks").ModelPruning
    home = sys.modules[f"{aliases.HOME}.pytorch.callbacks.pruning"]
    assert inspect.getmodule(kind) is home
    assert inspect.getfile(kind) == aliases.TABLE
    assert pickle.loads(pickle.dumps(kind)) is kind is home.ModelPruning
    with pytest.raises(
        OSError, match=r"could not find class|source code not available"
    ):  # as for any class without a file
        inspect.getsource(kind)
    with pytest.raises(ConfigError, match="ModelPruning is not offered"):
        kind()


def test_a_module_that_is_no_row_is_missing_as_any_other():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'fabricamp\.lightning\.packages\.pytorch\.none'"):
        importlib.import_module(f"{aliases.HOME}.pytorch.none")
    assert importlib.util.find_spec(f"{aliases.HOME}.pytorch.callbacks.none") is None


OWN_PATHS = """
import sys
import fabricamp as pl

for path in sys.argv[1:]:
    found = pl
    for part in path.split(".")[1:]:
        found = getattr(found, part)
    assert found.__name__ == found.__spec__.name == path and found.__file__.endswith("aliases.toml"), path
    assert found is sys.modules[path], path
try:
    pl.core.none
except AttributeError as error:
    print(error)
"""


def test_an_own_path_is_imported_on_first_use_and_can_be_inspected():
    paths = OWN - {"fabricamp.plugins", "fabricamp.plugins.io"}  # no attributes of the package
    words = [sys.executable, "-c", OWN_PATHS, *sorted(paths)]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert shown == "module 'fabricamp.core' has no attribute 'none'\n"


STUBS = Path(fabricamp.__file__).parents[1] / "fabricamp-stubs"


def test_type_checkers_read_of_each_own_path_what_its_row_says():
    stubs = {}
    for file in STUBS.rglob("*.pyi"):
        tree = ast.parse(file.read_text())
        path = ".".join(["fabricamp", *file.relative_to(STUBS).with_suffix("").parts]).removesuffix(".__init__")
        names, has_all = {}, False
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                names.update({one.asname: f"{node.module}:{one.name}" for one in node.names})
            else:
                assert ast.unparse(node) == f"__all__ = {sorted(names)}"
                has_all = True
        stubs[path] = [file.stem == "__init__", names, has_all]
    assert stubs == {path: [EXPECTED[path][0], *EXPECTED[path][2:]] for path in OWN}
    assert (STUBS / "py.typed").read_text() == "partial\n"  # the rest is in the package


def test_no_module_of_the_package_imports_a_row():
    root = Path(fabricamp.__file__).parent
    for file in root.rglob("*.py"):
        if not file.is_relative_to(root / "lightning" / "packages"):
            imports = {one.module for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.ImportFrom)}
            assert not imports & EXPECTED.keys(), file


def test_a_folder_without_a_file_of_its_own_is_a_row():
    root = Path(fabricamp.__file__).parent.parent
    for file in (root / "fabricamp" / "lightning" / "packages").rglob("*.py"):
        folder = file.parent
        package = ".".join(folder.relative_to(root).parts)
        assert (folder / "__init__.py").exists() or EXPECTED[package][0], folder


PROGRAM = """
import sys
import fabricamp

fabricamp.__path__.insert(0, sys.argv[1])
from fabricamp.lightning import names

names.install()
import pkgutil
import lightning.fabric
import lightning.pytorch as pl
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.pytorch.callbacks.pruning import ModelPruning
from lightning.pytorch.utilities.parsing import get_init_args

assert pl.callbacks.ModelPruning is ModelPruning
files = [names.__file__, pl.__file__, sys.modules[ModelPruning.__module__].__file__, sys.modules[get_init_args.__module__].__file__]
assert all(file.startswith(sys.argv[1]) for file in files), files
for package in (pl, lightning.fabric):
    print(*sorted(one.name for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")))
"""


def test_the_table_is_read_from_a_zip_archive(tmp_path, alias):
    archive = tmp_path / "fabricamp.zip"
    with zipfile.ZipFile(archive, "w") as file:
        root = Path(fabricamp.__file__).parents[1]
        for one in (root / "fabricamp" / "lightning").rglob("*"):
            if one.suffix != ".pyc":
                file.write(one, one.relative_to(root))
    words = [sys.executable, "-c", PROGRAM, f"{archive}/fabricamp"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for package, line in zip(("lightning.pytorch", "lightning.fabric"), done.stdout.splitlines(), strict=True):
        assert line.split() == sorted(one.name for one in pkgutil.walk_packages(alias(package).__path__, f"{package}."))
