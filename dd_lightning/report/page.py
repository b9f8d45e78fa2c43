"""What the pages of runs and studies share: one offline file, dark or light as the reader is."""

from __future__ import annotations

import base64
import json
from html import escape
from pathlib import Path
from typing import Any

CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --pale: #5b636d; --line: #d9dde2; --back: #fff;
  --card: #f5f7f9; --good: #00735a; --bad: #b3400a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaee; --pale: #9aa4af; --line: #333a42;
  --back: #14171b; --card: #1d2228; --good: #4cc9a6; --bad: #ff9a6b; } }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; font: 16px/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--back); }
.what { color: var(--pale); font-size: .95rem; margin: 0; }
h1 { font-size: 1.25rem; font-weight: 600; line-height: 1.35; margin: .9rem 0 .2rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
.answer { font-size: 1.25rem; line-height: 1.45; margin: .2rem 0 1.2rem; max-width: 62rem; }
.finished { color: var(--good); } .failed, .interrupted { color: var(--bad); }
.tiles { display: flex; flex-wrap: wrap; gap: .6rem; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .5rem .9rem; min-width: 7.5rem; flex: 1 0 auto; }
.tile b { display: block; font-size: 1.2rem; } .tile span, .note { color: var(--pale);
  font-size: .88rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
th { color: var(--pale); font-weight: 600; font-size: .88rem; }
.figures { columns: 2 26rem; column-gap: 1rem; }
figure { margin: 0 0 1rem; break-inside: avoid; background: var(--card); padding: .6rem;
  border: 1px solid var(--line); border-radius: .5rem; } figure img { display: block; width: 100%; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: .3rem; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .8rem; overflow-x: auto; font-size: .85rem; }
"""


def render_page(title: str, what: str, question: str, answer: str, body: str) -> str:
    """The whole page. It references nothing outside itself.

    Args:
        title, what, question: plain text.
        answer, body: HTML.
    """
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{CSS}</style>
</head>
<body>
<p class="what">dd_lightning · {escape(what)}</p>
<h1>{escape(question)}</h1>
<p class="answer">{answer}</p>
{body}
</body>
</html>
"""


def figure(path: Path, title: str) -> str:
    """The SVG beside a figure's PNG, which follows the reader's colours."""
    data = base64.b64encode(path.with_suffix(".svg").read_bytes()).decode()
    title = escape(title)
    return (
        f'<figure><figcaption>{title}</figcaption><img alt="{title}" '
        f'src="data:image/svg+xml;base64,{data}"></figure>'
    )


def as_json(value: Any) -> str:
    """A block of JSON."""
    return f"<pre>{escape(json.dumps(value, indent=1, ensure_ascii=False))}</pre>"
