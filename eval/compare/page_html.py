"""A page → one HTML file that needs nothing else: pictures inline, no script, light or dark as the reader's system."""

import re
from html import escape

from eval.compare.page import MARKUP, Block, Bullets, Folded, Heading, Page, Pictures, Table, Text, Warning
from eval.compare.palette import DARK, LIGHT

_COLOUR = re.compile(r"#[0-9a-fA-F]{6}")
_VARIABLES = {colour: f"var(--{key})" for key, colour in LIGHT.items()}
_STYLE = """
:root { color-scheme: light dark; %(light)s --page: #ffffff; --box: #f4f6f8; --warn: #fff4d6; --link: #0b6bcb; }
@media screen and (prefers-color-scheme: dark) { :root { %(dark)s --page: #14171b; --box: #1f242b; --warn: #3a3013; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: break-word; }
p, ul { max-width: 46rem; }
ul { padding-left: 1.2rem; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { margin-top: 2.2rem; font-size: 1.3rem; } h3 { font-size: 1.08rem; }
code { font: 0.92em ui-monospace, Menlo, Consolas, monospace; background: var(--box); border-radius: 3px;
  padding: 0 0.2em; }
.warning { background: var(--warn); border-radius: 6px; padding: 0.6rem 0.8rem; }
.box { overflow-x: auto; margin: 0.8rem 0; border: 1px solid var(--grid); border-radius: 6px; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; min-width: 100%%; }
th, td { padding: 0.35rem 0.6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }
tr:last-child > * { border-bottom: 0; }
thead th { background: var(--box); font-weight: 600; vertical-align: bottom; }
th:first-child { text-align: left; position: sticky; left: 0; background: var(--box); font-weight: 500;
  white-space: normal; min-width: 6.5rem; max-width: 11rem; }
.words { text-align: left; white-space: normal; min-width: 7rem; }
.words code { overflow-wrap: anywhere; }
.pictures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%%, 20rem), 1fr)); }
figure { margin: 0; max-width: 34rem; } figcaption { font-size: 0.88rem; }
svg { display: block; width: 100%%; height: auto; }
details { margin: 0.8rem 0; } summary { cursor: pointer; font-weight: 600; padding: 0.4rem 0; }
@media (max-width: 30rem) { body { padding: 0.7rem; } th, td { padding: 0.3rem 0.4rem; } table { font-size: 0.84rem; } }
@media print {
  @page { margin: 12mm; }
  :root { color-scheme: light; }
  body { max-width: none; padding: 0; font-size: 9pt; }
  p, ul { max-width: none; }
  .box { overflow: visible; border: 0; }
  table { font-size: 7pt; width: 100%%; }
  th, td { white-space: normal; padding: 0.15rem 0.25rem; }
  th:first-child { position: static; min-width: 0; }
  code { overflow-wrap: anywhere; }
  tr, figure { break-inside: avoid; }
  h1, h2, h3, thead { break-after: avoid; }
  .pictures { grid-template-columns: 1fr 1fr; }
  details::details-content { content-visibility: visible; height: auto; }
}
"""


def to_html(page: Page) -> str:
    """The page as HTML that is well-formed XML too."""
    themes = {
        theme: " ".join(f"--{key}: {value};" for key, value in colours.items())
        for theme, colours in (("light", LIGHT), ("dark", DARK))
    }
    body = "\n".join(_block(block) for block in page.blocks)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(page.title)}</title>\n<style>{_STYLE % themes}</style>\n</head>\n"
        f"<body>\n<h1>{escape(page.title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _block(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{_inline(text)}</h{level}>"
        case Text(text):
            return f"<p>{_inline(text)}</p>"
        case Warning(text):
            return f'<p class="warning">{_inline(text)}</p>'
        case Bullets(items):
            return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + "</ul>"
        case Table(_, columns, rows, words):
            kinds = [' class="words"' if number in words else "" for number in range(len(columns))]
            titles = zip(kinds, columns, strict=True)
            head = "".join(f'<th scope="col"{kind}>{_inline(column)}</th>' for kind, column in titles)
            lines = "\n".join(
                f'<tr><th scope="row">{_inline(row[0])}</th>'
                + "".join(f"<td{kind}>{_inline(cell)}</td>" for kind, cell in zip(kinds[1:], row[1:], strict=True))
                + "</tr>"
                for row in rows
            )
            return f'<div class="box"><table><thead><tr>{head}</tr></thead>\n<tbody>{lines}</tbody></table></div>'
        case Pictures(pictures):
            shown = "\n".join(
                f"<figure>{themed(picture.svg, picture.file, picture.caption)}"
                f"<figcaption>{_inline(picture.caption)}</figcaption></figure>"
                for picture in pictures
            )
            return f'<div class="pictures">{shown}</div>'
        case Folded(title, blocks):
            inner = "\n".join(_block(inside) for inside in blocks)
            return f"<details><summary>{_inline(title)}</summary>\n{inner}\n</details>"


def _inline(text: str) -> str:
    parts, end = [], 0
    for match in MARKUP.finditer(text):
        parts.append(escape(text[end : match.start()]))
        tag, inner = ("code", match[1]) if match[1] is not None else ("strong", match[2])
        parts.append(f"<{tag}>{escape(inner) if tag == 'code' else _inline(inner)}</{tag}>")
        end = match.end()
    return "".join([*parts, escape(text[end:])])


def themed(svg: str, prefix: str, title: str) -> str:
    """A picture whose colours follow the page and whose ids start with ``prefix``."""
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    # An SVG element inside HTML is in its namespace already.
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg).replace("url(#", f"url(#{prefix}-")
    svg = _COLOUR.sub(lambda found: _VARIABLES.get(found[0].lower(), found[0]), svg)
    plain = escape(re.sub(r"[`*]", "", title))
    return svg.replace("<svg", f'<svg role="img" aria-label="{plain}"', 1)
