"""Files and folders are whole or absent, whatever fails on the way."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import biphase.files as files
from biphase.errors import BusyError, InputError
from biphase.files import (
    content_hash,
    file_hash,
    locked,
    read_json,
    read_json_as,
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
        pass
    (tmp_path / "theirs").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(InputError, match="link is a link"), locked(tmp_path / "link"):
        pass
    assert (tmp_path / "theirs").read_text() == "kept"
