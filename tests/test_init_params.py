"""Mistakes in `init.*` are one line each, found before anything is loaded."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxft import init_params
from jaxft.checkpoint.manager import CheckpointManager
from jaxft.config import Config, ConfigError, InitConfig, resolve

pytestmark = pytest.mark.device

STATE = {
    "step": jnp.int32(1),
    "params": {f"w{i}": jnp.full(3, i, jnp.float32) for i in range(8)},
    "opt_state": {"mu": {"w0": jnp.ones(3)}, "count": jnp.int32(1)},
}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("origin")
    with CheckpointManager(root / "run") as checkpoints:
        checkpoints.save(1, STATE)
    return root


def structs(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def check(origin: pathlib.Path, params: Any, **chosen: str) -> None:
    place = str(origin / chosen.pop("at", "run"))
    init_params.check(InitConfig(checkpoint=place, **chosen), structs(params))


def changed(**leaves: Any) -> dict[str, Any]:
    return STATE["params"] | leaves


FRESH = {f"fresh{i}": jnp.ones(2) for i in range(7)}


@pytest.mark.parametrize(
    ("chosen", "params", "path", "words"),
    [
        ({"at": "nowhere"}, {}, "checkpoint", ["is not there"]),
        ({"at": "."}, {}, "checkpoint", ["nothing to load"]),
        ({"rename": "a to b"}, {}, "rename", ["'a to b' is no rule"]),
        ({"rename": "param=base"}, {}, "rename", ["'param'", "it holds", "params/w0"]),
        ({"rename": "**=*"}, {}, "rename", ["wildcards"]),
        ({"paths": "param/**"}, {}, "paths", ["'param/**' fits none", "and 6 more"]),
        ({"paths": "params/**, !x"}, {}, "paths", ["'!x' fits none of"]),
        ({"paths": "step, !step"}, {}, "paths", ["no leaf"]),
        ({"optional": "hed/**"}, {}, "optional", ["'hed/**' fits none of w0, w1"]),
        ({"allow_cast": "v*"}, {}, "allow_cast", ["'v*' fits none of w0"]),
        (
            {},
            changed(**FRESH),
            "checkpoint",
            ["not stored: fresh0, ", "fresh4 ... and 2 more (init.optional"],
        ),
        (
            {},
            {"w0": jnp.ones(3)},
            "checkpoint",
            ["no parameters: w1, ", "w5 ... and 2 more (init.rename", "init.paths"],
        ),
        (
            {},
            changed(w2=jnp.ones(3, jnp.bfloat16)),
            "checkpoint",
            ["w2 (stored array float32[3], wanted bfloat16) (init.allow_cast "],
        ),
        ({}, changed(w2=jnp.ones(3, bool)), "checkpoint", ["another kind of value"]),
        ({}, changed(w2=jnp.ones(4)), "checkpoint", ["w2: ", "[4]", "init.optional"]),
        (
            {"optional": "w9"},
            changed(w9=jnp.ones(4), w8=jnp.ones(1)),
            "checkpoint",
            ["not stored: w8 ("],
        ),
    ],
)
def test_each_mistake_is_one_line_that_names_its_setting(
    origin: pathlib.Path,
    chosen: dict[str, str],
    params: Any,
    path: str,
    words: list[str],
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(origin, params or STATE["params"], **chosen)
    text = str(caught.value)
    assert text.startswith(f"config.init.{path}: ")
    assert "\n" not in text
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize(
    ("chosen", "params"),
    [
        ({}, STATE["params"]),
        # Fine-tuning: nothing but the parameters counts in a whole state.
        ({"rename": "params=base"}, {"base": STATE["params"]}),
        ({"rename": "params=params/base"}, {"base": STATE["params"]}),
        ({"rename": "params=base", "optional": "lora"}, None),
        ({"allow_cast": "w2"}, changed(w2=jnp.ones(3, jnp.bfloat16))),
        ({"optional": "fresh?"}, changed(**FRESH)),
        ({"paths": "params/w0"}, {"w0": jnp.ones(3)}),
        ({"paths": "opt_state/mu/**", "rename": "opt_state/mu="}, {"w0": jnp.ones(3)}),
        ({"at": "run/1/state"}, STATE["params"]),
    ],
)
def test_what_is_meant_is_let_through(
    origin: pathlib.Path, chosen: dict[str, str], params: Any
) -> None:
    params = params or {"base": STATE["params"], "lora": jnp.ones(2)}
    check(origin, params, **chosen)


@dataclasses.dataclass
class Step:
    """As much of a train step as a load asks for."""

    params: Any

    @property
    def abstract_state(self) -> Any:
        return Step(structs(self.params))

    def init(self) -> Any:
        return self


def test_loading_does_what_the_check_has_promised(origin: pathlib.Path) -> None:
    events: list[str] = []
    chosen = InitConfig(
        checkpoint=str(origin / "run"), rename="params=base", optional="lora"
    )
    step = Step({"base": STATE["params"], "lora": jnp.full(2, 7.0)})
    loaded = init_params.load(
        chosen, step, emit=lambda kind, **fields: events.append(kind)
    )
    assert np.array_equal(loaded["base"]["w3"], STATE["params"]["w3"])
    assert np.array_equal(loaded["lora"], step.params["lora"])
    assert events == ["load"]
    # What no type can tell.
    step = Step({"w0": jnp.zeros((), jnp.int8)})
    with CheckpointManager(origin / "large") as checkpoints:
        checkpoints.save(1, {"params": {"w0": jnp.int32(1000)}})
    chosen = InitConfig(checkpoint=str(origin / "large"), allow_cast="w0")
    init_params.check(chosen, step.abstract_state.params)
    with pytest.raises(ConfigError, match=r"init.checkpoint: w0: holds 1000"):
        init_params.load(chosen, step, emit=lambda kind, **fields: None)


@pytest.mark.parametrize("name", ["paths", "rename", "optional", "allow_cast"])
def test_settings_without_the_one_that_they_speak_of(name: str) -> None:
    config = Config()
    setattr(config.init, name, "x=y")
    with pytest.raises(ConfigError, match=rf"init.{name}: does nothing without init"):
        resolve(config)
    config.init.checkpoint = "there"
    resolve(config)


def test_a_rate_without_a_mirror() -> None:
    config = Config()
    config.checkpoint.mirror_rate = "50MB"
    with pytest.raises(ConfigError, match="mirror_rate: does nothing without checkp"):
        resolve(config)
