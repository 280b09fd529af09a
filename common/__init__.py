"""FlashAttention-2's backward pass, one CUDA kernel a chapter: what the notebooks import."""

from common.attention import flash_attention
from common.chapters import (
    Chapter,
    ChapterInfo,
    Workspace,
    WorkspacePart,
    list_chapters,
    load_chapter,
    load_kernel,
)
from common.jit import BuildError
from common.reference import compare, explicit_gradients, reference_gradients
from common.tiles import count_tiles

__all__ = [
    "BuildError",
    "Chapter",
    "ChapterInfo",
    "Workspace",
    "WorkspacePart",
    "compare",
    "count_tiles",
    "explicit_gradients",
    "flash_attention",
    "list_chapters",
    "load_chapter",
    "load_kernel",
    "reference_gradients",
]
