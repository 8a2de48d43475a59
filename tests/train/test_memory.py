"""A corpus that is larger than the memory which a run may have: read piece by piece, killed, and resumed bitwise."""

import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from harness.killing import SAVE_EVERY, STEPS, Command, checkpoints, same, taken, until

MORE = 32 << 20  # bytes that a run on the large corpus may have beyond one on the small
NAMES = ["[UNK]", "</s>", *(f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst")]


@pytest.fixture(scope="module")
def command(tmp_path_factory) -> Iterator[Command]:
    with pytest.MonkeyPatch.context() as patch:
        # However many cores there are: each thread that encodes takes memory of its own.
        patch.setenv("RAYON_NUM_THREADS", "2")
        patch.setenv("MALLOC_ARENA_MAX", "2")
        command = Command(tmp_path_factory.mktemp("memory"))
    yield command
    command.close()


@pytest.fixture(scope="module")
def settings(command) -> list[object]:
    """All but the data; with a tokenizer of words, which is fast."""
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(NAMES)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(command.folder / "tokenizer.json"))
    return [
        *("--model", "tiny", "--tokenizer", command.folder / "tokenizer.json", "--seq-len", 256, "--batch-size", 4),
        *("--micro", "tokens:512", "--steps", STEPS, "--save-every", SAVE_EVERY, "--sample-tokens", 0),
        *("--validate-every", 0, "--validation", 0.0002),
    ]


@pytest.fixture(scope="module")
def small(command) -> Path:
    return written(command.folder / "small.jsonl", 5 << 20)


@pytest.fixture(scope="module")
def large(command) -> Path:
    """More text, and more tokens, than fit into what a run may have more."""
    return written(command.folder / "large.jsonl", 36 << 20)


def written(path: Path, size: int) -> Path:
    draw, length = random.Random(0), 0
    with path.open("w") as file:
        while length < size:
            text = " ".join(draw.choices(NAMES[2:], k=draw.randrange(200, 2000)))
            length += file.write(json.dumps({"text": text}) + "\n")
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_larger_than_memory_killed_and_resumed(command, settings, small, large, ranks):
    memory = MORE + command.memory_of(
        *settings, "--data", small, "--out", command.folder / f"small-{ranks}", ranks=ranks
    )
    run, other, cache = (command.folder / name for name in (f"killed-{ranks}", f"undisturbed-{ranks}", "cache"))
    limited = [*settings, "--data", large]

    if ranks == 1:  # while it is encoded; later runs find it in the cache
        started = command.start(*limited, "--out", run, memory=memory)
        assert until(started, lambda: any(path.stat().st_size > MORE // 8 for path in cache.glob("*.partial")))
        started.kill()
        assert started.wait() == [-signal.SIGKILL], started.output
        assert not run.exists()

    started = command.start(*limited, "--out", run, ranks=ranks, memory=memory)
    assert until(started, lambda: taken(run) >= 7), started.output
    started.kill()
    assert set(started.wait()) == {-signal.SIGKILL}, started.output
    assert checkpoints(run)
    assert max(path.stat().st_size for path in cache.glob("corpus-*")) > MORE < large.stat().st_size

    command.run("--resume", "--out", run, ranks=ranks, memory=memory)
    command.run(*limited, "--out", other, ranks=ranks, memory=memory)
    same(run, other)
