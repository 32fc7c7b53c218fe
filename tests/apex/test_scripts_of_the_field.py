"""Scripts written for apex run unchanged on GPUs, and on the CPU with device and backend replaced."""

import math
import re

import pytest
import torch

import fabricamp.apex
from tests.apex.conftest import kept
from tests.apex.field import cpu_twin, free_port, import_what_scripts_do, losses, run_script, run_scripts
from tests.distributed.forked import start_forked
from tests.distributed.scripts import finish

LEVELS = ["O0", "O1", "O2", "O3"]
STRINGS = {  # arguments of the ImageNet example, for each level
    "O0": ["--loss-scale", "1.0"],
    "O1": ["--loss-scale", "dynamic"],
    "O2": ["--keep-batchnorm-fp32", "True", "--loss-scale", "128.0", "--channels-last", "True"],
    "O3": ["--keep-batchnorm-fp32", "False"],
}
ALONE = ["dcgan", "two_encoders", "readme_checkpoint"]
TOGETHER = ["imagenet", "simple_distributed", "torch_wrapper", "readme_training", "sample_code", "pytorch_note"]
WITHOUT_LEVEL = ["sample_twice", "parallel_computing"]


@pytest.fixture(scope="module", autouse=True)
def installed():
    with kept():
        fabricamp.apex.install()
        import_what_scripts_do()
        yield


def arguments(name, level):
    if name in WITHOUT_LEVEL:
        return ()
    if name == "imagenet":
        return ("--sync_bn", "--lr", "2", "--epochs", "3", "--opt-level", level, *STRINGS[level])
    return ("--opt_level", level)


def check(name, printed):
    """Checks that each rank's losses are finite and decrease, and that all ranks end with the same weights."""
    for text in printed:
        found = losses(text)
        assert len(found) >= 6
        assert all(map(math.isfinite, found))
        quarter = len(found) // 4
        if name != "dcgan":  # the losses of a GAN's two models need not decrease
            assert sum(found[-quarter:]) < sum(found[:quarter])
    assert len({tuple(re.findall(r"^weights \[.*", text, re.MULTILINE)) for text in printed}) == 1


def all_levels(place):
    """Returns all levels, to run in the same processes; each level is the first, in new processes, for some of the scripts."""
    first = place % len(LEVELS)
    return LEVELS[first:] + LEVELS[:first]


@pytest.mark.parametrize("name", ALONE)
def test_on_one_process(tmp_path, name):
    runs = [arguments(name, level) for level in all_levels(ALONE.index(name))]
    (printed,) = run_script(name, tmp_path, *runs)
    for text in printed:
        check(name, [text])
        assert name != "dcgan" or "scalers 3" in text


@pytest.mark.parametrize("name", TOGETHER)
def test_on_two_processes(tmp_path, name):
    runs = [arguments(name, level) for level in all_levels(TOGETHER.index(name))]
    for texts in zip(*run_script(name, tmp_path, *runs, ranks=2), strict=True):
        check(name, texts)


@pytest.mark.parametrize("name", WITHOUT_LEVEL)
def test_without_a_level_on_two_processes(tmp_path, name):
    check(name, [text for (text,) in run_script(name, tmp_path, (), ranks=2)])


def test_an_optimizer_built_after_initialize_is_taken_with_a_line(tmp_path):
    printed = run_script("parallel_computing", tmp_path, (), ranks=2)
    assert [text.count("built after amp.initialize") for (text,) in printed] == [1, 0]


def test_the_readmes_checkpoint_goes_on_with_the_same_bits(tmp_path):
    for level in LEVELS:
        ((printed,),) = run_script("readme_checkpoint", tmp_path, ("--opt_level", level))
        steps = re.findall(r"step 1\d Loss .*", printed)
        assert len(steps) == 10
        assert steps[:5] == steps[5:]


def test_the_imagenet_example_resumes(tmp_path):
    file = str(tmp_path / "checkpoint.pt")
    common = arguments("imagenet", "O2")
    straight = run_script("imagenet", tmp_path, (*common, "--epochs", "3"), ranks=2)
    run_script("imagenet", tmp_path, (*common, "--epochs", "2", "--save", file), ranks=2)
    resumed = run_script("imagenet", tmp_path, (*common, "--epochs", "3", "--resume", file), ranks=2)
    for (whole,), (rest,) in zip(straight, resumed, strict=True):
        found, expected = losses(rest), losses(whole)[-len(losses(rest)) :]
        assert len(found) == 4
        # Not exact: all ranks load rank 0's running statistics, and half weights rounded from the fp32 file.
        assert found == pytest.approx(expected, rel=2e-3)


def same_bits(one, other):
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            same_bits(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            same_bits(*pair)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def resumes(tmp_path, kind, levels, **options):
    """Compares an uninterrupted run with a resumed run at each level; each kind of run has one process for all levels."""
    files = {level: [str(tmp_path / f"{name} {level}.pt") for name in ("straight", "resumed")] for level in levels}

    def printed(steps, place):
        runs = [
            ("--opt_level", level, "--optimizer", kind, "--steps", steps, "--checkpoint", file[place])
            for level, file in files.items()
        ]
        return [re.findall("step .*", text) for text in run_script("save_and_restore", tmp_path, *runs, **options)[0]]

    for straight, first, second in zip(printed("20", 0), printed("10", 1), printed("10", 1), strict=True):
        assert len(straight) == 20
        assert straight == first + second
    for pair in files.values():
        same_bits(*[torch.load(file, map_location="cpu") for file in pair])


@pytest.mark.parametrize("kind", ["Adam", "SGD", "FusedAdam", "FusedLAMB"])
def test_a_restored_run_has_the_bits_of_one_that_never_stopped(tmp_path, kind):
    resumes(tmp_path, kind, LEVELS)


def test_torchs_launcher_starts_it(tmp_path):
    (tmp_path / "main.py").write_text(cpu_twin("parallel_computing"))
    launcher = ["-m", "torch.distributed.launch", "--nproc_per_node=2", "--master_port", str(free_port())]
    code, out, err = finish(start_forked(tmp_path, *launcher, "-m", "fabricamp.apex", "main.py"))
    assert code == 0, err
    # Two processes write to one stream, unbuffered word by word; a list of numbers is one write.
    weights = re.findall(r"\[-?\d[^\]]*\]", out)
    assert len(weights) == 2
    assert len(set(weights)) == 1


def test_a_group_that_the_script_leaves_ends_before_the_interpreter(tmp_path):
    """Threads of the group may need the interpreter, and would abort a process that ends."""
    (tmp_path / "main.py").write_text(
        "import atexit\n"
        "import torch.distributed as dist\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "assert dist.is_initialized()\n"
        "atexit.register(lambda: print('initialized:', dist.is_initialized()))\n"
    )
    code, out, err = finish(start_forked(tmp_path, "-m", "fabricamp.apex", "main.py"))
    assert code == 0, err
    assert out.strip() == "initialized: False"


# -- on GPUs: many in one process, since starting one costs more than training in it ---------------------------------------------


def all_of(names):
    return [
        (name, arguments(name, level)) for name in names for level in LEVELS if level == "O0" or arguments(name, level)
    ]


def together(tmp_path, names, **options):
    jobs = all_of(names)
    printed = run_scripts(tmp_path, jobs, **options)
    for (name, _), texts in zip(jobs, zip(*printed, strict=True), strict=True):
        check(name, texts)


def test_one_after_the_other_in_the_same_processes(tmp_path):
    together(tmp_path, ["sample_code", "two_encoders", "sample_twice"], ranks=2)


@pytest.mark.gpu
@pytest.mark.parametrize("names", [ALONE, TOGETHER[:3], TOGETHER[3:], WITHOUT_LEVEL], ids=" ".join)
def test_as_they_are_on_one_gpu(tmp_path, names):
    together(tmp_path, names, gpu=True)


@pytest.mark.gpu2
@pytest.mark.parametrize("names", [TOGETHER[:3], [*TOGETHER[3:], *WITHOUT_LEVEL]], ids=" ".join)
def test_as_they_are_on_two_gpus(tmp_path, names):
    together(tmp_path, names, gpu=True, ranks=2)


@pytest.mark.gpu
def test_a_restored_run_has_the_same_bits_on_a_gpu(tmp_path):
    resumes(tmp_path, "FusedAdam", ["O2"], gpu=True)
