"""Trains a generator and a discriminator side by side, each with its own optimizer, in one accumulate()."""

import argparse
import json
from pathlib import Path

import accelerate
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--max_grad_norm", type=float, default=0.2)
    args = parser.parse_args()

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    accelerate.utils.set_seed(1)
    draw = torch.Generator().manual_seed(2)
    real, latent = torch.randn(60, 2, generator=draw) + 2, torch.randn(60, 3, generator=draw)
    dtype = torch.get_default_dtype()
    loader = DataLoader(TensorDataset(real.to(dtype), latent.to(dtype)), batch_size=args.batch_size)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    discriminator = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9), eps=1e-5)
    opt_d = torch.optim.RMSprop(discriminator.parameters(), lr=1e-2, eps=1e-5)
    generator, discriminator = accelerator.prepare(generator, discriminator)
    opt_g, opt_d, loader = accelerator.prepare(opt_g, opt_d, loader)
    bare_discriminator = accelerator.unwrap_model(discriminator)

    logged = []
    for _ in range(args.epochs):
        for samples, noise in loader:
            with accelerator.accumulate(generator, discriminator):
                fake = generator(noise)

                scores = discriminator(torch.cat([samples, fake.detach()]))
                good, bad = scores.chunk(2)
                d_loss = F.softplus(-good).mean() + F.softplus(bad).mean()
                accelerator.backward(d_loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_value_(discriminator.parameters(), args.max_grad_norm)

                bare_discriminator.requires_grad_(False)
                g_loss = F.softplus(-bare_discriminator(fake)).mean()
                accelerator.backward(g_loss)
                bare_discriminator.requires_grad_(True)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(generator.parameters(), args.max_grad_norm)

                opt_d.step()
                opt_d.zero_grad()
                opt_g.step()
                opt_g.zero_grad()
            losses = accelerator.reduce(torch.stack([d_loss, g_loss]).detach(), reduction="mean")
            logged.append(losses.tolist())

    accelerator.save_model(generator, args.output_dir)
    if accelerator.is_main_process:
        Path(args.output_dir, "all_results.json").write_text(json.dumps(logged))


if __name__ == "__main__":
    main()
