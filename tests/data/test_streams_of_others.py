"""WebDataset and Hugging Face datasets from local files: sharded among ranks and workers, and resumed."""

from __future__ import annotations

import io
import tarfile
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from fabricamp import Callback, TrainingModule
from tests.distributed.ranks import run_ranks
from tests.small import quiet_trainer

SAMPLES = 32


def webdataset(folder):
    """Returns a stream of four shards; WebDataset distributes them over ranks and workers."""
    wds = pytest.importorskip("webdataset", reason="needs the package webdataset")
    shards = [str(folder / f"{number}.tar") for number in range(4)]
    stream = wds.WebDataset(shards, shardshuffle=False, nodesplitter=wds.split_by_node).decode()
    return stream.to_tuple("pth").map(lambda sample: {"x": sample[0]})


def hugging_face(folder):
    """Returns a map-style data set, which the Trainer shards."""
    datasets = pytest.importorskip(
        "datasets", reason="needs the package datasets"
    )  # no requirement of the tests, because it installs pyarrow and pandas
    return datasets.Dataset.from_dict({"x": [[float(one), 1.0] for one in range(SAMPLES)]}).with_format("torch")


def hugging_face_stream(folder):
    """Returns a stream of four shards; ``datasets`` distributes them over workers, and gets rank and world size here."""
    stream = hugging_face(folder).to_iterable_dataset(num_shards=4)
    if not dist.is_initialized():
        return stream
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(stream, dist.get_rank(), dist.get_world_size())


@pytest.fixture(autouse=True)
def _shards(tmp_path):
    for shard in range(4):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as file:
            for number in range(shard * 8, shard * 8 + 8):
                content = io.BytesIO()
                torch.save(torch.tensor([float(number), 1.0]), content)
                member = tarfile.TarInfo(f"{number:03d}.pth")
                member.size = content.tell()
                content.seek(0)
                file.addfile(member, content)


class Sees(TrainingModule):
    def __init__(self):
        super().__init__()
        self.net, self.seen = torch.nn.Linear(2, 1), []

    def training_step(self, batch, batch_idx):
        self.seen += batch["x"][:, 0].int().tolist()
        return self.net(batch["x"]).square().mean() * 1e-6

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Saves(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 5:
            trainer.save_checkpoint(self.path)


def seen(dataset, *, workers=0, ckpt_path=None, **options):
    module = Sees()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = quiet_trainer(max_epochs=1, **options)
        trainer.fit(module, DataLoader(dataset, batch_size=2, num_workers=workers), ckpt_path=ckpt_path)
    return module.seen


@pytest.mark.parametrize("make", [webdataset, hugging_face, hugging_face_stream])
def test_each_sample_is_seen_once_and_a_run_goes_on(make, tmp_path):
    assert sorted(seen(make(tmp_path), workers=2)) == list(range(SAMPLES))
    path = tmp_path / "a.ckpt"
    straight = seen(make(tmp_path), callbacks=[Saves(path)])
    assert straight == list(range(SAMPLES))
    assert seen(make(tmp_path), ckpt_path=path) == straight[10:]


@pytest.mark.parametrize("make", [webdataset, hugging_face, hugging_face_stream])
def test_two_ranks_with_two_workers_each(make, tmp_path):
    make(tmp_path)
    shares = run_ranks(lambda: seen(make(tmp_path), workers=2, strategy="ddp", devices="auto"), 2)
    assert sorted(shares[0] + shares[1]) == list(range(SAMPLES))
