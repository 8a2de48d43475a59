"""Public example scripts at a commit, audited by the command as they are, on made-up data.

    python benchmarks/report_card.py --public FOLDER

`FOLDER` has a git repository for each of them, named "owner+name". Data, models and packages that are missing have
stand-ins here: only their shapes matter to an audit.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WORDS = [f"word{index}" for index in range(40)]
WINDOWS = 8


def nothing(_: Path) -> None:
    """The script needs no data."""


def texts(folder: Path) -> None:
    """Texts for the language models of PyTorch's examples."""
    target = folder / "data" / "wikitext-2"
    target.mkdir(parents=True)
    for split in ("train", "valid", "test"):
        (target / f"{split}.txt").write_text("\n".join(sentences(120)))


def sentences(count: int) -> list[str]:
    """Sentences of unequal length."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, 14))) for _ in range(count)]


def tokens(folder: Path) -> None:
    """A file of tokens."""
    import numpy as np

    (folder / "data" / "made").mkdir(parents=True)
    for split in ("train", "val"):
        drawn = np.random.default_rng(0).integers(0, 50, 4000, dtype=np.uint16)
        drawn.tofile(folder / "data" / "made" / f"{split}.bin")


def pretrained(folder: Path, kind: str) -> None:
    """A tiny model with its tokenizer, in a folder with the name that the script loads."""
    import transformers as tf
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: index for index, word in enumerate(["<pad>", "<unk>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>", "mask_token": "<unk>"}
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=64, **special).save_pretrained(folder)
    sizes = {"vocab_size": len(vocabulary), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "pad_token_id": 0, "max_position_embeddings": 64}
    if kind == "bert":
        tf.BertForSequenceClassification(tf.BertConfig(**sizes, **heads)).save_pretrained(folder)
    elif kind == "gpt2":
        shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "eos_token_id": 2, "bos_token_id": 2}
        tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=len(vocabulary), **shape)).save_pretrained(folder)
    else:
        llama = tf.LlamaConfig(**sizes, **heads, num_key_value_heads=2, eos_token_id=2, bos_token_id=2)
        tf.LlamaForCausalLM(llama).save_pretrained(folder)


def dataset(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """A data set with the name of a configuration, in a folder with the name that the script loads."""
    folder.mkdir(parents=True)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "validation"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n")
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def pairs_of_sentences(folder: Path) -> None:
    """For the example of Accelerate that classifies pairs of sentences."""
    pretrained(folder / "bert-base-cased", "bert")
    found = sentences(200)
    rows = [
        {"sentence1": a, "sentence2": b, "label": index % 2, "idx": index}
        for index, (a, b) in enumerate(zip(found[::2], found[1::2], strict=True))
    ]
    dataset(folder / "nyu-mll" / "glue", "mrpc", rows)


def lines_of_text(folder: Path) -> None:
    """For the example of Accelerate that trains a language model."""
    pretrained(folder / "HuggingFaceTB" / "SmolLM-360M", "llama")
    dataset(folder / "Salesforce" / "wikitext", "wikitext-2-v1", [{"text": one} for one in sentences(600)])


def a_text_file(kind: str) -> Callable[[Path], None]:
    """A model, and a file of text."""

    def prepare(folder: Path) -> None:
        pretrained(folder / "model", kind)
        (folder / "train.txt").write_text("\n".join(sentences(400)))

    return prepare


@dataclass(frozen=True)
class Script:
    """A public program."""

    repository: str
    files: tuple[str, ...]  # the first is the program
    arguments: str = ""
    prepare: Callable[[Path], None] = nothing


def example(folder: str, arguments: str = "", prepare: Callable[[Path], None] = nothing, *others: str) -> Script:
    """An example of PyTorch."""
    files = tuple(f"{folder}/{name}" for name in ("main.py", *others))
    return Script("pytorch/examples", files, arguments, prepare)


NANO = (
    "--device=cpu --compile=False --dtype=float32 --dataset=made --batch_size=4 --block_size=16 --n_layer=1 --n_head=2 "
    "--n_embd=16 --max_iters=10 --eval_iters=1 --eval_interval=100 --log_interval=100 --gradient_accumulation_steps=4"
)
CLM = (
    "--model_name_or_path model --train_file train.txt --block_size 16 --per_device_train_batch_size 2 --report_to none"
    " --do_train --output_dir out --use_cpu --gradient_accumulation_steps 4"
)
LM, BY_FEATURE = "examples/pytorch/language-modeling", "examples/by_feature"
SCRIPTS = (
    example("mnist", "--batch-size 8 --epochs 1"),
    example("vae", "--batch-size 8 --epochs 1"),
    example("dcgan", "--dataset fake --batchSize 4 --niter 1 --ngf 4 --ndf 4 --workers 0"),
    example("mnist_rnn", "--batch-size 8 --epochs 1"),
    example("word_language_model", "--epochs 1 --emsize 16 --nhid 16 --use-optimizer", texts, "model.py", "data.py"),
    example("word_language_model", "--epochs 1 --emsize 16 --nhid 16", texts, "model.py", "data.py"),
    Script("pytorch/examples", ("reinforcement_learning/reinforce.py",)),
    Script("pytorch/examples", ("reinforcement_learning/actor_critic.py",)),
    Script("karpathy/nanoGPT", ("train.py", "model.py", "configurator.py"), NANO, tokens),
    Script("huggingface/accelerate", ("examples/nlp_example.py",), "--cpu", pairs_of_sentences),
    Script(
        "huggingface/accelerate", (f"{BY_FEATURE}/gradient_accumulation.py",),
        "--cpu --gradient_accumulation_steps 4", pairs_of_sentences,
    ),
    Script(
        "huggingface/accelerate", (f"{BY_FEATURE}/gradient_accumulation_for_autoregressive_models.py",),
        "--cpu --gradient_accumulation_steps 2", lines_of_text,
    ),
    Script("huggingface/transformers", (f"{LM}/run_clm.py",), CLM, a_text_file("llama")),
    Script("huggingface/transformers", (f"{LM}/run_clm.py",), CLM, a_text_file("gpt2")),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------- packages in their place

STAND_INS = {
    "torchvision/__init__.py": "from . import datasets, transforms, utils\n",
    "torchvision/datasets.py": """
import torch
class _Images(torch.utils.data.Dataset):
    def __init__(self, *_, image_size=(1, 28, 28), transform=None, **more):
        self.data = torch.randint(256, (96, *image_size[1:]), dtype=torch.uint8)
        self.targets, self.size = torch.arange(96) % 10, image_size
    def __len__(self):
        return len(self.data)
    def __getitem__(self, index):
        image = self.data[index].float().div(255).expand(self.size)
        return image, int(self.targets[index])
MNIST = FakeData = _Images
""",
    "torchvision/transforms.py": """
class _Anything:
    def __init__(self, *_, **__): pass
    def __call__(self, image): return image
Compose = ToTensor = Normalize = Resize = Lambda = _Anything
""",
    "torchvision/utils.py": "def save_image(*_, **__): pass\n",
    "gymnasium.py": """
import types
import numpy as np
class _Pole:
    spec = types.SimpleNamespace(reward_threshold=475)
    def reset(self, seed=0):
        self.turns = 0
        return np.random.randn(4), {}
    def step(self, action):
        self.turns += 1
        return np.random.randn(4), 1.0, self.turns > 4 + np.random.randint(6), False, {}
def make(*_, **__):
    return _Pole()
""",
    "evaluate.py": """
class _Metric:
    def add_batch(self, **_): pass
    def compute(self, **_): return {"accuracy": 0.0}
def load(*_, **__):
    return _Metric()
""",
}


def audited(script: Script, repositories: Path) -> dict[str, Any]:
    """Run the command on a script, in a folder of its own."""
    git = ["git", "-C", str(repositories / script.repository.replace("/", "+"))]
    if (repositories / script.repository.replace("/", "+") / "repo").exists():
        git[2] += "/repo"

    def output_of(*command: str) -> str:
        return subprocess.run([*git, *command], check=True, capture_output=True, text=True).stdout

    with tempfile.TemporaryDirectory() as temporary:
        packages, folder = Path(temporary, "packages"), Path(temporary, "program")
        folder.mkdir()
        for name in STAND_INS if script.repository == "pytorch/examples" else ["evaluate.py"]:
            (packages / name).parent.mkdir(parents=True, exist_ok=True)
            (packages / name).write_text(STAND_INS[name])
        for file in script.files:
            (folder / Path(file).name).write_text(output_of("show", f"HEAD:{file}"))
        script.prepare(folder)
        name = Path(script.files[0]).name
        command = [sys.executable, "-m", "macrobatch", "audit", "--windows", str(WINDOWS), "--json", "-", name]
        path = os.pathsep.join([str(packages), str(ROOT / "src")])
        offline = {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(packages / "cache"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        done = subprocess.run(
            [*command, *script.arguments.split()], cwd=folder, env=os.environ | offline | {"PYTHONPATH": path},
            capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        try:
            found = json.loads(done.stdout)
        except json.JSONDecodeError as error:
            raise RuntimeError(f"{name} gave no report: {done.stderr[-2000:]}") from error
        if any("the program failed" in one for one in found["unseen"]):
            raise RuntimeError(f"{name} failed: {done.stderr[-3000:]}")
    return {
        "library": script.repository,
        "version": output_of("rev-parse", "HEAD").strip()[:10],
        "name": script.files[0],
        "configuration": configuration_of(script),
        "verdict": found["verdict"],
        "factor": None if found["factor"] is None else round(found["factor"], 4),
        "causes": found["causes"],
        "unseen": found["unseen"][:1],
        "windows": len(found["windows"]),
    }


def configuration_of(script: Script) -> str:
    """What of its arguments changes how it accumulates."""
    words = script.arguments.replace("=", " ").split()
    steps = next((words[i + 1] for i, word in enumerate(words) if word == "--gradient_accumulation_steps"), None)
    kind = "GPT-2" if script.prepare.__closure__ and script.prepare.__closure__[0].cell_contents == "gpt2" else None
    said = [f"{steps} steps" if steps else "as it is", kind, "--use-optimizer" if "--use-optimizer" in words else None]
    return ", ".join(one for one in said if one)
