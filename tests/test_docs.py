"""What the documents say is what the program does."""

import re
from pathlib import Path

from torchtitan_ext.cli import COMMANDS
from torchtitan_ext.run_file import describe_schema

ROOT = Path(__file__).resolve().parent.parent


def test_every_key_of_a_run_file_is_documented_as_it_is() -> None:
    documented = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    for row in describe_schema():
        assert f"| `{row.key}` | {row.type} | {row.default} | {row.description} |" in documented, row.key


def test_the_readme_shows_every_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert f"`depth {name}" in readme, name


def test_links_lead_to_what_exists() -> None:
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            file, _, anchor = target.partition("#")
            if target.startswith("http"):
                continue
            found = path.parent / file if file else path
            assert found.exists(), f"{path.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), flags=re.MULTILINE)
                anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
                assert anchor in anchors, f"{path.name}: {target}"


def test_no_document_holds_an_unresolved_merge() -> None:
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        assert not any(line.startswith(("<<<<<<< ", ">>>>>>> ")) for line in text.splitlines()), path.name
