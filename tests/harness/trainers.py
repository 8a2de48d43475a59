"""Small models, data of unequal lengths, trainers of transformers; and one big batch in plain torch."""

import contextlib
import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

transformers.utils.logging.set_verbosity_error()
WORDS = 37
LEARNING_RATE = 0.1
Sample = dict[str, Tensor]
SMALL: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}


def llama(**more: Any) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS, **more))


def gpt2() -> nn.Module:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, **no_dropout, **ends))


def mixtral(coefficient: float = 0.5) -> nn.Module:
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": coefficient}
    model = MixtralForCausalLM(MixtralConfig(**SMALL, **HEADS, **experts))
    model.set_experts_implementation("eager")  # the other one has no float64
    return model


def bert() -> nn.Module:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**SMALL, num_attention_heads=2, max_position_embeddings=64, **no_dropout))


def t5() -> nn.Module:
    sizes = {"d_model": 16, "d_ff": 24, "num_layers": 2, "num_heads": 2, "d_kv": 8, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, decoder_start_token_id=0, pad_token_id=0, **sizes))


MODELS = {"llama": llama, "gpt2": gpt2, "mixtral": mixtral, "bert": bert, "t5": t5}


def make(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[kind]().double()


def samples(kind: str, count: int, seed: int = 0) -> list[Sample]:
    """Of 3 to 19 tokens, of which some have no label."""
    draw = torch.Generator().manual_seed(seed)

    def tokens(low: int, high: int) -> Tensor:
        return torch.randint(1, WORDS, (int(torch.randint(low, high, (1,), generator=draw)),), generator=draw)

    found = []
    for index in range(count):
        ids = tokens(3, 20)
        labels = tokens(2, 12) if kind == "t5" else ids.clone()
        if kind == "bert":
            labels[torch.rand(len(labels), generator=draw) < 0.6] = -100
        elif kind != "t5" and index % 2:
            labels[: len(ids) // 3] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def collate(batch: Sequence[Sample]) -> dict[str, Tensor]:
    def padded(rows: list[Tensor], value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    ids = padded([sample["input_ids"] for sample in batch], 0)
    mask = padded([torch.ones_like(sample["input_ids"]) for sample in batch], 0)
    return {"input_ids": ids, "attention_mask": mask, "labels": padded([sample["labels"] for sample in batch], -100)}


class MeanOverPositions(Trainer):  # type: ignore[misc]
    """Padded positions count, too: the loss of a sample depends on the width of its batch."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        each = nn.functional.cross_entropy(outputs.logits.transpose(1, 2), inputs["labels"], reduction="none")
        return (each.mean(), outputs) if return_outputs else each.mean()


@dataclass
class Noting(TrainerCallback):  # type: ignore[misc]
    """What callbacks are called, and the gradient norm and the loss that are logged."""

    events: list[str] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.events.append("on_log")
        self.logs.append(dict(logs))


for _name in (
    "step_begin",
    "substep_end",
    "pre_optimizer_step",
    "optimizer_step",
    "step_end",
    "epoch_end",
    "train_end",
):
    setattr(Noting, f"on_{_name}", lambda self, *_, _name=_name, **__: self.events.append(_name))


def arguments(steps: int = 4, per_device: int = 2, kind: type = TrainingArguments, **more: Any) -> Any:
    options = {
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": steps,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
    }
    return kind(more.pop("output_dir", None) or tempfile.mkdtemp(), **(options | more))


def trainer(kind: str, trainer_class: Any, data: Any, *, model: Any = None, **more: Any) -> Any:
    given = {name: more.pop(name) for name in ("callbacks", "compute_loss_func", "eval_dataset") if name in more}
    return trainer_class(
        model=make(kind) if model is None else model,
        args=arguments(**more, remove_unused_columns=False),
        train_dataset=data,
        data_collator=collate,
        **given,
    )


def train(made: Any, **options: Any) -> list[float]:
    """The losses that were logged."""
    with contextlib.redirect_stdout(io.StringIO()):
        made.train(**options)
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def one_big_batch(
    kind: str, data: Sequence[Sample], size: int, *, max_norm: float = 0.0, model: Any = None
) -> tuple[dict[str, Tensor], list[float]]:
    """The weights after plain steps on so many samples at once, by the model's own mean; and the losses."""
    model = make(kind) if model is None else model
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), []
    model.train()
    for start in range(0, len(data), size):
        loss = model(**collate(data[start : start + size])).loss
        optimizer.zero_grad()
        loss.backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def apart(found: Any, expected: dict[str, Tensor]) -> float:
    """The largest difference of weights."""
    weights = found if isinstance(found, dict) else found.model.state_dict()
    return max((weights[name] - expected[name]).abs().max().item() for name in expected)
