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

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from jaxft.choices import (
    ArrayLayout,
    Codec,
    Corpus,
    Progress,
    ResumeMode,
    Schedule,
    Verify,
)
from jaxft.safeguards import (
    DistributedConfig,
    ElasticConfig,
    FaultsConfig,
    HangConfig,
    PreemptionConfig,
    RollbackConfig,
    SupervisorConfig,
)
from jaxft.settings import (
    ConfigError,
    Section,
    fraction,
    not_negative,
    positive,
    seed32,
    setting,
    share,
    shown,
    typed,
    walk,
)


@dataclasses.dataclass(kw_only=True, slots=True)
class ModelConfig(Section):
    """The model; `factory` is called with this section and a `RematConfig`."""

    factory: str = setting(
        "jaxft.models.transformer:make_model", "package.module:function"
    )
    vocab_size: int = positive(256, "number of token ids")
    width: int = positive(128, "features of the residual stream")
    num_layers: int = positive(4, "number of blocks")
    num_heads: int = positive(4, "query heads; must divide the width")
    num_kv_heads: int = not_negative(0, "key and value heads; 0 means num_heads")
    mlp_width: int = not_negative(0, "hidden features of the MLP; 0 chooses 8/3 width")
    rope_theta: float = positive(10_000.0, "base of the rotary position frequencies")
    tied_head: bool = setting(True, "share the embedding with the output head")
    scan_layers: bool = setting(True, "one stack under lax.scan, or a Python loop")
    options: ConfigDict = setting(ConfigDict, "values for a factory of your own")


@dataclasses.dataclass(kw_only=True, slots=True)
class LossConfig(Section):
    """The loss; `factory` is called with this section."""

    factory: str = setting(
        "jaxft.models.transformer:next_token_loss",
        "package.module:function; empty when the model brings its own",
    )
    options: ConfigDict = setting(ConfigDict, "values for a factory of your own")


@dataclasses.dataclass(kw_only=True, slots=True)
class OptimizerConfig(Section):
    """The optimizer; `factory` is called with this section."""

    factory: str = setting(
        "jaxft.train.optimizer:make_optimizer", "package.module:function"
    )
    learning_rate: float = positive(3e-3, "peak rate")
    warmup_steps: int = not_negative(100, "linear warm-up, in updates")
    schedule: Schedule = setting(Schedule.COSINE, "constant or cosine")
    decay_steps: int = not_negative(0, "updates until the end; 0 means train.num_steps")
    end_fraction: float = share(0.1, "last rate over peak rate, for cosine")
    b1: float = fraction(0.9, "AdamW's first decay")
    b2: float = fraction(0.95, "AdamW's second decay")
    weight_decay: float = not_negative(0.1, "AdamW's decoupled decay, of matrices only")
    trainable: str = setting(
        "**", "globs of the parameters that are updated; others stay as they are"
    )
    options: ConfigDict = setting(ConfigDict, "values for a factory of your own")


@dataclasses.dataclass(kw_only=True, slots=True)
class DataConfig(Section):
    """The data; `factory` is called with this section."""

    factory: str = setting("jaxft.data.sources:make_sources", "package.module:function")
    corpus: Corpus = setting(Corpus.STDLIB, "stdlib, text, npy or synthetic")
    path: str = setting("", "glob of text files, or one .npy file of token ids")
    seq_len: int = positive(128, "tokens a row")
    global_batch: int = positive(32, "rows a step, over all processes")
    holdout_fraction: float = fraction(0.05, "share of the corpus kept for evaluation")
    shuffle: bool = setting(True, "a new global order in each epoch")
    seed: int = seed32(0, "seed of the order")
    skip: str = setting(
        "", "batches that are left out, by number from 0, e.g. '300-310, 400'"
    )
    num_threads: int = positive(2, "threads that read ahead", numbers=False)
    prefetch: int = positive(4, "batches read ahead", numbers=False)
    options: ConfigDict = setting(ConfigDict, "values for a factory of your own")


@dataclasses.dataclass(kw_only=True, slots=True)
class MeshConfig(Section):
    """Mesh axes; -1 fills up with the devices that are left, at most one."""

    data: int = setting(-1, "replicas, within a slice")
    fsdp: int = setting(1, "shards of every large leaf, within a slice")
    tensor: int = setting(1, "shards of single layers, within a slice")
    dcn_data: int = setting(1, "replicas over slices")
    dcn_fsdp: int = setting(1, "shards of every large leaf over slices")
    dcn_tensor: int = setting(1, "shards of single layers over slices")
    num_devices: int = not_negative(0, "use the first so many devices; 0 means all")


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
    min_shard_elements: int = not_negative(2**12, "automatic FSDP skips smaller leaves")


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
        "dots, dots_no_batch, names(a,b), offload(a,b); auto chooses for the budget",
        numbers=False,
    )
    memory_budget: str = setting(
        "90%",
        "of a device, for auto: e.g. 14GiB, or a share of its memory",
        numbers=False,
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainConfig(Section):
    """The training step and how long to go on."""

    num_steps: int = positive(1000, "finished step attempts at the end", numbers=False)
    num_microbatches: int = positive(1, "parts that a batch is computed in")
    virtual_shards: int = not_negative(
        0, "parts summed in one order: same numbers on any number of devices; 0 is off"
    )
    seed: int = seed32(0, "seed of initialisation and of every step's randomness")
    rng_impl: str = setting("threefry2x32", "implementation of the random key")
    guard: bool = setting(True, "do not apply a non-finite update")
    clip_norm: float = not_negative(0.0, "global gradient norm limit; 0 is off")
    ema_decay: float = fraction(0.0, "average of parameters for evaluation: 0 is off")
    offload_opt_state: bool = setting(
        False,
        "keep the arrays of the optimizer's state in host memory between updates",
        numbers=False,
    )
    max_nonfinite: int = positive(
        10, "non-finite steps in a row before the run rolls back", numbers=False
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class EvalConfig(Section):
    """Evaluation on held-out data, at step borders."""

    every_steps: int = not_negative(0, "between evaluations; 0 is off", numbers=False)
    num_batches: int = positive(8, "batches of one evaluation", numbers=False)


@dataclasses.dataclass(kw_only=True, slots=True)
class CheckpointConfig(Section):
    """When to save, what to keep, how it is stored and proven."""

    save: str = setting(
        "steps(100) | secs(600)",
        "when: steps(n), secs(n), auto, joined by |",
        numbers=False,
    )
    expected_failure_hours: float = positive(
        24.0, "between failures; a guess that auto begins with", numbers=False
    )
    keep: str = setting(
        "last(3)",
        "what stays: last(n), every(n), best(n, metric), best(n, metric, max), "
        "joined by |",
        numbers=False,
    )
    timeout_secs: float = positive(600.0, "deadline of one save", numbers=False)
    on_save_error: str = setting(
        "fail", "what a failed save means: fail, warn or retry(n)", numbers=False
    )
    max_failed_saves: int = positive(
        3, "failed saves in a row that end the run under warn", numbers=False
    )
    layout: ArrayLayout = setting(
        ArrayLayout.AUTO,
        "files (unchanged leaves are linked), ocdbt (few files) or auto",
        numbers=False,
    )
    codec: Codec = setting(
        Codec.RAW, "raw, or for slow storage lz4 or zstd", numbers=False
    )
    full_every: int = not_negative(
        10, "commits after which a leaf is written anew; 0 never links", numbers=False
    )
    verify: Verify = setting(
        Verify.FULL, "what a restore proves: full, sample or off", numbers=False
    )
    health: str = setting(
        "params/**, opt_state/average/**",
        "globs of the leaves that must be finite in a checkpoint",
        numbers=False,
    )
    memory_budget: str = setting(
        "auto",
        "host memory of a save or restore beyond the state, e.g. 4GiB; auto is half "
        "of what is available",
        numbers=False,
    )
    mirror: str = setting(
        "",
        "folder, s3:// or gs:// address of a second copy of all steps; empty is off",
        numbers=False,
    )
    mirror_rate: str = setting(
        "", "most bytes a second to the mirror, e.g. 50MB; empty is all", numbers=False
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class ResumeConfig(Section):
    """What a start does with what it finds in the workdir."""

    mode: ResumeMode = setting(
        ResumeMode.AUTO, "auto, required or never", numbers=False
    )
    allow: str = setting(
        "",
        "what may differ from the saved run: facts (jax), settings (optimizer.b1), "
        "sections (optimizer) or patterns (optimizer.b*), comma separated",
        numbers=False,
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class InitConfig(Section):
    """Parameters of another checkpoint to begin with; all else is made anew.

    Only a run without a checkpoint of its own reads them.
    """

    checkpoint: str = setting(
        "", "an item, a step or a root of any Orbax; empty is off", numbers=False
    )
    paths: str = setting(
        "",
        "globs over the stored paths to take; empty is params/** of a whole state, "
        "and all of anything else",
        numbers=False,
    )
    rename: str = setting(
        "", "stored path = path of the parameters, comma separated", numbers=False
    )
    optional: str = setting(
        "", "globs over parameters that stay fresh where not stored", numbers=False
    )
    allow_cast: str = setting(
        "", "globs over parameters that may have another dtype", numbers=False
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
    event_secs: float = not_negative(1.0, "least time between events", numbers=False)
    tensorboard: str = setting(
        "", "folder of curves for TensorBoard, or true: in the workdir", numbers=False
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
    hang: HangConfig = setting(HangConfig, "hangs")
    distributed: DistributedConfig = setting(DistributedConfig, "several processes")
    elastic: ElasticConfig = setting(ElasticConfig, "processes that are gone")
    rollback: RollbackConfig = setting(RollbackConfig, "bad steps")
    faults: FaultsConfig = setting(FaultsConfig, "faults on purpose")
    resume: ResumeConfig = setting(ResumeConfig, "resuming")
    init: InitConfig = setting(InitConfig, "parameters to begin with")
    compile: CompileConfig = setting(CompileConfig, "compile cache")
    log: LogConfig = setting(LogConfig, "output")


def resolve(config: Config) -> Config:
    """Fills in the fields that follow from others; returns the same config.

    Raises:
        ConfigError: a value has another type than its field or is out of range.
    """
    check_types(config)
    for path, section, field in walk(config):
        must, value = field.metadata["must"], getattr(section, field.name)
        if must is not None and not must[1](value):
            raise ConfigError(path, f"must be {must[0]}, is {shown(value)}")
    _check_companions(config)
    data, train, model = config.data, config.train, config.model
    if data.global_batch % train.num_microbatches:
        problem = f"{train.num_microbatches} does not divide data.global_batch"
        raise ConfigError("train.num_microbatches", f"{problem} {data.global_batch}")
    if config.optimizer.decay_steps == 0:
        cosine = config.optimizer.schedule is Schedule.COSINE
        config.optimizer.decay_steps = train.num_steps if cosine else 1
    if model.num_kv_heads == 0:
        model.num_kv_heads = model.num_heads
    if model.mlp_width == 0:
        model.mlp_width = -(-model.width * 8 // 3 // 8) * 8
    return config


def _check_companions(config: Config) -> None:
    """Refuses what does nothing alone: somebody counts on it."""
    init = config.init
    alone = {
        f"init.{name}": (getattr(init, name), "init.checkpoint", init.checkpoint)
        for name in ("paths", "rename", "optional", "allow_cast")
    }
    mirror, rate = config.checkpoint.mirror, config.checkpoint.mirror_rate
    alone["checkpoint.mirror_rate"] = rate, "checkpoint.mirror", mirror
    for path, (value, needed, other) in alone.items():
        if value and not other:
            raise ConfigError(path, f"does nothing without {needed}: set both or none")


def check_types(config: Any) -> None:
    """Holds every value against the declared type of its field, in place.

    An int becomes a float, the text of a choice the choice, a dict of options a
    `ConfigDict`, where those are declared; nothing else is converted.

    Raises:
        ConfigError: a value is of another type.
    """
    if type(config) is not Config:
        raise ConfigError("", f"this is {shown(config)}, not a jaxft.Config")
    for path, section, field in walk(config):
        before = getattr(section, field.name)
        value = typed(before, field.type, path)
        if value is not before:
            setattr(section, field.name, value)
