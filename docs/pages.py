"""What the site needs beside the pages in this folder: pages that live at the root of the repository, and linked files.

Links stay as they are read in the repository. Here each becomes a link to where the site has its target. Examples in
docstrings, which are doctests, become blocks of code, and defaults are shown by their values.
"""

import os
import re
from pathlib import Path
from typing import Any

from griffe import Attribute, Extension, Function, Object
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
AT_THE_ROOT = {"README.md": "index.md"} | {
    f"{name.upper()}.md": f"{name}.md" for name in ("changelog", "contributing", "security")
}
WRITTEN = {"docs/messages.py": "messages.md"}  # by another hook, from the source
BOOST = {"troubleshooting.md": 100, "reference/train.md": 0.01, "log.md": 0.1, "changelog.md": 0.1}  # in a search
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)\s#]+)")


def on_config(config: Any) -> Any:
    """Take the link to the repository, and the address of the site, which the page for missing addresses needs."""
    config.repo_url = os.environ.get("REPOSITORY") or config.repo_url
    if config.repo_url:
        owner, name = config.repo_url.rstrip("/").split("/")[-2:]
        config.repo_name = f"{owner}/{name}"
        config.site_url = config.site_url or f"https://{owner.lower()}.github.io/{name}/"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root, and every file of the repository that a page links to."""
    for source, place in AT_THE_ROOT.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text()))
    for page in list(files.documentation_pages()):
        for target in LINK.findall(page.content_string):
            there = repository_path(page.src_uri, target)
            if (ROOT / there).is_file() and files.get_file_from_path(site_path(there)) is None:
                files.append(File.generated(config, site_path(there), content=(ROOT / there).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite the links of a page, and say how early a search shows it."""
    page.meta["search"] = {"boost": BOOST.get(page.file.src_uri, 1)}
    here = os.path.dirname(page.file.src_uri)

    def rewritten(link: re.Match[str]) -> str:
        return os.path.relpath(site_path(repository_path(page.file.src_uri, link[1])), here or ".")

    return LINK.sub(rewritten, markdown)


def repository_path(page: str, target: str) -> str:
    """Where a link of a page leads, from the root of the repository."""
    sources = {place: source for source, place in AT_THE_ROOT.items()}
    return os.path.normpath(os.path.join(os.path.dirname(sources.get(page, f"docs/{page}")), target))


def site_path(path: str) -> str:
    """Where the site has a file of the repository."""
    return (AT_THE_ROOT | WRITTEN).get(path, path.removeprefix("docs/"))


class Readable(Extension):
    """Fences around the examples of every docstring, and the values of constants instead of their names."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)

    def on_function(self, *, func: Function, **_: Any) -> None:
        for parameter in func.parameters:
            parameter.default = value_of(parameter.default, func)

    def on_attribute(self, *, attr: Attribute, **_: Any) -> None:
        if not attr.name.isupper():
            attr.value = value_of(attr.value, attr)


def value_of(default: Any, used_by: Object) -> Any:
    """What a default is, where it is the name of a constant of the same module."""
    constant = used_by.module.members.get(str(default))
    return constant.value if isinstance(constant, Attribute) and constant.value is not None else default
