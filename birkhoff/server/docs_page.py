"""`GET /docs`: all routes of the OpenAPI document on one HTML page without scripts, with body fields and an example.

FastAPI's own pages load their scripts from other servers, which this server's pages never do.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from typing import Any

from starlette.responses import Response

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
:root { color-scheme: light dark }
summary { cursor: pointer; padding: .3rem 0 } code, pre { font-family: ui-monospace, monospace; font-size: .9em }
pre { overflow-x: auto; padding: .6rem; border: 1px solid color-mix(in srgb, currentColor 25%, transparent) }
.method { display: inline-block; min-width: 4.5rem; font-weight: 600 }
table { border-collapse: collapse } td, th { text-align: left; padding: .1rem .8rem .1rem 0; vertical-align: top }
"""
MAX_EXAMPLE_CHARS = 1200


class DocsPage:
    """Serves the page; `document` returns the complete OpenAPI document."""

    def __init__(self, document: Callable[[], dict[str, Any]]):
        self._document = document

    async def page(self) -> Response:
        """All routes with their bodies and examples."""
        return Response(render(self._document()), media_type="text/html; charset=utf-8")


def render(document: dict[str, Any]) -> str:
    """The page of an OpenAPI document."""
    info = document["info"]
    sections = [
        _operation(path, method.upper(), operation, document)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    title = f"{html.escape(info['title'])} {html.escape(info['version'])}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title} API</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><main>'
        f"<h1>{title}: HTTP API</h1>"
        '<p>Machine-readable: <a href="/openapi.json">/openapi.json</a>. Examples are bodies that work on a server of '
        "nano; send the key, if there is one, as <code>Authorization: Bearer KEY</code>.</p>"
        + "".join(sections)
        + "</main></body></html>"
    )


def _operation(path: str, method: str, operation: dict[str, Any], document: dict[str, Any]) -> str:
    parts = [f"<p>{html.escape(operation.get('description', ''))}</p>"]
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    if content:
        parts.append(_fields(content["schema"], document))
    if "example" in content:
        parts.append(_example(path, content["example"]))
    return (
        f'<details id="{html.escape(operation["operationId"])}"><summary><span class="method">{method}</span>'
        f"<code>{html.escape(path)}</code> {html.escape(operation.get('summary', ''))}</summary>"
        f"{''.join(parts)}</details>"
    )


def _fields(schema: dict[str, Any], document: dict[str, Any]) -> str:
    model = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    required = set(model.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(_kind(field))}</td>"
        f"<td>{'required' if name in required else ''}</td></tr>"
        for name, field in model.get("properties", {}).items()
    )
    return f"<table><tr><th>field</th><th>type</th><th></th></tr>{rows}</table>" if rows else ""


def _kind(field: dict[str, Any]) -> str:
    """A short description of a field's type."""
    if "$ref" in field:
        return str(field["$ref"]).rsplit("/", 1)[1]
    if "anyOf" in field:
        kinds = [_kind(option) for option in field["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in field:
        return ", ".join(map(str, field["enum"]))
    if "const" in field:
        return str(field["const"])
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    bounds = [
        f"{name} {field[key]}" for name, key in (("from", "minimum"), ("to", "maximum")) if key in field
    ]
    return " ".join([str(field.get("type", "any")), *bounds])


def _example(path: str, body: dict[str, Any]) -> str:
    text = json.dumps(body, indent=1)
    if len(text) > MAX_EXAMPLE_CHARS:
        text = json.dumps(body)[:MAX_EXAMPLE_CHARS] + " …"
    command = f"curl -s localhost:8000{path} -H 'content-type: application/json' -d '{text}'"
    return f"<pre>{html.escape(command)}</pre>"
