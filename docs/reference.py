"""Build the API reference from docstrings, options and routes: `python docs/reference.py OUT`, or `make reference`.

Writes a page for every public class and function, every option and every HTTP route as Markdown, adds the guides of
this folder, and turns all of it into a site with Sphinx (the extra `docs`). Nothing is fetched from a network, and no
model is loaded."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import birkhoff
from birkhoff.api.options import EngineOptions, describe
from birkhoff.engine.sampling_params import SamplingParams
from birkhoff.errors import BirkhoffError
from birkhoff.server.app import openapi_document

DOCS = Path(__file__).parent
# Public names beside those of the package itself: what its functions take and return, and the tools around them.
OTHERS = {
    "Results": """output.Stream trace.TraceBatch analysis.lens.Lens analysis.attention.AttentionReadout
        analysis.patching.PatchSweep analysis.logit_attribution.LogitAttribution sae.feature_probe.Feature
        analysis.gradients.Gradients analysis.attribution.Node analysis.circuit.Circuit analysis.circuit.Edge
        hooks.plan.SiteRows hooks.results.CaptureResult capture.sinks.captured_rows.Acts
        engine.request.TokenEvent engine.request.TokenLogprob""",
    "Captures on disk": """capture.store.reader.read_request capture.store.reader.read_sharded
        capture.store.row_reader.iter_rows capture.store.entry.CaptureEntry capture.store.reader.CaptureEntries
        analysis.harvest.harvest analysis.harvest.estimate_harvest analysis.harvest.HarvestReport""",
    "Steering vectors": """steering.vector_file.SteeringVector steering.position_rows.PositionRows
        steering.position_rows.align_tokens analysis.contrast.contrast""",
    "Dictionaries": """analysis.sae_train.train_sae analysis.sae_train.TrainResult sae.train.TrainOptions
        analysis.sae_rows.LiveRows analysis.sae_rows.StoreRows analysis.sae_features.explain""",
    "Files": """weights.inspect.inspect_checkpoint weights.checkpoint.open_checkpoint
        convert.convert.convert convert.synth.synth
        validate.validate.validate""",
}
CONF = """
project, author, html_title = "Birkhoff", "The Birkhoff authors", "Birkhoff"
extensions = ["myst_parser"]
html_theme, html_show_sourcelink, html_copy_source, html_show_sphinx = "alabaster", False, False, False
html_theme_options = {"page_width": "1100px", "show_powered_by": False}
suppress_warnings = ["myst.xref_missing", "myst.header", "image.not_readable", "misc.highlighting_failure"]
"""


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class, its own and those of other classes of the package, in source order."""
    seen = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("birkhoff"):
            continue
        for name, value in vars(base).items():
            plain = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if (
                not name.startswith("_")
                and name not in seen
                and (callable(plain) or isinstance(value, property))
            ):
                seen.add(name)
                yield name, plain


def signature(name: str, value: Any) -> str:
    """The call as text, one parameter per line if it is long."""
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return f"{name}(...)"
    text = re.sub(r"<(?:object|function|class|module)[^>]*>", "...", text)
    text = re.sub(r"\bbirkhoff(?:\.\w+)*\.(?=[A-Z])|\bcollections\.abc\.|\btyping\.", "", text)
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)  # annotations are strings
    if len(text) > 90:
        inner, _, after = text[1:].rpartition(")")
        parts = re.split(r", (?=(?:\*{0,2}\w+(?::| =|,|$)|\*,|\*$|/$))", inner)
        text = "(\n    " + ",\n    ".join(parts) + ",\n)" + after
    return name + text


def text_of(value: Any) -> str:
    return inspect.getdoc(value) or ""


def page(title: str, qualified: str, value: Any) -> str:
    """One class or function."""
    parts = [f"# {title}", f"`{qualified}`"]
    if inspect.ismodule(value):
        parts.append(text_of(value))
        for name, item in vars(value).items():
            if (
                not name.startswith("_")
                and getattr(item, "__module__", "") == value.__name__
                and text_of(item)
            ):
                parts += [f"## {name}", code(signature(name, item)), text_of(item)]
                if isinstance(item, type):
                    parts += methods(item)
        return "\n\n".join(parts) + "\n"
    parts += [code(signature(title, value)), text_of(value)]
    if isinstance(value, type):
        if (
            not dataclasses.is_dataclass(value)
            and value.__init__.__doc__
            and value.__init__ is not object.__init__
        ):
            parts.append(inspect.getdoc(value.__init__) or "")
        if dataclasses.is_dataclass(value):
            parts.append(field_table(value))
        parts += methods(value)
    return "\n\n".join(part for part in parts if part) + "\n"


def methods(kind: type) -> list[str]:
    parts = []
    for name, value in members(kind):
        if isinstance(value, property):
            parts += [f"### {name}", text_of(value) or "A property."]
        else:
            parts += [f"### {name}", code(signature(name, value)), text_of(value)]
    return parts


def code(text: str) -> str:
    return f"```python\n{text}\n```"


def cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def field_table(kind: Any) -> str:
    rows = ["| field | type | default |", "| --- | --- | --- |"]
    for each in dataclasses.fields(kind):
        if not each.name.startswith("_"):
            has = each.default is not dataclasses.MISSING
            rows.append(f"| `{each.name}` | {cell(each.type)} | {f'`{cell(each.default)}`' if has else ''} |")
    return "\n".join(rows)


def classes(out: Path) -> dict[str, list[str]]:
    """A page for each public name; returns the pages by section."""
    sections: dict[str, list[str]] = {"The package": []}
    for name in birkhoff.__all__:
        value = getattr(birkhoff, name)
        (out / f"{name}.md").write_text(page(name, f"birkhoff.{name}", value))
        sections["The package"].append(name)
    for section, names in OTHERS.items():
        sections[section] = []
        for path in names.split():
            module, _, name = path.rpartition(".")
            value = getattr(importlib.import_module(f"birkhoff.{module}"), name)
            (out / f"{path}.md").write_text(page(name, f"birkhoff.{path}", value))
            sections[section].append(path)
    return sections


def errors(out: Path) -> None:
    """One page with every exception."""
    parts = ["# Errors", text_of(BirkhoffError)]
    pending: list[type[BirkhoffError]] = [BirkhoffError]
    while pending:
        kind = pending.pop(0)
        pending += sorted(kind.__subclasses__(), key=lambda each: each.__name__)
        own = kind.__doc__ if kind is not BirkhoffError else ""
        parts.append(
            f"## {kind.__name__}\n\nCode `{kind.code}`; a `{kind.__base__.__name__}`. {inspect.cleandoc(own or '')}"
        )
    (out / "errors.md").write_text("\n\n".join(parts) + "\n")


def options(out: Path) -> dict[str, list[str]]:
    """A page for each option of `load` and of `generate`."""
    sections: dict[str, list[str]] = {}
    for section, kind, used in (
        ("Options of load", EngineOptions, "birkhoff.load(model, {0}=...)"),
        ("Options of generate", SamplingParams, "engine.generate(prompt, {0}=...)"),
    ):
        sections[section] = []
        for each in dataclasses.fields(kind):
            text, default = describe(kind, each.name)
            name = f"option.{kind.__name__}.{each.name}"
            lines = [
                f"# {each.name}",
                code(used.format(each.name)),
                text,
                f"Default: {default}. Type: `{each.type}`.",
            ]
            (out / f"{name}.md").write_text("\n\n".join(lines) + "\n")
            sections[section].append(name)
    return sections


def routes(out: Path) -> list[str]:
    """A page for each HTTP route."""
    document = openapi_document()
    schemas = document.get("components", {}).get("schemas", {})
    names = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            name = f"route.{method}{re.sub(r'[^A-Za-z0-9]+', '-', path).rstrip('-') or '-root'}"
            parts = [
                f"# {method.upper()} {path}",
                f"{operation.get('summary', '')}. {operation.get('description', '')}",
            ]
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            if content:
                parts.append(body_table(content["schema"], schemas))
                if "example" in content:
                    parts.append(
                        f"```json\n{json.dumps(content['example'], indent=2, ensure_ascii=False)}\n```"
                    )
            answers = [
                f"| {status} | {cell(each.get('description', ''))} |"
                for status, each in operation["responses"].items()
            ]
            parts.append("\n".join(["| status | answer |", "| --- | --- |", *answers]))
            (out / f"{name}.md").write_text("\n\n".join(parts) + "\n")
            names.append(name)
    return names


def body_table(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    model = schemas[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema
    required = set(model.get("required", ()))
    rows = ["| field | type | |", "| --- | --- | --- |"]
    for name, each in model.get("properties", {}).items():
        note = "required" if name in required else cell(each.get("description", ""))
        rows.append(f"| `{name}` | {cell(kind_of(each))} | {note} |")
    return "\n".join(rows)


def kind_of(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[1])
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind_of(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(json.dumps(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {kind_of(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def write(source: Path) -> None:
    """Write all pages as Markdown into `source`."""
    reference = source / "reference"
    reference.mkdir(parents=True)
    sections: dict[str, list[str]] = classes(reference)
    errors(reference)
    sections["The package"].append("errors")
    sections |= options(reference)
    sections["HTTP routes"] = routes(reference)
    trees = []
    for section, names in sections.items():
        file = "index-" + re.sub(r"\W+", "-", section).lower()
        tree = "\n".join(names)
        (reference / f"{file}.md").write_text(f"# {section}\n\n```{{toctree}}\n:maxdepth: 1\n\n{tree}\n```\n")
        trees.append(f"reference/{file}")
    guides = source / "guides"
    guides.mkdir()
    for guide in sorted(DOCS.glob("*.md")):
        shutil.copy(guide, guides / guide.name)
    shutil.copytree(DOCS / "images", guides / "images")
    listed = "\n".join(f"guides/{guide.stem}" for guide in sorted(DOCS.glob("*.md")))
    (source / "index.md").write_text(
        "# Birkhoff\n\nRun, read and steer DeepSeek-V4.\n\n"
        f"```{{toctree}}\n:caption: Reference\n:maxdepth: 1\n\n{chr(10).join(trees)}\n```\n\n"
        f"```{{toctree}}\n:caption: Guides\n:maxdepth: 1\n\n{listed}\n```\n"
    )
    (source / "conf.py").write_text(CONF)


def main(arguments: list[str]) -> int:
    out = Path(arguments[0] if arguments else "site")
    try:
        from sphinx.cmd.build import build_main
    except ImportError:
        print(
            "the reference is built with Sphinx. Install it: pip install 'birkhoff-v4[docs]'", file=sys.stderr
        )
        return 1
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        write(source)
        status = build_main(["-q", "-b", "html", "-d", f"{folder}/doctrees", str(source), str(out)])
    if status == 0:
        print(f"{len(list(out.rglob('*.html')))} pages in {out}: open {out / 'index.html'}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
