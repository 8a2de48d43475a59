"""`macrobatch train` inside a program: callbacks get every step, and your own function selects the best model.

python examples/embedded_training.py
"""

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from macrobatch.train import Event, Settings, StopTraining, train

TEXT = "the quick brown fox jumps over a lazy dog while seven wizards drink tea"


def accuracy(model: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
    """How often the most likely token is the right one."""
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"].to(model.device)
    likeliest = model(ids).logits[:, :-1].argmax(-1)
    return {"accuracy": (likeliest == ids[:, 1:]).float().mean()}


def watch(event: Event) -> None:
    """Print the progress of the run, and end it when the model is good enough."""
    if event.kind == "validation":
        print(f"after step {event.step}, {event.numbers['accuracy']:.0%} of the tokens are right")
        if event.numbers["accuracy"] > 0.9:
            raise StopTraining


def main() -> None:
    folder, draw, words = Path(tempfile.mkdtemp()), random.Random(0), TEXT.split()
    starts = [draw.randrange(len(words) - 2) for _ in range(400)]
    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": " ".join(words[start:])}) + "\n" for start in starts))
    settings = Settings(
        model="tiny",
        data=(str(data),),
        validation=0.1,
        batch_size=32,
        steps=60,
        validate_every=5,
        best="accuracy:max",
        sample_tokens=0,
        out=str(folder / "run"),
    )
    outcome = train(settings, callbacks=[watch], evaluate=accuracy)
    print(f"{outcome.steps} steps, the last loss is {outcome.metrics[-1]['loss']:.3f}, the model is in {outcome.model}")


if __name__ == "__main__":
    main()
