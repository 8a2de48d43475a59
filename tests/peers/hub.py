"""Stand-ins for the models, tokenizers and datasets of the hub that the suites name: nothing is fetched.

`prepare` writes a cache folder as the hub's own client lays it out, with models of a few thousand weights and one small
tokenizer. TRL's datasets come from the scripts in its own repository that make them, if a checkout of it is given.
"""

from __future__ import annotations

import contextlib
import functools
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COMMIT = "0" * 40  # the version of every model in the cache
ENDS = ("flat one", "nested one", "last answer, which was wrong")
TEXT = [
    f"The {thing} is {what} than the {end}." for thing in ("cat", "dog") for what in ("better", "older") for end in ENDS
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>", "[MASK]"]
SMALL: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLM = SMALL | {"num_key_value_heads": 2}
WIDE = LLM | {"head_dim": 16}
MOE = WIDE | {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16}
REWARD = {"num_labels": 1}

# The class, its configuration, and the chat template of TRL that its tokenizer has.
Model = tuple[str, dict[str, Any], str]
QWEN2: Model = ("Qwen2ForCausalLM", LLM, "qwen2_5")
QWEN3: Model = ("Qwen3ForCausalLM", WIDE, "qwen3")
GPT2: Model = ("GPT2LMHeadModel", {"n_embd": 8, "n_layer": 2, "n_head": 2}, "")
BERT: Model = ("BertForMaskedLM", SMALL, "")
T5: Model = ("T5ForConditionalGeneration", {"d_model": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "d_kv": 4}, "")
TRL: dict[str, Model] = {
    "tiny-Qwen2ForCausalLM-2.5": QWEN2,
    "tiny-Qwen3ForCausalLM": QWEN3,
    "tiny-LlamaForCausalLM-3.2": ("LlamaForCausalLM", LLM, "llama3_2"),
    "tiny-MistralForCausalLM-0.2": ("MistralForCausalLM", LLM, "qwen2_5"),
    "tiny-GPTNeoXForCausalLM": ("GPTNeoXForCausalLM", SMALL, "qwen2_5"),
    "tiny-Qwen3MoeForCausalLM": ("Qwen3MoeForCausalLM", MOE, "qwen3"),
    "tiny-GptOssForCausalLM": ("GptOssForCausalLM", MOE, "gptoss"),
    "tiny-Cohere2ForCausalLM": ("Cohere2ForCausalLM", LLM, "cohere2"),
    "tiny-Glm4MoeForCausalLM": ("Glm4MoeForCausalLM", MOE | {"n_routed_experts": 4}, "glm4moe"),
    "tiny-Olmo3ForCausalLM": ("Olmo3ForCausalLM", LLM, "qwen2_5"),
    "tiny-Gemma2ForCausalLM": ("Gemma2ForCausalLM", WIDE, "gemma"),
    "small-Qwen2ForCausalLM-2.5": QWEN2,
    "small-Qwen3ForCausalLM": QWEN3,
    "tiny-Qwen2ForSequenceClassification-2.5": ("Qwen2ForSequenceClassification", LLM | REWARD, "qwen2_5"),
    "tiny-Qwen3ForSequenceClassification": ("Qwen3ForSequenceClassification", WIDE | REWARD, "qwen3"),
    "tiny-LlamaForSequenceClassification-3.2": ("LlamaForSequenceClassification", LLM | REWARD, "llama3_2"),
}
STAND_INS = {f"trl-internal-testing/{name}": model for name, model in TRL.items()} | {
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN2,
    "hf-internal-testing/tiny-random-gpt2": GPT2,
    "hf-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", LLM, ""),
    "openai-community/gpt2": GPT2,
    "google-t5/t5-small": T5,
    "google-bert/bert-base-uncased": BERT,
    "bert-base-uncased": BERT,
    "bert-base-cased": BERT,
    "prajjwal1/bert-tiny": BERT,
}
TEXTS = {"Salesforce/wikitext": "text", "stanfordnlp/imdb": "text", "fka/awesome-chatgpt-prompts": "prompt"}


def environment(folder: Path) -> dict[str, str]:
    """The environment in which the hub is this folder."""
    return {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "PEERS_DATASETS": str(folder / "stand-ins")}


def prepare(folder: Path, trl: Path | None = None) -> None:
    """Write all stand-ins, in an `environment` of this folder."""
    data = folder / "stand-ins"
    for name, column in TEXTS.items():
        _write({"train": {column: TEXT * 20}, "test": {column: TEXT}}, data / name / "default")
    for script in sorted((trl / "scripts").glob("generate_*_dataset.py")) if trl is not None else []:
        _run_script(script, data)
    words = _tokenizer(data)
    for name, model in STAND_INS.items():
        repository = folder / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        (repository / "snapshots").mkdir()
        (repository / "snapshots" / COMMIT).symlink_to(_make_model(folder / "made", words, *model))


def _tokenizer(data: Path) -> Any:
    """A tokenizer that can write every text, and has words for those of the datasets."""
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    texts = [
        str(row)
        for file in sorted(data.glob("**/*language_modeling/*.parquet"))
        for row in Dataset.from_parquet(str(file))
    ]
    made.train_from_iterator(
        [*TEXT, *texts],
        trainers.BpeTrainer(
            vocab_size=1500,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return made


def _make_model(folder: Path, words: Any, kind: str, config: dict[str, Any], template: str) -> Path:
    import torch
    import transformers

    path = folder / f"{kind}-{template}"
    if path.exists():
        return path
    pad = "<|endoftext|>" if template else "<pad>"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<|im_end|>" if template else "<|endoftext|>",
        pad_token=pad,
        mask_token="[MASK]",
        model_max_length=512,
    )
    if template:
        import trl

        tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    if kind == T5[0]:
        ends["decoder_start_token_id"] = tokenizer.pad_token_id
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(vocab_size=len(tokenizer), **config, **ends))
    model.to(torch.bfloat16 if template else torch.float32).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


# ---------------------------------------------------------------------------------------------- datasets


def _write(splits: Any, folder: Path) -> None:
    import datasets
    from datasets import Dataset

    datasets.disable_progress_bars()
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        rows = rows if isinstance(rows, Dataset) else Dataset.from_dict(rows)
        rows.to_parquet(folder / f"{split}.parquet")


def _run_script(script: Path, folder: Path) -> None:
    """Run a script that pushes datasets to the hub, and keep them in a folder instead."""
    import datasets

    def keep(self: Any, repo_id: str, config_name: str = "default", **_: Any) -> None:
        _write(self if isinstance(self, dict) else {"train": self}, folder / repo_id / config_name)

    before = [(kind, kind.push_to_hub) for kind in (datasets.Dataset, datasets.DatasetDict)]
    for kind, _ in before:
        kind.push_to_hub = keep
    try:
        name = script.stem.removeprefix("generate_").removesuffix("_dataset").replace("_", "-")
        runpy.run_path(str(script))["main"](0.1, True, f"trl-internal-testing/{name}")
    finally:
        for kind, push in before:
            kind.push_to_hub = push


@contextlib.contextmanager
def datasets_redirected(data: Path) -> Iterator[None]:
    """A context in which `datasets.load_dataset` finds the stand-ins in this folder."""
    import datasets

    stock: Any = datasets.load_dataset

    @functools.wraps(stock)
    def load(path: str, name: str | None = None, *arguments: Any, **options: Any) -> Any:
        for config in (name, "default"):
            if config and (files := sorted((data / path / config).glob("*.parquet"))):
                kept = {key: options[key] for key in ("split", "streaming") if key in options}
                return stock("parquet", data_files={file.stem: str(file) for file in files}, **kept)
        return stock(path, name, *arguments, **options)

    datasets.load_dataset = load
    try:
        yield
    finally:
        datasets.load_dataset = stock


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
