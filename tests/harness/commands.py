"""What tests of `macrobatch train` share: small data, the command in this process or in many, and the losses of a run.

As a program, ``commands.py FILE`` runs the commands in a JSON file one after the other, on every rank of a torchrun:
what takes longest, starting Python and its packages, happens once. `IMPORTED` is what training imports.
"""

import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

IMPORTED = [
    "macrobatch.train.trainer",
    "torch.utils.tensorboard",
    "transformers.models.llama.modeling_llama",
]
TEXT = "the quick brown fox jumps over a lazy dog while seven wizards box with liquor jugs and drink tea"


def sentences(count: int = 400, seed: int = 0) -> list[str]:
    """Texts of very different lengths."""
    random_, words = random.Random(seed), TEXT.split()
    lengths = [min(60, int(random_.lognormvariate(2.3, 0.8)) + 1) for _ in range(count)]
    return [" ".join(random_.choice(words) for _ in range(length)) for length in lengths]


def json_lines(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def arguments(data: Path, out: Path, *more: object) -> list[str]:
    """A small run on the CPU; what is said later counts."""
    settings = {
        "--model": "tiny",
        "--data": data,
        "--vocabulary-size": 300,
        "--seq-len": 64,
        "--steps": 4,
        "--batch-size": 24,
        "--sample-tokens": 0,
        "--device": "cpu",
        "--out": out,
    }
    given = iter(more)
    flags: list[object] = []
    for flag in given:
        if flag in settings:
            settings[flag] = next(given)
        else:
            flags.append(flag)
    return ["train", *(str(word) for pair in settings.items() for word in pair), *map(str, flags)]


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in metrics(run)]


def farthest(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference."""
    assert len(found) == len(wanted)
    return max(abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=True))


def refused(command: list[str], capsys: Any, *said: str) -> str:
    """Exit status 2, one message, no traceback."""
    from macrobatch.cli import main

    capsys.readouterr()
    assert main(command) == 2
    message = capsys.readouterr().err
    assert message.startswith("macrobatch: ")
    assert message.count("macrobatch: ") == 1
    assert "Traceback" not in message
    for words in said:
        assert words in message
    return message


def main() -> None:
    from harness import ranks
    from macrobatch.cli import main as macrobatch

    ranks.be_a_rank()
    statuses = []
    for number, command in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # as if the ranks had been started anew for each
        statuses.append(macrobatch(command))
    Path(f"{sys.argv[1]}.{os.environ['RANK']}").write_text(json.dumps(statuses))


if __name__ == "__main__":
    main()
