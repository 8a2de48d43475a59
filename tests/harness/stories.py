"""The stories of examples/stories: scripts in cells, run for real, and the pages in docs/stories with their output.

`cells_of` reads a script, `run_cells` runs it in a process of its own, `page_of` puts text, code, output and figures
together. As a program, ``python -m harness.stories`` writes all pages and figures anew (`make stories`).
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import ROOT, environment

SCRIPTS = sorted(path for path in (ROOT / "examples" / "stories").glob("*.py") if "\n# %%" in path.read_text())
PAGES = ROOT / "docs" / "stories"
SECONDS = 180  # on a busy machine; each takes less than 30 alone


@dataclass(frozen=True)
class Cell:
    """A part of a script: text in Markdown, or code. The page of a figure does not show the code that draws it."""

    is_text: bool
    is_figure: bool
    line: int  # of the script: where it begins
    source: str

    @property
    def text(self) -> str:
        """Without the signs of a comment."""
        return re.sub(r"^# ?", "", self.source, flags=re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """What a cell of code printed, and the figures that it showed: the name of each file, and what is in it."""

    output: str
    figures: list[tuple[str, str]]


def cells_of(script: str) -> list[Cell]:
    """Split a script at its lines ``# %%`` (code), ``# %% [markdown]`` and ``# %% [figure]``, from the first on."""
    marks = list(re.finditer(r"^# %%(.*)\n", script, re.MULTILINE))
    ends = [mark.start() for mark in marks[1:]] + [len(script)]
    return [
        Cell(
            is_text="[markdown]" in mark[1],
            is_figure="[figure]" in mark[1],
            line=script[: mark.end()].count("\n") + 1,
            source=script[mark.end() : end].strip("\n"),
        )
        for mark, end in zip(marks, ends, strict=True)
    ]


def page_of(path: Path, shown: list[Shown]) -> str:
    """The page of a script, given what its cells of code showed."""
    results, parts = iter(shown), []
    for cell in cells_of(path.read_text()):
        if cell.is_text:
            parts.append(cell.text)
            continue
        if not cell.is_figure:
            parts.append(f"```python\n{cell.source}\n```")
        result = next(results)
        if result.output:
            parts.append(f"```text\n{result.output.rstrip()}\n```")
        parts += [f"![{label}]({name})" for name, label in result.figures]
    script = f"[`{path.name}`]({os.path.relpath(path, PAGES)})" if path.is_relative_to(ROOT) else path.name
    parts.append(f"*This page is the output of {script}, which is also a notebook in cells. `make stories` writes it.*")
    return "\n\n".join(parts) + "\n"


def page_path(script: Path) -> Path:
    return PAGES / f"{script.stem.replace('_', '-')}.md"


# -------------------------------------------------------------------------------------------------- a script that runs


def run(script: Path, figures: Path) -> list[Shown]:
    """Run a script in a process of its own, on one core of a CPU, where warnings are errors.

    Args:
        script: a file in cells.
        figures: the folder for its figures.

    Returns:
        What each cell of code showed.
    """
    warnings = ["-W", "error", "-W", "ignore:FigureCanvasAgg is non-interactive"]  # figures are saved, not shown
    command = [sys.executable, *warnings, "-c", "from harness import stories; stories.run_cells()"]
    plain = environment(CUDA_VISIBLE_DEVICES="", MPLBACKEND="agg", OMP_NUM_THREADS="1")
    done = subprocess.run(
        [*command, str(script), str(figures)], capture_output=True, text=True, timeout=SECONDS, env=plain
    )
    if done.returncode != 0:
        raise RuntimeError(f"{script.name} failed:\n{done.stderr}")
    return [Shown(one["output"], [(name, label) for name, label in one["figures"]]) for one in json.loads(done.stdout)]


def run_cells() -> None:
    """Run the script that the command line names, cell by cell; write what each of them showed to stdout as JSON."""
    script, folder = Path(sys.argv[1]), Path(sys.argv[2])
    sys.path.insert(0, str(script.parent))  # as `python script` does
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
    shown: list[dict[str, Any]] = []
    count = 0
    for cell in cells_of(script.read_text()):
        if cell.is_text:
            continue
        program = compile("\n" * (cell.line - 1) + cell.source, str(script), "exec")  # errors name lines of the file
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(program, names)
        figures = _save_figures(folder, page_path(script).stem, count)
        count += len(figures)
        shown.append({"output": printed.getvalue(), "figures": figures})
    json.dump(shown, sys.stdout)


def _save_figures(folder: Path, stem: str, count: int) -> list[tuple[str, str]]:
    """Save and close the open figures, as a notebook does at the end of a cell; returns their files and labels."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    plots = sys.modules["matplotlib.pyplot"]
    saved = []
    for number, opened in enumerate(plots.get_fignums(), count + 1):
        figure, name = plots.figure(opened), f"{stem}-{number}.png"
        figure.savefig(folder / name, dpi=120, metadata={"Software": None})  # the same figures give the same file
        saved.append((name, figure.get_label()))
    plots.close("all")
    return saved


def main() -> None:
    for script in SCRIPTS:
        page = page_path(script)
        page.write_text(page_of(script, run(script, PAGES)))
        print(f"Written to {os.path.relpath(page)}")


if __name__ == "__main__":
    main()
