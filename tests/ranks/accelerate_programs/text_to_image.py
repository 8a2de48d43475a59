"""Trains a small denoising network on pictures with captions, with two frozen networks beside it and an EMA."""

import argparse
import json
import logging
import math
import os
import shutil
from pathlib import Path

import accelerate
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader

logger = get_logger(__name__, log_level="INFO")


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_train_steps", type=int, default=7)
    parser.add_argument("--train_batch_size", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--max_grad_norm", type=float, default=0.05)
    parser.add_argument("--checkpointing_steps", type=int, default=2)
    parser.add_argument("--checkpoints_total_limit", type=int, default=2)
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--mixed_precision", default="bf16")
    return parser.parse_args()


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 4)

    def forward(self, input_ids):
        return self.embedding(input_ids).mean(1)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(2, 4, 3, padding=1)
        self.time = nn.Embedding(10, 4)
        self.norm = nn.GroupNorm(2, 4)
        self.dropout = nn.Dropout(0.1)
        self.conv_out = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, latents, timesteps, condition):
        hidden = self.conv_in(latents) + (self.time(timesteps) + condition)[:, :, None, None]
        return self.conv_out(self.dropout(F.silu(self.norm(hidden))))


class EMA:
    def __init__(self, parameters, decay):
        self.shadow = [p.detach().clone() for p in parameters]
        self.decay = decay

    @torch.no_grad()
    def step(self, parameters):
        for shadow, p in zip(self.shadow, parameters, strict=True):
            shadow.lerp_(p.detach(), 1 - self.decay)


def main():
    args = parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
        log_with="tensorboard",
        project_config=ProjectConfiguration(
            project_dir=args.output_dir, logging_dir=str(Path(args.output_dir, "logs"))
        ),
    )
    logging.basicConfig(level=logging.WARNING)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(42)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)

    vae, text_encoder, unet = nn.Conv2d(3, 2, 2, stride=2), TextEncoder(), UNet()
    vae.requires_grad_(False)
    text_encoder.requires_grad_(False)
    unet.train()
    ema_unet = EMA(unet.parameters(), decay=0.9)

    def save_model_hook(models, weights, output_dir):
        if accelerator.is_main_process:
            torch.save(ema_unet.shadow, Path(output_dir, "unet_ema.pt"))
            for model in models:
                torch.save(accelerator.unwrap_model(model).state_dict(), Path(output_dir, "unet.pt"))
                weights.pop()  # so that it is not saved again

    def load_model_hook(models, input_dir):
        ema_unet.shadow = torch.load(Path(input_dir, "unet_ema.pt"), weights_only=True)
        for _ in range(len(models)):
            model = models.pop()  # so that it is not loaded again
            state = torch.load(Path(input_dir, "unet.pt"), weights_only=True)
            accelerator.unwrap_model(model).load_state_dict(state)

    accelerator.register_save_state_pre_hook(save_model_hook)
    accelerator.register_load_state_pre_hook(load_model_hook)

    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-2, weight_decay=1e-2)
    with accelerator.main_process_first():
        draw = torch.Generator().manual_seed(1)
        dataset = [
            {
                "pixel_values": torch.rand(3, 8, 8, generator=draw) * 2 - 1,
                "input_ids": torch.randint(16, (5,), generator=draw),
            }
            for _ in range(28)
        ]

    def collate_fn(examples):
        return {name: torch.stack([example[name] for example in examples]) for name in ("pixel_values", "input_ids")}

    train_dataloader = DataLoader(dataset, shuffle=True, collate_fn=collate_fn, batch_size=args.train_batch_size)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / (3 * accelerator.num_processes))
    )
    unet, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        unet, optimizer, train_dataloader, lr_scheduler
    )

    weight_dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    text_encoder.to(accelerator.device, dtype=weight_dtype)
    vae.to(accelerator.device, dtype=weight_dtype)
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    num_train_epochs = math.ceil(args.max_train_steps / num_update_steps_per_epoch)
    if accelerator.is_main_process:
        accelerator.init_trackers("text2image-fine-tune", {"batch_size": args.train_batch_size})

    global_step = first_epoch = resume_step = 0
    if args.resume_from_checkpoint:
        path = args.resume_from_checkpoint
        if path == "latest":
            folders = [name for name in os.listdir(args.output_dir) if name.startswith("checkpoint")]
            path = max(folders, key=lambda name: int(name.split("-")[1]))
        accelerator.print(f"Resuming from checkpoint {path}")
        accelerator.load_state(os.path.join(args.output_dir, path))
        global_step = int(path.split("-")[1])
        first_epoch = global_step // num_update_steps_per_epoch
        resume_step = (global_step % num_update_steps_per_epoch) * args.gradient_accumulation_steps

    noise_schedule = torch.linspace(0.99, 0.1, 10, device=accelerator.device)
    logged = []
    for epoch in range(first_epoch, num_train_epochs):
        train_loss = 0.0
        active_dataloader = train_dataloader
        if epoch == first_epoch and resume_step:
            active_dataloader = accelerate.skip_first_batches(train_dataloader, resume_step)
        for batch in active_dataloader:
            with accelerator.accumulate(unet):
                latents = vae(batch["pixel_values"].to(weight_dtype))
                noise = torch.randn_like(latents)
                timesteps = torch.randint(0, 10, (latents.shape[0],), device=latents.device)
                kept = noise_schedule[timesteps].to(weight_dtype)[:, None, None, None]
                noisy_latents = kept.sqrt() * latents + (1 - kept).sqrt() * noise
                encoder_hidden_states = text_encoder(batch["input_ids"])
                model_pred = unet(noisy_latents, timesteps, encoder_hidden_states)
                loss = F.mse_loss(model_pred.float(), noise.float(), reduction="mean")

                avg_loss = accelerator.gather(loss.repeat(args.train_batch_size)).mean()
                train_loss += avg_loss.item() / args.gradient_accumulation_steps
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            if accelerator.sync_gradients:
                ema_unet.step(unet.parameters())
                global_step += 1
                accelerator.log({"train_loss": train_loss, "lr": lr_scheduler.get_last_lr()[0]}, step=global_step)
                logged.append([global_step, train_loss, lr_scheduler.get_last_lr()[0]])
                train_loss = 0.0
                if global_step % args.checkpointing_steps == 0 and accelerator.is_main_process:
                    folders = [name for name in os.listdir(args.output_dir) if name.startswith("checkpoint")]
                    folders.sort(key=lambda name: int(name.split("-")[1]))
                    for name in folders[: max(0, len(folders) + 1 - args.checkpoints_total_limit)]:
                        shutil.rmtree(os.path.join(args.output_dir, name))
                    accelerator.save_state(os.path.join(args.output_dir, f"checkpoint-{global_step}"))
            if global_step >= args.max_train_steps:
                break

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with torch.no_grad():
            for p, shadow in zip(accelerator.unwrap_model(unet).parameters(), ema_unet.shadow, strict=True):
                p.copy_(shadow)
        torch.save(accelerator.unwrap_model(unet).state_dict(), Path(args.output_dir, "unet.pt"))
        Path(args.output_dir, "all_results.json").write_text(json.dumps(logged))
    accelerator.end_training()


if __name__ == "__main__":
    main()
