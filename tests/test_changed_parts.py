"""`make quick` runs the tests of a changed module, found by name and by imports, and none that start processes."""

from pathlib import Path

from tests import changed_parts
from tests.changed_parts import WITH_PROCESSES, imported


def found(*files):
    return {str(one) for one in changed_parts.tests_for([Path(file) for file in files])}


def test_a_module_has_the_tests_for_its_name_and_those_that_import_it():
    tests = found("fabricamp/metrics/recording.py", "fabricamp/callbacks/_checkpoint_files.py")
    for test in tests:
        named = Path(test).parts[1:2] == ("metrics",) and "naming" in test
        assert named or imported(Path(__file__).parents[1] / test) & {
            "fabricamp.metrics.recording",
            "fabricamp.callbacks._checkpoint_files",
        }
    assert "tests/callbacks/test_early_stopping.py" in found("fabricamp/callbacks/early_stopping.py")


def test_what_every_fit_runs_has_the_tests_of_fits():
    tests = found("fabricamp/engine/session.py")
    assert {Path(one).parts[1] for one in tests} >= {"loop", "trainer"}
    assert "tests/trainer/test_resume.py" in tests


def test_kernels_helpers_and_tests_themselves():
    assert "tests/ops/test_dispatch.py" in found("fabricamp/ops/kernels/adam.cu")
    assert "tests/parity/test_torch_defaults.py" in found("tests/whole_run.py")
    assert found("tests/kill/test_kills.py") == {"tests/kill/test_kills.py", "tests/examples/test_features.py"}
    assert not found("fabricamp/callbacks/__init__.py", "README.md", "docs/kernels.md")


def test_nothing_that_starts_processes_unless_it_changed():
    tests = found("fabricamp/strategies/ddp.py", "fabricamp/watchdog/stop.py", "fabricamp/launch/agent.py")
    assert not {one for one in tests if Path(one).parts[1] in WITH_PROCESSES}
