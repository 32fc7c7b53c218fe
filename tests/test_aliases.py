"""The alias modules equal the entries of tools/aliases.toml, as ``make aliases`` writes them."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[1]


def load_script():
    spec = importlib.util.spec_from_file_location("write_aliases", ROOT / "tools" / "write_aliases.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


script = load_script()


def test_each_module_is_as_its_row_says():
    modules = script.modules()
    assert {path: (ROOT / path).read_text(encoding="utf-8") for path in modules} == modules


def test_no_module_is_left_behind_without_a_row():
    written = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "fabricamp").rglob("*.py")
        if file.read_text(encoding="utf-8").startswith(script.HEAD)
    }
    assert written == script.modules().keys()
