"""A config becomes a run: restores, meshes, factories of one's own, one-line errors."""

import pathlib
import threading
from typing import Any

import jax
import numpy as np
import pytest

from jaxft import config as configs
from jaxft import settings
from jaxft.build import Parts, build, load_function
from jaxft.config import Config, ConfigError, Corpus
from jaxft.events import EventLog, read_events
from jaxft.faults.preemption import StopRequests
from jaxft.records import ignore_event
from jaxft.worker import Worker

pytestmark = pytest.mark.device


def small(num_steps: int = 20, **overrides: Any) -> Config:
    config = Config()
    config.model.width = 32
    config.model.num_layers = 2
    config.model.num_heads = 2
    config.data.corpus = Corpus.SYNTHETIC
    config.data.seq_len = 32
    config.data.global_batch = 8
    config.optimizer.warmup_steps = 5
    config.optimizer.decay_steps = 1000
    config.train.num_steps = num_steps
    config.checkpoint.save = "steps(1)"
    config.checkpoint.keep = "every(1)"
    config.log.event_secs = 0.0
    for path, value in overrides.items():
        section, name = path.split("__")
        setattr(getattr(config, section), name, value)
    return settings.lock(configs.resolve(config))


def make(config: Config, workdir: pathlib.Path, *, devices: Any = None) -> Parts:
    return build(config, workdir=workdir, emit=ignore_event, devices=devices)


def follow(parts: Parts, state: Any, *, until: int) -> tuple[list[float], Any]:
    """Losses of the steps up to `until`, and the last state."""
    losses = []
    while int(state.step) < until:
        batch, word = parts.train_step.place(next(parts.iterator))
        state, output = parts.train_step(state, batch, word)
        losses.append(float(output.metrics["loss"]))
    return losses, state


def bits(state: Any) -> list[bytes]:
    raw = state.replace(rng=jax.random.key_data(state.rng))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(raw)]


def test_every_committed_step_gives_the_identical_rest(tmp_path: pathlib.Path) -> None:
    config = small(15)
    parts = make(config, tmp_path)
    losses, state = [], parts.train_step.init()
    for step in range(15):
        position = parts.iterator.get_state()
        assert parts.manager.save(step, state, data=position, force=True)
        more, state = follow(parts, state, until=step + 1)
        losses += more
    parts.manager.wait()
    final = bits(state)
    parts.iterator.close()
    parts = make(config, tmp_path)
    assert parts.manager.steps() == list(range(15))
    follow(parts, parts.train_step.init(), until=3)
    num_programs = parts.train_step._jitted._cache_size()
    for step in parts.manager.steps():
        restored = parts.manager.restore(parts.train_step.abstract_state, step=step)
        parts.iterator.set_state(restored.data)
        rest, state = follow(parts, restored.state, until=15)
        assert rest == losses[step:], step
        assert bits(state) == final, step
    # The restored states all fitted the program of the fresh one.
    assert parts.train_step._jitted._cache_size() == num_programs
    parts.iterator.close()


@pytest.mark.slow  # The sample has it in tests/e2e.
def test_a_worker_goes_on_where_another_ended(tmp_path: pathlib.Path) -> None:
    states = {}
    for name, lengths in {"whole": [20], "parts": [7, 13, 20]}.items():
        (tmp_path / name).mkdir()
        for num_steps in lengths:
            config = small(num_steps)
            log = EventLog(tmp_path / name / "events", role="work")
            with StopRequests(config.preemption) as stops:
                workdir = tmp_path / name
                worker = Worker(config, workdir=workdir, log=log, stops=stops)
                states[name], _ = worker.live()
    assert bits(states["whole"]) == bits(states["parts"])
    events = read_events(tmp_path / "parts" / "events")
    # Each step ran once, over all three.
    assert [e["step"] for e in events if e["kind"] == "step"] == list(range(1, 21))


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((8, 1, 1), marks=pytest.mark.slow),
        pytest.param((1, 8, 1), marks=pytest.mark.slow),
        (2, 2, 2),
    ],
)
def test_meshes_give_the_same_losses(
    tmp_path: pathlib.Path, shape: tuple[int, int, int], full: bool
) -> None:
    num_steps = 100 if full else 12
    one = make(small(), tmp_path, devices=jax.devices()[:1])
    expected, _ = follow(one, one.train_step.init(), until=num_steps)
    one.iterator.close()
    data, fsdp, tensor = shape
    sharded = small(mesh__data=data, mesh__fsdp=fsdp, mesh__tensor=tensor)
    parts = make(sharded, tmp_path)
    losses, state = follow(parts, parts.train_step.init(), until=num_steps)
    parts.iterator.close()
    tolerance = 1e-5 if tensor > 1 else 3e-6
    np.testing.assert_allclose(losses, expected, rtol=tolerance)
    assert jax.tree.map(lambda x: x.sharding, state) == parts.train_step.state_shardings


def test_initialisation_does_not_depend_on_the_mesh(tmp_path: pathlib.Path) -> None:
    one = make(small(), tmp_path, devices=jax.devices()[:1])
    parts = make(small(mesh__fsdp=8, mesh__data=1), tmp_path)
    for each in (one, parts):
        each.iterator.close()
    # The same draws; newer compilers round their scaling by the partition.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=5e-7),
        jax.device_get(one.train_step.init().params),
        jax.device_get(parts.train_step.init().params),
    )


def test_initialisation_never_holds_an_unsharded_leaf(tmp_path: pathlib.Path) -> None:
    config = small(mesh__fsdp=8, mesh__data=1, model__width=128, model__vocab_size=4096)
    parts = make(config, tmp_path)
    step = parts.train_step
    compiled = (
        jax.jit(step._factory.make_state, out_shardings=step.state_shardings)
        .lower(step._key)
        .compile()
    )
    memory = compiled.memory_analysis()
    largest = max(
        x.size * x.dtype.itemsize
        for x in jax.tree.leaves(parts.train_step.abstract_state.params)
    )
    assert memory.temp_size_in_bytes < largest
    parts.iterator.close()


def test_own_functions_by_name(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    (tmp_path / "own_parts.py").write_text(OWN_PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = small(
        model__factory="own_parts:make_model",
        loss__factory="",
        data__factory="own_parts:make_data",
        optimizer__learning_rate=0.1,
    )
    parts = make(config, tmp_path)
    losses, state = follow(parts, parts.train_step.init(), until=30)
    assert losses[-1] < 0.2 * losses[0]
    assert state.params["w"].shape == (4,)
    assert parts.items == ("rows", 8)
    parts.iterator.close()


OWN_PARTS = """
import jax.numpy as jnp, numpy as np, jax
from jaxft.data.sources import Sources
from jaxft.models.adapters import from_functions

class Rows:
    fingerprint = "abc"
    def __len__(self): return 100
    def __getitem__(self, index):
        x = np.random.default_rng(index).standard_normal(4).astype(np.float32)
        return {"x": x, "y": x.sum()}

def make_data(config): return Sources(Rows())

def make_model(config, remat):
    def init(key): return {"w": jnp.zeros(4)}
    def loss(params, batch, rng):
        error = batch["x"] @ params["w"] - batch["y"]
        return jnp.sum(error ** 2), jnp.float32(error.size)
    return from_functions(init, loss)

def fails(config, remat): return config.no_such_field
def nothing(config, *rest): return None
"""


@pytest.mark.parametrize(
    ("setting", "value", "problem"),
    [
        ("model__factory", "own_parts:fails", "raised AttributeError"),
        ("model__factory", "own_parts:nothing", "NoneType"),
        ("model__factory", "own_parts", "is not of the form"),
        ("optimizer__factory", "own_parts:nothing", "not an optax"),
        ("data__factory", "own_parts:nothing", "not a jaxft.data.sources.Sources"),
        ("loss__factory", "own_parts:missing", "has no function"),
    ],
)
def test_own_functions_that_fail_are_one_line(
    tmp_path: pathlib.Path, monkeypatch: Any, setting: str, value: str, problem: str
) -> None:
    (tmp_path / "own_parts.py").write_text(OWN_PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=problem) as error:
        make(small(**{setting: value}), tmp_path)
    assert error.value.path == setting.replace("__", ".")
    assert "\n" not in str(error.value)


def test_a_module_that_breaks_on_import_is_named(
    tmp_path: Any, monkeypatch: Any
) -> None:
    (tmp_path / "breaks.py").write_text("raise RuntimeError('not today')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"RuntimeError: not today .*breaks\.py:1"):
        load_function("breaks:x", "model.factory")


def test_a_corpus_beyond_the_vocabulary_is_refused(tmp_path: pathlib.Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(3000, dtype=np.int32) % 300)
    config = small(data__corpus=Corpus.NPY, data__path=str(tmp_path / "ids.npy"))
    with pytest.raises(ConfigError, match="token id 299: set at least 300"):
        make(config, tmp_path)


def test_facts_tell_configs_and_corpora_apart(tmp_path: pathlib.Path) -> None:
    facts = []
    for overrides in ({}, {"optimizer__b1": 0.8}, {"data__seed": 1}, {"mesh__fsdp": 2}):
        parts = make(small(**overrides), tmp_path)
        parts.iterator.close()
        facts.append(parts.facts)
    assert all(facts[i] != facts[j] for i in range(4) for j in range(i))
    parts = make(small(remat__plan="full", train__max_nonfinite=3), tmp_path)
    parts.iterator.close()
    assert parts.facts == facts[0]


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((1, 8, 1), marks=pytest.mark.slow),
        pytest.param((2, 4, 1), marks=pytest.mark.slow),
        (2, 2, 2),
    ],
)
@pytest.mark.slow
def test_sharded_parameters_do_not_unshard_the_batch(
    tmp_path: pathlib.Path, shape: tuple[int, int, int]
) -> None:
    """Each device computes its own rows, whatever the parameters are split by."""
    costs = {}
    for data, fsdp, tensor in ((8, 1, 1), shape):
        config = small(
            mesh__data=data,
            mesh__fsdp=fsdp,
            mesh__tensor=tensor,
            model__width=128,
            data__seq_len=128,
            data__global_batch=16,
            remat__plan="none",
        )
        parts = make(config, tmp_path)
        parts.iterator.close()
        batch, word = parts.train_step.place(parts.example)
        compiled = parts.train_step.lower(None, batch, word).compile()
        memory = compiled.memory_analysis().temp_size_in_bytes
        costs[data, fsdp, tensor] = (memory, compiled.cost_analysis()["flops"])
    (whole, whole_flops), (split, split_flops) = costs[8, 1, 1], costs[shape]
    # The tensor axis keeps residuals whole and splits what is between them.
    limit = 1.3 if shape[2] == 1 else 2.0
    assert split < limit * whole
    assert split_flops < 1.15 * whole_flops


def test_a_mistake_in_the_loss_is_one_line(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "own_parts.py").write_text(
        "def arity(config): return lambda outputs: outputs\n"
        "def missing(config): return lambda outputs, batch: batch['labels']\n"
        "def number(config): return 42\n"
        "def leaves(config): raise SystemExit(3)\n"
        "def rows(config):\n"
        "    from jaxft.data.sources import Sources\n"
        "    return Sources([{'x': 1.0}] * 100)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = threading.active_count()
    for setting, name in [
        ("loss__factory", "arity"),
        ("loss__factory", "missing"),
        ("loss__factory", "number"),
        ("loss__factory", "leaves"),
        ("model__factory", "leaves"),
        ("data__factory", "rows"),
    ]:
        with pytest.raises(ConfigError) as error:
            make(small(**{setting: f"own_parts:{name}"}), tmp_path)
        assert error.value.path == setting.replace("__", "."), name
        assert "\n" not in str(error.value)
    # What was refused left no reader behind.
    assert threading.active_count() <= before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eval__every_steps": 5}, "there is no metric 'los'; .* gives .*loss"),
        ({}, "los is a metric of the evaluation: set eval.every_steps"),
    ],
)
def test_a_policy_that_goes_by_no_metric_is_refused(
    tmp_path: pathlib.Path, settings: dict[str, int], words: str
) -> None:
    config = small(checkpoint__keep="last(3) | best(2, los)", **settings)
    with pytest.raises(ConfigError, match=rf"checkpoint\.keep: {words}"):
        make(config, tmp_path)
