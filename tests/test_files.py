"""Files and folders are whole or absent, whatever fails on the way."""

import errno
import fcntl
import json
import os
import shutil
import signal
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

import biphase.files as files
from biphase.console import duration
from biphase.errors import BusyError, InputError, StoppedError
from biphase.files import (
    MARK,
    content_hash,
    file_hash,
    is_locked,
    locked,
    make_once,
    new_file,
    own_folder,
    parse_json,
    parse_yaml,
    read_json,
    read_json_as,
    reading,
    refuse_damaged,
    remove_folder,
    sweep_parts,
    whole_folder,
    write_json,
    write_text,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a", "old")

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, failing, full)
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "a" / "b") as folder:
        (folder / "x").write_text("1")
        assert not (tmp_path / "a" / "b").exists()
    assert names(tmp_path / "a") == ["b"]
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "a" / "b") as folder:
        (folder / "x").write_text("2")
        1 / 0  # noqa: B018
    assert names(tmp_path / "a") == ["b"]
    assert (tmp_path / "a" / "b" / "x").read_text() == "1"
    with whole_folder(tmp_path / "a" / "b") as folder:
        (folder / "y").write_text("3")
    assert names(tmp_path / "a" / "b") == ["y"]


def test_a_stop_between_two_names_loses_neither_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old folder is moved aside before the new one takes its name: it comes back, at once or, after a kill, with
    the next call."""
    replace = os.replace

    def stop(source: Path, target: Path) -> None:
        if source == tmp_path / ".a.part":
            raise KeyboardInterrupt
        replace(source, target)

    (tmp_path / "a" / "x").mkdir(parents=True)
    monkeypatch.setattr(files.os, "replace", stop)
    with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "a"):
        pass
    assert names(tmp_path) == ["a"] and names(tmp_path / "a") == ["x"]
    (tmp_path / "a").rename(tmp_path / ".a.old.part")
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "a"):
        1 / 0  # noqa: B018
    assert names(tmp_path) == ["a"] and names(tmp_path / "a") == ["x"]


def test_two_at_one_place_do_not_mix(tmp_path: Path) -> None:
    """The second is told, whatever it writes; a killed one holds nothing."""
    (tmp_path / ".a.part" / "killed").mkdir(parents=True)
    with whole_folder(tmp_path / "a") as part:
        assert names(part) == []
        (part / "x").touch()
        for writing in (whole_folder(tmp_path / "a"), own_folder(tmp_path / "a", "report")):
            with pytest.raises(BusyError, match=r"another process is writing .*/a: wait for it, or give"), writing:
                pytest.fail("it is taken")
        assert names(part) == ["x"]
    assert names(tmp_path) == ["a"]


def test_two_at_one_place_do_not_mix_where_folders_have_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS locks files, but answers EBADF for a folder."""
    lock = fcntl.flock

    def lock_files(descriptor: int, how: int) -> None:
        if stat.S_ISDIR(os.fstat(getattr(descriptor, "fileno", lambda: descriptor)()).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        lock(descriptor, how)

    monkeypatch.setattr(files.fcntl, "flock", lock_files)
    test_two_at_one_place_do_not_mix(tmp_path)


def test_a_new_file_replaces_none(tmp_path: Path) -> None:
    """Two writers ask at the same time whether the file exists; the second is told, and the first one's file stays."""
    with new_file(tmp_path / "a.csv") as first:
        first.write("first")
        with pytest.raises(InputError, match=r"another process is writing .*a\.csv"), new_file(tmp_path / "a.csv"):
            pytest.fail("it is taken")
    with pytest.raises(InputError, match=r"a\.csv already exists"), new_file(tmp_path / "a.csv"):
        pytest.fail("it is taken")
    assert (tmp_path / "a.csv").read_text() == "first"
    other = tmp_path / f"b-{os.getpid()}.csv"
    told = pytest.raises(InputError, match=f"by another program meanwhile, and stays; {other} is the new")
    with told, new_file(tmp_path / "b.csv") as second:
        second.write("ours")
        (tmp_path / "b.csv").write_text("theirs")
    assert (tmp_path / "b.csv").read_text() == "theirs" and other.read_text() == "ours"
    assert names(tmp_path) == ["a.csv", other.name, "b.csv"]


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / ".b.part").mkdir()
    (tmp_path / ".b.part" / "junk").write_text("")
    with whole_folder(tmp_path / "b") as folder:
        assert not names(folder)
    assert names(tmp_path) == ["b"]


def test_json_that_cannot_be_read(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"größe": [1, 2.5]})
    assert read_json(tmp_path / "a.json") == {"größe": [1, 2.5]}
    with pytest.raises(InputError, match=r"b\.json does not exist"):
        read_json(tmp_path / "b.json")
    for content in (b'{"a": 1', b"\xff", b""):
        (tmp_path / "b.json").write_bytes(content)
        with pytest.raises(InputError, match=r"b\.json is not valid JSON"):
            read_json(tmp_path / "b.json")


def test_json_of_a_known_form(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": [1, "x"]})
    assert read_json_as(tmp_path / "a.json", dict[str, list[Any]]) == {"a": [1, "x"]}
    with pytest.raises(InputError, match=r"a\.json is damaged \(a\.1: .*integer.*\); make it anew$"):
        read_json_as(tmp_path / "a.json", dict[str, list[int]], remedy="make it anew")
    with pytest.raises(InputError, match=r"b\.json does not exist"):
        read_json_as(tmp_path / "b.json", dict[str, Any])


def test_hashes_are_of_content(tmp_path: Path) -> None:
    assert content_hash({"a": 1, "b": [2]}) == content_hash({"b": [2], "a": 1})
    assert content_hash({"a": 1}) != content_hash({"a": 1.5})
    (tmp_path / "a").write_bytes(b"abc")  # FIPS 180-2, B.1
    assert file_hash(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_lock_is_held_by_one_and_never_written_through_a_link(tmp_path: Path) -> None:
    with locked(tmp_path / "lock"), pytest.raises(BusyError), locked(tmp_path / "lock"):
        pass
    with locked(tmp_path / "lock"):  # free again
        assert is_locked(tmp_path / "lock")
    with (tmp_path / "lock").open() as asked:  # by another process, at this moment
        fcntl.flock(asked, fcntl.LOCK_SH)
        assert not is_locked(tmp_path / "lock")
    assert not is_locked(tmp_path / "nothing") and not (tmp_path / "nothing").exists()
    (tmp_path / "theirs").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="link"), locked(tmp_path / "link"):
        pass
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".locks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"\.locks is a link"), locked(tmp_path / ".locks" / "cell"):
        pass
    assert names(tmp_path / "elsewhere") == []
    (tmp_path / ".made.part").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(InputError, match=r"\.made\.part is a link"), whole_folder(tmp_path / "made"):
        pass
    assert (tmp_path / "theirs").read_text() == "kept"


def test_a_lock_whose_folder_is_removed_at_this_moment_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def remove(number: int, _: int) -> None:
        opened.append(number)
        shutil.rmtree(tmp_path / "run")

    monkeypatch.setattr(files.fcntl, "flock", remove)
    with pytest.raises(BusyError, match="in use"), locked(tmp_path / "run" / ".lock", busy="run is in use"):
        pass

    def refuse(number: int, _: int) -> None:
        opened.append(number)
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    for write in (lambda: locked(tmp_path / "lock").__enter__(), lambda: write_json(tmp_path / "a.json", 1)):
        with pytest.raises(OSError, match=r"no locks on its file system \(No locks available\)") as caught:
            write()
        assert str(caught.value.filename).startswith(str(tmp_path)) and names(tmp_path) == []
    for number in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)


def test_a_folder_of_ours_is_replaced(tmp_path: Path) -> None:
    for text in ("one", "two"):
        with own_folder(tmp_path / "made", "report") as part:
            (part / "inner").mkdir()
            write_text(part / "inner" / "page", text)
    assert (tmp_path / "made" / "inner" / "page").read_text() == "two"
    (tmp_path / "empty").mkdir()
    with own_folder(tmp_path / "empty", "report") as part:
        write_text(part / "page", "three")
    assert names(tmp_path / "empty") == [MARK, "page"]


@pytest.mark.parametrize("spoil", ["added", "changed", "linked", "mark", "kind", "deeper"])
def test_nothing_that_we_did_not_write_is_removed(spoil: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    with own_folder(made, "report") as part:
        write_text(part / "page", "one")
    match spoil:
        case "added":
            write_text(made / "notes", "mine")
        case "changed":
            write_text(made / "page", "mine")
        case "linked":
            (made / "page").rename(tmp_path / "page")
            (made / "page").symlink_to(tmp_path / "page")
        case "mark":
            (made / MARK).unlink()
        case "kind":
            write_json(made / MARK, {"biphase": "tokenizer", "files": {"page": file_hash(made / "page")}})
        case "deeper":
            (made / "inner").mkdir()
            write_text(made / "inner" / "page", "mine")
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="give a new or an empty folder"), own_folder(made, "report"):
        pytest.fail("nothing may be begun")
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before
    assert names(tmp_path) == (["made", "page"] if spoil == "linked" else ["made"])


@pytest.mark.parametrize("is_new", [True, False])
def test_what_comes_into_the_place_meanwhile_stays(is_new: bool, tmp_path: Path) -> None:
    """As does the new folder, under another name."""
    made, other = tmp_path / "made", tmp_path / f"made-{os.getpid()}"
    if not is_new:
        with own_folder(made, "report") as part:
            write_text(part / "page", "one")
    told = pytest.raises(InputError, match=f"^{other} is the new report, because its place has other files by now: ")
    with told, own_folder(made, "report") as part:
        write_text(part / "page", "two")
        made.mkdir(exist_ok=True)
        write_text(made / "notes", "mine")
    assert names(tmp_path) == ["made", other.name]
    assert (made / "notes").read_text() == "mine" and (other / "page").read_text() == "two"
    refuse_damaged(other, "make it again")


def test_a_file_is_never_replaced_by_a_folder(tmp_path: Path) -> None:
    write_text(tmp_path / "made", "mine")
    with pytest.raises(InputError, match="made is a file"), own_folder(tmp_path / "made", "report"):
        pytest.fail("nothing may be begun")
    assert (tmp_path / "made").read_text() == "mine"


def test_what_a_library_raises_over_a_file_names_the_file(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    path = tmp_path / "x"
    for content in (b"", b"\xff" * 99):
        path.write_bytes(content)
        with (
            pytest.raises(InputError, match=r"x cannot be read \(.+\); ask for it again"),
            reading(path, "ask for it again"),
        ):
            load_file(path)
    with pytest.raises(InputError, match="x cannot be read"), reading(path):
        path.read_bytes().decode()
    with pytest.raises(InputError, match="y does not exist"), reading(tmp_path / "y"):
        (tmp_path / "y").read_text()
    with pytest.raises(InputError, match=r"cannot be read \(Is a directory\)"), reading(tmp_path):
        tmp_path.read_text()
    with pytest.raises(TypeError), reading(path):  # raised by a line of biphase, so a mistake of ours
        duration(None)  # type: ignore[arg-type]


def test_a_stop_while_a_file_is_read_is_no_damage(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException

    for stop in (StoppedError(), SignalException("asked to end", signal.SIGTERM)):
        with pytest.raises(type(stop)), reading(tmp_path):
            raise stop


def test_a_full_disk_is_one_in_the_words_of_every_library(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as caught, whole_folder(tmp_path / "x"):
        raise Exception("Error while serializing: I/O error: No space left on device (os error 28)")
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_sweeping_removes_only_what_was_being_written(tmp_path: Path) -> None:
    for name in (".5.part", ".x.json.12.part", ".7.old.part", "a.part", ".lock", "5"):
        (tmp_path / name).mkdir()
    (tmp_path / ".b.1.part").write_text("")
    (tmp_path / ".c.part").symlink_to(tmp_path / "5")
    sweep_parts(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "5", "a.part"]


def test_a_kill_while_a_folder_is_removed_leaves_only_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    (tmp_path / "5" / "model").mkdir(parents=True)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    remove_folder(tmp_path / "5")
    assert [path.name for path in tmp_path.iterdir()] == [".5.part"]


def test_a_text_whose_writer_was_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / ".a.json.part").write_text("half of a long text that somebody was writing")
    write_text(tmp_path / "a.json", "1")
    assert (names(tmp_path), (tmp_path / "a.json").read_text()) == (["a.json"], "1")


@pytest.mark.parametrize("record", ["README.md", "index.json", "config.json"])
def test_a_folder_of_ours_without_its_mark_is_told_once(
    record: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others' folders have none, and nothing is said of them."""
    (tmp_path / record).write_text("---\ntags:\n- bert\n- biphase\nlicense: mit\n---\n# A model\n")
    for _ in range(2):
        refuse_damaged(tmp_path, "make it again")
    lacks = f"{tmp_path} lacks .biphase.json, the file with its hashes, so that damage goes unnoticed"
    told = f"{lacks}; copy the folder again, with its hidden files\n"
    assert capsys.readouterr().err == (told if record != "config.json" else "")


def test_many_write_one_text(tmp_path: Path) -> None:
    texts = [str(number) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            list(pool.map(lambda text: write_text(tmp_path / "a", text), texts))
            assert names(tmp_path) == ["a"] and (tmp_path / "a").read_text() in texts


def test_files_of_a_folder_follow_the_umask(tmp_path: Path) -> None:
    """Whoever may read the folder may read the weights, which safetensors writes for their owner alone."""
    from safetensors.numpy import save_file

    before = os.umask(0o027)
    try:
        with whole_folder(tmp_path / "model") as part:
            save_file({}, part / "model.safetensors")
            (part / "config.json").touch()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {0o640}


def test_what_is_made_once_is_as_it_was_or_refused(tmp_path: Path) -> None:
    path, made = tmp_path / "file", list[Path]()

    def make(part: Path) -> None:
        made.append(part)
        part.write_text("texts")

    for _ in range(2):
        make_once(path, make)
    assert path.read_text() == "texts" and len(made) == 1
    path.write_text("other")
    with pytest.raises(InputError, match=f"{path} is damaged .*delete it and rerun"):
        make_once(path, make)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, True, "ä 😀 [[[["]}, "x", [[[]]], {"text": "{" * 500}])
def test_json_reads_as_python_does(value: object) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_json(json.dumps(value, ensure_ascii=False)) == value


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested more than 100 deep"),
        ("[" * 200 + "]" * 200, "nested more than 100 deep"),
        ('{"a":' * 200 + "1" + "}" * 200, "nested more than 100 deep"),
        ("9" * 5000, "4300 digits"),
        (r'"\ud800"', "surrogate"),
        (r'{"\uDC00": 1}', "surrogate"),
        ('[{"text": 1, "id": 2, "text": 3}]', "the key 'text' occurs twice"),
        ("[1,", "Expecting value"),
    ],
)
def test_json_that_is_refused(text: str, reason: str) -> None:
    with pytest.raises(json.JSONDecodeError, match=reason):
        parse_json(text)


def test_yaml_reads_as_pyyaml_does() -> None:
    text = "a: &x {b: 1, c: [1, 2]}\nd: &y {<<: *x, e: 2}\ne:\n  <<: *y\n  b: 3\n1: 2020-02-03\n"
    assert parse_yaml(text) == yaml.safe_load(text)
    assert parse_yaml("") is None
    text = "[0, 0x10, 1_000, 0.05, -0.5, 08, '0100', '1:30', 10:30 o'clock, 1.e+3]"
    assert parse_yaml(text) == yaml.safe_load(text)


def test_numbers_to_another_base_are_texts() -> None:
    assert parse_yaml("[0100, 1:30, -1:30.5, 0x10]") == ["0100", "1:30", "-1:30.5", 16]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: the key 'a' occurs twice"),
        ("a:\n  b: 1\n  'b': 2\n", "line 3: the key 'b' occurs twice"),
        (BOMB, "expands to more than 200,000 values"),
        ("a: &a [*a]\n", "expands to more than 200,000 values"),
        ("a: " + "[" * 5000 + "]" * 5000, "nested more than 100 deep"),
        ("a: " + "9" * 5000, "line 1: '9{40}…' is not a valid int"),
        ("a: 1\nb: 2020-99-99\n", "line 2: '2020-99-99' is not a valid timestamp; write a text in quotes"),
        ("a: !!bool x\n", "line 1: 'x' is not a valid bool"),
        ("a: !!int ''\n", "line 1: '' is not a valid int"),
        ("a: !!timestamp x\n", "line 1: 'x' is not a valid timestamp"),
        ('a: "\\ud800"\n', "surrogate"),
        ("a: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
        ("x" * 2_000_001, "2,000,000 characters"),
        ("2024-01-01: 3\n", "keys must be str"),
        ("!!binary aGk=: 3\n", "keys must be str"),
    ],
)
def test_yaml_that_is_refused(text: str, reason: str) -> None:
    with pytest.raises(yaml.YAMLError, match=reason):
        parse_yaml(text)
