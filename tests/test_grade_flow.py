"""From a release to grades: nothing leaks, what was interrupted goes on, one item is graded again."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

from common import jit
from common.grade import __main__ as student
from common.grade import catalogue, exercises, release, submissions
from common.grade.exercises import find_exercise, list_exercises
from common.grade.feedback import page, write_csv
from common.grade.find import plant
from common.grade.markers import bare, solution_lines
from common.grade.release import Assignment, LeakError, check_for_leaks, make_release
from common.grade.results import Check, Item
from common.grade.similarity import similar

pytestmark = pytest.mark.xdist_group("grade")
SEED = "flow"
ALIBI = "02_tiled/alibi"


@pytest.fixture(scope="module")
def handed_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of all chapters, for two students."""
    out = tmp_path_factory.mktemp("assignment") / "out"
    make_release(out, Assignment(SEED, ("ada", "bob")))
    return out


# ---------------------------------------------------------------- what is handed out


def test_no_line_of_any_solution_is_in_the_release(handed_out: Path) -> None:
    public = {
        bare(line)
        for p in (jit.REPO_ROOT / "chapters").glob("*/kernel.cu")
        for line in p.read_text().splitlines()
    }
    secret = set()
    for exercise in list_exercises():
        if exercise.kind != "find":
            secret |= solution_lines(exercise.marked_source, exercise.suffix)
    secret -= public
    assert len(secret) > 100
    for path in [*(handed_out / "release").rglob("*"), *(handed_out / "students").rglob("*")]:
        if path.is_file():
            lines = {
                bare(line.strip().removeprefix('"').removesuffix('\\n",'))
                for line in path.read_text(errors="replace").splitlines()
            }
            assert not lines & secret, path


def test_no_solution_file_marker_output_or_hash_is_in_the_release(handed_out: Path) -> None:
    names = [path for path in (handed_out / "release").rglob("*") if path.is_file()]
    assert not [p for p in names if p.name in ("changes.txt", "answer.py", "assignment.json")]
    assert {p.parent.name for p in names if p.name == "check.py"} >= {"derive"}
    assert not {p.parent.name for p in names if p.name == "check.py"} & {"ratio", "extra_bytes"}
    for path in names:
        text = path.read_text(errors="replace")
        assert SEED not in text.split() or path.suffix == ".py", path
        if "exercises" in path.parts:
            assert "BEGIN SOLUTION" not in text
            import re

            assert not re.search(r"\b[0-9a-f]{12,}\b", text), f"{path} has a hash"
        if path.suffix == ".ipynb":
            cells = nbformat.read(path, as_version=4).cells
            assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    with zipfile.ZipFile(handed_out / "release.zip") as archive:
        assert {Path(n).name for n in archive.namelist() if not n.endswith("/")} == {p.name for p in names}


@pytest.mark.parametrize(
    "where", ["02_tiled/02_tiled.ipynb", "02_tiled/note.md", "08_preprocess_delta/no_lse.cu"]
)
def test_a_leak_is_seen(where: str, handed_out: Path, tmp_path: Path) -> None:
    """Planted: a line of a solution, in a notebook's cell, a text and a kernel."""
    folder = tmp_path / "release"
    shutil.copytree(handed_out / "release" / "exercises", folder)
    check_for_leaks(folder, list_exercises())
    line = "s -= slope(params, blockIdx.x % params.num_heads) * abs(place - (n_start + col));"
    path = folder / where
    if path.suffix == ".ipynb":
        notebook = nbformat.read(path, as_version=4)
        notebook.cells.append(nbformat.v4.new_markdown_cell(f"see\n    {line}"))
        nbformat.write(notebook, path)
    else:
        path.write_text((path.read_text() if path.is_file() else "") + f"\n  {line}\n")
    with pytest.raises(LeakError, match="a line of the solution of 02_tiled/alibi"):
        check_for_leaks(folder, list_exercises())


def test_a_stored_output_and_a_marker_are_seen(handed_out: Path, tmp_path: Path) -> None:
    folder = tmp_path / "release"
    shutil.copytree(handed_out / "release" / "exercises" / "01_naive", folder)
    (folder / "document.cu").write_text("// END SOLUTION\n")
    with pytest.raises(LeakError, match="still has a marker"):
        check_for_leaks(folder, list_exercises())
    (folder / "document.cu").unlink()
    notebook = nbformat.read(folder / "01_naive.ipynb", as_version=4)
    cell = next(c for c in notebook.cells if c.cell_type == "code")
    cell.outputs = [nbformat.v4.new_output("stream", text="10.0")]
    nbformat.write(notebook, folder / "01_naive.ipynb")
    with pytest.raises(LeakError, match="stored outputs"):
        check_for_leaks(folder, list_exercises())


def test_students_have_variants_and_faults_of_their_own(handed_out: Path) -> None:
    texts = {
        s: (handed_out / "students" / s / "exercises" / "02_tiled" / "find_it.cu").read_text()
        for s in ("ada", "bob")
    }
    assert texts["ada"] != texts["bob"]
    for name, text in texts.items():
        assert text == plant(find_exercise(ALIBI).info, SEED, name).text
        variant = json.loads(
            (handed_out / "students" / name / "exercises" / "02_tiled" / "variant.json").read_text()
        )
        assert variant["alibi"] == find_exercise(ALIBI).variant(SEED, name)
        source = (handed_out / "students" / name / "exercises" / "02_tiled" / "alibi.cu").read_text()
        assert f"constexpr int kAlibi = {variant['alibi']['kAlibi']};" in source


def test_an_instructors_own_exercise_takes_part(tmp_path: Path) -> None:
    own = tmp_path / "mine" / "02_tiled" / "own"
    shutil.copytree(exercises.FOLDER / "02_tiled" / "alibi", own)
    (own / "kernel.cu").write_text(find_exercise(ALIBI).marked_source.replace("kAlibi", "kSlope"))
    (own / "changes.txt").unlink()
    text = (own / "exercise.toml").read_text().replace("kAlibi", "kSlope").replace("[8, 4, 6]", "[3]")
    (own / "exercise.toml").write_text(text)
    out = tmp_path / "out"
    found = make_release(out, Assignment(SEED, (), (str(tmp_path / "mine"),)), "02")
    assert "02_tiled/own" in {exercise.key for exercise in found}
    assert "constexpr int kSlope = 3;" in (out / "release" / "exercises" / "02_tiled" / "own.cu").read_text()
    assert "slope(" not in (out / "release" / "exercises" / "02_tiled" / "own.cu").read_text()


def test_a_broken_marker_makes_no_release(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    own = tmp_path / "mine" / "02_tiled" / "own"
    shutil.copytree(exercises.FOLDER / "02_tiled" / "alibi", own)
    (own / "kernel.cu").write_text(
        find_exercise(ALIBI).marked_source.replace("// END SOLUTION", "// END SOLUTON", 1)
    )
    arguments = ["--out", str(tmp_path / "out"), "--solutions", str(tmp_path / "mine"), "--chapter", "02"]
    assert release.main(arguments) == 2
    assert "no release was made: 02_tiled/own" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "named"), [("ada\nada\n", "twice"), ("../x\n", "no name for a folder"), ("a b\n", "no name")]
)
def test_a_roster_that_cannot_be_is_named(
    names: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    roster = tmp_path / "roster.csv"
    roster.write_text(names)
    assert release.main(["--out", str(tmp_path / "out"), "--students", str(roster), "--chapter", "02"]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "names no student"),
        (b"student,mail\n\n", "names no student; expected one name a line"),
        ("Zo\u00eb\n".encode("latin-1"), "is not text in UTF-8"),
    ],
)
def test_a_roster_without_names_makes_no_release(
    content: bytes, named: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    roster = tmp_path / "roster.csv"
    roster.write_bytes(content)
    assert release.main(["--out", str(tmp_path / "out"), "--students", str(roster), "--chapter", "02"]) == 2
    assert f"no release was made: {roster} {named}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- grading a folder


def hand_in(handed_out: Path, folder: Path) -> None:
    """Ada is right, Bob has two mistakes, Eve handed in what she got, Mal a link and a huge file."""
    for name in ("ada", "bob"):
        shutil.copytree(handed_out / "students" / name / "exercises" / "02_tiled", folder / name / "02_tiled")
    shutil.copytree(handed_out / "release" / "exercises", folder / "eve" / "exercises")
    for path in (folder / "eve" / "exercises").iterdir():
        if path.name != "02_tiled":
            shutil.rmtree(path)
    exercise = find_exercise(ALIBI)
    (folder / "ada" / "02_tiled" / "alibi.cu").write_text(exercise.solution(exercise.variant(SEED, "ada")))
    fault = plant(exercise.info, SEED, "ada")
    (folder / "ada" / "02_tiled" / "find_it.toml").write_text(f'line = {fault.line}\nkind = "{fault.kind}"\n')
    wrong = exercise.solution(exercise.variant(SEED, "bob")).replace(
        "acc_dk, params.softmax_scale", "acc_dk, 1.0f"
    )
    (folder / "bob" / "02_tiled" / "alibi.cu").write_text(
        wrong.replace("__syncthreads();  // sK is still read by the product", "")
    )
    for path in folder.rglob("no_o_tile.cu"):
        path.unlink()
    (folder / "mal" / "02_tiled").mkdir(parents=True)
    (folder / "mal" / "02_tiled" / "alibi.cu").symlink_to(
        exercises.FOLDER / "02_tiled" / "alibi" / "changes.txt"
    )
    (folder / "mal" / "02_tiled" / "find_it.toml").write_bytes(b"x" * (3 << 20))


def run(folder: Path, handed_out: Path, out: Path, *more: str) -> int:
    assignment = handed_out / "instructor" / "assignment.json"
    return submissions.main(
        [str(folder), "--assignment", str(assignment), "--out", str(out), "-j", "1", *more]
    )


def test_a_folder_is_graded(handed_out: Path, tmp_path: Path) -> None:
    hand_in(handed_out, tmp_path / "submissions")
    out = tmp_path / "grades"
    assert run(tmp_path / "submissions", handed_out, out) == 0
    with (out / "grades.csv").open() as file:
        rows = {row["student"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"ada", "bob", "eve", "mal"}
    assert float(rows["ada"][ALIBI]) == 10
    assert float(rows["ada"]["02_tiled/find_it"]) == 10
    assert 1 < float(rows["bob"][ALIBI]) < 10
    assert float(rows["eve"][ALIBI]) < 5
    assert float(rows["mal"]["score"]) == 0
    items = {(i["student"], i["exercise"]): i for i in json.loads((out / "grades.json").read_text())}
    mal = items["mal", ALIBI]
    assert mal["checks"][0]["seen"] == "alibi.cu was not handed in"
    assert "at most 1,048,576 are read" in items["mal", "02_tiled/find_it"]["checks"][0]["seen"]

    text = (out / "feedback" / "bob.html").read_text()
    assert "racecheck: s" in text
    assert "add_product&lt;kNumThreads&gt;(acc_dq, smem.sdS, smem.sK);" in text  # the student's own line
    assert "1 / softmax_scale" in text
    assert "A bias that does not depend on Q or K" in text  # a hint
    assert str(jit.REPO_ROOT) not in text
    assert str(tmp_path) not in text

    # Again: nothing is graded but what changed, was lost, or is asked for.
    stored = {path: path.stat().st_mtime_ns for path in (out / "items").rglob("*.json")}
    assert len(stored) == len(items)
    lost = out / "items" / "eve" / "02_tiled" / "find_it.json"
    lost.write_text("{")  # interrupted while it was written
    assert run(tmp_path / "submissions", handed_out, out, "--regrade", "mal:02_tiled/find_it") == 0
    changed = {
        p.relative_to(out / "items").as_posix() for p, t in stored.items() if p.stat().st_mtime_ns != t
    }
    assert changed == {"eve/02_tiled/find_it.json", "mal/02_tiled/find_it.json"}


def test_folders_that_are_none_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, handed_out: Path
) -> None:
    assert run(tmp_path / "nowhere", handed_out, tmp_path / "grades") == 2
    assert "is no folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run(tmp_path / "empty", handed_out, tmp_path / "grades") == 2
    assert "no folders in it" in capsys.readouterr().err
    (tmp_path / "empty" / "ada").mkdir()
    assert run(tmp_path / "empty", handed_out, tmp_path / "grades") == 2
    assert "no student of" in capsys.readouterr().err
    assert submissions.main([str(tmp_path), "--assignment", str(tmp_path / "none.json")]) == 2
    assert "make assignment writes one" in capsys.readouterr().err


@pytest.mark.parametrize("item", ["zzz", "ada:02_tiled/zzz", "zzz:02_tiled/alibi", "01_naive/derive", ""])
def test_what_cannot_be_regraded_is_named(
    item: str,
    handed_out: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submissions, "grade_all", lambda *_, **__: pytest.fail("something is graded"))
    hand_in(handed_out, tmp_path / "submissions")
    out = tmp_path / "grades"
    assert run(tmp_path / "submissions", handed_out, out, "--regrade", "ada", "--regrade", item) == 2
    said = capsys.readouterr().err
    assert f"--regrade {item!r} is nothing that is graded here" in said
    assert "ada, bob, eve, mal" in said
    assert "02_tiled/alibi, 02_tiled/no_o_tile, 02_tiled/find_it" in said
    assert not out.exists()


@pytest.mark.parametrize("below", ["", "exercises"])
def test_the_folder_of_one_student_is_not_a_class(
    below: str,
    handed_out: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One level too deep, where the folder "exercises" would be the only student, whatever it is called."""
    monkeypatch.setattr(submissions, "grade_all", lambda *_, **__: pytest.fail("something is graded"))
    submitted = tmp_path / "submissions"
    shutil.copytree(
        handed_out / "students" / "ada" / "exercises" / "02_tiled", submitted / "ada" / below / "02_tiled"
    )
    (tmp_path / "link").symlink_to(submitted / "ada")
    out = tmp_path / "grades"
    out.mkdir()
    (out / "grades.csv").write_text("the class\n")
    for folder in (submitted / "ada", tmp_path / "link"):
        assert run(folder, handed_out, out) == 2
        said = capsys.readouterr().err
        assert f"SUBMISSIONS={folder} is the folder of one student: it has " in said
        assert str(Path(below) / "02_tiled") in said
    assert [path.name for path in out.iterdir()] == ["grades.csv"]
    assert (out / "grades.csv").read_text() == "the class\n"


def test_a_student_may_be_called_like_a_chapter(handed_out: Path, tmp_path: Path) -> None:
    """Groups are numbered, too: 02_ada is a student."""
    shutil.copytree(
        handed_out / "students" / "ada" / "exercises" / "02_tiled", tmp_path / "02_ada" / "02_tiled"
    )
    assert {task.student for task in submissions.tasks_of(tmp_path, list_exercises())} == {"02_ada"}


@pytest.mark.slow
def test_a_student_works_in_an_unpacked_release(handed_out: Path, tmp_path: Path) -> None:
    """With nothing of this repository but the archive: the starter, three honest mistakes, and the solution."""
    with zipfile.ZipFile(handed_out / "release.zip") as archive:
        archive.extractall(tmp_path)
    work = tmp_path / "exercises" / "02_tiled" / "alibi.cu"
    solution = find_exercise(ALIBI).solution()
    attempts = {
        "starter": (work.read_text(), "P must be recomputed from the same scores"),
        "forgot the head": (
            solution.replace("slope(params, blockIdx.x % params.num_heads)", "slope(params, 0)"),
            "heads",
        ),
        "forgot the offset": (
            solution.replace(" + params.seqlen_k - params.seqlen_q;\n    s -=", ";\n    s -="),
            "right:",
        ),
        "typing error": (solution.replace("float(kAlibi)", "float(kAlibi"), "FAIL compiles"),
        "solution": (solution, "10.00 of 10.00 points"),
    }
    for name, (text, said) in attempts.items():
        work.write_text(text)
        command = [sys.executable, "-m", "common.grade", "02", "--exercise", "alibi", "--html", "page.html"]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={"PATH": "/usr/bin:/bin", "TORCH_EXTENSIONS_DIR": str(jit.build_root())},
        )
        assert said in done.stdout, f"{name}: {done.stdout}{done.stderr}"
        assert (done.returncode == 0) == (name == "solution")
        assert (tmp_path / "page.html").is_file()


def test_a_students_command_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert student.main(["55"]) == 2
    assert "no exercises for '55'" in capsys.readouterr().err
    assert student.main(["02", "--exercise", "nope"]) == 2
    assert "there is no exercise 'nope'" in capsys.readouterr().err
    assert student.main(["02", "--folder", str(tmp_path / "none")]) == 2
    assert "--folder says where your files are" in capsys.readouterr().err
    assert student.main(["02", "--folder", str(tmp_path)]) == 1
    assert "alibi.cu was not handed in" in capsys.readouterr().out


def test_a_file_is_no_folder_of_a_student(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("mine")
    for more in ([], ["--start"]):
        assert student.main(["02", "--folder", str(tmp_path / "file"), *more]) == 2
        assert f"{tmp_path / 'file'} is no folder; --folder says where" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "mine"


def test_a_page_is_written_where_it_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is missing is made; a place that cannot be written to is named before anything is graded."""
    arguments = ["02", "--folder", str(tmp_path), "--html"]
    assert student.main([*arguments, str(tmp_path / "not" / "yet" / "page.html")]) == 1
    assert "alibi.cu was not handed in" in (tmp_path / "not" / "yet" / "page.html").read_text()
    (tmp_path / "file").touch()
    monkeypatch.setattr(student, "grade", lambda *_: pytest.fail("something is graded"))
    for page_, why in ((tmp_path / "file" / "page.html", "File exists"), (tmp_path, "Is a directory")):
        assert student.main([*arguments, str(page_)]) == 2
        assert f"--html {page_} cannot be written: {why}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected the constants of each exercise"),
        ('{"alibi": 4}', "expected the constants of each exercise"),
        ('{"alibi": {"kAlibi": "4"}}', "expected the constants of each exercise"),
        ("\udcff", "'utf-8' codec can't decode"),
    ],
)
def test_a_broken_variant_is_named(
    text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "variant.json").write_bytes(text.encode(errors="surrogateescape"))
    monkeypatch.setattr(student, "grade", lambda *_: pytest.fail("something is graded"))
    for more in ([], ["--start"]):
        assert student.main(["02", "--folder", str(tmp_path), *more]) == 2
        said = capsys.readouterr().err
        assert f"{tmp_path / 'variant.json'} cannot be read: " in said
        assert named in said
    assert len(list(tmp_path.iterdir())) == 1


# ---------------------------------------------------------------- pages, tables, likeness


def test_a_page_escapes_what_students_write() -> None:
    item = Item(
        ALIBI,
        "<script>",
        [Check("dq", 2, 0.0, "<b>seen</b>", [1], "hint")],
        "alibi.cu",
        [(1, "<i>found</i>")],
    )
    text = page(
        "<script>x", [item], {ALIBI: find_exercise(ALIBI)}, {ALIBI: "<script>alert(1)</script>\n"}, ""
    )
    assert "<script>" not in text
    assert "<b>seen" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_a_name_is_no_formula_in_the_table(tmp_path: Path) -> None:
    write_csv(tmp_path / "grades.csv", [Item("e", "=1+1", [Check("c", 1, 1.0, "")])])
    assert (tmp_path / "grades.csv").read_text().splitlines()[1].startswith("'=1+1,1.00")


def test_a_score_is_never_rounded_up_to_all_points() -> None:
    assert Item("e", "s", [Check("c", 10, 0.99999, "")]).score == 9.99
    assert Item("e", "s", [Check("c", 10 / 3, 1.0, ""), Check("d", 20 / 3, 1.0, "")]).score == 10


def test_renaming_hides_no_copy() -> None:
    exercise = find_exercise("08_preprocess_delta/no_lse")
    solution, starter = exercise.solution(), exercise.starter()
    copied = solution.replace("row_max", "biggest").replace("lse_kernel", "mine").replace("other_sum", "o")
    other = find_exercise("08_preprocess_delta/lse_base2").solution()
    pairs = similar("e", {"ada": solution, "bob": copied, "eve": other, "idle": starter}, starter)
    assert [(pair.first, pair.second) for pair in pairs] == [("ada", "bob")]
    assert pairs[0].share > 0.95


def test_the_page_for_instructors_is_current() -> None:
    text = (exercises.FOLDER / "README.md").read_text()
    assert catalogue.render(text) == text, "run python -m common.grade.catalogue --readme"


def test_a_reader_can_start_without_a_release(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "02_tiled"
    assert student.main(["02", "--start", "--folder", str(folder)]) == 0
    assert {p.name for p in folder.iterdir()} == {
        "02_tiled.ipynb",
        "alibi.cu",
        "no_o_tile.cu",
        "find_it.cu",
        "find_it.toml",
        "variant.json",
    }
    assert student.main(["02", "--start", "--folder", str(folder)]) == 2
    assert "has all files already, and is left as it is" in capsys.readouterr().err
    fault = plant(find_exercise(ALIBI).info, "public", "")
    (folder / "find_it.toml").write_text(f'line = {fault.line}\nkind = "{fault.kind}"\n')
    assert student.main(["02", "--exercise", "find_it", "--folder", str(folder)]) == 0


def test_a_start_writes_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "02_tiled"
    folder.mkdir()
    assert student.main(["02", "--start", "--folder", str(folder)]) == 0
    assert "left as they are" not in capsys.readouterr().out
    assert len(list(folder.iterdir())) == 6
    starter = (folder / "no_o_tile.cu").read_text()
    (folder / "alibi.cu").write_text("my work")
    (folder / "no_o_tile.cu").unlink()
    (folder / "find_it.cu").unlink()
    # Not followed, whether or not it leads anywhere.
    (folder / "find_it.cu").symlink_to(tmp_path / "elsewhere")
    assert student.main(["02", "--start", "--folder", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "written: no_o_tile.cu\n" in said
    assert "left as they are: 02_tiled.ipynb, alibi.cu, find_it.cu, find_it.toml, variant.json\n" in said
    assert (folder / "alibi.cu").read_text() == "my work"
    assert (folder / "no_o_tile.cu").read_text() == starter
    assert not (tmp_path / "elsewhere").exists()


def test_a_start_keeps_the_variant_that_is_there(handed_out: Path, tmp_path: Path) -> None:
    exercise = find_exercise(ALIBI)
    constants = {"kAlibi": 6}
    assert constants != exercise.variant("", "")
    (tmp_path / "variant.json").write_text(json.dumps({"alibi": constants}))
    assert student.main(["02", "--start", "--folder", str(tmp_path)]) == 0
    assert (tmp_path / "alibi.cu").read_text() == exercise.starter(constants)


def test_a_start_that_cannot_write_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "02_tiled"
    assert student.main(["02", "--start", "--folder", str(folder)]) == 2
    assert f"{folder} cannot be written: Not a directory; --folder says where" in capsys.readouterr().err


def test_a_release_says_that_it_makes_no_files_anew(handed_out: Path) -> None:
    command = [sys.executable, "-m", "common.grade", "02", "--start"]
    done = subprocess.run(command, cwd=handed_out / "release", capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is not there, which files are made from; a release has them in release.zip" in done.stderr
    assert "Traceback" not in done.stderr
