"""Project consistency: names, versions, pins, documents, examples, and no paths of a particular machine."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import birkhoff
from birkhoff.cli.verbs import app
from tests.cli.conftest import clean_environment

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "birkhoff"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ("birkhoff", "tests", "training", "examples", "docs", "bench", ".ci")
TEXTS = {".py", ".md", ".toml", ".txt", ".jsonl", ".json", ".html", ".css", ".js", "", ".yml"}


def python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
        env=clean_environment(),
    )
    assert done.returncode == 0, done.stderr
    return done


def pins(file: str) -> dict[str, str]:
    """Versions by package name; every line must be an exact pin."""
    result: dict[str, str] = {}
    for line in (ROOT / file).read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("-r "):
            result |= pins(line.removeprefix("-r "))
            continue
        match = re.fullmatch(r"([a-z0-9-]+)==([0-9][0-9a-z.]*)", line)
        assert match, f"{file}: {line!r} is not an exact pin"
        assert match[1] not in result, f"{file}: {match[1]} is pinned twice"
        result[match[1]] = match[2]
    return result


def test_the_version_is_defined_once():
    assert PROJECT["version"] == birkhoff.__version__


def test_public_names_are_complete():
    assert birkhoff.__all__ == sorted(birkhoff.__all__) and set(birkhoff._HOMES) | {"mhc", "plot"} == set(
        birkhoff.__all__
    )
    for name in birkhoff.__all__:
        assert getattr(birkhoff, name) is not None
    assert set(birkhoff.__all__) <= set(dir(birkhoff))
    with pytest.raises(AttributeError, match="'lod'"):
        birkhoff.lod  # noqa: B018
    promised = (PACKAGE / "__init__.py").read_text().split("if TYPE_CHECKING:")[1].split("__version__")[0]
    assert {line.split(" as ")[1] for line in promised.splitlines() if " as " in line} == set(
        birkhoff.__all__
    )


def test_the_core_imports_without_the_command_line_and_the_oracle():
    code = "import sys, birkhoff; birkhoff.load; print(sorted({'typer', 'rich', 'transformers'} & set(sys.modules)))"
    assert python("-c", code).stdout == "[]\n"


def test_pins_satisfy_what_the_package_accepts():
    extras = PROJECT["optional-dependencies"]
    required = {
        "requirements.txt": PROJECT["dependencies"] + extras["server"] + extras["grammar"],
        "requirements-test.txt": extras["test"] + extras["dev"],
    }
    for file, requirements in required.items():
        pinned = pins(file)
        for text in requirements:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            assert name in pinned and requirement.specifier.contains(pinned[name]), f"{file} and {text}"
    assert pins("requirements.txt")["torch"] == "2.13.0"
    make = (ROOT / "Makefile").read_text()
    assert make.index("install -q torch==2.13.0") < make.index("install -q -r requirements.txt")


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-test.txt"])
def test_the_lock_file_is_complete(file):
    """Every dependency of a pinned package is pinned too, so that an installation is reproducible."""
    pinned = pins(file)
    checked = 0
    for name, version in pinned.items():
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if distribution.version.split("+")[0] != version:
            continue
        checked += 1
        for text in distribution.requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(
                {**default_environment(), "extra": ""}
            ):
                needed = canonicalize_name(requirement.name)
                by_torch = name == "torch" and needed.startswith(
                    ("nvidia-", "triton", "cuda-")
                )  # pinned by torch itself
                assert by_torch or (needed in pinned and requirement.specifier.contains(pinned[needed])), (
                    name,
                    text,
                )
    assert checked > len(pinned) // 2, "this environment was not installed from the lock file"


def test_the_readme_opens_with_the_two_commands_and_its_snippet_runs(tmp_path):
    text = (ROOT / "README.md").read_text()
    assert text.index("make demo") < text.index("make test") < 200 and len(text.splitlines()) <= 70
    shell = next(line for line in text.splitlines() if line.startswith("birkhoff generate"))
    words = shlex.split(shell, comments=True)[1:]
    assert python("-m", "birkhoff", *words, "--max-tokens", "8", cwd=tmp_path).stdout.strip()
    snippet = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert snippet
    assert "torch.Size([" in python("-c", snippet[1], cwd=tmp_path).stdout


def verbs() -> set[str]:
    return {command.name or command.callback.__name__ for command in app.registered_commands} | {
        group.name for group in app.registered_groups
    }


def test_documents_list_every_verb():
    readme, cli = (ROOT / "README.md").read_text(), (ROOT / "docs/cli.md").read_text()
    row = next(line for line in readme.splitlines() if line.startswith("| `birkhoff "))
    built, planned = row.strip("|").split("|")
    assert set(re.findall(r"[a-z-]+", built.replace("birkhoff", ""))) == verbs()
    assert not set(re.findall(r"[a-z-]+", planned)) & verbs()
    assert all(f"`{verb}" in cli for verb in verbs())


def test_the_map_names_every_room():
    """Every room of the package has a row, every row a room, and the file to read first exists."""
    table = (ROOT / "docs/map.md").read_text()
    rows = dict(re.findall(r"^\| `birkhoff/([\w.]+)` \|.*\|(.*)\|$", table, re.MULTILINE))
    rooms = {path.name for path in PACKAGE.iterdir() if not path.name.startswith("__")}
    assert set(rows) == rooms - {"models"}  # data, not a room
    for room, first in rows.items():
        word = re.search(r"`([\w./]+)`", first)
        if word and (PACKAGE / room).is_dir():
            assert (PACKAGE / room / word[1]).exists(), f"{room}/{word[1]}"
        elif word:
            assert f"class {word[1]}" in (PACKAGE / room).read_text(), first


def test_functions_named_in_the_map_exist():
    """Every `file:function` of docs/map.md is defined there."""
    steps = re.findall(r"`([\w/]+\.py):([\w.]+)`", (ROOT / "docs/map.md").read_text())
    assert len(steps) > 30
    for file, name in steps:
        body = ast.parse((PACKAGE / file).read_text()).body
        for part in name.split("."):
            kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            result = [node for node in body if isinstance(node, kinds) and node.name == part]
            assert result, f"{file}:{name}"
            body = result[0].body


def test_every_module_has_a_docstring():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert not text.strip() or text.startswith('"""'), path
        assert len(text.splitlines()) <= 650, path


def test_the_index_of_a_room_names_only_modules_that_exist():
    shared = {"reference.py", "cpu.py", "prefill.py", "decode.py"}  # of the folders in kernels/
    named = 0
    for path in PACKAGE.rglob("__init__.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        for name in re.findall(r"`([\w/]+\.py)`", docstring):
            named += 1
            known = (
                (path.parent / name).exists()
                or (PACKAGE / name).exists()
                or (PACKAGE / "kernels" / name).exists()
            )
            assert known or name in shared, f"{path.relative_to(ROOT)}: {name}"
    assert named > 100


def tracked() -> list[Path]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    return [p for p in files if p.suffix in TEXTS and "__pycache__" not in p.parts and p.name != ".git"]


def test_no_file_contains_machine_paths_or_a_package_index():
    """The patterns are concatenated so that this file does not match them."""
    folders = "|".join(("work", "root", "home", "Users", "mnt"))
    machine = re.compile(rf"(?<![\w.~$/}}])/(?:{folders})/")
    index = re.compile(
        "|".join(("py" + "pi", "python" + "hosted", "index" + "-url", "find" + "-links")), re.IGNORECASE
    )
    for path in tracked():
        for line_number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            assert not machine.search(line) and not index.search(line), (
                f"{path.relative_to(ROOT)}:{line_number}: {line}"
            )


def test_make_has_its_targets_and_ci_runs_the_same_command():
    make = (ROOT / "Makefile").read_text()
    for target in ("demo", "serve", "test", "test-all", "check", "bench", "clean"):
        assert re.search(rf"^{target}:", make, re.MULTILINE), target
    ci = ROOT / ".ci/run"
    assert os.access(ci, os.X_OK) and re.search(r"^(time )?make test$", ci.read_text(), re.MULTILINE)
    if shutil.which("make"):
        shown = subprocess.run(["make", "-n", "test-all"], capture_output=True, text=True, cwd=ROOT)
        assert shown.returncode == 0 and "BIRKHOFF_FULL=1" in shown.stdout
        refused = subprocess.run(["make", "-n", "no-such-target"], capture_output=True, text=True, cwd=ROOT)
        assert refused.returncode == 2


def test_the_licence_is_complete():
    text = (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0" and "Version 2.0, January 2004" in text
    assert text.count("\n") == 202 and "END OF TERMS AND CONDITIONS" in text


def test_the_tour_runs_and_prints_every_section(tmp_path):
    done = python(str(ROOT / "examples/tour.py"), str(tmp_path / "out"))
    for words in (
        "1  The model",
        "csa layers",
        "2  An answer",
        "from 3",
        "write",
        "stream 3",
        "7  Experts of the last token",
        "8  A circuit: how nano recalls a name",
        "post_attn of layer 6",
        "9  Dictionaries over several sites",
        "A transcoder: 512 features",
        "streams.safetensors",
        "What to try next",
    ):
        assert words in done.stdout
    assert (tmp_path / "out/streams.safetensors").stat().st_size > 1e6


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pytest.importorskip("hatchling", reason="needs the build backend of requirements.txt")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(PACKAGE, source / "birkhoff", ignore=shutil.ignore_patterns("__pycache__"))
    python("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist"), cwd=source)
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_a_wheel_contains_the_package_and_its_command(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry = next(name for name in names if name.endswith("entry_points.txt"))
        assert "birkhoff = birkhoff.cli.main:main" in archive.read(entry).decode()
    modules = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py")}
    assert modules <= set(names) and any(name.endswith("LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "training"))]


@pytest.fixture(scope="module")
def installed(tmp_path_factory, wheel) -> Path:
    """A fresh environment with the wheel; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(str(Path(pytest.__file__).parents[1]) + "\n")
    interpreter = str(folder / "venv" / "bin" / "python")
    python("-m", "pip", "--python", interpreter, "install", "-q", "--no-deps", "--no-index", str(wheel))
    return folder / "venv"


def run_installed(venv: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment, without this checkout on its path."""
    environment = {name: value for name, value in clean_environment().items() if name != "PYTHONPATH"}
    command = [venv / "bin" / program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=venv, timeout=300, env=environment)


def test_an_installed_wheel_generates_with_compiled_kernels(installed):
    done = run_installed(
        installed, "birkhoff", "generate", "Once upon a time", "--max-tokens", "4", "--seed", "1"
    )
    assert done.returncode == 0 and done.stdout and "cpu kernels" in done.stderr, done.stderr
    where = run_installed(installed, "python", "-c", "import birkhoff; print(birkhoff.__file__)")
    assert str(installed) in where.stdout


def test_the_other_project_s_package_is_noticed(installed):
    """Its files next to ours are reported; once it has replaced our package's first file, the command still says so."""
    (package,) = (installed / "lib").glob("python*/site-packages/birkhoff")
    other = package.parent / "birkhoff-0.0.5.dist-info"
    other.mkdir()
    done = run_installed(installed, "birkhoff", "--version")
    assert (
        done.returncode == 0 and "birkhoff-0.0.5" in done.stderr and "pip uninstall birkhoff" in done.stderr
    )
    ours = (package / "__init__.py").read_text()
    (package / "__init__.py").write_text("")
    done = run_installed(installed, "birkhoff", "--version")
    (package / "__init__.py").write_text(ours)
    other.rmdir()
    assert done.returncode == 1 and "pip uninstall birkhoff" in done.stderr and "Traceback" not in done.stderr
    assert not run_installed(installed, "birkhoff", "--version").stderr


def test_without_numba_one_line_says_what_to_install(installed):
    code = (
        "import sys, importlib.util; sys.modules['numba'] = None; importlib.util.find_spec = lambda name: None\n"
        "from birkhoff.cli.main import run; run(['generate', 'hi', '--max-tokens', '1'])"
    )
    done = run_installed(installed, "python", "-c", code)
    assert done.returncode == 0 and "reference kernels" in done.stderr
    assert len([line for line in done.stderr.splitlines() if "pip install numba" in line]) == 1


def test_hints_name_this_distribution_and_its_extras():
    """`pip install birkhoff` would install another project's package."""
    extras = set(PROJECT["optional-dependencies"])
    found = 0
    for path in [*PACKAGE.rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for name, extra in re.findall(
            r"(?:pip install|install) ['\"]?(birkhoff[\w-]*|\.)\[(\w+)\]", path.read_text()
        ):
            found += 1
            assert name in ("birkhoff-v4", ".") and extra in extras, (path, name, extra)
        assert not re.search(r"pip install ['\"]?birkhoff(?!-v4)", path.read_text()), path
    assert found > 4
    table = (ROOT / "docs" / "install.md").read_text()
    assert all(f"`{extra}`" in table for extra in extras)
