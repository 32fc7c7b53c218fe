"""Prints the test files for the changes since a commit, for `make quick`.

    python tests/changed_parts.py [--base COMMIT] [--sources]

A changed test file is printed itself, with the test of the page of features, which may name one of its tests.  For a changed module
these are the test files that import it, or have its name in theirs, and start no processes; for code that every fit runs
(WHOLE_RUNS) also the tests of fits.  ``--sources`` prints the changed files of the package instead.
"""

import argparse
import ast
import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
WITH_PROCESSES = {"distributed", "kill", "launch", "examples", "kernels", "gpu"}
"""Folders with tests that start processes or compile for every card: run only if they changed themselves, and by `make test`."""
WHOLE_RUNS = {"engine": {"loop", "trainer"}, "trainer": {"loop", "trainer"}}
"""Folders with tests of complete fits, by the part of the package that they test."""
NAMES_TESTS = Path("tests", "examples", "test_features.py")
"""Checks that the tests named in docs/features.md exist."""


def changed(base):
    """Returns the Python files that differ from ``base``, including untracked ones."""
    commands = (["git", "diff", "--name-only", base], ["git", "ls-files", "--others", "--exclude-standard"])
    lines = [subprocess.run(one, cwd=ROOT, capture_output=True, text=True, check=True).stdout for one in commands]
    files = [Path(line) for text in lines for line in text.splitlines()]
    return sorted(one for one in files if one.suffix in {".py", ".cu", ".cuh"} and (ROOT / one).exists())


def module_of(file):
    """Returns the dotted name of a module's file."""
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imported(file):
    """Returns the dotted names that a file imports: modules, and names from them."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{one.name}" for one in node.names)
    return names


def tests_for(files):
    """Returns the test files for the changed ``files``."""
    own = [one for one in files if one.parts[0] == "tests" and one.name.startswith("test_")]
    sources = [
        one for one in files if one.parts[0] == "fabricamp" and one.suffix == ".py" and one.name != "__init__.py"
    ]
    modules = {module_of(one) for one in sources}
    places = {(one.parts[1], one.stem.strip("_")) for one in sources}
    folders = set().union(*(WHOLE_RUNS.get(part, ()) for part, _ in places))
    helpers = {module_of(one) for one in files if one.parts[0] == "tests" and not one.name.startswith("test_")}
    kernels = {one.stem for one in files if one.suffix in {".cu", ".cuh"}}
    others = []
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        place = test.relative_to(ROOT)
        if place in own or place.parts[1] in WITH_PROCESSES:
            continue
        named = place.parts[1] in folders or any(place.parts[1] == part and stem in place.stem for part, stem in places)
        if named or imported(test) & (modules | helpers) or any(f'"{one}"' in test.read_text() for one in kernels):
            others.append(place)
    return [*own, *([NAMES_TESTS] if own and NAMES_TESTS not in own else []), *others]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--base", default="HEAD")
    parser.add_argument("--sources", action="store_true")
    given = parser.parse_args()
    files = changed(given.base)
    sources = [one for one in files if one.parts[0] == "fabricamp" and one.suffix == ".py"]
    found = sources if given.sources else tests_for(files)
    print("\n".join(map(str, found)))


if __name__ == "__main__":
    main()
