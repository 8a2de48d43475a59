"""`macrobatch bench`: the benchmarks one after the other, each a process of its own, then what they found.

They are scripts, in `benchmarks/` of a checkout and of the installed package. `benchmarks/record.py` says what such a
script does and what its file of results holds; nothing here knows any of them by name but the one that draws figures.
"""

from __future__ import annotations

from collections.abc import Sequence


def plain_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns in line, the first to the left, the others to the right.

    >>> print(plain_table(["loop", "tokens/s"], [["by hand", "9"], ["ours", "12"]]))
    loop     tokens/s
    -------  --------
    by hand         9
    ours           12
    """
    table = [headings, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(headings))]
    lines = [headings, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
