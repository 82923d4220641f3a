"""A child whose disk is full: its message cannot be written either, and is made by its parent."""

import shutil
from collections import namedtuple

import pytest

from nautile.common.processes import ExitCode
from nautile.tasks.engine.child_process import ChildFiles, Exit, raise_for_exit
from nautile.tasks.engine.errors import NotWritable, StageCrash

Disk = namedtuple("Disk", "total used free")


@pytest.mark.parametrize(("free", "error"), [(0, NotWritable), (2**40, StageCrash)])
def test_a_child_that_could_not_write_why_it_stopped(tmp_path, monkeypatch, free, error):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(2**40, 2**40 - free, free))
    with pytest.raises(error, match="no space is left" if error is NotWritable else "exit code"):
        raise_for_exit(Exit(ExitCode.BAD_INPUT, 0), ChildFiles(tmp_path))
