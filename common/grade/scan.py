"""What a kernel file has no use for: found before anything is compiled, and named with its line.

This spares honest students a puzzle ("the grader says it crashed") and is no protection: that is the sandbox.
"""

from __future__ import annotations

import re
from pathlib import Path

ALLOWED_INCLUDES = re.compile(
    r"common/cuda/\w+\.h|cuda_runtime\.h|cuda_fp16\.h|cuda_bf16\.h"
    r"|cstdint|cstddef|cmath|cfloat|climits|limits|type_traits|utility|initializer_list|algorithm|array|string"
)
_WORDS = re.compile(
    r"\b(asm|__asm__|__asm|dlopen|dlsym|syscall|v?fork|system|popen|exec[lv]p?e?|p?exit|_exit|_Exit|quick_exit|"
    r"atexit|kill|raise|signal|sigaction|f?open|[io]?fstream|mmap|mprotect|ptrace|setjmp|longjmp|pthread_\w+|"
    r"constructor|destructor|cpu_device_\w+|grade_\w+|__tsan_\w+|__wrap_\w+)\b(?=\s*[\(<\)]|\s+\w+\s*[;\({])"
    r"|\b(torch|at|c10)(?=::)"
)


def _blanked(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def without_comments(text: str) -> str:
    """Comments and strings as spaces; every line stays where it is."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\''
    return re.sub(pattern, _blanked, text, flags=re.DOTALL)


def scan(text: str) -> list[tuple[int, str]]:
    """(line, what is wrong with it) of what a kernel may not use."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        match = re.match(r"\s*#\s*include\s*(.*)", line)
        if match is None:
            continue
        name = re.match(r'["<]([^">]+)[">]', match[1])
        if name is None or not ALLOWED_INCLUDES.fullmatch(name[1]):
            what = f"includes {name[1] if name else match[1].strip()}"
            found.append((number, f"{what}: a kernel includes only common/cuda/… and CUDA's own headers"))
    for number, line in enumerate(without_comments(text).splitlines(), start=1):
        if re.match(r"\s*#\s*include", line):
            continue
        for match in _WORDS.finditer(line):
            found.append((number, f"uses {match[0]}, which a kernel has no use for"))
    return found


def foreign_headers(dependencies: str, own: Path, allowed: list[Path]) -> list[str]:
    """Of what the compiler says a file depends on, headers of neither the system nor ``allowed``."""
    paths = [Path(name) for name in dependencies.replace("\\\n", " ").partition(":")[2].split()]
    foreign = []
    for path in paths:
        is_system = path.is_absolute() and (
            path.parts[1:3] == ("usr", "include")
            or "gcc" in path.parts
            or "clang" in path.parts
            or "c++" in path.parts
        )
        is_own = path.parent == own or not path.is_absolute()
        if not is_own and not is_system and not any(path.is_relative_to(folder) for folder in allowed):
            foreign.append(path.name)
    return foreign
