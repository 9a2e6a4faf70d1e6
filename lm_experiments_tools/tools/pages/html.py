"""One HTML file with its style, its script and its data in it, light or dark as the reader's system is."""

import html
import json
from typing import Any

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>@TITLE@</title>
<style>
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --soft: #777; --line: #e4e4e7; --mark: 31, 83, 153; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --paper: #181a1f; --soft: #999; --line: #33363d; --mark: 96, 165, 250; }
}
body { font: 14px/1.5 system-ui, sans-serif; margin: 1.5rem; color: var(--ink); background: var(--paper); }
h1 { font-size: 1.1rem } h2 { font-size: .95rem; margin: 1rem 0 .3rem; color: var(--soft) }
p { margin: .4rem 0 } .soft { color: var(--soft) }
@STYLE@</style></head><body>
@BODY@<script type="application/json" id="data">@DATA@</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const byId = id => document.getElementById(id);
@SCRIPT@</script></body></html>
"""


def html_page(title: str, data: Any, *, style: str, body: str, script: str) -> str:
    """The text of a page whose script finds `data`, of plain JSON types, under that name."""
    inside = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    page = _PAGE.replace("@TITLE@", html.escape(title)).replace("@STYLE@", style).replace("@BODY@", body)
    return page.replace("@SCRIPT@", script).replace("@DATA@", inside)
