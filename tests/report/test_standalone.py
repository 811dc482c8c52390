"""Files of views: modules joined into one script, data inside, nothing from elsewhere."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from birkhoff.report.standalone import DATA, FOLDER, joined_scripts, joined_styles, standalone_html


def test_the_file_holds_style_scripts_and_data_and_refers_to_nothing():
    data = {"panels": ["chat"], "texts": [], "title": "</script><b>“a”\u2028"}
    html = standalone_html(data)
    assert html.count("</script>") == 1, "data cannot end the script"
    assert "http://" not in html.replace("http://www.w3.org", "") and "https://" not in html
    assert not re.search(r"""\b(src|href)=["'](?!\$|")""", html.split("<script>")[0])
    stored = re.search(r"showSaved\((.*)\);", html)[1]
    assert json.loads(stored) == data
    assert standalone_html().count(DATA) == 1


def test_modules_are_joined_in_the_order_of_their_imports(tmp_path):
    (tmp_path / "a.js").write_text('import { b, c as d } from "./b.js";\nexport const a = b + d;\n')
    (tmp_path / "b.js").write_text(
        'import { z } from "./z.js";\nexport const b = z;\nexport function c() {}\n'
    )
    (tmp_path / "z.js").write_text("export const z = 1;\n")
    joined = joined_scripts("a", tmp_path)
    assert [joined.index(f"const ${name} =") for name in "zba"] == sorted(
        joined.index(f"const ${n} =") for n in "zba"
    )
    assert "const { b, c: d } = $b;" in joined and "return { b, c };" in joined and "import" not in joined


def test_styles_are_joined_in_the_order_of_their_links(tmp_path):
    (tmp_path / "index.html").write_text(
        '<link rel="stylesheet" href="assets/b.css" />\n<link rel="stylesheet" href="assets/a.css" />\n'
    )
    (tmp_path / "a.css").write_text("a {}\n")
    (tmp_path / "b.css").write_text("b {}\n")
    assert joined_styles(tmp_path) == "b {}\na {}\n"


def test_every_style_sheet_of_the_page_is_linked():
    joined = joined_styles()
    sheets = [file.read_text() for file in FOLDER.glob("*.css")]
    assert sheets and all(sheet in joined for sheet in sheets)
    assert sum(map(len, sheets)) == len(joined), "each once"


@pytest.mark.parametrize(
    "source", ['import x from "./b.js";\n', "export default 3;\n", 'export * from "./b.js";\n']
)
def test_forms_that_are_not_joined_are_refused(tmp_path, source):
    (tmp_path / "a.js").write_text(source)
    with pytest.raises(ValueError, match="not joined"):
        joined_scripts("a", tmp_path)


def test_circles_are_refused(tmp_path):
    (tmp_path / "a.js").write_text('import { b } from "./b.js";\n')
    (tmp_path / "b.js").write_text('import { a } from "./a.js";\n')
    with pytest.raises(ValueError, match="a -> b -> a"):
        joined_scripts("a", tmp_path)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_joined_script_is_valid(tmp_path):
    (tmp_path / "all.js").write_text(joined_scripts())
    subprocess.run(["node", "--check", tmp_path / "all.js"], check=True, timeout=300)
