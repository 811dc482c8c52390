"""`birkhoff pull ORG/NAME`: download a model into the hub cache, after a memory plan made from its headers.

The plan is that of `birkhoff inspect`: the headers of all weight files are fetched first (a few megabytes) and stand
for the files, so that a checkpoint that cannot run here is reported before the download. Prints the path to stdout.
"""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from birkhoff.byte_size import format_bytes, parse_bytes
from birkhoff.cli.gpu_plan import DevicePlan, device_plan, host_lines, host_plan
from birkhoff.cli.inspect import print_report
from birkhoff.cli.options import Json, PlanContext, PlanGpuMemory, PlanRam, PlanRequests
from birkhoff.cli.terminal import ProgressCallback, print_status, progress_bar
from birkhoff.errors import BirkhoffError, CheckpointError, HubError, OptionError, quoted
from birkhoff.free_memory import free_host_bytes
from birkhoff.hf.checkpoint import family_of, read_config, runs_here
from birkhoff.hf.families import Family
from birkhoff.hf_hub import INDEX, RemoteRepo, RepoPath, cache_folder, select_files
from birkhoff.sae.releases import find_release

if TYPE_CHECKING:
    from rich.console import Console

    from birkhoff.weights.inspect import Inspection

_HEADER_START = 1 << 17  # most safetensors headers are shorter
_GGUF_STARTS = (1 << 22, 1 << 25, 1 << 28)  # a GGUF header has the tokenizer and says nowhere how long it is
_STATUS_SECONDS = 10.0


def pull(
    model: Annotated[str, typer.Argument(help="org/name on the hub, or org/name/path for a part of it.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit. \\[default: main]")] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(help="Take only files that match this pattern, such as '*.json'. May be repeated."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Leave out files that match this pattern. May be repeated.")
    ] = None,
    gguf_file: Annotated[str | None, typer.Option(help="Take this GGUF file of the repository.")] = None,
    gpu_memory: PlanGpuMemory = None,
    ram: PlanRam = None,
    context: PlanContext = None,
    requests: PlanRequests = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Download also a checkpoint whose headers have problems.")
    ] = False,
    json: Json = False,
) -> None:
    """Download a model into the hub cache, with its memory plan first; continues an interrupted download."""
    from rich.console import Console

    release = find_release(model)
    where = RepoPath.parse(model if release is None else str(release.where), revision)
    if where is None:
        raise OptionError(f"{quoted(model)} is no name on the hub, expected org/name.")
    if gguf_file is not None:
        if where.inside or include:
            raise OptionError("--gguf-file names the one file to take. Leave out the path or --include.")
        where = RepoPath(where.repo, gguf_file, where.revision)
    device_bytes = None if gpu_memory is None else parse_bytes(gpu_memory)
    host_bytes = None if ram is None else parse_bytes(ram)
    repo = RemoteRepo.open(where)
    files = _select(repo, include or (), exclude or ())
    total = sum(repo.files[file] for file in files)
    present = total - sum(repo.files[file] for file in repo.missing(files))
    print_status(
        f"{where}, commit {repo.commit[:12]}: {len(files)} files of {format_bytes(total)}, {format_bytes(present)} of "
        f"them in the cache {cache_folder()}"
    )
    plan = _plan(repo, files, device_bytes, host_bytes, context, requests)
    if not json:
        plan.print(Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty()))
    needed, free = repo.check_disk(files)
    print_status(f"{format_bytes(needed)} to download, {format_bytes(free)} free on disk")
    result: dict[str, Any] = {
        "repo": where.repo,
        "inside": where.inside,
        "revision": where.revision,
        "commit": repo.commit,
        "files": {file: repo.files[file] for file in files},
        "bytes": total,
        "download_bytes": needed,
        "free_bytes": free,
        "plan": plan.to_dict(),
        "path": None,
    }
    if plan.problems and not (force or dry_run):
        raise CheckpointError(
            f"{where} was not downloaded, because it would not load: {plan.problems[0]} "
            "Download it nevertheless with --force."
        )
    if not dry_run:
        with _byte_progress() as advance:
            path = repo.download(files, advance) / where.inside
        result["path"] = str(path)
        use = f"birkhoff chat --model {where}" if release is None else f'Sae.load("{model}")'
        print_status(f"complete. Use it by its name: {use}")
    if json:
        typer.echo(json_module.dumps(result, ensure_ascii=False))
    elif not dry_run:
        typer.echo(result["path"])
    if dry_run and plan.problems:
        raise typer.Exit(1)


def _select(repo: RemoteRepo, include: Sequence[str], exclude: Sequence[str]) -> list[str]:
    try:
        return select_files(repo, include, exclude)
    except HubError:
        choices = sorted(file for file in repo.files if file.endswith(".gguf"))
        if include or repo.where.inside or not choices:
            raise
        rows = "\n".join(f"{format_bytes(repo.files[file]):>12}  {file}" for file in choices)
        raise HubError(
            f"{repo.where.repo} holds GGUF files. Say which to take with --gguf-file:\n{rows}"
        ) from None


@dataclass(frozen=True)
class _PullPlan:
    """What the headers say. `reason`: why our engine has no plan; `broken`: the files are to blame."""

    report: Inspection | None
    device: DevicePlan | None
    reason: str
    weight_bytes: int
    broken: bool = False
    host: dict[str, Any] = field(default_factory=dict)  # the plan for a CPU

    @property
    def problems(self) -> list[str]:
        """What prevents loading."""
        if self.report is None:
            return [self.reason] if self.broken else []
        return [problem["message"] for problem in self.report.problems]

    def to_dict(self) -> dict[str, Any]:
        if self.report is None or self.device is None:
            return {"reason": self.reason, "weight_bytes": self.weight_bytes}
        plans = self.device.to_dict() | ({"host": self.host} if self.host else {})
        return {**json_module.loads(self.report.to_json()), **plans}

    def print(self, console: Console) -> None:
        if self.report is None or self.device is None:
            print_status(f"no plan of our own engine: {self.reason}")
            if self.weight_bytes:
                print_status(f"the weights take {format_bytes(self.weight_bytes)} of memory as stored")
            return
        print_report(self.report, console)
        for line in [*self.device.lines(), *(host_lines(self.host) if self.host else [])]:
            console.print(line)


def _plan(
    repo: RemoteRepo,
    files: list[str],
    device_bytes: int | None,
    host_bytes: int | None,
    context: int | None,
    requests: int,
) -> _PullPlan:
    """Inspect the headers of the weights among `files`, and plan for a GPU, or for a CPU where there is none."""
    from birkhoff.engine.speed_bounds import BUS_SPEED, DEVICE_SPEED
    from birkhoff.weights.inspect import device_memory, inspect_checkpoint

    weights = [file for file in files if file.endswith((".safetensors", ".gguf"))]
    size = sum(repo.files[file] for file in weights)
    folders = {Path(file).parent for file in weights}
    is_gguf = bool(weights) and weights[0].endswith(".gguf")
    beside = {
        name: (folder / name).as_posix()
        for folder in folders
        for name in ("config.json", INDEX)
        if (folder / name).as_posix() in files
    }
    if len(folders) != 1 or not (is_gguf or "config.json" in beside):
        return _PullPlan(None, None, "there is no checkpoint among these files.", size)
    with TemporaryDirectory(prefix="birkhoff-pull-") as folder:
        stand_in = Path(folder)
        _write_headers(repo, weights, stand_in)
        for name, file in beside.items():
            (stand_in / name).write_bytes(repo.fetch(file).read_bytes())
        path = stand_in / Path(repo.where.inside or weights[0]).name if is_gguf else stand_in
        try:
            report = inspect_checkpoint(path)
        except CheckpointError as error:
            return _PullPlan(None, None, str(error), size, broken=True)
        if any(problem["code"] in ("config", "model-unsupported") for problem in report.problems):
            try:
                if is_gguf or not runs_here(raw := read_config(stand_in)):
                    return _PullPlan(None, None, report.problems[0]["message"], size, broken=True)
                return _PullPlan(None, None, _ordinary_plan(family_of(raw), report), size)
            except BirkhoffError as error:
                return _PullPlan(None, None, str(error), size, broken=True)
        if device_bytes is None and host_bytes is None:
            gpus = [memory for device, memory in device_memory().items() if device != "host"]
            device_bytes = max(gpus, default=None)
        host = {}
        if device_bytes is None and not report.problems:
            host = host_plan(path, host_bytes or free_host_bytes(), context, requests)
        device = device_plan(report, device_bytes, context, requests, (DEVICE_SPEED, BUS_SPEED), host_bytes)
    return _PullPlan(replace(report, path=str(repo.where)), device, "", size, host=host)


def _ordinary_plan(family: Family, report: Inspection) -> str:
    """What runs a checkpoint of another architecture than V4, and how much memory its weights take."""
    sizes = ", ".join(f"{form} {format_bytes(size)}" for form, size in report.weight_bytes.items())
    return f"{family.title} runs through Transformers (docs/models.md). Memory of the weights: {sizes}."


def _write_headers(repo: RemoteRepo, weights: list[str], folder: Path) -> None:
    """Write files of the size of the weights that hold their headers and nothing else, as sparse files."""

    def write(file: str, start: bytes) -> Path:
        path = folder / Path(file).name
        with open(path, "wb") as out:
            out.write(start)
            out.truncate(repo.files[file])
        return path

    def safetensors(file: str) -> None:
        start = repo.read_start(file, _HEADER_START)
        length = 8 + int.from_bytes(start[:8], "little")
        if len(start) < length <= min(repo.files[file], 10**8):
            start = repo.read_start(file, length)
        write(file, start)

    def gguf(file: str) -> None:
        from birkhoff.weights.gguf import read_header

        for size in _GGUF_STARTS:
            path = write(file, repo.read_start(file, size))
            try:
                read_header(path)
                return
            except BirkhoffError:
                if size >= repo.files[file]:
                    return  # the inspector says what is wrong

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda file: gguf(file) if file.endswith(".gguf") else safetensors(file), weights))


@contextmanager
def _byte_progress() -> Iterator[ProgressCallback]:
    """A progress bar on a terminal, and a line every ten seconds elsewhere."""
    if sys.stderr.isatty():
        with progress_bar("downloading") as advance:
            yield advance
        return
    begun = last = time.monotonic()
    first: int | None = None

    def tell(done: int, total: int | None) -> None:
        nonlocal last, first
        now = time.monotonic()
        first = done if first is None else first
        if now - last >= _STATUS_SECONDS or done == total:
            last = now
            speed = (done - first) / max(now - begun, 1e-3)
            print_status(f"{format_bytes(done)} of {format_bytes(total or 0)}, {format_bytes(speed)}/s")

    yield tell
