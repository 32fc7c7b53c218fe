"""Sequence to sequence: words of different lengths turned round, and a learning rate that is looked for first."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateFinder
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

PAD, BEGIN, END, WORDS = 0, 1, 2, 10


class Turned(Dataset):
    """Words from 3 on; the target is the source from behind."""

    def __init__(self, number, seed):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 6, (number,), generator=generator).tolist()
        self.sources = [torch.randint(3, WORDS, (length,), generator=generator) for length in lengths]

    def __len__(self):
        return len(self.sources)

    def __getitem__(self, index):
        source = self.sources[index]
        return source, torch.cat([torch.tensor([BEGIN]), source.flip(0), torch.tensor([END])])


def collate(samples):
    sources, targets = zip(*samples)
    lengths = torch.tensor([len(source) for source in sources])
    return pad_sequence(sources, batch_first=True), lengths, pad_sequence(targets, batch_first=True)


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width, padding_idx=PAD)
        self.rnn = nn.GRU(width, width, batch_first=True)

    def forward(self, source, lengths):
        packed = pack_padded_sequence(self.embedding(source), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.rnn(packed)[1]


class Decoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width, padding_idx=PAD)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, WORDS)

    def forward(self, words, state):
        features, state = self.rnn(self.embedding(words), state)
        return self.out(features), state


class Seq2Seq(pl.LightningModule):
    def __init__(self, width=24, lr=1e-4):
        super().__init__()
        self.save_hyperparameters()
        self.encoder, self.decoder = Encoder(width), Decoder(width)

    def forward(self, source, lengths, steps=7):
        """What it says by itself, a word after the other."""
        state = self.encoder(source, lengths)
        words = [torch.full((len(source), 1), BEGIN, device=self.device)]
        for _ in range(steps):
            logits, state = self.decoder(words[-1], state)
            words.append(logits.argmax(-1))
        return torch.cat(words[1:], dim=1)

    def _loss(self, batch):
        source, lengths, target = batch
        logits, _ = self.decoder(target[:, :-1], self.encoder(source, lengths))
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[0]))
        return loss

    def validation_step(self, batch, batch_idx):
        source, lengths, target = batch
        said = self(source, lengths, steps=target.shape[1] - 1)
        right = (said == target[:, 1:]) | (target[:, 1:] == PAD)
        self.log("val_loss", self._loss(batch), batch_size=len(source), prog_bar=True)
        self.log("val_words", right.float().mean(), batch_size=len(source))

    def on_validation_epoch_end(self):
        metrics = self.trainer.callback_metrics
        if not self.trainer.sanity_checking:
            print("validation", self.global_step, f"{metrics['val_loss']:.8f} {metrics['val_words']:.8f}")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def main():
    pl.seed_everything(5)
    model = Seq2Seq()
    loaders = [
        DataLoader(Turned(256, 0), batch_size=8, collate_fn=collate),  # that search leaves another order of a shuffled one
        DataLoader(Turned(64, 1), batch_size=32, collate_fn=collate),
    ]
    finder = LearningRateFinder(min_lr=1e-5, max_lr=0.5, num_training_steps=30)
    quiet = {"logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(max_epochs=3, accelerator="cpu", callbacks=[finder], gradient_clip_val=0.5, **quiet)
    trainer.fit(model, *loaders)
    results = finder.optimal_lr.results
    print("tried", len(results["lr"]), f"{results['lr'][0]:.8f} {results['lr'][-1]:.8f}", f"{results['loss'][-1]:.8f}")
    print("found", f"{finder.optimal_lr.suggestion():.8f} {model.hparams.lr:.8f}")
    print("trained", trainer.global_step, f"{trainer.callback_metrics['train_loss']:.8f}")
    print("weights", f"{sum(p.double().sum() for p in model.parameters()):.12f}")
    with torch.no_grad():
        print("said", model(*next(iter(loaders[1]))[:2])[:3].tolist())


if __name__ == "__main__":
    main()
