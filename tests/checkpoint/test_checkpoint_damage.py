"""Damaged checkpoints given to fit: each raises a CheckpointError or restores the very same state, and no code in them runs."""

from __future__ import annotations

import copy
import os
import pickle
import random
import warnings
import zipfile
from collections import Counter

import pytest
import torch

from fabricamp import Callback, CheckpointError
from fabricamp.checkpoint import write_checkpoint
from tests.distributed.ranks import run_ranks
from tests.small import Classifier, loader, quiet_trainer

STEPS = 6
LEVELS = ["O0", "O1", "O2", "O4", "O5"]


class Net(Classifier):
    """AdamW, a schedule, BatchNorm."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Keeps(Callback):
    """Has a state; keeps the content of a checkpoint before the first step and after the last."""

    def __init__(self):
        self.count = 7
        self.before = self.after = None

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"] + 0

    def on_train_start(self, trainer, module):
        trainer.save_checkpoint("", write=lambda _, state: setattr(self, "before", copy.deepcopy(state)))

    def on_train_end(self, trainer, module):
        trainer.save_checkpoint("", write=lambda _, state: setattr(self, "after", copy.deepcopy(state)))


def fit(path=None, precision="O2", **options):
    """Trains from the start, or two more steps from a checkpoint."""
    keeps, steps = Keeps(), STEPS + 2 * (path is not None)
    trainer = quiet_trainer(max_steps=steps, max_epochs=-1, precision=precision, callbacks=keeps, **options)
    trainer.fit(Net(), loader(16, shuffle=True), ckpt_path=path)
    return keeps


def assert_equal(one, other, path="state"):
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_equal(one[key], other[key], f"{path}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{path}[{index}]")
    else:
        assert one == other or (one != one and other != other), (path, one, other)


class Good:
    """An undamaged checkpoint, the states of a run that resumes from it, and a checkpoint written by two ranks."""

    def __init__(self, folder):
        self.file, self.of_two = folder / "good.ckpt", folder / "two.ckpt"
        torch.manual_seed(0)
        write_checkpoint(self.file, fit().after)
        self.content = torch.load(self.file, weights_only=True)
        self.begin = fit(self.file)

        def train():
            keeps = fit(strategy="ddp", devices="auto")
            if os.environ["RANK"] == "0":
                write_checkpoint(self.of_two, keeps.after)

        run_ranks(train, 2, backend=None)
        self.weights_of_two = torch.load(self.of_two, weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return Good(tmp_path_factory.mktemp("good"))


# -- kinds of damage: each writes ``path``, and may return further arguments or expectations of the fit


def truncation(good, path, draw):
    content = good.file.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def bit_flips(good, path, draw):
    content = bytearray(good.file.read_bytes())
    for _ in range(draw.choice([1, 1, 1, 2, 50])):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def lost_block(good, path, draw):
    """Simulates a page that the disk did not write, or wrote to another place."""
    content = bytearray(good.file.read_bytes())
    start, size = draw.randrange(len(content)), draw.choice([16, 512, 4096])
    length = len(content[start : start + size])
    other = draw.randrange(len(content) - length + 1)
    content[start : start + size] = draw.choice([bytes(length), content[other : other + length]])
    path.write_bytes(content)


def garbage_behind(good, path, draw):
    path.write_bytes(good.file.read_bytes() + draw.randbytes(draw.randrange(1, 3000)))


def places_in(value, found=None):
    """Returns every (container, key) in nested dicts and lists."""
    found = [] if found is None else found
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], dict | list):
            places_in(value[key], found)
    return found


def wrong_keys(good, path, draw):
    """A key at any place is missing, renamed, or has another value."""
    content = copy.deepcopy(good.content)
    container, key = draw.choice(places_in(content))
    how = draw.choice(["gone", "renamed", "other"])
    if how == "other" or isinstance(container, list):
        container[key] = draw.choice(["text", None, -3, [1, 2], {"a": 1}, torch.zeros(2), 1e300])
    else:
        value = container.pop(key)
        if how == "renamed":
            container[draw.choice([f"{key}x", 999])] = value
    torch.save(content, path)


def wrong_shapes(good, path, draw):
    content = copy.deepcopy(good.content)
    container, key = draw.choice([one for one in places_in(content) if isinstance(one[0][one[1]], torch.Tensor)])
    value = container[key]
    shapes = [value.new_zeros(3, 3), value.unsqueeze(0).repeat(2, *[1] * value.dim()), value.unsqueeze(-1)]
    container[key] = draw.choice([one for one in shapes if one.shape != value.shape])
    torch.save(content, path)


def edited_on_purpose(good, path, draw):
    """The checksum was removed, so the damage has to be detected when the content is loaded."""
    content = copy.deepcopy(good.content)
    del content["checksum"]
    weights, states = content["state_dict"], content["optimizer_states"][0]
    name = draw.choice(list(weights))
    index = draw.randrange(len(states["state"]))

    def shrink(holder, key):
        holder[key] = holder[key].flatten()[:1].repeat(17)

    edits = [
        lambda: weights.pop(name),
        lambda: weights.__setitem__("added", torch.zeros(1)),
        lambda: weights.__setitem__(name, draw.choice(["text", 3, None])),
        lambda: shrink(weights, "net.0.weight"),
        lambda: shrink(states["state"][index], draw.choice(["exp_avg", "exp_avg_sq"])),
        lambda: states["param_groups"].append(states["param_groups"][0]),
        states["param_groups"][0]["params"].pop,
        lambda: content.__setitem__("optimizer_states", draw.choice([[], "text", [states, states], [3]])),
        lambda: content.pop(
            draw.choice(["epoch", "global_step", "amp", "callbacks", "data", "lr_schedulers", "loops"])
        ),
        lambda: content.__setitem__(
            draw.choice(["epoch", "global_step", "loops"]), draw.choice([-1, 1.5, "3", [1], None])
        ),
        lambda: content["lr_schedulers"].append({}),
        lambda: content["callbacks"]["Keeps"].__setitem__("count", "text"),
        lambda: content.__setitem__("state_dict", [1]),
    ]
    draw.choice(edits)()
    torch.save(content, path)


def another_level(good, path, draw):
    path.write_bytes(good.file.read_bytes())
    return {"precision": draw.choice(LEVELS)}


def another_world_size(good, path, draw):
    path.write_bytes(good.of_two.read_bytes())
    return {"weights": good.weights_of_two}


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def pickle_bomb(good, path, draw):
    content = copy.deepcopy(good.content)
    container, key = draw.choice(places_in(content))
    container[key] = Bomb()
    how = draw.choice(["zip", "legacy", "bare", "record"])
    if how in ("zip", "legacy"):
        torch.save(content, path, _use_new_zipfile_serialization=how == "zip")
    elif how == "bare":
        path.write_bytes(pickle.dumps(Bomb()))
    else:  # a bomb in an otherwise good file, with right checksums
        with zipfile.ZipFile(good.file) as source, zipfile.ZipFile(path, "w") as target:
            for name in source.namelist():
                target.writestr(name, pickle.dumps(Bomb()) if name.endswith("data.pkl") else source.read(name))


KINDS = [
    truncation,
    bit_flips,
    bit_flips,
    lost_block,
    garbage_behind,
    wrong_keys,
    wrong_keys,
    wrong_shapes,
    edited_on_purpose,
    another_level,
    another_world_size,
    pickle_bomb,
]
HARMLESS = {"another_level", "another_world_size"}


def try_one(good, path, kind, draw):
    """Returns whether the checkpoint was refused; fails if it was accepted and the state differs."""
    expected = kind(good, path, draw) or {}
    precision = expected.get("precision", "O2")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own warnings about legacy formats
            state = fit(path, precision)
    except CheckpointError:
        return True
    if "weights" in expected:
        assert_equal(dict(state.before["state_dict"]), dict(expected["weights"]))
    elif precision != "O2":
        for part in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
            assert_equal(state.before[part], good.begin.before[part])
    else:
        assert_equal(state.after, good.begin.after)
    return False


def damage(good, folder, monkeypatch, trials, seed):
    monkeypatch.chdir(folder)
    path, refused, tried = folder / "damaged.ckpt", Counter(), Counter()
    for trial in range(trials):
        kind, draw = KINDS[trial % len(KINDS)], random.Random(seed + trial)
        tried[kind.__name__] += 1
        try:
            refused[kind.__name__] += try_one(good, path, kind, draw)
        except BaseException as error:
            raise AssertionError(f"{kind.__name__} with random.Random({seed + trial})") from error
        assert not (folder / "exploded").exists(), f"{kind.__name__} with random.Random({seed + trial}) ran code"
    for name, number in tried.items():
        assert (
            (refused[name] == 0) if name in HARMLESS else (refused[name] > 0.5 * number or name == "garbage_behind")
        ), name
    return refused, tried


def test_two_hundred_damaged_checkpoints(good, tmp_path, monkeypatch):
    refused, tried = damage(good, tmp_path, monkeypatch, 200, seed=1)
    # Some damage of the other kinds changes nothing: a zip has padding, and a checkpoint without a checksum is loaded as it is.
    for name in ("truncation", "wrong_shapes", "edited_on_purpose", "pickle_bomb"):
        assert refused[name] == tried[name], name


@pytest.mark.slow
def test_a_thousand_damaged_checkpoints(good, tmp_path, monkeypatch):
    refused, tried = damage(good, tmp_path, monkeypatch, 1000, seed=10_000)
    print(f"refused {sum(refused.values())} of {sum(tried.values())}: {dict(refused)}")


def test_the_bomb_would_go_off(tmp_path, monkeypatch):
    """Tests the test: loaded without restrictions, the file runs its code."""
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": Bomb()}, "bomb.ckpt")
    torch.load("bomb.ckpt", weights_only=False)
    assert (tmp_path / "exploded").exists()
