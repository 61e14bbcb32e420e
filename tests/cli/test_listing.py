"""`ckpt ls` and `ckpt show`."""

import shutil

import numpy as np
import pytest


def test_ls_lists_steps_and_what_is_none(ckpt, ckpt_json, root, handmade, leaves):
    handmade.make_step(root, 40, leaves, keys=("key",), with_manifest=False)
    handmade.make_step(root, 50, leaves, keys=("key",), healthy=False)
    shutil.copytree(root / "10", root / "5.quarantined-1")
    shutil.copytree(root / "10", root / "6.abandoned-t0")
    (root / "60.orbax-checkpoint-tmp").mkdir()
    (root / "70").mkdir()
    code, found = ckpt_json("ls", root)
    assert code == 0
    assert found["root"] == str(root)
    steps = {step["step"]: step for step in found["steps"]}
    assert list(steps) == [10, 20, 30, 40, 50]
    assert [step["healthy"] for step in steps.values()] == [
        True,
        True,
        True,
        None,
        False,
    ]
    assert steps[10]["metrics"] == {"eval/loss": 1.25}
    assert steps[10]["time"] == 1.7e9 + 10
    assert steps[30]["timeline"] == 0
    assert 160 <= steps[30]["num_linked_bytes"] < 300
    assert steps[40]["problem"] == "no manifest"
    others = {other["kind"]: other["path"] for other in found["others"]}
    assert others == {
        "quarantined": str(root / "5.quarantined-1"),
        "abandoned": str(root / "6.abandoned-t0"),
        "unfinished": str(root / "60.orbax-checkpoint-tmp"),
        "foreign": str(root / "70"),
    }
    # A linked file is there once.
    own = sum(step["num_bytes"] for step in steps.values())
    own += sum(other["num_bytes"] for other in found["others"])
    linked = steps[30]["num_linked_bytes"]
    assert own - 3 * linked - 1500 < found["num_bytes"] <= own - linked
    code, out, _ = ckpt("ls", root.parent)
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split()[:3] == ["step", "size", "linked"]
    assert lines[1].endswith("healthy      eval/loss=1.25")
    assert "NOT HEALTHY" in lines[5]
    assert lines[6].startswith("quarantined: ")
    assert lines[-1].startswith("5 steps, ")


def test_ls_of_nothing_is_66(ckpt, tmp_path):
    assert ckpt("ls", tmp_path) == (66, f"nothing in {tmp_path}\n", "")


@pytest.mark.parametrize("name", ["run/metadata", "manifest/metadata"])
def test_ls_goes_on_over_damage(ckpt_json, root, name):
    file = root / "20" / name
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-9])
    code, found = ckpt_json("ls", root)
    assert code == 0
    assert [bool(step["problem"]) for step in found["steps"]] == [False, True, False]
    assert str(file) in found["steps"][1]["problem"]


def test_show_shows_every_leaf(ckpt, ckpt_json, root):
    code, found = ckpt_json("show", root / "30")
    assert code == 0
    assert found["step"] == 30
    assert (found["array_layout"], found["codec"]) == ("files", "raw")
    leaves = {leaf["path"]: leaf for leaf in found["leaves"]}
    assert list(leaves) == ["params/w", "params/b", "key", "step", "note"]
    w = leaves["params/w"]
    assert (w["dtype"], w["shape"], w["written_at"]) == ("float32", [8, 5], 10)
    assert (w["num_links"], w["num_chunks"], w["codec"]) == (2, 2, "raw")
    assert leaves["step"]["written_at"] == 30
    assert leaves["params/b"]["num_nonfinite"] == 1
    assert leaves["key"]["dtype"] == "key<fry>"
    assert leaves["note"]["text"] == "some text"
    code, out, _ = ckpt("show", root / "30", "--match=params/**")
    assert code == 0
    assert "10 (linked 2)" in out
    assert "note" not in out
    assert out.splitlines()[-1].startswith("2 leaves, ")


def test_show_tells_data_position_and_metrics(ckpt, root):
    _, out, _ = ckpt("show", root / "10")
    assert 'data {"batch": 10}' in out
    assert 'metrics {"eval/loss": 1.25}' in out


def test_show_of_a_step_without_manifest_or_of_any_orbax_item(
    ckpt, ckpt_json, tmp_path, handmade
):
    leaves = {"a/w": np.zeros((2, 3), np.float16), "t": "text"}
    step = handmade.make_step(tmp_path, 1, leaves, with_manifest=False)
    code, out, _ = ckpt("show", step)
    assert code == 0
    assert "no manifest: cannot be proven" in out
    code, found = ckpt_json("show", step / "state")
    assert code == 0
    assert [leaf["type"] for leaf in found["leaves"]] == ["float16[2,3]", "str"]


def test_show_names_a_lost_array(ckpt, root):
    (root / "20/manifest/metadata").unlink()
    shutil.rmtree(root / "20" / "state" / "params.w")
    code, out, _ = ckpt("show", root / "20")
    assert code == 0
    assert "bytes,crc32c" in next(r for r in out.splitlines() if "params/b" in r)
    assert "zarr.json" in next(row for row in out.splitlines() if "params/w" in row)


def test_show_of_a_damaged_description_is_one_line(ckpt, root):
    (root / "20/state/_METADATA").unlink()
    code, out, err = ckpt("show", root / "20")
    assert (code, out) == (66, "")
    assert "_METADATA is missing" in err
