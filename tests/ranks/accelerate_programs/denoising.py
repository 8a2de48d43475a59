"""Trains a small denoising network with a Trainer class that accumulates in a loop of its own."""

import argparse
import copy
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, Dataset


def exists(x):
    return x is not None


def cycle(dl):
    while True:
        yield from dl


class Pictures(Dataset):
    def __init__(self, count):
        self.pictures = torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        return self.pictures[index]


class GaussianDiffusion(nn.Module):
    def __init__(self, model, timesteps=8):
        super().__init__()
        self.model = model
        self.num_timesteps = timesteps
        self.register_buffer("kept", torch.linspace(0.99, 0.05, timesteps))

    def forward(self, img):
        t = torch.randint(0, self.num_timesteps, (len(img),), device=img.device)
        noise = torch.randn_like(img)
        kept = self.kept[t][:, None, None, None]
        noisy = kept.sqrt() * (img * 2 - 1) + (1 - kept).sqrt() * noise
        return F.mse_loss(self.model(noisy), noise, reduction="none").mean((1, 2, 3)).mean()


class EMA:
    def __init__(self, model, beta=0.9, update_every=2):
        self.ema_model = copy.deepcopy(model).requires_grad_(False)
        self.online, self.beta, self.update_every, self.step = model, beta, update_every, 0

    def update(self):
        self.step += 1
        if self.step % self.update_every == 0:
            for shadow, p in zip(self.ema_model.parameters(), self.online.parameters(), strict=True):
                shadow.lerp_(p.detach(), 1 - self.beta)


class Trainer:
    def __init__(
        self,
        diffusion_model,
        *,
        results_folder,
        train_batch_size=4,
        gradient_accumulate_every=3,
        train_num_steps=6,
        save_every=3,
        max_grad_norm=1.0,
        amp=True,
        mixed_precision_type="bf16",
    ):
        self.accelerator = Accelerator(
            dataloader_config=DataLoaderConfiguration(split_batches=True),
            mixed_precision=mixed_precision_type if amp else "no",
        )
        self.model = diffusion_model
        self.gradient_accumulate_every, self.train_num_steps = gradient_accumulate_every, train_num_steps
        self.save_every, self.max_grad_norm = save_every, max_grad_norm
        dl = DataLoader(Pictures(20), batch_size=train_batch_size, shuffle=True, pin_memory=False)
        self.dl = cycle(self.accelerator.prepare(dl))
        self.opt = torch.optim.Adam(diffusion_model.parameters(), lr=1e-2, betas=(0.9, 0.99))
        if self.accelerator.is_main_process:
            self.ema = EMA(diffusion_model)
            self.ema.ema_model.to(self.device)
        self.results_folder = Path(results_folder)
        self.results_folder.mkdir(exist_ok=True, parents=True)
        self.step, self.losses = 0, []
        self.model, self.opt = self.accelerator.prepare(self.model, self.opt)

    @property
    def device(self):
        return self.accelerator.device

    def save(self, milestone):
        if not self.accelerator.is_local_main_process:
            return
        data = {
            "step": self.step,
            "model": self.accelerator.get_state_dict(self.model),
            "opt": self.opt.state_dict(),
            "ema": self.ema.ema_model.state_dict(),
            "scaler": self.accelerator.scaler.state_dict() if exists(self.accelerator.scaler) else None,
        }
        torch.save(data, self.results_folder / f"model-{milestone}.pt")

    def load(self, milestone):
        data = torch.load(
            self.results_folder / f"model-{milestone}.pt", map_location=self.device.type, weights_only=True
        )
        self.accelerator.unwrap_model(self.model).load_state_dict(data["model"])
        self.step = data["step"]
        self.opt.load_state_dict(data["opt"])
        if self.accelerator.is_main_process:
            self.ema.ema_model.load_state_dict(data["ema"])
        if exists(self.accelerator.scaler) and exists(data["scaler"]):
            self.accelerator.scaler.load_state_dict(data["scaler"])

    def train(self):
        accelerator = self.accelerator
        while self.step < self.train_num_steps:
            self.model.train()
            total_loss = 0.0
            for _ in range(self.gradient_accumulate_every):
                data = next(self.dl).to(self.device)
                with accelerator.autocast():
                    loss = self.model(data)
                    loss = loss / self.gradient_accumulate_every
                    total_loss += loss.item()
                accelerator.backward(loss)
            self.losses.append(total_loss)
            accelerator.wait_for_everyone()
            accelerator.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            self.opt.step()
            self.opt.zero_grad()
            accelerator.wait_for_everyone()
            self.step += 1
            if accelerator.is_main_process:
                self.ema.update()
                if self.step % self.save_every == 0:
                    self.save(math.ceil(self.step / self.save_every))
        accelerator.print("training complete")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--milestone", type=int)
    args = parser.parse_args()
    torch.manual_seed(5)
    network = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.SiLU(), nn.Conv2d(4, 1, 3, padding=1))
    trainer = Trainer(GaussianDiffusion(network), results_folder=args.output_dir)
    if args.milestone is not None:
        trainer.load(args.milestone)
    trainer.train()
    if trainer.accelerator.is_main_process:
        (trainer.results_folder / "all_results.json").write_text(json.dumps(trainer.losses))
