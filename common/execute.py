"""Executes the notebooks and stores their outputs: ``make notebooks``.

Every notebook gets the same two cells at its top: a badge that opens it in Colab, and a cell that installs
the repository there. Both come from the address in ``pyproject.toml``.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import tomllib
from pathlib import Path

import nbformat
import zmq
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from tqdm import tqdm
from traitlets.config import Config

from common import jit

FOLDER = jit.REPO_ROOT / "notebooks"
SKIP = "nbval-skip"
_LIMIT = 300  # seconds a cell may take


def notebooks() -> list[Path]:
    """All notebooks, in reading order."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))


def repository() -> str:
    """Where the repository is published."""
    project = tomllib.loads((jit.REPO_ROOT / "pyproject.toml").read_text())["project"]
    return project["urls"]["Repository"]


def badge(path: Path) -> str:
    """The Markdown of a notebook's first cell."""
    place = repository().removeprefix("https://github.com/")
    link = f"https://colab.research.google.com/github/{place}/blob/main/notebooks/{path.name}"
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({link})"


def colab_cell() -> str:
    """The code of a notebook's second cell: does nothing outside of Colab, and keeps Colab's PyTorch."""
    name = repository().rsplit("/", 1)[1]
    return (
        "# On Colab: fetch the repository and the packages it needs besides PyTorch.\n"
        "import sys\n\n"
        'if "google.colab" in sys.modules:\n'
        f"    !git clone -q {repository()}.git\n"
        f"    %cd {name}/notebooks\n"
        "    !pip install -q ninja pyelftools sympy tqdm && pip install -q --no-deps -e .."
    )


def with_first_cells(notebook: NotebookNode, path: Path) -> NotebookNode:
    """The notebook with the two cells at its top brought up to date."""
    cells = [cell for cell in notebook.cells if "fa2-top" not in cell.metadata.get("tags", [])]
    top = nbformat.v4.new_markdown_cell(badge(path), metadata={"tags": ["fa2-top"]}, id="top-badge")
    code = nbformat.v4.new_code_cell(colab_cell(), metadata={"tags": ["fa2-top", SKIP]}, id="top-colab")
    notebook.cells = [top, code, *cells]
    return notebook


def is_build_message(output: NotebookNode) -> bool:
    """Whether an output says only what was built, which depends on what was built before."""
    message = r"\s*(Building .* …( [\d.]+ s)?|Waiting for .* …|[\d.]+ s)?\s*"
    return output.get("name") == "stderr" and all(re.fullmatch(message, x) for x in output.text.splitlines())


def _encryption() -> str:
    """How a kernel talks to the notebook: encrypted where ZeroMQ can, as a kernel warns where it is not."""
    return "auto" if zmq.has("curve") else "disabled"


def execute(path: Path) -> float:
    """Runs a notebook from top to bottom and stores its outputs. Returns the seconds it took."""
    notebook = with_first_cells(nbformat.read(path, as_version=4), path)
    client = NotebookClient(
        notebook,
        timeout=_LIMIT,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        coalesce_streams=True,  # one output of what a cell prints, in however many pieces it comes
        config=Config({"KernelManager": {"transport_encryption": _encryption()}}),
        shutdown_kernel="immediate",  # a second less for each notebook; nothing of a kernel outlives it
    )
    start = time.perf_counter()
    client.execute()
    seconds = time.perf_counter() - start
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if not is_build_message(output)]
        for output in cell.get("outputs", []):
            output.get("metadata", {}).pop("execution", None)
    # Not which Python it was: the outputs say so where it matters.
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    nbformat.write(notebook, path)
    return seconds


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m common.execute", description=__doc__.splitlines()[0])
    parser.add_argument("numbers", nargs="*", metavar="NN", help="which ones; default: all")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args(arguments)
    numbers = {path.name[:2] for path in notebooks()}
    if unknown := [number for number in options.numbers if number not in numbers]:
        stems = ", ".join(path.stem for path in notebooks())
        parser.error(f"NN is {unknown[0]}; expected the two digits of one of {stems}")
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif options.device == "cuda" and (problem := jit.cuda_problem()):
        print(f"cannot run on a GPU: {problem}", file=sys.stderr)
        return 2
    paths = [p for p in notebooks() if not options.numbers or p.name[:2] in options.numbers]
    failed = 0
    for path in (bar := tqdm(paths, disable=None)):
        bar.set_description(path.stem)
        try:
            print(f"{path.name}: {execute(path):.1f} s", flush=True)
        except CellExecutionError as error:
            failed += 1
            print(f"{path.name} failed:\n{error}", file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
