import errno
import os

import pytest

from perturbdiff.runtime import files, locks
from perturbdiff.runtime.errors import UserError


def test_output_appears_only_at_the_end(tmp_path):
    out = tmp_path / "a" / "out.txt"
    with files.writing(out) as partial:
        partial.write_text("new")
        assert not out.exists()
    assert out.read_text() == "new"
    assert list(out.parent.iterdir()) == [out]


def test_failure_leaves_the_old_output_and_nothing_else(tmp_path):
    out = tmp_path / "out.txt"
    out.write_text("old")
    with pytest.raises(RuntimeError), files.writing(out) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_folder_replaces_folder(tmp_path):
    out = tmp_path / "store"
    for text in ("one", "two"):
        with files.writing(out, folder=True) as partial:
            (partial / "x").write_text(text)
    assert (out / "x").read_text() == "two"
    assert list(tmp_path.iterdir()) == [out]


def test_a_folder_is_discarded_while_others_write_there(tmp_path, monkeypatch):
    folder, remove = tmp_path / "checkpoints", files.remove
    folder.mkdir()
    (folder / "last.ckpt").write_text("old")

    def meanwhile(path):
        if path.exists():
            folder.mkdir()
            (folder / locks.LOCK).touch()
        remove(path)

    monkeypatch.setattr(files, "remove", meanwhile)
    files.discard(folder)
    assert [p.name for p in tmp_path.rglob("*")] == ["checkpoints", locks.LOCK]


def test_a_folder_goes_although_a_thread_still_writes_there(tmp_path, monkeypatch):
    folder, rmtree, late = tmp_path / "partial", files.shutil.rmtree, ["first", "second"]
    folder.mkdir()

    def with_a_thread(path):
        if late:  # the thread's file comes between the listing of the folder and its removal
            (path / late.pop()).touch()
            path.rmdir()
        rmtree(path)

    monkeypatch.setattr(files.shutil, "rmtree", with_a_thread)
    files.remove(folder)
    assert not folder.exists()
    assert not late


def test_disk_full_is_explained_and_cleaned_up(tmp_path):
    out = tmp_path / "store"
    with pytest.raises(UserError, match="disk full while writing .*store.*nothing was left behind"):
        with files.writing(out, folder=True) as partial:
            (partial / "x").write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_signature_tells_a_changed_file(tmp_path):
    (tmp_path / "a").write_text("one")
    before = files.signature(tmp_path / "a"), files.signature(tmp_path)
    assert before == (files.signature(tmp_path / "a"), files.signature(tmp_path))
    (tmp_path / "a").write_text("three")
    assert before[0] != files.signature(tmp_path / "a")
    assert before[1] != files.signature(tmp_path)


def test_missing_permission_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match="permission denied"), files.writing(tmp_path / "out.txt"):
        pass


def test_hash_of_a_folder_sees_names_and_contents(tmp_path):
    def make(name, entry, text):
        (tmp_path / name).mkdir()
        (tmp_path / name / entry).write_text(text)
        return files.sha256(tmp_path / name)

    one = make("a", "x", "1")
    assert one == make("b", "x", "1")
    assert one != make("c", "y", "1")
    assert one != make("d", "x", "2")


def test_one_process_holds_a_folder(tmp_path):
    with locks.locked(tmp_path / "x", "another run"):
        with pytest.raises(UserError, match="x: another run is using this folder .*process"):
            with locks.locked(tmp_path / "x", "another run"):
                pass
    with locks.locked(tmp_path / "x", "another run"):
        pass
