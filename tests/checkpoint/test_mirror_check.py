"""A mirror that cannot be one is refused before the first step."""

import functools
import os

import pytest

from jaxft import config
from jaxft.checkpoint import manager, mirror_check

pytestmark = pytest.mark.device


def _refusal(ask) -> str:
    with pytest.raises(config.ConfigError) as caught:
        ask()
    assert caught.value.path == "checkpoint.mirror"
    assert "\n" not in str(caught.value)
    return caught.value.problem


@pytest.mark.parametrize(
    ("mirror", "words"),
    [
        ("run/checkpoints", "is the checkpoint root"),
        ("run/checkpoints/", "is the checkpoint root"),
        ("run/../run/checkpoints", "is the checkpoint root"),
        ("linked/checkpoints", "is the checkpoint root"),
        ("run/checkpoints/copy", "is within the checkpoint root"),
        ("linked/checkpoints/copy", "is within the checkpoint root"),
        ("run", "holds the checkpoint root"),
        (".", "holds the checkpoint root"),
    ],
)
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_mirror_and_its_root_lie_apart(tmp_path, mirror, words, scheme):
    os.symlink(tmp_path / "run", tmp_path / "linked")
    address = f"{scheme}{tmp_path}/{mirror}"

    def ask():
        manager.CheckpointManager(tmp_path / "run/checkpoints", mirror=address)

    assert words in _refusal(ask)
    assert os.listdir(tmp_path) == ["linked"]


@pytest.mark.parametrize("mirror", ["run/mirror", "run/checkpoints2", "else"])
def test_beside_the_root_there_is_room(tmp_path, mirror):
    root, address = tmp_path / "run/checkpoints", str(tmp_path / mirror)
    with manager.CheckpointManager(root, mirror=address) as checkpoints:
        checkpoints.check({"w": 1.0})
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_one(tmp_path):
    (tmp_path / "file").write_text("x")
    for place, words in [
        ("/proc/nope", "/proc/nope cannot be made: "),
        (f"{tmp_path}/file", "file cannot be written: Not a directory"),
        (f"{tmp_path}/file/below", "below cannot be made: Not a directory"),
    ]:
        checkpoints = manager.CheckpointManager(tmp_path / "root", mirror=place)
        assert words in _refusal(functools.partial(checkpoints.check, {"w": 1.0}))
    assert os.listdir(tmp_path) == ["file"]


def test_a_probe_takes_away_what_a_kill_left_of_another(tmp_path):
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    seen = []
    mkdir = os.mkdir
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "mkdir", lambda path, *a: (seen.append(path), mkdir(path)))
        mirror_check.check_folder(str(mirror))
    os.makedirs(f"{seen[0]}/a")
    mirror_check.check_folder(str(mirror))
    assert os.listdir(mirror) == []


def test_a_store_is_not_asked():
    mirror_check.check_apart("s3://bucket/run", root="/run")
    mirror_check.check_folder("s3://bucket/run")
