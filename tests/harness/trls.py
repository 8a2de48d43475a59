"""TRL's trainers: small models, texts, and one run of a trainer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from harness.trainers import HEADS, SMALL, WORDS, arguments, make, train

ROUNDING = 3e-8  # their losses are computed in float32


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["<pad>", "<eos>", "<unk>"] + [f"w{index}" for index in range(WORDS - 3)]
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def texts(*columns: tuple[str, int, int], count: int) -> Any:
    """Each column has a name and its shortest and longest text, in words."""
    import datasets

    draw = torch.Generator().manual_seed(3)

    def text(low: int, high: int) -> str:
        length = int(torch.randint(low, high, (1,), generator=draw))
        return " ".join(f"w{int(word)}" for word in torch.randint(0, WORDS - 3, (length,), generator=draw))

    rows = [{name: text(low, high) for name, low, high in columns} for _ in range(count)]
    return datasets.Dataset.from_list(rows)


def run_trainer(
    trainer_class: Any,
    config: Any,
    data: Any,
    *,
    big: bool = False,
    model: Callable[[], nn.Module] | None = None,
    steps: int = 4,
    per_device: int = 2,
    options: dict[str, Any] | None = None,
    **given: Any,
) -> tuple[Any, list[float]]:
    """Train; `big`: with all samples of a window in one batch."""
    sizes = {"steps": 1, "per_device": steps * per_device} if big else {"steps": steps, "per_device": per_device}
    more = {"bf16": False, "gradient_checkpointing": False, **(options or {})}
    made = trainer_class(
        model=make("llama") if model is None else model(),
        args=arguments(kind=config, **sizes, **more),
        train_dataset=data,
        processing_class=tokenizer(),
        **given,
    )
    return made, train(made)


def reference_model() -> nn.Module:
    model = make("llama")
    for parameter in model.parameters():
        parameter.data += 0.02
    return model


def reward_model() -> nn.Module:
    torch.manual_seed(1)
    return LlamaForSequenceClassification(LlamaConfig(**SMALL, **HEADS, num_labels=1)).double()


def lengths(completions: Any, **_: Any) -> list[float]:
    return [float(len(completion) % 5) for completion in completions]


def float32_model() -> nn.Module:
    return make("llama").float()


def grpo(trainer_class: Any, loss_type: str, *, big: bool = False, model: Any = None, **more: Any) -> Any:
    """Two steps of GRPO, or of RLOO."""
    import trl  # which takes seconds

    torch.manual_seed(5)
    config = trl.GRPOConfig if loss_type else trl.RLOOConfig
    options: dict[str, Any] = {
        "max_completion_length": 8,
        "num_generations": 4,
        **({"loss_type": loss_type} if loss_type else {"beta": 0.0}),  # without a reference model
        **more,
    }
    data = texts(("prompt", 2, 6), count=8)
    sizes: dict[str, Any] = {"big": big, "per_device": 4, "reward_funcs": lengths, "model": model}
    return run_trainer(trainer_class, config, data, options=options, **sizes)
