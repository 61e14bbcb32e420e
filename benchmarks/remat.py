"""Whether planned remat beats the best single policy, by a real compiler's numbers.

Command:   JAX_PLATFORMS=cpu python benchmarks/remat.py [--target=tpu:v5e:2x2]
Hardware:  two CPU cores and `pip install 'jaxft[tpu-aot]'`; no TPU
Time:      20 to 70 s a compile, about thirty of them; what is in FILE is not repeated
Expected:  every plan within its budget, and no more recomputation than the best
           single policy that fits

A transformer of 12 layers under scan. Its single policies are compiled; eight budgets
lie evenly between the peaks of `full` and `none`. For each the planner chooses,
compiles and corrects. Predictions are judged by form: one compile of each form
calibrates, all others of it are predicted.
"""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from jaxft import config as configs
from jaxft import memory_plan
from jaxft.config import Config, ConfigError
from jaxft.remat import planner
from jaxft.remat.collectives import Collective
from jaxft.remat.targets import Footprint, find_target

_TARGET = flags.DEFINE_string("target", "tpu:v5e:2x2", "as of `plan`")
_RESULTS = flags.DEFINE_string("results", "/tmp/jaxft-remat.json", "compiles so far")
_SCAN = flags.DEFINE_bool("scan", True, "a stack under scan, or a loop")
_LAYERS = flags.DEFINE_integer("layers", 12, "of the model")
_BUDGETS = flags.DEFINE_integer("budgets", 8, "between full and none")
_ONLY = flags.DEFINE_list("only", [], "single policies to predict, no budgets")

_SINGLES = (
    "full",
    "names(attn,up)",
    "names(attn,gate,up)",
    "names(attn,gate,qkv,up)",
    "dots_no_batch",
    "dots",
    "none",
)


def make_config(num_devices: int) -> Config:
    """The model that is planned: 190 million parameters, 4 rows a device."""
    config = Config()
    config.model.width, config.model.num_heads = 1024, 8
    config.model.num_layers, config.model.mlp_width = _LAYERS.value, 4096
    config.model.vocab_size, config.model.scan_layers = 8192, _SCAN.value
    config.mesh.data, config.mesh.fsdp = 1, num_devices
    config.precision.compute_dtype = "bfloat16"
    config.data.corpus = configs.Corpus.SYNTHETIC
    config.data.global_batch, config.data.seq_len = 4 * num_devices, 1024
    config.remat.plan = "auto"
    return configs.resolve(config)


class Compiles:
    """What was compiled, on disk: each plan once."""

    def __init__(self, path: pathlib.Path, subject: memory_plan.Subject, key: str):
        self._path, self._subject, self._key = path, subject, key

    def __call__(self, plan: Sequence[str]) -> tuple[Footprint, tuple]:
        """As `Subject.compile`."""
        known = json.loads(self._path.read_text()) if self._path.exists() else {}
        name = f"{self._key} {planner.describe(plan)}"
        if name not in known:
            started = time.monotonic()
            footprint, collectives = self._subject.compile(plan)
            known[name] = {
                "footprint": vars(footprint),
                "collectives": [vars(c) for c in collectives],
                "secs": time.monotonic() - started,
            }
            self._path.write_text(json.dumps(known, indent=1))
            print(f"compiled {name} in {known[name]['secs']:.0f} s", flush=True)
        found = known[name]
        collectives = tuple(Collective(**c) for c in found["collectives"])
        return Footprint(**found["footprint"]), collectives


def show_singles(layers: planner.Layers, compiles: Compiles) -> dict[str, int]:
    """Compiles the single policies; peak bytes of those that the device takes."""
    offered = {option.policy for option in layers.options[0]}
    wanted = _ONLY.value or [p for p in _SINGLES if p in offered]
    peaks: dict[str, int] = {}
    base = None
    print("\nsingle policy | kept MiB | recomputed GF | peak MiB | predicted | off %")
    for policy in wanted:
        plan = (policy,) * len(layers.options)
        footprint, _ = compiles(plan)
        kept = layers.kept_bytes(plan)
        if base is None:
            base = footprint.peak_bytes - kept
        predicted = base + kept
        off = 100 * (predicted / footprint.peak_bytes - 1)
        flops = layers.recomputed_flops(plan) / 1e9
        peak = footprint.peak_bytes
        print(
            f"{policy} | {kept / 2**20:.0f} | {flops:.1f} | {peak / 2**20:.0f} | "
            f"{predicted / 2**20:.0f} | {off:+.1f}"
            + (" | refused" if footprint.refused else "")
        )
        if not footprint.refused:
            peaks[policy] = peak
    return peaks


def show_budgets(
    subject: memory_plan.Subject, compiles: Compiles, peaks: dict[str, int]
) -> None:
    """Plans for budgets between the least and the most."""
    low, high = min(peaks.values()), max(peaks.values())
    layers, gains = subject.layers, []
    predictions: dict[str, list[tuple[int, int]]] = {}
    print(
        "\nbudget MiB | peak MiB | compiles | planned GF | best single | its GF | plan"
    )
    for number in range(1, _BUDGETS.value + 1):
        budget = low + (high - low) * number // (_BUDGETS.value + 1)
        fits = {p: v for p, v in peaks.items() if v <= budget}
        single = min(
            fits, key=lambda p: layers.recomputed_flops((p,) * len(layers.options))
        )
        its = layers.recomputed_flops((single,) * len(layers.options)) / 1e9
        try:
            found = memory_plan.decide(subject, budget, compile_plan=compiles)
        except ConfigError as error:
            print(f"{budget / 2**20:.0f} | refused: {error}")
            continue
        for trial in found.trials:
            pair = layers.kept_bytes(trial.plan), trial.footprint.peak_bytes
            form = planner.form(layers, trial.plan)
            predictions.setdefault(form, []).append(pair)
        flops = layers.recomputed_flops(found.plan) / 1e9
        gains.append(1 - flops / its if its else 0.0)
        print(
            f"{budget / 2**20:.0f} | "
            f"{found.accepted.footprint.peak_bytes / 2**20:.0f} | "
            f"{len(found.trials)} | {flops:.1f} | {single} | {its:.1f} | {found.text}",
            flush=True,
        )
    mean = 100 * sum(gains) / len(gains) if gains else 0.0
    print(f"\n{mean:.1f} % less recomputation than the best single policy, on average")
    show_predictions(predictions)


def show_predictions(predictions: dict[str, list[tuple[int, int]]]) -> None:
    """How far the kept bytes and one constant a form are from the compiler."""
    print("\nform | plans beside the first | off % of each")
    for form, pairs in predictions.items():
        pairs = list(dict.fromkeys(pairs))
        constant = pairs[0][1] - pairs[0][0]
        offs = [100 * ((constant + kept) / peak - 1) for kept, peak in pairs[1:]]
        print(f"{form} | {len(offs)} | {', '.join(f'{off:+.1f}' for off in offs)}")


def main(argv: Sequence[str]) -> Any:
    """Prints the tables."""
    del argv
    target = find_target(_TARGET.value)
    config = make_config(len(target.devices))
    subject = memory_plan.Subject(config, target)
    print(f"{target.name}: traced in {subject.trace_secs:.1f} s")
    form = "scan" if _SCAN.value else "loop"
    key = f"{target.name} {form} {_LAYERS.value}"
    compiles = Compiles(pathlib.Path(_RESULTS.value), subject, key)
    peaks = show_singles(subject.layers, compiles)
    if not _ONLY.value:
        show_budgets(subject, compiles, peaks)


if __name__ == "__main__":
    app.run(main)
