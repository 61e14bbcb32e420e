"""`ckpt verify`, `ckpt diff` and `ckpt export`."""

import os

import numpy as np


def _flip(file) -> None:
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    mode = file.stat().st_mode
    file.unlink()
    file.write_bytes(data)
    file.chmod(mode)


def test_verify_proves_every_step_of_a_root(ckpt, root):
    code, out, _ = ckpt("verify", root.parent)
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 3
    assert all(": proven (" in line for line in lines)


def test_verify_names_leaf_and_chunk(ckpt, ckpt_json, root):
    _flip(root / "20/state/params.w/c/1/0")
    _flip(root / "20/_CHECKPOINT_METADATA")
    code, out, _ = ckpt("verify", root)
    assert code == 66
    assert f"{root / '20'}: 2 problems" in out
    assert "  state/params.w/c/1/0 of leaf params/w: " in out
    assert "  _CHECKPOINT_METADATA: its bytes have changed" in out
    code, found = ckpt_json("verify", root / "20")
    assert code == 66
    assert not found["proven"]
    assert [one["leaf"] for one in found["steps"][0]["problems"]] == ["", "params/w"]
    assert ckpt("verify", root / "30")[0] == 0
    assert ckpt("verify", root / "20", "--quick")[0] == 0


def test_verify_never_takes_the_absence_of_proof_for_proof(
    ckpt, tmp_path, handmade, leaves
):
    step = handmade.make_step(tmp_path, 1, leaves, keys=("key",), with_manifest=False)
    code, out, _ = ckpt("verify", step)
    assert code == 66
    assert "no manifest" in out
    code, out, _ = ckpt("verify", step, "--allow-unproven")
    assert code == 0
    assert "readable, but without a manifest nothing is proven" in out
    _flip(step / "state/params.w/c/0/0")
    assert ckpt("verify", step, "--allow-unproven")[0] == 66


def test_diff_says_what_differs(ckpt, ckpt_json, root):
    code, out, _ = ckpt("diff", root / "10", root / "20")
    assert code == 0
    assert out.startswith("5 leaves equal, 0 different")
    code, out, _ = ckpt("diff", root / "10", root)
    assert code == 1
    assert out.splitlines()[1].split() == [
        "step",
        "int64[]",
        "1",
        "of",
        "1",
        "1",
        "0.125",
    ]
    code, found = ckpt_json("diff", root / "10", root / "30")
    assert code == 1
    assert (found["num_equal"], len(found["different"])) == (4, 1)
    assert found["different"][0]["max_abs"] == 1.0
    assert ckpt("diff", root / "10", root / "30", "--match=params/**")[0] == 0


def test_diff_shows_structure_and_infinite_distances(
    ckpt, ckpt_json, tmp_path, handmade
):
    a = {"x": np.float32([np.nan, 1]), "only": 1, "y": np.zeros(3, np.int8)}
    b = {"x": np.float32([0, 1]), "more": True, "y": np.zeros(4, np.int8)}
    left = handmade.make_step(tmp_path / "a", 1, a)
    right = handmade.make_step(tmp_path / "b", 1, b)
    code, out, _ = ckpt("diff", left, right)
    assert code == 1
    for words in (
        "int64[] only in A",
        "bool[] only in B",
        "int8[3] in A, int8[4] in B",
    ):
        assert words in out
    assert "inf" in out
    _, found = ckpt_json("diff", left, right)
    assert found["different"][0]["max_abs"] == "inf"


def test_diff_of_damage_is_one_line(ckpt, root):
    _flip(root / "30/state/step/c")
    code, _, err = ckpt("diff", root / "10", root / "30")
    assert code == 66
    assert err.startswith("jaxft: leaf step: ")


def test_export_writes_what_is_asked_for(ckpt, ckpt_json, root, tmp_path):
    out = tmp_path / "x.safetensors"
    code, said, err = ckpt("export", root, out)
    assert code == 0
    assert f"{out}: 4 arrays of {root / '30'}" in said
    assert "checked against their fingerprints" in said
    assert err == "left out, being text: note\n"
    code, found = ckpt_json(
        "export", root / "10", tmp_path / "p.npz", "--match=params/w"
    )
    assert code == 0
    assert found["names"] == ["params.w"]
    with np.load(tmp_path / "p.npz") as arrays:
        assert arrays["params.w"].shape == (8, 5)
    out = tmp_path / "params.safetensors"
    assert ckpt_json("export", root, out, "--params-only")[1]["names"] == [
        "params.w",
        "params.b",
    ]


def test_export_refuses_in_one_line(ckpt, root, tmp_path):
    (tmp_path / "taken.npz").write_text("mine")
    for name, words, message in [
        ("x.npz", (), "params/b is bfloat16"),
        ("x.txt", (), "ends in neither"),
        ("taken.npz", ("--match=step",), "is there already"),
        ("x.npz", ("--match=nothing",), "no array of"),
    ]:
        code, _, err = ckpt("export", root, tmp_path / name, *words)
        assert code == 78, name
        assert message in err
    assert (tmp_path / "taken.npz").read_text() == "mine"
    code, _, err = ckpt("export", root, tmp_path / "no/x.npz", "--match=step")
    assert code == 74
    assert "No such file" in err
    assert sorted(os.listdir(tmp_path)) == ["run", "taken.npz"]
