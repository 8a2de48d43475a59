"""The causes that `verify` knows: the table that is made of them.

cd tests && ../.venv/bin/python -m harness.causes       # writes the tables in docs/verify.md
"""

from harness import ROOT
from macrobatch.verification.catalogue import CAUSES, UNKNOWN

PAGE = ROOT / "docs" / "verify.md"
START, END = "<!-- causes: made by tests/harness/causes.py -->\n", "<!-- end of causes -->\n"


def table() -> str:
    """Both tables: the causes of a wrong gradient, and the reasons why it cannot be told."""
    wrong = "".join(f"| `{name}` | {kind.happened} |\n" for name, kind in CAUSES.items() if name not in UNKNOWN)
    unknown = "".join(
        f"| `{name}` | {CAUSES[name].happened} | {CAUSES[name].cure} |\n" for name in CAUSES if name in UNKNOWN
    )
    return (
        f"| cause | what happened |\n|---|---|\n{wrong}\n"
        'The verdict is "unknown" if these are the only causes:\n\n'
        f"| why it is unknown | what happened | what to do |\n|---|---|---|\n{unknown}"
    )


def page() -> str:
    """The page with the tables as they should be."""
    before, _, rest = PAGE.read_text().partition(START)
    return before + START + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
