"""Decisions: compiles counted, corrections, refusals, what is saved and reused."""

import copy
import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest

from jaxft import config as configs
from jaxft import memory_plan, memory_record
from jaxft.config import Config, ConfigError
from jaxft.memory_plan import Subject, decide, parse_budget
from jaxft.remat import planner
from jaxft.remat.targets import Footprint, find_target, read_footprint

MIB = 2**20


def small(**changes):
    config = Config()
    config.model.width, config.model.num_layers, config.model.num_heads = 32, 4, 2
    config.model.vocab_size = 64
    config.data.corpus = configs.Corpus.SYNTHETIC
    config.data.seq_len, config.data.global_batch = 64, 8
    config.mesh.num_devices = 1
    config.optimizer.warmup_steps = 2
    config.remat.plan, config.remat.memory_budget = "auto", "8MiB"
    for path, value in changes.items():
        section, field = path.split("__")
        setattr(getattr(config, section), field, value)
    return configs.resolve(config)


@pytest.fixture(scope="module")
def subject():
    return Subject(small(), find_target("here", devices=jax.devices()[:1]))


class Compiler:
    """Takes what the layers keep and a constant that grows with the scans."""

    def __init__(self, layers, constant, a_scan=0):
        self.layers, self.constant, self.a_scan = layers, constant, a_scan
        self.plans = []

    def __call__(self, plan):
        self.plans.append(plan)
        peak = self.constant + self.layers.kept_bytes(plan)
        return Footprint(peak_bytes=peak + self.a_scan * planner.num_scans(plan)), ()


def _limits(layers):
    count = len(layers.options)
    kept = [layers.kept_bytes((o.policy,) * count) for o in layers.options[0]]
    return min(kept), max(kept)


@pytest.mark.parametrize("constant", [0, MIB, 40 * MIB])
@pytest.mark.parametrize("a_scan", [0, MIB // 8])
@pytest.mark.parametrize("share", [0.1, 0.35, 0.6, 0.9])
def test_every_plan_fits_in_at_most_three_compiles(subject, constant, a_scan, share):
    subject, layers = copy.copy(subject), subject.layers
    layers = subject.layers = dataclasses.replace(
        layers, options=layers.options * 3, forward_flops=layers.forward_flops * 3
    )
    low, high = _limits(layers)
    budget = int(constant + 2 * a_scan + low + share * (high - low))
    compiler = Compiler(layers, constant, a_scan)
    found = decide(subject, budget, compile_plan=compiler)
    assert len(compiler.plans) <= 3
    assert found.accepted.footprint.peak_bytes <= budget
    singles = [
        (o.policy,) * 12
        for o in layers.options[0]
        if compiler((o.policy,) * 12)[0].peak_bytes <= budget
    ]
    best = min(layers.recomputed_flops(plan) for plan in singles)
    assert layers.recomputed_flops(found.plan) <= best


def test_a_refusal_says_what_is_missing_and_what_would_help(subject):
    compiler = Compiler(subject.layers, 40 * MIB)
    with pytest.raises(ConfigError) as caught:
        decide(subject, 20 * MIB, compile_plan=compiler)
    text = str(caught.value)
    assert "no plan fits 20.0 MiB a device: full takes" in text
    assert "too many; nearest: train.num_microbatches=" in text
    assert "\n" not in text
    assert len(compiler.plans) <= 3


def test_a_refusal_where_the_state_alone_is_too_large(subject):
    compiler = Compiler(subject.layers, 40 * MIB)
    with pytest.raises(ConfigError, match=r"the state alone is .* more devices"):
        decide(subject, MIB // 8, compile_plan=compiler)


def test_the_optimizer_s_state_is_offered_to_the_host_where_that_is_enough(subject):
    state = subject.state_bytes
    compiler = Compiler(subject.layers, state)
    needed = state + _limits(subject.layers)[0]
    rows = copy.copy(subject)
    rows.local_rows = 1  # Neither batch nor microbatches can give way.
    with pytest.raises(ConfigError, match=r"nearest: train\.offload_opt_state=True"):
        decide(rows, needed - 1024, compile_plan=compiler)


def test_a_compiler_that_does_not_say_how_much_is_corrected_too(subject):
    layers = subject.layers

    def compile_plan(plan):
        if layers.kept_bytes(plan) > _limits(layers)[0]:
            return Footprint(peak_bytes=0, refused="RESOURCE_EXHAUSTED"), ()
        return Footprint(peak_bytes=MIB), ()

    found = decide(subject, 8 * MIB, compile_plan=compile_plan)
    assert set(found.plan) == {"full"}


def test_the_real_compiler_agrees_and_explain_says_it_by_layer(subject):
    found = decide(subject, parse_budget("8MiB", None))
    assert found.accepted.footprint.peak_bytes <= 8 * MIB
    table = found.explain().splitlines()
    assert table[0].split() == ["layer", "policy", "kept", "offloaded", "recomputed"]
    assert len(table) == 5


@pytest.mark.parametrize(
    ("text", "memory", "bytes_or_problem"),
    [
        ("14GiB", None, 14 * 2**30),
        ("90%", 1000, 900),
        ("90%", None, "a memory that the backend does not tell"),
        ("0%", 1000, "is no share"),
        ("x%", 1000, "is no share"),
        ("much", 1000, "is no size"),
    ],
)
def test_budgets(text, memory, bytes_or_problem):
    if isinstance(bytes_or_problem, int):
        assert parse_budget(text, memory) == bytes_or_problem
    else:
        with pytest.raises(ConfigError, match=bytes_or_problem):
            parse_budget(text, memory)


def test_refuses_what_it_does_not_know():
    here = find_target("here", devices=jax.devices()[:1])
    with pytest.raises(ConfigError, match="auto does not know virtual shards"):
        Subject(small(train__virtual_shards=2), here)
    with pytest.raises(ConfigError, match="write here, tpu:v5e:4x4"):
        find_target("tpu:v5e")


def test_a_decision_is_kept_reused_and_never_remade_unseen(tmp_path):
    told = []
    emit = lambda kind, /, **fields: told.append((kind, fields))
    options = {"workdir": tmp_path, "emit": emit}
    assert memory_record.find_plan(small(remat__plan="full"), **options) is None
    first = memory_record.find_plan(small(), **options)
    assert first.is_new
    assert list(tmp_path.iterdir()) == []  # Until the preflight is over.
    first.write(tmp_path)
    again = memory_record.find_plan(small(), **options)
    assert (again.plan, again.is_new) == (first.plan, False)
    assert [fields["reused"] for kind, fields in told] == [False, True]
    told.clear()
    # What the plan does not depend on changes nothing.
    assert not memory_record.find_plan(small(train__num_steps=7), **options).is_new
    told.clear()
    other = memory_record.find_plan(small(data__global_batch=4), **options)
    assert other.is_new
    assert told[0] == ("remat_replan", {"changes": {"data.global_batch": [8, 4]}})
    (tmp_path / memory_record.FILE).write_text("{")
    told.clear()
    assert memory_record.find_plan(small(), **options).is_new
    assert told[0][1]["changes"] == {"remat.json": ["unreadable", ""]}


@pytest.mark.parametrize(
    ("real", "kinds"),
    [(None, []), (1050, ["memory"]), (1200, ["memory", "memory_differs"])],
)
def test_the_real_peak_is_told_where_it_is_known(real, kinds):
    told = []
    stats = None if real is None else {"peak_bytes_in_use": real}
    emit = lambda kind, /, **fields: told.append(kind)
    memory_record.compare_peak(1000, stats, emit=emit)
    assert told == kinds


_HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None


@pytest.mark.skipif(_HAS_LIBTPU, reason="libtpu is installed: nothing is missing")
def test_a_missing_compiler_is_one_line():
    with pytest.raises(ConfigError, match=r"pip install 'jaxft\[tpu-aot\]'"):
        find_target("tpu:v5e:2x2")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not _HAS_LIBTPU, reason="libtpu is not installed")
def test_plans_for_a_tpu_that_is_not_here(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(
        "from jaxft.config import Config\n"
        "def get_config():\n"
        "    config = Config()\n"
        "    config.model.width, config.model.num_layers = 256, 4\n"
        "    config.model.num_heads = 2  # 128 features: no tile is padded.\n"
        "    config.data.corpus = 'synthetic'\n"
        "    config.data.global_batch, config.mesh.fsdp = 16, 4\n"
        "    config.mesh.data = 1\n"
        "    config.remat.plan = 'full'\n"
        "    config.train.offload_opt_state = True\n"
        "    return config\n"
    )
    words = ["-m", "jaxft.cli", "plan", f"--config={config}", "--target=tpu:v5e:2x2"]
    env = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run(
        [sys.executable, *words, "--json"],
        capture_output=True,
        text=True,
        env=env,
        timeout=590,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert (found["device"], found["num_devices"]) == ("TPU v5 lite", 4)
    assert found["peak_bytes"] > 0
    # Both moments of AdamW, a quarter of them for each device, lie on the host.
    num_params = 4 * 12 * 256 * 256 + 256 * 256  # Nearly: norms are small.
    assert found["host_bytes"] == pytest.approx(2 * num_params, rel=0.15)
    assert {c["kind"] for c in found["collectives"]} & {"all-gather", "all-reduce"}


@functools.cache
def _compiled(policy):
    subject = Subject(small(), find_target("here", devices=jax.devices()[:1]))
    return subject.compile((policy,) * 4)[0].peak_bytes


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_policies_are_ordered_by_what_they_keep_in_scan_and_loop(subject, scan):
    here = find_target("here", devices=jax.devices()[:1])
    layers = Subject(small(model__scan_layers=scan), here).layers
    kept = {o.policy: o.kept_bytes for o in layers.options[0]}
    assert kept["full"] < kept["names(attn)"] < kept["names(attn,up)"]
    assert kept["names(attn,up)"] < kept["dots_no_batch"] < kept["dots"] < kept["none"]
    assert layers.options[0] == subject.layers.options[0]


@pytest.mark.parametrize(
    "policy",
    [
        "full",
        *(
            pytest.param(policy, marks=pytest.mark.slow)
            for policy in ("names(attn,up)", "dots_no_batch", "dots")
        ),
    ],
)
def test_each_policy_changes_what_the_real_step_keeps(subject, policy):
    # On CPU a loop's memory does not follow what is kept; a scan's does.
    kept = {o.policy: o.kept_bytes for o in subject.layers.options[0]}
    saved = 4 * (kept["none"] - kept[policy])
    assert _compiled("none") - _compiled(policy) == pytest.approx(saved, rel=0.4)


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_optimized_program_computes_again(scan):
    """`prevent_cse`: else the compiler would undo the remat of a loop."""
    here = find_target("here", devices=jax.devices()[:1])
    config = small(model__scan_layers=scan)
    core = memory_plan.build_core
    products = {}
    for plan in ("none", "full"):
        step = core(config, devices=here.devices, plan=plan)
        compiled = step.train_step.lower(None, step.batch).compile()
        products[plan] = compiled.as_text().count(" dot(")
        assert read_footprint(compiled).peak_bytes > 0
    assert products["full"] > products["none"]
