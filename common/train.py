"""Trains a small character model with PyTorch's SDPA, with ``flash_attention``, and with SDPA again.

``make train``. The three take their steps in turns, with the same data, seed and order of batches: what
differs is who computes attention and its gradients. The loss curve of ``flash_attention`` should agree with
SDPA's as SDPA's two do with each other, as SDPA adds in another order each time; the times of a step say what
it is worth. The text is that of this repository.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from common import flash_attention, jit
from common.attention import default_chapter
from common.ladder import check_at_least_one, machine
from common.measurements import FOLDER, is_current

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Settings:
    """The model and its training. Characters are bytes."""

    layers: int = 6
    heads: int = 4
    head_dim: int = 64
    context: int = 1024
    batch: int = 16
    steps: int = 300
    learning_rate: float = 1e-3
    seed: int = 0

    @property
    def width(self) -> int:
        """Of a row: heads times head_dim."""
        return self.heads * self.head_dim


SMALL = Settings(layers=1, heads=1, head_dim=64, context=96, batch=2, steps=4)  # for a CPU


class Block(nn.Module):
    """Attention and a two-layer network, each behind a norm and beside a shortcut."""

    def __init__(self, settings: Settings, attention: Attention) -> None:
        super().__init__()
        width = settings.width
        self.shape = (settings.heads, settings.head_dim)
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, context, width]."""
        batch, context, width = x.shape
        qkv = self.to_qkv(self.norms[0](x)).view(batch, context, 3, *self.shape)
        # Strided views: no chapter needs them dense. 16 bits, whatever the rest computes in.
        q, k, v = (t.transpose(1, 2) for t in qkv.bfloat16().unbind(2))
        out = self.attention(q, k, v).transpose(1, 2).reshape(batch, context, width)
        x = x + self.to_out(out.to(x.dtype))
        return x + self.network(self.norms[1](x))


class Model(nn.Module):
    """Predicts the next of 256 bytes."""

    def __init__(self, settings: Settings, attention: Attention) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, settings.width)
        self.places = nn.Embedding(settings.context, settings.width)
        self.blocks = nn.Sequential(*(Block(settings, attention) for _ in range(settings.layers)))
        self.norm, self.to_bytes = nn.LayerNorm(settings.width), nn.Linear(settings.width, 256)

    def forward(self, text: Tensor) -> Tensor:
        """text: [batch, context], bytes."""
        places = torch.arange(text.shape[1], device=text.device)
        return self.to_bytes(self.norm(self.blocks(self.bytes(text) + self.places(places))))


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by the chapter that ``flash_attention`` picks."""
    return flash_attention(q, k, v, is_causal=True)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by PyTorch, which picks a backend, too."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def corpus() -> Tensor:
    """The texts and sources of this repository, one after the other."""
    suffixes = (".md", ".py", ".cu", ".h", ".cpp")
    folders = ("chapters", "common", "tests")
    paths = [p for f in folders for p in sorted((jit.REPO_ROOT / f).rglob("*")) if p.suffix in suffixes]
    return torch.tensor(list(b"\n".join(path.read_bytes() for path in paths)), dtype=torch.uint8)


def train(settings: Settings, attention: Attention, text: Tensor) -> Iterator[tuple[float, float]]:
    """Trains step by step: the loss and the seconds of each."""
    device = text.device
    torch.manual_seed(settings.seed)
    model = Model(settings, attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    batches = torch.Generator().manual_seed(settings.seed)
    for _ in range(settings.steps):
        starts = torch.randint(len(text) - settings.context - 1, (settings.batch,), generator=batches)
        rows = torch.stack([text[s : s + settings.context + 1] for s in starts.tolist()]).long()
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(rows[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        reached = loss.item()  # waits for the device
        yield reached, time.perf_counter() - start


def compare(settings: Settings, device: torch.device) -> dict[str, object]:
    """Trains with PyTorch's attention, with ours and with PyTorch's again; what is printed and stored."""
    text = corpus().to(device)
    parameters = sum(p.numel() for p in Model(settings, sdpa).parameters())
    # Step by step in turns: what slows the machine for a while slows all three.
    attentions = {"SDPA": sdpa, "ours": ours, "SDPA again": sdpa}
    trainings = {name: train(settings, attention, text) for name, attention in attentions.items()}
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in trainings}
    for _ in tqdm(range(settings.steps), desc="training three models", disable=None):
        for name, training in trainings.items():
            steps[name].append(next(training))
    runs = {}
    for name, found in steps.items():
        losses, seconds = zip(*found, strict=True)
        usual = statistics.median(seconds[len(seconds) // 4 :])  # the first steps compile and warm up
        runs[name] = {"losses": losses, "step_seconds": usual}
    chapter = default_chapter(torch.bfloat16, settings.head_dim, device)
    return {
        "machine": machine(device),
        "settings": asdict(settings),
        "parameters": parameters,
        "chapter": chapter.name,
        "source": jit.kernel_digest(chapter.kernel),
        "runs": runs,
    }


def load(path: Path = FOLDER / "training.json") -> dict[str, Any] | None:
    """The stored training, or None if there is none or the chapter's kernel was edited since."""
    data = json.loads(path.read_text()) if path.is_file() else None
    return data if data and is_current(data["chapter"], data["source"]) else None


def main(arguments: list[str] | None = None) -> int:
    """The command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m common.train", description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if it can be used")
    parser.add_argument("--steps", type=int, help="of each of the three; default: 300; on a CPU 4")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder to write to, on a GPU")
    options = parser.parse_args(arguments)
    check_at_least_one(parser, options, "steps")
    problem = jit.cuda_problem()
    device = torch.device(options.device or ("cpu" if problem else "cuda"))
    if device.type == "cuda" and problem:
        print(f"cannot train on a GPU: {problem}", file=sys.stderr)
        return 2
    usual = Settings() if device.type == "cuda" else SMALL
    settings = Settings(**asdict(usual) | ({"steps": options.steps} if options.steps else {}))
    found = compare(settings, device)
    runs = found["runs"]
    print(f"{found['parameters']:,} parameters; ours is {found['chapter']} on {device}")
    print("step   " + "   ".join(runs))
    for step in range(0, settings.steps, max(1, settings.steps // 15)):
        print(f"{step:4}  " + "  ".join(f"{run['losses'][step]:.3f}" for run in runs.values()))
    for name, run in runs.items():
        last = statistics.mean(run["losses"][-max(1, settings.steps // 10) :])
        print(f"{name}: loss at the end {last:.3f}, {1e3 * run['step_seconds']:.1f} ms a step")
    if device.type == "cuda":
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "training.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
