"""What is handed in, read from folders and zip files, harmless, damaged and hostile ones."""

import os
import stat
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutorial.workshop.submission import MOST_BYTES, Submission, read_submission

CACHE = "shared/cache/view/contiguous.py"
NORM = "shared/ops/rmsnorm.py"
CODE = b"x = 1\n"


def lay(folder: Path, *paths: str) -> Path:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(CODE)
    return folder


def pack(file: Path, *names: str, content: bytes = CODE) -> Path:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, content)
    return file


def read(path: Path) -> Submission:
    return read_submission(path, "ada", (CACHE, NORM))


@pytest.mark.parametrize(
    "around",
    ["", "workspace/", "ada/", "ada/workspace/", "ada/mine/", "infer-workshop-03/workspace/", "a/b/workspace/"],
)
def test_a_workspace_is_found_in_folders_and_zip_files(around: str, tmp_path: Path) -> None:
    names = (f"{around}{CACHE}", f"{around}.handed/{NORM}", f"{around}shared/models/own.py", f"{around}ladder.png")
    assert read(lay(tmp_path / "folder", *names)) == Submission("ada", {CACHE: CODE})
    assert read(pack(tmp_path / "ada.zip", *names)) == Submission("ada", {CACHE: CODE})


def test_a_checkout_s_workspace_is_taken_and_not_its_reference(tmp_path: Path) -> None:
    names = (CACHE, NORM, f"workspace/{CACHE}", f"backup/{NORM}", f".venv/{NORM}", f"__MACOSX/workspace/{NORM}")
    assert set(read(lay(tmp_path / "checkout", *names)).files) == {CACHE}
    assert set(read(pack(tmp_path / "ada.zip", *names)).files) == {CACHE}


def test_separators_of_windows_are_understood(tmp_path: Path) -> None:
    assert read(pack(tmp_path / "ada.zip", r"workspace\shared\ops\rmsnorm.py")).files == {NORM: CODE}


@pytest.mark.parametrize(
    "name", ["../escape.py", "/etc/escape.py", "workspace/../../escape.py", r"..\escape.py", "C:/x"]
)
def test_a_zip_file_that_leads_out_of_itself_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    found = read(pack(tmp_path / "in" / "ada.zip", CACHE, name))
    assert found.files == {}
    assert "leads out of the zip file" in found.refused
    assert [path.name for path in tmp_path.rglob("*")] == ["in", "ada.zip"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.py"
    secret.write_text("password = 1\n")
    folder = lay(tmp_path / "ada", NORM)
    (folder / CACHE).parent.mkdir(parents=True)
    (folder / CACHE).symlink_to(secret)
    found = read(folder)
    assert set(found.files) == {NORM}
    assert "links are not followed" in found.problems[CACHE]
    elsewhere = lay(tmp_path / "elsewhere", CACHE)
    bob = tmp_path / "bob"
    (bob / "shared").mkdir(parents=True)
    (bob / "shared/cache").symlink_to(elsewhere / "shared/cache")
    assert "links are not followed" in read(bob).problems[CACHE]
    (tmp_path / "eve").mkdir()
    (tmp_path / "eve/workspace").symlink_to(elsewhere)
    assert read(tmp_path / "eve").refused == "holds no folder `shared`"


def test_a_link_in_a_zip_file_is_not_taken(tmp_path: Path) -> None:
    info = zipfile.ZipInfo(CACHE)
    info.create_system = 3
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(tmp_path / "ada.zip", "w") as archive:
        archive.writestr(info, "/etc/passwd")
    assert "links are not followed" in read(tmp_path / "ada.zip").problems[CACHE]


def test_what_is_no_ordinary_file_or_too_large_is_not_read(tmp_path: Path) -> None:
    folder = lay(tmp_path / "ada", NORM)
    (folder / CACHE).parent.mkdir(parents=True)
    os.mkfifo(folder / CACHE)  # reading it would wait forever
    (folder / NORM).write_bytes(b"#" * (MOST_BYTES + 1))
    problems = read(folder).problems
    assert problems == {CACHE: "is no regular file", NORM: "is larger than 1 MiB"}
    bomb = pack(tmp_path / "bomb.zip", NORM, content=bytes(200 * MOST_BYTES))
    assert bomb.stat().st_size < MOST_BYTES
    assert read(bomb).problems == {NORM: "is larger than 1 MiB"}


def test_a_submission_without_a_workspace_or_with_several_says_so(tmp_path: Path) -> None:
    assert read(lay(tmp_path / "empty", "notes.txt")).refused == "holds no folder `shared`"
    assert (
        "several workspaces (ada, bob)" in read(lay(tmp_path / "all", f"ada/{CACHE}", f"bob/workspace/{CACHE}")).refused
    )
    assert "neither a folder nor a zip" in read(lay(tmp_path, "thesis.pdf") / "thesis.pdf").refused


@pytest.mark.parametrize("around", ["", "workspace/", "ada/workspace/"])
@pytest.mark.parametrize("has_exercises", [True, False])
def test_bug_hunts_are_a_part_of_the_workspace_also_alone(around: str, has_exercises: bool, tmp_path: Path) -> None:
    hunts = [f"bugs/08b1/{CACHE}", f"bugs/03.1b2/{NORM}"]
    wanted = [*hunts, *[CACHE] * has_exercises]
    names = [around + name for name in wanted]
    for path in (lay(tmp_path / "folder", *names), pack(tmp_path / "ada.zip", *names)):
        assert read_submission(path, "ada", (*hunts, CACHE)) == Submission("ada", dict.fromkeys(wanted, CODE))


def test_a_missing_file_is_no_problem_and_an_encrypted_one_is(tmp_path: Path) -> None:
    assert read(lay(tmp_path / "ada", f"workspace/{NORM}")) == Submission("ada", {NORM: CODE})
    file = pack(tmp_path / "ada.zip", NORM)
    content = bytearray(file.read_bytes())
    central = content.index(b"PK\x01\x02")
    content[6] |= 1  # the flag of encryption, in both headers
    content[central + 8] |= 1
    file.write_bytes(content)
    assert "password" in read(file).problems[NORM]


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_file_whose_compressed_bytes_are_damaged_is_a_problem(method: int, tmp_path: Path) -> None:
    file = tmp_path / "ada.zip"
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr(CACHE, bytes(range(256)) * 16)
    content = bytearray(file.read_bytes())
    begin = content.index(CACHE.encode()) + len(CACHE)
    content[begin + 4 : begin + 9] = b"\xff" * 5
    file.write_bytes(content)
    assert list(read(file).problems) == [CACHE]
    assert not read(file).refused


@given(st.data())
def test_a_damaged_zip_file_raises_nothing(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    file = pack(tmp_path_factory.mktemp("zip") / "ada.zip", f"workspace/{CACHE}", f"workspace/{NORM}")
    content = bytearray(file.read_bytes())
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=5)
    ):
        content[place] = value
    file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    found = read(file)
    assert set(found.files) <= {CACHE, NORM}
    assert all(content == CODE for content in found.files.values()), "a checksum was not kept"
    assert not (found.files and found.refused)
