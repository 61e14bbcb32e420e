"""Meshes of 8 fake devices, slices that are not there, and every impossible size."""

import ast
import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxft.config import ConfigError, MeshConfig
from jaxft.parallel import mesh as mesh_lib
from jaxft.parallel.mesh import AXES, describe_mesh, make_mesh, plan_axes

pytestmark = pytest.mark.device


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (MeshConfig(), (8, 1, 1)),
        (MeshConfig(data=1, fsdp=-1), (1, 8, 1)),
        (MeshConfig(data=-1, fsdp=2, tensor=2), (2, 2, 2)),
        (MeshConfig(data=2, fsdp=2, tensor=-1), (2, 2, 2)),
        (MeshConfig(data=8), (8, 1, 1)),
        (MeshConfig(num_devices=6, fsdp=2), (3, 2, 1)),
        (MeshConfig(num_devices=1), (1, 1, 1)),
    ],
)
def test_sizes(config, shape):
    mesh = make_mesh(config)
    assert mesh.axis_names == AXES
    assert mesh.devices.shape == shape
    assert mesh.axis_types == (AxisType.Auto,) * 3
    ids = [device.id for device in mesh.devices.flat]
    assert ids == sorted(ids) == list(range(len(ids)))


def test_no_argument_means_all_devices_along_data():
    assert dict(make_mesh().shape) == {"data": 8, "fsdp": 1, "tensor": 1}


def test_an_explicit_list_is_used_as_it_is():
    chosen = [jax.devices()[i] for i in (7, 5, 3, 2, 1, 0)]
    mesh = make_mesh(MeshConfig(fsdp=3), devices=chosen)
    assert mesh.devices.shape == (2, 3, 1)
    assert list(mesh.devices.flat) == chosen


@pytest.mark.parametrize(
    ("config", "path", "words"),
    [
        (
            MeshConfig(data=3),
            "mesh.data",
            "3 x 1 x 1 axes need 3 of 8 devices: set mesh.num_devices=3 or "
            "mesh.data=-1",
        ),
        (MeshConfig(data=16), "mesh.data", "need 16 of 8 devices: set mesh.data=-1"),
        (MeshConfig(fsdp=3), "mesh.data", "3 does not divide 8 devices"),
        (MeshConfig(data=5, fsdp=-1), "mesh.fsdp", "5 does not divide 8 devices"),
        (MeshConfig(fsdp=-1), "mesh.fsdp", "and so is mesh.data"),
        (MeshConfig(data=1, dcn_data=-1, tensor=-1), "mesh.dcn_data", "mesh.tensor"),
        (MeshConfig(data=0), "mesh.data", "must be positive or -1, is 0"),
        (MeshConfig(tensor=-2), "mesh.tensor", "must be positive or -1, is -2"),
        (MeshConfig(num_devices=9), "mesh.num_devices", "asks for 9 of 8 devices"),
        (MeshConfig(dcn_data=2), "mesh.dcn_data", "no slice_index"),
        (MeshConfig(data=1, dcn_fsdp=8), "mesh.dcn_fsdp", "'cpu' devices have no"),
    ],
)
def test_impossible_sizes_name_field_and_counts(config, path, words):
    with pytest.raises(ConfigError) as caught:
        make_mesh(config)
    assert caught.value.path == path
    assert words in caught.value.problem
    assert "\n" not in str(caught.value)


def test_no_devices_at_all():
    with pytest.raises(ConfigError, match="0 devices"):
        make_mesh(devices=[])


def _chip(number, *, slice_index=None, process_index=0):
    """As much of a device as mesh building looks at."""
    chip = types.SimpleNamespace(
        id=number, platform="gpu", device_kind="H", process_index=process_index
    )
    if slice_index is not None:
        chip.slice_index = slice_index
    return chip


def test_a_process_without_a_device_is_refused():
    chips = [_chip(i, process_index=i // 2) for i in range(8)]
    with pytest.raises(ConfigError, match="leave process 2 without one"):
        mesh_lib._choose_devices(MeshConfig(num_devices=4), devices=chips)
    used = mesh_lib._choose_devices(MeshConfig(num_devices=7), devices=chips)
    assert [chip.id for chip in used] == [0, 1, 2, 3, 4, 5, 6]


def test_slices_only_meet_along_the_dcn_axes():
    chips = [_chip(i, slice_index=i % 2) for i in range(8)]
    within, over = plan_axes(MeshConfig(dcn_data=2, fsdp=2), num_devices=8)
    assert (within, over) == ((2, 2, 1), (2, 1, 1))
    grid = mesh_lib._arrange(chips, within=within, over=over)
    assert grid.shape == (4, 2, 1)
    slices = np.vectorize(lambda chip: chip.slice_index)(grid)
    assert (slices[:2] == 0).all()
    assert (slices[2:] == 1).all()
    assert sorted(chip.id for chip in grid.flat) == list(range(8))


def test_the_number_of_slices_must_be_right():
    chips = [_chip(i, slice_index=i % 2) for i in range(8)]
    with pytest.raises(ConfigError, match=r"ask for 4 slices.*lie in 2") as caught:
        mesh_lib._arrange(chips, within=(2, 1, 1), over=(1, 4, 1))
    assert caught.value.path == "mesh.dcn_fsdp"


def test_slices_of_unequal_size_are_refused_in_one_line():
    chips = [_chip(i, slice_index=int(i > 2)) for i in range(8)]
    with pytest.raises(ConfigError, match="does not fit") as caught:
        mesh_lib._arrange(chips, within=(4, 1, 1), over=(2, 1, 1))
    assert "\n" not in str(caught.value)


def test_description_is_json():
    described = describe_mesh(make_mesh(MeshConfig(fsdp=2, tensor=2)))
    assert json.loads(json.dumps(described)) == {
        "axes": ["data", "fsdp", "tensor"],
        "shape": [2, 2, 2],
        "platform": "cpu",
        "device_kind": "cpu",
        "num_devices": 8,
    }


def test_only_the_default_of_make_mesh_asks_for_all_devices():
    """A list of all devices still names the dead ones after a slice is lost."""
    package = pathlib.Path(mesh_lib.__file__).parents[1]
    found = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in sorted(package.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr in ("devices", "local_devices")
        and isinstance(node.value, ast.Name)
        and node.value.id == "jax"
    ]
    assert [place.split(":")[0] for place in found] == ["parallel/mesh.py"], found


def test_a_backend_that_is_not_here_is_one_line():
    program = "from jaxft.parallel.mesh import make_mesh; make_mesh()"
    env = os.environ | {"JAX_PLATFORMS": "no_such_backend"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("jaxft.settings.ConfigError: config.mesh: JAX finds no ")
    assert "no_such_backend" in last
