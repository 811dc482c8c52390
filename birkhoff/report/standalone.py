"""One HTML file with the page's panels, its style and its data inside.

    standalone_html({"panels": ["chat", "heatmap"], "texts": [{"title": None, "state": {...}}]})

The scripts of `birkhoff/web` are modules that import each other by name; a file without a server cannot load modules,
so those that `viewer.js` needs are joined into one script: each becomes a function that returns its exports, in the
order of their imports. Nothing is minified. The file's content security policy forbids every network access.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "web"
ENTRY = "viewer"
DATA = "null /* data */"
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_STYLE_LINK = re.compile(r'<link rel="stylesheet" href="assets/([\w.]+)" />')
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function\*? ?|class |const |let )(\w+)", re.MULTILINE)

_HTML = """<!doctype html>
<html lang="en">
  <head>
    <meta charset="utf-8" />
    <meta name="viewport" content="width=device-width, initial-scale=1" />
    <meta name="color-scheme" content="light dark" />
    <meta http-equiv="content-security-policy" content="{policy}" />
    <title>Birkhoff</title>
    <style>
{style}
    </style>
  </head>
  <body>
    <header class="top">
      <div id="title" class="model"></div>
      <div class="top-tools"><button type="button" id="theme">Theme</button></div>
    </header>
    <main></main>
    <div id="tip" class="tip" role="tooltip" hidden></div>
    <div id="toast" class="toast" role="status" aria-live="polite"></div>
    <script>
"use strict";
{script}
${entry}.showSaved({data});
    </script>
  </body>
</html>
"""


def standalone_html(data: dict[str, Any] | None = None) -> str:
    """The file that shows `data`: `panels` (names), `texts` (each with `title` and `state`), `title` and `facts`.

    Without data it is a template: the page replaces `DATA` by the data of a view."""
    text = DATA if data is None else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return _HTML.format(
        policy=POLICY,
        style=joined_styles(),
        script=joined_scripts(),
        entry=ENTRY,
        data=text if data is None else text.replace("<", "\\u003c").replace("\u2028", "\\u2028"),
    )


def joined_styles(folder: Path = FOLDER) -> str:
    """The style sheets of the page as one, in the order in which `index.html` links them."""
    names = _STYLE_LINK.findall((folder / "index.html").read_text(encoding="utf-8"))
    return "".join((folder / name).read_text(encoding="utf-8") for name in names)


def joined_scripts(entry: str = ENTRY, folder: Path = FOLDER) -> str:
    """The modules that `entry` needs, and itself, as one script."""
    done: dict[str, str] = {}

    def add(name: str, above: tuple[str, ...]) -> None:
        if name in done:
            return
        if name in above:
            raise ValueError(f"modules import each other in a circle: {' -> '.join((*above, name))}.")
        source = (folder / f"{name}.js").read_text(encoding="utf-8")
        for needed in _IMPORT.finditer(source):
            add(needed[2], (*above, name))
        done[name] = _as_function(name, source)

    add(entry, ())
    return "\n".join(done.values())


def _as_function(name: str, source: str) -> str:
    """A module as a constant `$name` that holds its exports."""

    def bound(match: re.Match[str]) -> str:
        names = " ".join(match[1].split()).rstrip(",").replace(" as ", ": ")
        return f"const {{ {names} }} = ${match[2]};\n"

    exports = [match[2] for match in _EXPORT.finditer(source)]
    body = _EXPORT.sub(r"\1\2", _IMPORT.sub(bound, source))
    left = re.search(r"^(import .*['\"];|export .*)$", body, re.MULTILINE)
    if left is not None:
        raise ValueError(f"{name}.js: this form is not joined: {left[0]}")
    return f"const ${name} = (() => {{\n{body}return {{ {', '.join(exports)} }};\n}})();\n"
