"""transformers' Trainer with exact gradient accumulation: a masked language model on lines of different lengths.

python examples/hf_trainer.py
torchrun --nproc-per-node=2 examples/hf_trainer.py
"""

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

from macrobatch import by_tokens, verify
from macrobatch.transformers import exact

WORDS, MASK, PADDING = 64, 1, 0
Sample = dict[str, Tensor]


def lines(count: int) -> list[Sample]:
    """Tokens that count upwards, 4 to 31 in a line. Every fifth one is masked, and has a label."""
    found = []
    for number in range(count):
        ids = torch.arange(number, number + 4 + number * 7 % 28) % (WORDS - 2) + 2
        is_hidden = torch.arange(len(ids)) % 5 == number % 5
        labels = ids.masked_fill(~is_hidden, -100)
        found.append({"input_ids": ids.masked_fill(is_hidden, MASK), "labels": labels})
    return found


def pad(samples: list[Sample]) -> Sample:
    def padded(rows: list[Tensor], value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    ids = padded([sample["input_ids"] for sample in samples], PADDING)
    labels = padded([sample["labels"] for sample in samples], -100)
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long(), "labels": labels}


def trainer(trainer_class: Any) -> Any:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
    )
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        num_train_epochs=15,
        learning_rate=3e-3,
        logging_steps=15,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(),
    )
    return trainer_class(model=BertForMaskedLM(config), args=arguments, train_dataset=lines(320), data_collator=pad)


def main() -> None:
    print(verify(trainer(Trainer)))
    made = trainer(exact(Trainer, micro=by_tokens(512)))
    print(verify(made))
    made.train()
    if made.is_world_process_zero():
        first, *_, last = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
        print(f"{made.state.global_step} steps, loss {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    main()
