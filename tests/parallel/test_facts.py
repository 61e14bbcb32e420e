"""What the run record says about the world, and that it is only values."""

import json

import jax
import pytest

from jaxft.parallel.facts import collect_facts
from jaxft.parallel.mesh import make_mesh

pytestmark = pytest.mark.device


def test_facts_are_json_and_name_all_that_changes_numbers():
    facts = collect_facts(make_mesh())
    assert json.loads(json.dumps(facts)) == facts
    assert facts["jax"] == jax.__version__
    assert facts["backend"] == jax.devices()[0].client.platform_version
    assert facts["mesh.shape"] == [8, 1, 1]
    assert facts["num_processes"] == 1
    assert facts["cpu"]


@pytest.mark.parametrize(
    "name", ["XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE"]
)
def test_an_environment_that_changes_numbers_is_a_fact(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    before = collect_facts(make_mesh())
    monkeypatch.setenv(name, "--one=1")
    after = collect_facts(make_mesh())
    assert {key for key in after if after[key] != before[key]} == {name}


def test_the_order_of_flags_and_where_dumps_go_is_no_fact(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--b=1 --a=2")
    before = collect_facts(make_mesh())
    monkeypatch.setenv("XLA_FLAGS", "--a=2 --xla_dump_to=/tmp/x --b=1")
    assert collect_facts(make_mesh()) == before
