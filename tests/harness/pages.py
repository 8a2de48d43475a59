"""The blocks of code in a page of the documentation."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    language: str
    line: int  # of the page: where the text begins
    text: str

    @property
    def end(self) -> int:
        """The line of the closing fence."""
        return self.line + self.text.count("\n")


def blocks_of(page: str) -> list[Block]:
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [Block(one[1], page[: one.start(2)].count("\n") + 1, one[2]) for one in found]
