"""Parts of the suite with a goal of their own in the Makefile: slow tests that depend on few files.

    python tests/parts.py left-out [NAME ...]  # options of pytest for `make test` with these parts
    python tests/parts.py say [NAME ...]       # what `make test` with these parts leaves out
    python tests/parts.py changed              # the parts that .ci/run makes
    python tests/parts.py NAME                 # the test files of a part

A part is made by ``.ci/run`` if one of its inputs, or of its tests, differs from the base: $CI_BASE, or where the branch left
origin/main, or on main itself the last commit of the day before HEAD's, as a push may have several commits.  If git does not know
the base (a clone without history), every part is made.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Part:
    """``tests`` are files and folders that `make test` leaves out; ``inputs`` are what else they depend on, most of all."""

    tests: tuple[str, ...]
    inputs: tuple[str, ...]


PARTS = {
    "kernels": Part(  # compiled for every architecture, and run on a CPU beside their references; layers and optimizers on them
        (
            "tests/distributed/test_sync_batch_norm_ranks.py",
            "tests/kernels",
            "tests/nn",
            "tests/ops",
            "tests/optimizers",
        ),
        (
            "fabricamp/commands/doctor.py",
            "fabricamp/gradients",
            "fabricamp/nn",
            "fabricamp/ops",
            "fabricamp/optimizers",
            "fabricamp/precision",
            "tests/cuda_on_cpu",
            "tests/own_parts.py",
            "tests/windows.py",
        ),
    ),
    "sharded": Part(  # parameters and state in parts, on two ranks and four
        (
            "tests/distributed/test_first_values_ranks.py",
            "tests/distributed/test_fsdp.py",
            "tests/distributed/test_fsdp_collectives.py",
            "tests/distributed/test_fsdp_features.py",
            "tests/distributed/test_fsdp_objects.py",
            "tests/distributed/test_sharded_optimizers.py",
            "tests/distributed/test_tensor_parallel.py",
            "tests/strategies/test_first_values_of_packages.py",
            "tests/trainer/test_float8_gather.py",
        ),
        (
            "fabricamp/callbacks/_averages.py",
            "fabricamp/checkpoint",
            "fabricamp/engine/saved/accumulation_state.py",
            "fabricamp/engine/saved/checkpoint_sections.py",
            "fabricamp/engine/checks/sharding_checks.py",
            "fabricamp/engine/update.py",
            "fabricamp/gradients",
            "fabricamp/ops",
            "fabricamp/optimizers",
            "fabricamp/precision",
            "fabricamp/strategies",
            "tests/cuda_on_cpu",
            "tests/distributed/sharded.py",
            "tests/strategies/first_values.py",
            "tests/trainer/test_float8_in_the_loop.py",
        ),
    ),
    "compiled": Part(  # by torch.compile and torch.export, which take seconds for each program
        (
            "tests/parity/test_compiled_code.py",
            "tests/parity/test_compiled_modules.py",
            "tests/parity/test_compiled_resume.py",
            "tests/parity/test_compiled_steps.py",
            "tests/test_export.py",
            "tests/test_startup.py",
            "tests/trainer/test_exporting.py",
            "tests/trainer/test_float8_in_the_loop.py",
        ),
        (
            "fabricamp/commands/export.py",
            "fabricamp/compilation.py",
            "fabricamp/engine/compilation_watch.py",
            "fabricamp/engine/compiled.py",
            "fabricamp/engine/compiled_calls.py",
            "fabricamp/engine/compiled_code.py",
            "fabricamp/engine/evaluation.py",
            "fabricamp/exporting.py",
            "fabricamp/engine/update.py",
            "fabricamp/nn",
            "fabricamp/ops/dispatch.py",
            "fabricamp/precision",
            "tests/parity/compiled_run.py",
        ),
    ),
    "services": Part(  # clients of logging services and of Optuna: to import one takes a second, to end one more
        (
            "tests/callbacks/test_optuna_pruning.py",
            "tests/loggers/test_comet_logger.py",
            "tests/loggers/test_mlflow_logger.py",
            "tests/loggers/test_wandb_logger.py",
        ),
        (
            "fabricamp/callbacks/_checkpoint_files.py",
            "fabricamp/callbacks/_rotation.py",
            "fabricamp/callbacks/checkpoint.py",
            "fabricamp/callbacks/model_checkpoint.py",
            "fabricamp/callbacks/optuna_pruning.py",
            "fabricamp/loggers",
        ),
    ),
    "processes": Part(  # started from a shell, killed, interrupted, lost
        (
            "tests/callbacks/test_checkpoint_ownership.py",
            "tests/distributed/test_elastic.py",
            "tests/distributed/test_end_of_process.py",
            "tests/distributed/test_faults.py",
            "tests/distributed/test_odd_ends.py",
            "tests/distributed/test_signals.py",
            "tests/distributed/test_stop_agreement.py",
            "tests/distributed/test_stop_phases.py",
            "tests/distributed/test_trainer_interrupts.py",
            "tests/distributed/test_trainer_launch.py",
            "tests/kill",
            "tests/launch",
            "tests/test_cli_processes.py",
            "tests/test_messages_processes.py",
            "tests/test_verify.py",
        ),
        (
            "fabricamp/agenda.py",
            "fabricamp/callbacks",
            "fabricamp/checkpoint",
            "fabricamp/cli.py",
            "fabricamp/engine",
            "fabricamp/launch",
            "fabricamp/messages.py",
            "fabricamp/rng.py",
            "fabricamp/runs/verify.py",
            "fabricamp/state.py",
            "fabricamp/strategies",
            "fabricamp/trainer",
            "fabricamp/watchdog",
            "tests/distributed",
        ),
    ),
    "programs": Part(  # written for Lightning and apex, each in an interpreter of its own
        (
            "tests/apex/test_amp_resume.py",
            "tests/apex/test_entry_point.py",
            "tests/apex/test_import_forms.py",
            "tests/apex/test_install.py",
            "tests/apex/test_parallel_wrapper.py",
            "tests/apex/test_same_curve.py",
            "tests/apex/test_scripts_of_the_field.py",
            "tests/checkpoint/test_lightning_names.py",
            "tests/checkpoint/test_objects_elsewhere.py",
            "tests/lightning/test_aliases.py",
            "tests/lightning/test_door.py",
            "tests/lightning/test_helpers.py",
            "tests/lightning/test_lightning_repros.py",
            "tests/lightning/test_names.py",
            "tests/lightning/test_objects_in_files.py",
            "tests/test_survey.py",
        ),
        (
            "fabricamp/apex",
            "fabricamp/checkpoint",
            "fabricamp/gradients",
            "fabricamp/lightning",
            "fabricamp/ops",
            "fabricamp/utilities",
            "tests/apex",
            "tests/lightning",
            "tools/survey.py",
        ),
    ),
    "pages": Part(  # what README, tutorial and examples show, run as their readers do
        (
            "tests/examples/test_audio.py",
            "tests/examples/test_cluster.py",
            "tests/examples/test_contrastive.py",
            "tests/examples/test_ddp_benchmark.py",
            "tests/examples/test_diffusion.py",
            "tests/examples/test_digits.py",
            "tests/examples/test_end_to_end_benchmark.py",
            "tests/examples/test_finetune.py",
            "tests/examples/test_forecasting.py",
            "tests/examples/test_from_apex.py",
            "tests/examples/test_from_lightning.py",
            "tests/examples/test_gan.py",
            "tests/examples/test_gnn.py",
            "tests/examples/test_gpt.py",
            "tests/examples/test_imagenet.py",
            "tests/examples/test_meta_start_benchmark.py",
            "tests/examples/test_notebook.py",
            "tests/examples/test_own_loop.py",
            "tests/examples/test_readme.py",
            "tests/examples/test_render.py",
            "tests/examples/test_resume.py",
            "tests/examples/test_rl.py",
            "tests/examples/test_segmentation.py",
            "tests/examples/test_titan_benchmark.py",
            "tests/site/test_site.py",
            "tests/site/test_tutorial.py",
        ),
        (
            "README.md",
            "benchmarks",
            "docs",
            "examples",
            "fabricamp/commands",
            "fabricamp/config.py",
            "fabricamp/own_loop",
            "fabricamp/trainer",
        ),
    ),
    "installed": Part(  # built and installed; tools/matrix.py runs some other tests in a clean environment
        ("tests/test_wheel.py",),
        ("LICENSE", "MANIFEST.in", "README.md", "fabricamp/commands/pages.py", "setup.py", "tools/matrix.py"),
    ),
}
FOR_ALL = (
    "Makefile",
    "constraints.txt",
    "fabricamp/torch_private.py",
    "pyproject.toml",
    "tests/conftest.py",
    "tests/distributed/ranks.py",
    "tests/distributed/scripts.py",
    "tests/inside.py",
    "tests/parts.py",
    "tests/shared.py",
    "tests/small.py",
    "tests/startup",
)
"""Inputs of every part."""
DAY = 24 * 60 * 60


def git(*words):
    """Returns what git prints, stripped; None if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def base():
    """Returns the commit to compare with, None if git does not know one."""
    given = os.environ.get("CI_BASE")
    if given:
        return git("rev-parse", "--verify", "--quiet", f"{given}^{{commit}}")
    left = git("merge-base", "HEAD", "origin/main")
    if left is not None and left != git("rev-parse", "HEAD"):
        return left
    last = git("log", "-1", "--format=%ct")
    if last is None:
        return None
    return git("rev-list", "-1", f"--before={int(last) - DAY}", "HEAD") or None


def changed():
    """Returns the names of parts whose inputs or tests differ from the base; all if that cannot be known."""
    commit = base()
    if commit is None:
        return list(PARTS)
    # `git diff --quiet` prints nothing and fails where something differs, and where it cannot tell.
    return [
        name
        for name, part in PARTS.items()
        if git("diff", "--quiet", commit, "--", *part.tests, *part.inputs, *FOR_ALL) is None
    ]


def main(word, *names):
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        raise SystemExit(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    left = {name: part for name, part in PARTS.items() if name not in names}
    if word == "left-out":
        print(*(f"--ignore={path}" for part in left.values() for path in part.tests))
    elif word == "say":
        print("left out here:", ", ".join(f"make {name}" for name in left) or "nothing")
    elif word == "changed":
        print(*changed())
    else:
        print(*PARTS[word].tests)


if __name__ == "__main__":
    main(*sys.argv[1:])
