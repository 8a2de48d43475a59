"""The trainers of the report card: transformers, TRL, Accelerate, Lightning and Fabric, as they are."""

import logging
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

WORDS, STEPS = 40, 4
SIZES = (4, 1, 3, 2, 2, 5, 1, 4, 3, 3)
Sample = dict[str, Tensor]


# ------------------------------------------------------------------------------------------------ transformers


def transformers_model(kind: str) -> nn.Module:
    """A tiny model of transformers."""
    import transformers as tf

    common = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    bert = {**common, "num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "gpt2":
        return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=1, n_head=2, pad_token_id=0))
    if kind == "mixtral":
        experts = {"num_local_experts": 2, "output_router_logits": True}
        return tf.MixtralForCausalLM(tf.MixtralConfig(**common, **heads, **experts))
    if kind == "t5":
        sizes = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8}
        return tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=WORDS, decoder_start_token_id=0, **sizes))
    if kind == "classes":
        return tf.BertForSequenceClassification(tf.BertConfig(**bert, num_labels=3))
    if kind == "tags":
        return tf.BertForTokenClassification(tf.BertConfig(**bert, num_labels=WORDS))
    if kind == "masked":
        return tf.BertForMaskedLM(tf.BertConfig(**bert))
    family = {"llama": "Llama", "qwen3": "Qwen3", "mistral": "Mistral", "gemma": "Gemma"}[kind]
    config = getattr(tf, f"{family}Config")(
        **common, **heads, **({"head_dim": 8} if kind in ("qwen3", "gemma") else {})
    )
    return getattr(tf, f"{family}ForCausalLM")(config)


def samples(kind: str, count: int = 22) -> list[Sample]:
    """Texts of unequal lengths."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for index in range(count):
        ids = torch.randint(1, WORDS, (int(torch.randint(3, 16, (1,), generator=draw)),), generator=draw)
        labels = torch.where(torch.rand(len(ids), generator=draw) < 0.5, ids, -100) if kind == "masked" else ids
        found.append({"input_ids": ids, "labels": torch.tensor(index % 3) if kind == "classes" else labels})
    return found


def collate(batch: Sequence[Sample]) -> Sample:
    """Pad a batch."""

    def padded(rows: list[Tensor], value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    ids = [sample["input_ids"] for sample in batch]
    labels = [sample["labels"] for sample in batch]
    return {
        "input_ids": padded(ids, 0),
        "attention_mask": padded([torch.ones_like(one) for one in ids], 0),
        "labels": torch.stack(labels) if labels[0].dim() == 0 else padded(labels, -100),
    }


def arguments(kind: type, **more: Any) -> Any:
    """Arguments of a trainer of transformers or TRL."""
    usual = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": STEPS, "num_train_epochs": 1, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    return kind(tempfile.mkdtemp(), **(usual | more))


def trainer(kind: str, **more: Any) -> None:
    """Transformers' Trainer."""
    from transformers import Trainer, TrainingArguments

    made = arguments(TrainingArguments, **more)
    Trainer(transformers_model(kind), made, train_dataset=samples(kind), data_collator=collate).train()


def exact_trainer(kind: str) -> None:
    """The same under `exact`."""
    from transformers import Trainer, TrainingArguments

    from macrobatch.transformers import exact

    made = arguments(TrainingArguments)
    exact(Trainer)(transformers_model(kind), made, train_dataset=samples(kind), data_collator=collate).train()


# ------------------------------------------------------------------------------------------------ TRL


def trl_trainer(name: str, columns: Sequence[str], **more: Any) -> None:
    """A trainer of TRL, on texts of unequal lengths."""
    import datasets
    import trl
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    words = {
        word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS - 3))])
    }
    core = Tokenizer(WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    draw = torch.Generator().manual_seed(1)
    rows = [
        {
            column: " ".join(f"w{int(w)}" for w in torch.randint(0, WORDS - 3, (2 + 3 * (index % 4),), generator=draw))
            for column in columns
        }
        for index in range(16)
    ]
    if name == "RewardTrainer":
        sizes = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "num_labels": 1}
        model: nn.Module = LlamaForSequenceClassification(LlamaConfig(**sizes, **heads))
    else:
        model = transformers_model("llama")
    others = {"ref_model": transformers_model("llama")} if name == "DPOTrainer" else {}
    config = getattr(trl, name.replace("Trainer", "Config"))
    made = getattr(trl, name)(
        model=model, args=arguments(config, **more), train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer, **others,
    )  # fmt: skip
    made.train()


# ------------------------------------------------------------------------------------------------ Accelerate, Lightning


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def loader(sizes: Sequence[int] = SIZES) -> DataLoader[Any]:
    """Batches of these numbers of tokens."""
    draw = torch.Generator().manual_seed(0)
    found = [(torch.randn(n, 6, generator=draw), torch.randint(5, (n,), generator=draw)) for n in sizes]
    return DataLoader(found, batch_size=1, collate_fn=lambda batch: batch[0])  # type: ignore[arg-type]


def accelerate_loop(sizes: Sequence[int] = SIZES) -> None:
    """The loop of the guide on gradient accumulation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(sizes))
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


def accelerate_tokens(before_shift: bool) -> None:
    """The guide's recipe for causal language models: sums, divided by the tokens of the window."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(3):
        window = [(torch.randn(2, n, 6), torch.randint(5, (2, n))) for n in (5, 3, 8, 6)]
        total = sum(y.numel() if before_shift else y[:, 1:].numel() for _, y in window)
        for x, y in window:
            loss = cross_entropy(model(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten(), reduction="sum")
            accelerator.backward(loss * accelerator.gradient_accumulation_steps * accelerator.num_processes / total)
        optimizer.step()
        optimizer.zero_grad()


def lightning_trainer(sizes: Sequence[int] = SIZES, *, manual: bool = False, **more: Any) -> None:
    """Lightning's Trainer."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Task(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = network()
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = cross_entropy(self.network(batch[0]), batch[1])
            if manual:
                self.manual_backward(loss / STEPS)
                if (index + 1) % STEPS == 0:
                    self.optimizers().step()
                    self.optimizers().zero_grad()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    options = quiet | {"max_epochs": 1, "accelerator": "cpu"} | more
    pl.Trainer(**options).fit(Task(), loader(sizes))


def fabric_loop(sizes: Sequence[int] = SIZES) -> None:
    """The loop of Fabric's guide on gradient accumulation."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    for index, (x, y) in enumerate(loader(sizes)):
        is_accumulating = (index + 1) % STEPS != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            fabric.backward(cross_entropy(model(x), y) / STEPS)
        if not is_accumulating:
            optimizer.step()
            optimizer.zero_grad()


HF = "4 steps of 2 texts"
EVEN = (4,) * 8
ROWS: list[tuple[str, str, str, Any]] = [
    ("transformers", "Trainer, Llama", HF, lambda: trainer("llama")),
    ("transformers", "Trainer, Qwen3", HF, lambda: trainer("qwen3")),
    ("transformers", "Trainer, Mistral", HF, lambda: trainer("mistral")),
    ("transformers", "Trainer, Gemma", HF, lambda: trainer("gemma")),
    ("transformers", "Trainer, GPT-2", HF, lambda: trainer("gpt2")),
    ("transformers", "Trainer, GPT-2", "no accumulation", lambda: trainer("gpt2", gradient_accumulation_steps=1)),
    ("transformers", "Trainer, Llama", HF + ", label smoothing", lambda: trainer("llama", label_smoothing_factor=0.1)),
    ("transformers", "Trainer, Mixtral with router loss", HF, lambda: trainer("mixtral")),
    ("transformers", "Trainer, BERT, masked words", HF, lambda: trainer("masked")),
    ("transformers", "Trainer, BERT, a class for each text", HF, lambda: trainer("classes")),
    ("transformers", "Trainer, BERT, a tag for each word", HF, lambda: trainer("tags")),
    ("transformers", "Trainer, T5", HF, lambda: trainer("t5")),
    ("macrobatch", "exact(Trainer), GPT-2", HF, lambda: exact_trainer("gpt2")),
    ("trl", "SFTTrainer", HF, lambda: trl_trainer("SFTTrainer", ["text"], loss_type="nll")),
    ("trl", "DPOTrainer", HF, lambda: trl_trainer("DPOTrainer", ["prompt", "chosen", "rejected"])),
    ("trl", "RewardTrainer", HF, lambda: trl_trainer("RewardTrainer", ["chosen", "rejected"])),
    ("accelerate", "accumulate()", "4 steps, unequal batches", accelerate_loop),
    ("accelerate", "accumulate()", "4 steps, equal batches", lambda: accelerate_loop(EVEN)),
    ("accelerate", "token recipe", "labels counted before the shift", lambda: accelerate_tokens(True)),
    ("accelerate", "token recipe", "labels counted after the shift", lambda: accelerate_tokens(False)),
    (
        "lightning",
        "Trainer",
        "accumulate_grad_batches=4, unequal batches",
        lambda: lightning_trainer(accumulate_grad_batches=4),
    ),
    (
        "lightning",
        "Trainer",
        "accumulate_grad_batches=4, equal batches",
        lambda: lightning_trainer(EVEN, accumulate_grad_batches=4),
    ),
    ("lightning", "Trainer", "no accumulation, unequal batches", lightning_trainer),
    (
        "lightning",
        "Trainer, manual optimization",
        "4 steps, equal batches",
        lambda: lightning_trainer(EVEN, manual=True),
    ),
    ("lightning", "Fabric", "4 steps, unequal batches", fabric_loop),
    ("lightning", "Fabric", "4 steps, equal batches", lambda: fabric_loop(EVEN)),
]
