"""Published programs, converted as the docs say: each has the gradient of one big batch."""

import json
import re

import pytest

from harness.converted import PAGE, PROGRAMS, RESULTS, page


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_gradient_is_that_of_one_big_batch(program):
    assert program.error() <= 1e-12


def test_the_page_is_made_of_the_figures():
    rows = json.loads(RESULTS.read_text())["programs"]
    assert PAGE.read_text() == page(rows)
    assert [row["name"] for row in rows] == [program.name for program in PROGRAMS]
    assert len(rows) >= 20
    assert all(row["error"] <= 1e-12 for row in rows)
    assert all(re.fullmatch(r"[\w-]+/[\w.-]+ [0-9a-f]{7}", f"{row['repository']} {row['commit']}") for row in rows)
