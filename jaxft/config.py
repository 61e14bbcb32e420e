"""The run as data: one section per capability, nothing that imports jax.

World: host-only. Floor: the lowest. Read `configs/tiny_lm.py` before this file and
`jaxft/build.py`, the only place that sees the whole config, after it.

A config file defines `get_config() -> Config`; any field is overridden on the
command line with `--config.section.field=value`. Every field has one scalar type;
quantities and policies are strings with a small grammar, parsed beside the feature
they steer. The exception is `options` of a section with a `factory`: free-form
values of the user's own, declared in the config file.

A field whose metadata says `numbers` can change what the run computes: a resume
that differs in one is refused unless it is allowed by name (`resume.allow`).

No postponed annotations here: config_flags needs the real classes.
"""

import copy
import dataclasses
import enum
import json
import typing
from collections.abc import Iterator
from typing import Any

import ml_collections


class ConfigError(ValueError):
    """A setting that cannot work, named by its path in the config.

    Attributes:
        path: the dotted config path, e.g. `data.global_batch`; empty for the command.
        problem: one line: what is wrong and what to do.
    """

    def __init__(self, path: str, problem: str):
        super().__init__(f"config.{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem


def setting(default: Any, meaning: str, *, numbers: bool = True) -> Any:
    """A config field with its meaning; `numbers`: it can change what is computed."""
    metadata = {"meaning": meaning, "numbers": numbers}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Section:
    """Base of all sections: plain attributes until `lock`, read-only afterwards."""

    __slots__ = ("_locked",)

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_locked", False):
            raise AttributeError(f"the config is locked: cannot set {name!r}")
        object.__setattr__(self, name, value)

    def __deepcopy__(self, memo: dict) -> "Section":
        values = {
            f.name: copy.deepcopy(getattr(self, f.name), memo) for f in fields(self)
        }
        return type(self)(**values)


def fields(section: Section) -> tuple[dataclasses.Field, ...]:
    """The declared fields of a section or config, in order."""
    return dataclasses.fields(typing.cast(Any, section))


class Schedule(enum.Enum):
    """How the learning rate goes on after the warm-up."""

    CONSTANT = "constant"
    COSINE = "cosine"


class Corpus(enum.Enum):
    """Where the built-in data factory takes its tokens from."""

    STDLIB = "stdlib"
    TEXT = "text"
    NPY = "npy"
    SYNTHETIC = "synthetic"


class ResumeMode(enum.Enum):
    """What a start does with the checkpoints it finds."""

    AUTO = "auto"
    REQUIRED = "required"
    NEVER = "never"


class Progress(enum.Enum):
    """When the live progress line is drawn."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclasses.dataclass(kw_only=True, slots=True)
class ModelConfig(Section):
    """The model; `factory` is called with this section and a `RematConfig`."""

    factory: str = setting(
        "jaxft.models.transformer:make_model", "package.module:function"
    )
    vocab_size: int = setting(256, "number of token ids")
    width: int = setting(128, "features of the residual stream")
    num_layers: int = setting(4, "number of blocks")
    num_heads: int = setting(4, "query heads; must divide the width")
    num_kv_heads: int = setting(0, "key and value heads; 0 means num_heads")
    mlp_width: int = setting(0, "hidden features of the MLP; 0 chooses 8/3 width")
    rope_theta: float = setting(10_000.0, "base of the rotary position frequencies")
    tied_head: bool = setting(True, "share the embedding with the output head")
    scan_layers: bool = setting(True, "one stack under lax.scan, or a Python loop")
    options: ml_collections.ConfigDict = setting(
        ml_collections.ConfigDict, "values for a factory of your own"
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class LossConfig(Section):
    """The loss; `factory` is called with this section."""

    factory: str = setting(
        "jaxft.models.transformer:next_token_loss",
        "package.module:function; empty when the model brings its own",
    )
    options: ml_collections.ConfigDict = setting(
        ml_collections.ConfigDict, "values for a factory of your own"
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class OptimizerConfig(Section):
    """The optimizer; `factory` is called with this section."""

    factory: str = setting(
        "jaxft.train.optimizer:make_optimizer", "package.module:function"
    )
    learning_rate: float = setting(3e-3, "peak rate")
    warmup_steps: int = setting(100, "linear warm-up, in updates")
    schedule: Schedule = setting(Schedule.COSINE, "constant or cosine")
    decay_steps: int = setting(0, "updates until the end; 0 means train.num_steps")
    end_fraction: float = setting(0.1, "last rate over peak rate, for cosine")
    b1: float = setting(0.9, "AdamW's first decay")
    b2: float = setting(0.95, "AdamW's second decay")
    weight_decay: float = setting(0.1, "AdamW's decoupled decay, of matrices only")
    options: ml_collections.ConfigDict = setting(
        ml_collections.ConfigDict, "values for a factory of your own"
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class DataConfig(Section):
    """The data; `factory` is called with this section."""

    factory: str = setting("jaxft.data.sources:make_sources", "package.module:function")
    corpus: Corpus = setting(Corpus.STDLIB, "stdlib, text, npy or synthetic")
    path: str = setting("", "glob of text files, or one .npy file of token ids")
    seq_len: int = setting(128, "tokens a row")
    global_batch: int = setting(32, "rows a step, over all processes")
    holdout_fraction: float = setting(0.05, "share of the corpus kept for evaluation")
    shuffle: bool = setting(True, "a new global order in each epoch")
    seed: int = setting(0, "seed of the order")
    num_threads: int = setting(2, "threads that read ahead", numbers=False)
    prefetch: int = setting(4, "batches read ahead", numbers=False)
    options: ml_collections.ConfigDict = setting(
        ml_collections.ConfigDict, "values for a factory of your own"
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class MeshConfig(Section):
    """Mesh axes; -1 fills up with the devices that are left, at most one."""

    data: int = setting(-1, "replicas, within a slice")
    fsdp: int = setting(1, "shards of every large leaf, within a slice")
    tensor: int = setting(1, "shards of single layers, within a slice")
    dcn_data: int = setting(1, "replicas over slices")
    dcn_fsdp: int = setting(1, "shards of every large leaf over slices")
    dcn_tensor: int = setting(1, "shards of single layers over slices")
    num_devices: int = setting(0, "use the first so many devices; 0 means all")


@dataclasses.dataclass(kw_only=True, slots=True)
class ShardingConfig(Section):
    """Which dim of which leaf lies on which mesh axis."""

    logical_rules: str = setting(
        "batch=data+fsdp, vocab=tensor, embed=fsdp, heads=tensor, kv_heads=tensor, "
        "mlp=tensor",
        "logical axis = mesh axes, comma separated; the first rule that fits wins",
    )
    path_rules: str = setting(
        "",
        "regular expression of a leaf path = one entry a dim, e.g. "
        "'.*/kernel = fsdp, tensor; .*/bias = -'; they win over logical axes",
    )
    min_shard_elements: int = setting(2**12, "automatic FSDP replicates smaller leaves")


@dataclasses.dataclass(kw_only=True, slots=True)
class PrecisionConfig(Section):
    """Dtypes of parameters, computation and gradient accumulation."""

    param_dtype: str = setting("float32", "stored parameters and optimizer state")
    compute_dtype: str = setting("float32", "forward and backward pass")
    accum_dtype: str = setting("float32", "sums of gradients over microbatches")


@dataclasses.dataclass(kw_only=True, slots=True)
class RematConfig(Section):
    """What the backward pass keeps. It does not change numbers."""

    plan: str = setting(
        "none",
        "a policy for all layers, or '0-3:full,4-7:dots'; policies: none, full, "
        "dots, dots_no_batch, names(a,b), offload(a,b)",
        numbers=False,
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainConfig(Section):
    """The training step and how long to go on."""

    num_steps: int = setting(1000, "finished step attempts at the end", numbers=False)
    num_microbatches: int = setting(1, "parts that a batch is computed in")
    seed: int = setting(0, "seed of initialisation and of every step's randomness")
    rng_impl: str = setting("threefry2x32", "implementation of the random key")
    guard: bool = setting(True, "do not apply a non-finite update")
    clip_norm: float = setting(0.0, "global gradient norm limit; 0 is off")
    ema_decay: float = setting(
        0.0, "average of the parameters for evaluation; 0 is off"
    )
    max_nonfinite: int = setting(
        10, "non-finite steps in a row before the run stops", numbers=False
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class EvalConfig(Section):
    """Evaluation on held-out data, at step borders."""

    every_steps: int = setting(0, "steps between evaluations; 0 is off", numbers=False)
    num_batches: int = setting(8, "batches of one evaluation", numbers=False)


@dataclasses.dataclass(kw_only=True, slots=True)
class CheckpointConfig(Section):
    """When to save, what to keep."""

    save: str = setting(
        "steps(100) | secs(600)", "when: steps(n), secs(n), joined by |", numbers=False
    )
    keep: str = setting(
        "last(3)", "what stays: last(n), every(n), joined by |", numbers=False
    )
    timeout_secs: float = setting(600.0, "deadline of one save", numbers=False)


@dataclasses.dataclass(kw_only=True, slots=True)
class PreemptionConfig(Section):
    """What counts as a request to stop, and how long there is to obey."""

    signals: str = setting(
        "SIGTERM, SIGUSR1, SIGINT", "signals that ask the run to stop", numbers=False
    )
    grace_secs: float = setting(
        30.0, "time from the request to the end of the process", numbers=False
    )
    time_limit_secs: float = setting(
        0.0, "stop this long after the start; 0 is off", numbers=False
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class SupervisorConfig(Section):
    """Restarts."""

    max_restarts: int = setting(10, "restart budget", numbers=False)
    refill_steps: int = setting(
        500, "good steps that give one restart back", numbers=False
    )
    backoff_secs: float = setting(
        0.5, "wait before the second restart without progress; doubles", numbers=False
    )
    backoff_max_secs: float = setting(60.0, "longest wait", numbers=False)


@dataclasses.dataclass(kw_only=True, slots=True)
class ResumeConfig(Section):
    """What a start does with what it finds in the workdir."""

    mode: ResumeMode = setting(
        ResumeMode.AUTO, "auto, required or never", numbers=False
    )
    allow: str = setting(
        "", "settings or facts that may differ from the saved run", numbers=False
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class CompileConfig(Section):
    """The persistent compile cache."""

    cache: bool = setting(True, "keep compiled programs in the workdir", numbers=False)


@dataclasses.dataclass(kw_only=True, slots=True)
class LogConfig(Section):
    """What a person sees."""

    progress: Progress = setting(
        Progress.AUTO, "live line: auto (on a terminal), always or never", numbers=False
    )
    event_secs: float = setting(
        1.0, "at most one step event in this time", numbers=False
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class Config(Section):
    """One run."""

    model: ModelConfig = setting(ModelConfig, "the model")
    loss: LossConfig = setting(LossConfig, "the loss")
    optimizer: OptimizerConfig = setting(OptimizerConfig, "the optimizer")
    data: DataConfig = setting(DataConfig, "the data")
    mesh: MeshConfig = setting(MeshConfig, "the mesh")
    sharding: ShardingConfig = setting(ShardingConfig, "placement")
    precision: PrecisionConfig = setting(PrecisionConfig, "dtypes")
    remat: RematConfig = setting(RematConfig, "what the backward pass keeps")
    train: TrainConfig = setting(TrainConfig, "the step")
    eval: EvalConfig = setting(EvalConfig, "evaluation")
    checkpoint: CheckpointConfig = setting(CheckpointConfig, "checkpoints")
    preemption: PreemptionConfig = setting(PreemptionConfig, "stop requests")
    supervisor: SupervisorConfig = setting(SupervisorConfig, "restarts")
    resume: ResumeConfig = setting(ResumeConfig, "resuming")
    compile: CompileConfig = setting(CompileConfig, "compile cache")
    log: LogConfig = setting(LogConfig, "output")


def lock(config: Config) -> Config:
    """Makes the whole config read-only and returns it."""
    for section in (config, *(value for _, value in _children(config))):
        if isinstance(section, Section):
            object.__setattr__(section, "_locked", True)
        elif isinstance(section, ml_collections.ConfigDict):
            section.lock()
    return config


def _children(section: Section) -> Iterator[tuple[str, Any]]:
    for field in fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section | ml_collections.ConfigDict):
            yield field.name, value
            if isinstance(value, Section):
                yield from _children(value)


def flatten(config: Section, *, only_numbers: bool = False) -> dict[str, Any]:
    """Dotted path -> JSON value, in declared order.

    Args:
        config: the config or one section.
        only_numbers: leave out the fields that cannot change what is computed.
    """
    flat: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Section):
            inner = flatten(value, only_numbers=only_numbers)
            flat |= {f"{field.name}.{path}": leaf for path, leaf in inner.items()}
        elif isinstance(value, ml_collections.ConfigDict):
            for path, leaf in value.to_dict().items():
                flat[f"{field.name}.{path}"] = json.loads(json.dumps(leaf, default=str))
        elif field.metadata.get("numbers", True) or not only_numbers:
            flat[field.name] = value.value if isinstance(value, enum.Enum) else value
    return flat


def resolve(config: Config) -> Config:
    """Fills in the fields that follow from others; returns the same config.

    Raises:
        ConfigError: a value is outside its range.
    """
    _check_ranges(config)
    if config.optimizer.decay_steps == 0:
        config.optimizer.decay_steps = (
            config.train.num_steps
            if config.optimizer.schedule is Schedule.COSINE
            else 1
        )
    if config.model.num_kv_heads == 0:
        config.model.num_kv_heads = config.model.num_heads
    if config.model.mlp_width == 0:
        config.model.mlp_width = -(-config.model.width * 8 // 3 // 8) * 8
    return config


_POSITIVE = (
    "model.vocab_size",
    "model.width",
    "model.num_layers",
    "model.num_heads",
    "data.seq_len",
    "data.global_batch",
    "data.num_threads",
    "data.prefetch",
    "train.num_steps",
    "train.num_microbatches",
    "train.max_nonfinite",
    "eval.num_batches",
    "checkpoint.timeout_secs",
    "preemption.grace_secs",
    "supervisor.refill_steps",
)
_NOT_NEGATIVE = (
    "model.num_kv_heads",
    "model.mlp_width",
    "optimizer.warmup_steps",
    "optimizer.decay_steps",
    "train.clip_norm",
    "eval.every_steps",
    "preemption.time_limit_secs",
    "supervisor.max_restarts",
    "supervisor.backoff_secs",
    "log.event_secs",
    "mesh.num_devices",
)


def _check_ranges(config: Config) -> None:
    """Refuses values no run could work with, whatever the model and machine."""
    flat = flatten(config)
    for path in _POSITIVE:
        if not flat[path] > 0:
            raise ConfigError(path, f"must be positive, is {flat[path]}")
    for path in _NOT_NEGATIVE:
        if not flat[path] >= 0:
            raise ConfigError(path, f"must not be negative, is {flat[path]}")
    if not 0 <= config.data.holdout_fraction < 1:
        raise ConfigError(
            "data.holdout_fraction",
            f"must be at least 0 and below 1, is {config.data.holdout_fraction}",
        )
    if config.data.global_batch % config.train.num_microbatches:
        raise ConfigError(
            "train.num_microbatches",
            f"{config.train.num_microbatches} does not divide "
            f"data.global_batch {config.data.global_batch}",
        )
