"""Trains low-rank adapters in two frozen networks at once with one optimizer, on pictures of a thing and its class."""

import argparse
import itertools
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=3)
    parser.add_argument("--max_grad_norm", type=float, default=0.02)
    parser.add_argument("--prior_loss_weight", type=float, default=0.5)
    parser.add_argument("--accumulate", choices=["models", "list", "unet"], default="models")
    return parser.parse_args()


class LoRALinear(nn.Module):
    def __init__(self, inner, rank=2):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(inner.in_features, rank, bias=False)
        self.up = nn.Linear(rank, inner.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x):
        return self.inner(x) + self.up(self.down(x))


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 6).requires_grad_(False)
        self.projection = LoRALinear(nn.Linear(6, 6))

    def forward(self, input_ids):
        return self.projection(self.embedding(input_ids)).mean(1)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = LoRALinear(nn.Linear(12, 6)), LoRALinear(nn.Linear(6, 12))

    def forward(self, latents, condition):
        return self.last(torch.tanh(self.first(latents) + condition))


def examples(count):
    draw = torch.Generator().manual_seed(11)
    return [
        {
            "instance": torch.randn(12, generator=draw),
            "prior": torch.randn(12, generator=draw),
            "input_ids": torch.randint(12, (4,), generator=draw),
        }
        for _ in range(count)
    ]


def collate_fn(samples):
    """Both kinds of pictures go through the network in one batch."""
    instance, prior = (torch.stack([sample[key] for sample in samples]) for key in ("instance", "prior"))
    input_ids = torch.stack([sample["input_ids"] for sample in samples])
    return {"latents": torch.cat([instance, prior]), "input_ids": torch.cat([input_ids, input_ids])}


def main():
    args = parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        project_config=ProjectConfiguration(project_dir=args.output_dir),
    )
    set_seed(3)
    unet, text_encoder = UNet(), TextEncoder()
    trained = [p for p in itertools.chain(unet.parameters(), text_encoder.parameters()) if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    train_dataloader = DataLoader(examples(28), batch_size=1, shuffle=True, collate_fn=collate_fn)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    unet, text_encoder, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        unet, text_encoder, optimizer, train_dataloader, lr_scheduler
    )
    if accelerator.is_main_process:
        Path(args.output_dir).mkdir(exist_ok=True, parents=True)

    given = {"models": (unet, text_encoder), "list": ([unet, text_encoder],), "unet": (unet,)}[args.accumulate]
    global_step, logged = 0, []
    for _ in range(args.num_train_epochs):
        unet.train()
        text_encoder.train()
        for batch in train_dataloader:
            with accelerator.accumulate(*given):
                noise = torch.randn_like(batch["latents"])
                model_pred = unet(batch["latents"] + 0.3 * noise, text_encoder(batch["input_ids"]))
                model_pred, model_pred_prior = torch.chunk(model_pred, 2, dim=0)
                target, target_prior = torch.chunk(noise, 2, dim=0)
                loss = F.mse_loss(model_pred.float(), target.float())
                loss = loss + args.prior_loss_weight * F.mse_loss(model_pred_prior.float(), target_prior.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    params_to_clip = itertools.chain(unet.parameters(), text_encoder.parameters())
                    accelerator.clip_grad_norm_(params_to_clip, args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad(set_to_none=True)
            if accelerator.sync_gradients:
                global_step += 1
            logged.append([global_step, loss.detach().item(), lr_scheduler.get_last_lr()[0]])

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        layers = accelerator.unwrap_model(unet).state_dict() | accelerator.unwrap_model(text_encoder).state_dict()
        accelerator.save({k: v for k, v in layers.items() if "up." in k or "down." in k}, f"{args.output_dir}/lora.pt")
        Path(args.output_dir, "all_results.json").write_text(json.dumps(logged))
    accelerator.end_training()


if __name__ == "__main__":
    main()
