"""The step benchmark: it runs, and it compares like with like."""

import numpy as np
import pytest

pytestmark = pytest.mark.device


@pytest.mark.slow
def test_the_built_step_and_the_hand_written_one_learn_the_same(bench, capsys):
    pairs, width = 200, 128
    bench.main(
        [f"--num-pairs={pairs}", f"--width={width}", "--seq-len=16", "--num-layers=1"]
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "hand-written step",
        "built / hand",
        "hand / hand",
    ]
    assert all(f"{pairs} pairs" in line for line in lines[1:])


@pytest.mark.slow
def test_virtual_shards_learn_the_same_as_the_plain_step(bench, capsys):
    sizes = ["--width=32", "--seq-len=16", "--num-layers=1", "--global-batch=8"]
    more = ["--num-pairs=10", "--virtual-shards=8", "--num-devices=4"]
    bench.main([*sizes, *more])
    lines = capsys.readouterr().out.splitlines()
    names = ["plain step", "shards / plain", "plain / plain"]
    assert [line.split(":")[0] for line in lines] == names


def test_contestants_that_compute_something_else_are_refused(bench):
    with pytest.raises(RuntimeError, match="losses differ"):
        bench.time_rounds({"a": lambda: 1.0, "b": lambda: 1.001}, num_rounds=1)


def test_ratios_are_of_pairs(bench):
    base = np.linspace(1.0, 9.0, 101)  # a machine that gets slower and slower
    ratio, low, high = bench.pairs.ratio(1.5 * base, base)
    assert ratio == low == high == 1.5
    noise = np.exp(np.random.default_rng(0).normal(0, 0.1, 400))
    ratio, low, high = bench.pairs.ratio(1.2 * noise, np.ones(400))
    assert low < 1.2 < high
    assert high - low < 0.05
