"""What a student reads: the checks of every exercise, the findings beside the lines of their own file."""

from __future__ import annotations

import csv
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment

from common.grade.exercises import Exercise
from common.grade.results import Item

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h2 { margin-top: 2.5rem; border-top: 1px solid #ccc; padding-top: 1rem; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .35rem .6rem; vertical-align: top; border-bottom: 1px solid #eee; }
td.n { white-space: nowrap; text-align: right; } .ok { color: #1a7f37; } .bad { color: #b42318; } .part { color: #9a6700; }
.hint { color: #444; font-style: italic; } .source { background: #f6f8fa; overflow-x: auto; font: 13px/1.45 ui-monospace, monospace; padding: .5rem 0; margin: 0 0 1rem; }
.source div { white-space: pre; padding: 0 .8rem; } .source .no { color: #888; display: inline-block; width: 3.5em; user-select: none; }
.source .named { background: #fff1d6; } .source .note { white-space: normal; background: #fde8e6; color: #7a1c13; padding: .25rem .8rem .25rem 4.5em; }
.source .gap { color: #888; padding-left: 1.5em; } .small { color: #666; font-size: 14px; }
</style></head><body>
<h1>{{ title }}</h1>
<p><b>{{ "%.2f"|format(score) }}</b> of {{ "%.2f"|format(max_score) }} points.</p>
<table><tr><th>exercise</th><th>points</th><th>lost in</th></tr>
{% for entry in entries %}<tr><td><a href="#{{ entry.anchor }}">{{ entry.title }}</a></td><td class="n">{{ "%.2f"|format(entry.item.score) }} / {{ "%.2f"|format(entry.item.max_score) }}</td><td>{{ entry.item.failed|map(attribute="name")|join(", ") or "—" }}</td></tr>
{% endfor %}</table>
{% for entry in entries %}
<h2 id="{{ entry.anchor }}">{{ entry.title }}</h2>
<p>{{ entry.goal }} <span class="small">{{ entry.item.exercise }}, {{ entry.item.file }}{% if entry.item.variant %}; your variant: {% for k, v in entry.item.variant.items() %}{{ k }} = {{ v }}{{ ", " if not loop.last }}{% endfor %}{% endif %}</span></p>
<table><tr><th>check</th><th>points</th><th>what was seen</th></tr>
{% for check in entry.item.checks %}<tr><td class="{{ 'ok' if check.ok else 'part' if check.share else 'bad' }}">{{ '✓' if check.ok else '◐' if check.share else '✗' }} {{ check.name }}</td><td class="n">{{ "%.2f"|format(check.score) }} / {{ "%.2f"|format(check.points) }}</td><td>{{ check.seen }}{% if check.lines and not check.ok %} (line {{ check.lines|join(", ") }}){% endif %}{% if check.hint and not check.ok %}<br><span class="hint">{{ check.hint }}</span>{% endif %}</td></tr>
{% endfor %}</table>
{% if entry.lines %}<h3>Your file</h3><div class="source">{% for line in entry.lines %}{% if line.gap %}<div class="gap">⋮</div>{% endif %}<div{% if line.named %} class="named"{% endif %}><span class="no">{{ line.number }}</span>{{ line.text }}</div>{% for note in line.notes %}<div class="note">{{ note }}</div>{% endfor %}{% endfor %}</div>{% endif %}
{% for note in entry.elsewhere %}<p class="bad">{{ note }}</p>{% endfor %}
{% endfor %}
<p class="small">Points for being clean and for the ledger count as far as the results are right. {{ protection }}</p>
</body></html>
"""
_AROUND = 3  # lines shown above and below one that is named


def _excerpt(item: Item, source: str) -> tuple[list[dict], list[str]]:
    """The lines of a student's file around those that checks and findings name, with notes below each."""
    notes: dict[int, list[str]] = {}
    for line, text in item.findings:
        notes.setdefault(line, []).append(text)
    named = {line for check in item.failed for line in check.lines} | set(notes)
    lines = source.splitlines()
    shown = sorted({n for line in named if line > 0 for n in range(line - _AROUND, line + _AROUND + 1) if 1 <= n <= len(lines)})
    rows, before = [], 0
    for number in shown:
        rows.append(
            {"number": number, "text": lines[number - 1], "named": number in named, "notes": notes.get(number, []),
             "gap": before and number != before + 1}
        )  # fmt: skip
        before = number
    elsewhere = [text for line, texts in notes.items() if not 1 <= line <= len(lines) for text in texts]
    return rows, elsewhere


def page(title: str, items: Sequence[Item], exercises: Mapping[str, Exercise], sources: Mapping[str, str], protection: str) -> str:
    """The feedback of one student as HTML. sources: exercise → the text of the file that was graded."""
    entries = []
    for item in items:
        exercise = exercises[item.exercise]
        lines, elsewhere = _excerpt(item, sources.get(item.exercise, "")) if exercise.kind != "python" else ([], [])
        entries.append(
            {"item": item, "title": exercise.title, "goal": exercise.goal, "lines": lines, "elsewhere": elsewhere,
             "anchor": html.escape(item.exercise.replace("/", "-"))}
        )  # fmt: skip
    template = Environment(autoescape=True, trim_blocks=False).from_string(_PAGE)
    return template.render(
        title=title, entries=entries, score=sum(i.score for i in items), max_score=sum(i.max_score for i in items),
        protection=protection,
    )  # fmt: skip


def write_csv(path: Path, items: Sequence[Item]) -> None:
    """One row a student, one column an exercise, the sum last: what a learning platform imports."""
    names = sorted({item.exercise for item in items})
    students: dict[str, dict[str, Item]] = {}
    for item in items:
        students.setdefault(item.student, {})[item.exercise] = item
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["student", *names, "score", "max_score"])
        for student, of in sorted(students.items()):
            scores = [f"{of[name].score:.2f}" if name in of else "" for name in names]
            # A name that a spreadsheet would take for a formula stays a name.
            shown = f"'{student}" if student[:1] in "=+-@" else student
            total = sum(item.score for item in of.values())
            most = sum(item.max_score for item in of.values())
            writer.writerow([shown, *scores, f"{total:.2f}", f"{most:.2f}"])


def write_json(path: Path, items: Sequence[Item]) -> None:
    """Everything."""
    path.write_text(json.dumps([item.as_json() for item in items], indent=1) + "\n")
