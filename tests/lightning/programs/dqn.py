"""Deep Q-learning in a corridor: a replay buffer behind an IterableDataset, a target network, no validation."""

from collections import OrderedDict, deque, namedtuple
from typing import Iterator, List, Tuple

import numpy as np
import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataset import IterableDataset

Experience = namedtuple("Experience", field_names=["state", "action", "reward", "done", "new_state"])


class Corridor:
    """Seven places in a row: one step left or right, the prize is at the right end."""

    def reset(self):
        self.place, self.time = 2, 0
        return self._state()

    def _state(self):
        return np.eye(7, dtype=np.float32)[self.place]

    def step(self, action):
        self.place = max(0, self.place + (1 if action else -1))
        self.time += 1
        return self._state(), float(self.place == 6), self.place == 6 or self.time == 20


class ReplayBuffer:
    def __init__(self, capacity: int) -> None:
        self.buffer = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self.buffer)

    def append(self, experience: Experience) -> None:
        self.buffer.append(experience)

    def sample(self, batch_size: int) -> Tuple:
        indices = np.random.choice(len(self.buffer), batch_size, replace=False)
        states, actions, rewards, dones, next_states = zip(*(self.buffer[idx] for idx in indices))
        return (
            np.array(states),
            np.array(actions),
            np.array(rewards, dtype=np.float32),
            np.array(dones),
            np.array(next_states),
        )


class RLDataset(IterableDataset):
    def __init__(self, buffer: ReplayBuffer, sample_size: int = 200) -> None:
        self.buffer = buffer
        self.sample_size = sample_size

    def __iter__(self) -> Iterator:
        states, actions, rewards, dones, new_states = self.buffer.sample(self.sample_size)
        for i in range(len(dones)):
            yield states[i], actions[i], rewards[i], dones[i], new_states[i]


class DQNLightning(LightningModule):
    def __init__(
        self, batch_size=16, lr=1e-2, gamma=0.95, sync_rate=10, replay_size=200, warm_start=100, episode_length=64
    ):
        super().__init__()
        self.save_hyperparameters()
        self.env, self.buffer = Corridor(), ReplayBuffer(replay_size)
        self.net = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 2))
        self.target_net = nn.Sequential(nn.Linear(7, 32), nn.ReLU(), nn.Linear(32, 2))
        self.state = self.env.reset()
        self.total_reward = self.episode_reward = self.episodes = 0
        for _ in range(self.hparams.warm_start):
            self.play_step(epsilon=1.0)

    @torch.no_grad()
    def play_step(self, epsilon: float) -> Tuple[float, bool]:
        if np.random.random() < epsilon:
            action = int(np.random.randint(2))
        else:
            action = int(self.net(torch.from_numpy(self.state)[None].to(self.device)).argmax(dim=1))
        new_state, reward, done = self.env.step(action)
        self.buffer.append(Experience(self.state, action, reward, done, new_state))
        self.state = self.env.reset() if done else new_state
        return reward, done

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def dqn_mse_loss(self, batch: Tuple[Tensor, Tensor]) -> Tensor:
        states, actions, rewards, dones, next_states = batch
        state_action_values = self.net(states).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            next_state_values = self.target_net(next_states).max(1)[0]
            next_state_values[dones] = 0.0
        return nn.MSELoss()(state_action_values, next_state_values.detach() * self.hparams.gamma + rewards)

    def get_epsilon(self, start: float, end: float, frames: int) -> float:
        return end if self.global_step > frames else start - (self.global_step / frames) * (start - end)

    def training_step(self, batch: Tuple[Tensor, Tensor], nb_batch) -> OrderedDict:
        epsilon = self.get_epsilon(1.0, 0.05, 60)
        self.log("epsilon", epsilon)
        reward, done = self.play_step(epsilon)
        self.episode_reward += reward
        self.log("episode reward", self.episode_reward)
        loss = self.dqn_mse_loss(batch)
        if done:
            self.total_reward, self.episode_reward = self.episode_reward, 0
            self.episodes += 1
        if self.global_step % self.hparams.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log_dict({"reward": reward, "train_loss": loss})
        self.log("total_reward", self.total_reward, prog_bar=True)
        self.log("steps", float(self.global_step), logger=False, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        metrics = self.trainer.callback_metrics
        line = " ".join(f"{name} {metrics[name]:.8f}" for name in ("train_loss", "epsilon", "steps", "total_reward"))
        print(self.current_epoch, self.global_step, self.episodes, line)

    def configure_optimizers(self) -> List[Optimizer]:
        return [Adam(self.net.parameters(), lr=self.hparams.lr)]

    def train_dataloader(self) -> DataLoader:
        dataset = RLDataset(self.buffer, self.hparams.episode_length)
        return DataLoader(dataset=dataset, batch_size=self.hparams.batch_size, sampler=None)


seed_everything(0)
model = DQNLightning()
trainer = Trainer(
    accelerator="auto", devices=1, max_epochs=20, val_check_interval=50, logger=False, enable_checkpointing=False
)
trainer.fit(model)
print("batches", trainer.num_training_batches, trainer.global_step, trainer.current_epoch)
values = model(torch.eye(7)).detach()
print("weights", f"{sum(p.double().sum() for p in model.net.parameters()):.12f}")
print("values", [f"{value:.7f}" for value in values.flatten().tolist()], values.argmax(dim=1).tolist())
