"""The attention model of RL4CO's quick start, which learns to solve travelling salesman problems; new data in each epoch."""

from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from recorder import Records, main
from rl4co.envs import TSPEnv
from rl4co.models import AttentionModelPolicy
from rl4co.models.rl import REINFORCE
from rl4co.utils import RL4COTrainer


class Recorder(Records, pl.Callback):
    pass


def parts():
    env = TSPEnv(generator_params={"num_loc": 8})
    policy = AttentionModelPolicy(
        env_name=env.name, embed_dim=16, num_encoder_layers=1, num_heads=2, feedforward_hidden=16
    )
    return env, policy


def fit():
    pl.seed_everything(9)
    env, policy = parts()
    model = REINFORCE(
        env,
        policy,
        baseline="rollout",
        batch_size=16,
        train_data_size=64,
        val_data_size=32,
        test_data_size=32,
        optimizer_kwargs={"lr": 1e-3},
        shuffle_train_dataloader=True,
    )
    trainer = RL4COTrainer(
        max_epochs=3,
        accelerator="cpu",
        precision="32-true",
        logger=CSVLogger("logs"),
        log_every_n_steps=1,
        callbacks=[
            ModelCheckpoint(
                "checkpoints", "epoch_{epoch:03d}", save_top_k=1, save_last=True, monitor="val/reward", mode="max"
            ),
            Recorder(),
        ],
    )
    trainer.fit(model)
    Path("best").write_text(trainer.checkpoint_callback.best_model_path)
    trainer.test(model)


def predict():
    model = REINFORCE.load_from_checkpoint(Path("best").read_text(), load_baseline=False, weights_only=False)
    env, _ = parts()
    torch.manual_seed(0)
    with torch.no_grad():
        out = model.policy(env.reset(batch_size=[16]), env, phase="test", decode_type="greedy")
    return [out["reward"], out["actions"]]


if __name__ == "__main__":
    main(fit, predict)
