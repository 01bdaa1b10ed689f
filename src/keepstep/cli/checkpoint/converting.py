"""``keepstep checkpoint export`` and ``import``: from and to the forms of other libraries."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from keepstep.checkpoint import (
    catalog,
    dcp_metadata,
    importing,
    new_path,
    safetensors_export,
    verify,
)
from keepstep.checkpoint.source import ManifestSource
from keepstep.checkpoint.tensor_bytes import nbytes
from keepstep.cli.checkpoint.common import (
    Run,
    choose_one,
    errors,
    progress_bar,
    root_of,
    size,
)
from keepstep.errors import CheckpointCorrupt, UsageError

Form = Literal["dcp", "safetensors", "torch"]
_SHOWN = 20


def export_command(
    run: Run,
    to_path: Annotated[str, typer.Argument(metavar="TO", help="File or folder to make.")],
    to: Annotated[
        Form,
        typer.Option(
            "--to",
            help="dcp: a folder for torch.distributed.checkpoint.load; safetensors: the modules' "
            "tensors; torch: one file for torch.load, as a plain script saves it.",
        ),
    ],
    step: Annotated[int | None, typer.Option("--step", help="Which step; else the newest.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAME", help="Only this tracked object; may be repeated."),
    ] = None,
    strip_prefix: Annotated[
        bool,
        typer.Option("--strip-prefix", help="safetensors: leave the module's name out."),
    ] = False,
    max_shard_gib: Annotated[
        float,
        typer.Option(
            "--max-shard-gib",
            min=0.0,
            help="safetensors: a folder of files of at most so many GiB, with an index.",
        ),
    ] = 0.0,
) -> None:
    """Write a checkpoint in the form of another library. It is verified first."""
    with errors():
        if to != "safetensors" and (strip_prefix or max_shard_gib):
            raise UsageError(
                f"--strip-prefix and --max-shard-gib do not go with --to {to}",
                done="nothing was written",
                advice="leave them out, or use --to safetensors",
            )
        root, path = root_of(run), Path(to_path)
        folder = choose_one(root, step)
        new_path.check(path)  # before much is read
        writer = None if to == "safetensors" else _torch_module("torch_export")
        _verify(root, folder)
        source = ManifestSource(root, folder)
        if writer is None:
            what = _to_safetensors(source, path, only or (), strip_prefix, max_shard_gib)
        else:
            export = writer.to_torch if to == "torch" else writer.to_dcp
            what = _with_torch(source, path, only or (), export)
        typer.echo(f"{folder}: {what} written to {path}")


def _to_safetensors(
    source: ManifestSource,
    path: Path,
    only: Sequence[str],
    strip_prefix: bool,
    max_shard_gib: float,
) -> str:
    """Write the modules; returns what was written, in words."""
    names = safetensors_export.names_of(source, only, strip_prefix=strip_prefix)
    stored = source.tensors(0)
    total = sum(nbytes(stored[name]) for name in names.values())
    limit = max(1, int(max_shard_gib * (1 << 30))) if max_shard_gib else 0
    with progress_bar("writing", total) as more:
        files = safetensors_export.export(source, names, path, max_shard_bytes=limit, progress=more)
    return f"{len(names)} tensors ({size(total)})" + (f" in {len(files)} files" if files else "")


def _with_torch(
    source: ManifestSource, path: Path, only: Sequence[str], export: Callable[..., list[str]]
) -> str:
    """Write what torch reads; returns what was written, in words."""
    total = sum(nbytes(tensor) for tensor in source.tensors(0).values())
    with progress_bar("writing", total) as more:
        left_out = export(source, path, only, more)
    for sentence in left_out:
        typer.echo(f"left out: {sentence}", err=True)
    return ", ".join(only) or f"everything ({size(total)})"


def _verify(root: Path, folder: str) -> None:
    """Raise CheckpointCorrupt unless every byte is what was committed."""
    total = catalog.load(root, folder).nbytes
    with progress_bar("verifying", total) as more:
        found = verify.verify(root, folder, progress=more)
    problems = [one for one in found if one.kind != "receipt"]  # nothing is read from those
    if problems:
        first = problems[0]
        raise CheckpointCorrupt(
            f"{folder} is damaged: {first.file}: {first.detail}",
            where=str(root),
            done="nothing was written",
            advice="export another one, with --step",
        )


def import_command(
    source: Annotated[
        str, typer.Argument(metavar="FROM", help="Folder of torch.distributed.checkpoint.save.")
    ],
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run folder without checkpoints; made if missing.")
    ],
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, help="Completed steps; else as the folder says."),
    ] = None,
    run_id: Annotated[
        str, typer.Option("--run-id", help="Id of the run; else the name of its folder.")
    ] = "",
    renames: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="OLD=NEW",
            help="Replace the beginning of names; '=model.' puts it in front of all. "
            "May be repeated.",
        ),
    ] = None,
) -> None:
    """Make a folder of torch's distributed checkpoints a checkpoint of a run."""
    with errors():
        folder = Path(source)
        if not dcp_metadata.is_dcp(folder):
            raise UsageError(
                f"{source} is no folder of torch.distributed.checkpoint: it has no "
                f"{dcp_metadata.METADATA}",
                done="nothing was imported",
                advice="give the folder that dcp.save has made",
            )
        pairs = [_pair(one) for one in renames or ()]
        module = _torch_module("torch_dcp")
        typer.echo(
            f"{folder / dcp_metadata.METADATA} is a pickle: it is read as data, nothing in it is "
            "run",
            err=True,
        )
        found = module.DcpSource(folder, pairs)
        root = _import_root(Path(run))
        name = run_id or (root.parent if root.name == "checkpoints" else root).resolve().name
        number = found.likely_step() if step is None else step
        total = sum(nbytes(tensor) for tensor in found.tensors(0).values())
        with progress_bar("importing", total) as more:
            made = importing.import_source(found, root, name, number, progress=more)
        _tell(found)
        typer.echo(f"{root / made}: step {number} of run {name}, {size(total)} of tensors")


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals:
        raise UsageError(
            f"--map {text} has no =",
            done="nothing was imported",
            advice="write it as OLD=NEW, for example module.=model.",
        )
    return old, new


def _import_root(run: Path) -> Path:
    """The folder of checkpoints of a run that need not exist yet."""
    if run.exists() and not run.is_dir():
        raise UsageError(f"{run} is not a folder", done="nothing was imported")
    return run if run.name == "checkpoints" else run / "checkpoints"


def _tell(found: Any) -> None:
    """What became of what was in the folder."""
    kinds = {name: value.get("type") for name, value in found.values(0).items()}
    typer.echo(f"imported: {', '.join(f'{name} ({kind})' for name, kind in kinds.items())}")
    for number, (name, why) in enumerate(found.unused.items()):
        if number == _SHOWN:
            typer.echo(f"and {len(found.unused) - _SHOWN} more are not used", err=True)
            break
        typer.echo(f"not used: {name}: {why}", err=True)


def _torch_module(name: str) -> Any:
    """A module of ours that imports torch, which need not be installed."""
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise UsageError(
            "this command needs torch, which is not installed",
            done="nothing was written",
            advice="pip install 'keepstep[torch]'",
        ) from error
    return importlib.import_module(f"keepstep.checkpoint.{name}")
