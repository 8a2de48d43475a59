"""What most files of the trainer's tests train on."""

from pathlib import Path

import pytest

from harness.commands import json_lines, sentences


@pytest.fixture(scope="module")
def data(request, tmp_path_factory) -> Path:
    """Texts of very different lengths. A file of tests that says SENTENCES = 100 has as many."""
    texts = sentences(getattr(request.module, "SENTENCES", 400))
    return json_lines(tmp_path_factory.mktemp("data") / "data.jsonl", [{"text": text} for text in texts])
