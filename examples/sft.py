"""TRL's SFTTrainer with exact gradient accumulation, cut again by tokens: prompts and answers of different lengths.

pip install '.[transformers]' trl
python examples/sft.py
torchrun --nproc-per-node=2 examples/sft.py
"""

import tempfile
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from macrobatch import by_tokens
from macrobatch.transformers import exact

NUMBERS = 40


def tokenizer() -> Any:
    words = ["<pad>", "<eos>", "count", "from", "to", ":", *map(str, range(NUMBERS))]
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<eos>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def questions(count: int) -> Any:
    """Questions to count from one number to another, with answers of 2 to 25 words."""
    rows = []
    for index in range(count):
        start, steps = index * 5 % 14, 2 + index * 7 % 24
        answer = " ".join(str(number) for number in range(start, start + steps))
        rows.append({"prompt": f"count from {start} to {start + steps - 1} :", "completion": f" {answer}"})
    return Dataset.from_list(rows)


def main() -> None:
    torch.manual_seed(0)
    words = tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            pad_token_id=words.pad_token_id,
        )
    )
    arguments = SFTConfig(
        tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        num_train_epochs=6,
        learning_rate=1e-2,
        max_length=64,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )
    trainer: Any = exact(SFTTrainer, micro=by_tokens(512))  # micro-batches of at most 512 tokens
    made = trainer(model=model, args=arguments, train_dataset=questions(256), processing_class=words)
    made.train()
    if made.is_world_process_zero():
        logs = [entry for entry in made.state.log_history if "mean_token_accuracy" in entry and "loss" in entry]
        print(
            f"{made.state.global_step} steps, loss {logs[0]['loss']:.3f} -> {logs[-1]['loss']:.3f}, "
            f"accuracy {logs[0]['mean_token_accuracy']:.2f} -> {logs[-1]['mean_token_accuracy']:.2f}"
        )


if __name__ == "__main__":
    main()
