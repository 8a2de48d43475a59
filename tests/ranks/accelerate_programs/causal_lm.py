"""Trains a small GPT-2 of transformers in a loop of one's own, without its Trainer."""

import argparse
import json
import math
import os

import torch
from accelerate import Accelerator, DistributedType
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_scheduler

logger = get_logger(__name__)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--per_device_train_batch_size", type=int, default=1)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--lr_scheduler_type", default="cosine")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--in_order", action="store_true")
    parser.add_argument("--checkpointing_steps")
    parser.add_argument("--resume_from_checkpoint")
    return parser.parse_args()


def blocks(count, seed):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(32, (count, 12), generator=draw)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.clone()} for row in ids]


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    logger.info(accelerator.state, main_process_only=False)
    set_seed(7)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()

    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = args.dropout
    model = GPT2LMHeadModel(config)
    with accelerator.main_process_first():
        train_dataset, eval_dataset = blocks(22, seed=1), blocks(7, seed=2)
    train_dataloader = DataLoader(
        train_dataset,
        shuffle=not args.in_order,
        collate_fn=default_data_collator,
        batch_size=args.per_device_train_batch_size,
    )
    eval_dataloader = DataLoader(eval_dataset, collate_fn=default_data_collator, batch_size=2)

    no_decay = ["bias", "ln_1.weight", "ln_2.weight", "ln_f.weight"]
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if not any(x in n for x in no_decay)], "weight_decay": args.weight_decay},
            {"params": [p for n, p in named if any(x in n for x in no_decay)], "weight_decay": 0.0},
        ],
        lr=5e-3,
        eps=1e-5,
    )
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    lr_scheduler = get_scheduler(
        name=args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=2 * accelerator.num_processes,
        num_training_steps=max_train_steps * accelerator.num_processes,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    if accelerator.distributed_type == DistributedType.XLA:
        model.tie_weights()
    num_update_steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    max_train_steps = args.num_train_epochs * num_update_steps_per_epoch
    checkpointing_steps = args.checkpointing_steps
    if checkpointing_steps is not None and checkpointing_steps.isdigit():
        checkpointing_steps = int(checkpointing_steps)

    completed_steps = starting_epoch = 0
    resume_step = None
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        difference = os.path.basename(args.resume_from_checkpoint)
        if "epoch" in difference:
            starting_epoch = int(difference.replace("epoch_", "")) + 1
            completed_steps = starting_epoch * num_update_steps_per_epoch
        else:
            resume_step = int(difference.replace("step_", "")) * args.gradient_accumulation_steps
            starting_epoch = resume_step // len(train_dataloader)
            completed_steps = resume_step // args.gradient_accumulation_steps
            resume_step -= starting_epoch * len(train_dataloader)

    history = []
    for epoch in range(starting_epoch, args.num_train_epochs):
        model.train()
        total_loss = 0
        active_dataloader = train_dataloader
        if epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        for batch in active_dataloader:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
                if isinstance(checkpointing_steps, int) and completed_steps % checkpointing_steps == 0:
                    accelerator.save_state(os.path.join(args.output_dir, f"step_{completed_steps}"))
            if completed_steps >= max_train_steps:
                break

        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(len(batch["labels"]))))
        losses = torch.cat(losses)
        eval_loss = torch.mean(losses)
        perplexity = math.exp(eval_loss)
        logger.info(f"epoch {epoch}: perplexity: {perplexity} eval_loss: {eval_loss}")
        history.append(
            {
                "epoch": epoch,
                "perplexity": perplexity,
                "eval_losses": losses.tolist(),
                "train_loss": total_loss.item() / len(train_dataloader),
                "step": completed_steps,
                "lr": lr_scheduler.get_last_lr(),
            }
        )
        if args.checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))

    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(
        args.output_dir,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.save_model(model, os.path.join(args.output_dir, "plain"))
    if accelerator.is_main_process:
        with open(os.path.join(args.output_dir, "all_results.json"), "w") as f:
            json.dump(history, f)
    accelerator.end_training()


if __name__ == "__main__":
    main()
