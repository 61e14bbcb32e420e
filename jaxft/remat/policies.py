"""What the backward pass keeps of each layer: policies by name, one plan a model.

World: device. Floor: above `types`, beside `parallel`. Read `jaxft/config.py`
(`RematConfig`) before this file and `jaxft/remat/layers.py`, which applies a plan,
after it.

A plan is one policy for all layers (`dots`) or a layer spec
(`0-3:full,4-7:names(attn,up)`). It changes memory and time, never numbers, and never
the state tree: layers stay one stack `[num_layers, ...]` (or one list) whatever the
plan says.

JAX's own policy objects stay in this file: their form changes between releases.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Collection
from typing import Any

import jax

from jaxft.config import ConfigError

_PATH = "remat.plan"
_POLICIES = "none, full, dots, dots_no_batch, names(a,b), offload(a,b)"


class Kind(enum.Enum):
    """What is kept of a layer; the rest is computed again in the backward pass."""

    NONE = "none"  # no `jax.checkpoint`: JAX keeps what the backward pass reads
    FULL = "full"  # only the layer's inputs
    DOTS = "dots"  # and the results of all matrix products
    DOTS_NO_BATCH = "dots_no_batch"  # of those without a batch dim (no attention)
    NAMES = "names"  # and what the model marked with `checkpoint_name`
    OFFLOAD = "offload"  # the same, moved to host memory


@dataclasses.dataclass(frozen=True)
class Policy:
    """What is kept of one layer.

    Attributes:
        kind: the rule.
        names: marked values, for `names` and `offload`; empty for the others.
    """

    kind: Kind
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.kind.value + (f"({','.join(self.names)})" if self.names else "")


def parse_plan(
    text: str, num_layers: int, *, names: Collection[str] | None = None
) -> tuple[Policy, ...]:
    """Reads a plan: one policy a layer.

    Args:
        text: a policy, or `layers:policy` entries joined by commas, where `layers`
            is `3` or `0-3` (inclusive). Spaces do not matter.
        num_layers: how many layers the model has.
        names: what the model marks with `checkpoint_name`; None accepts any name.

    Raises:
        ConfigError: an unknown policy, name or layer, or a layer that is named
            twice or not at all.
    """
    entries = _split_outside_parentheses("".join(text.split()))
    if ":" not in text and len(entries) == 1:
        return (parse_policy(entries[0], names=names),) * num_layers
    plan: list[Policy | None] = [None] * num_layers
    for entry in entries:
        layers, colon, policy_text = entry.partition(":")
        if not colon:
            raise ConfigError(
                _PATH, f"{entry!r} is not 'layers:policy'; policies: {_POLICIES}"
            )
        policy = parse_policy(policy_text, names=names)
        for layer in _parse_layers(layers, num_layers):
            if plan[layer] is not None:
                raise ConfigError(_PATH, f"layer {layer} is given twice")
            plan[layer] = policy
    whole = tuple(policy for policy in plan if policy is not None)
    if len(whole) < num_layers:
        gaps = [str(layer) for layer, policy in enumerate(plan) if policy is None]
        raise ConfigError(
            _PATH, f"no policy for layer {', '.join(gaps)} of 0-{num_layers - 1}"
        )
    return whole


def policy_of(text: str, layer: int) -> Policy:
    """What a plan has for one layer, whatever the number of layers is.

    Raises:
        ConfigError: the plan is wrong, or has nothing for it.
    """
    entries = _split_outside_parentheses("".join(text.split()))
    last = max([layer, *(int(n) for n in re.findall(r"(\d+):", " ".join(entries)))])
    if ":" not in text:
        return parse_plan(text, last + 1)[layer]
    for entry in entries:
        layers, _, policy = entry.partition(":")
        if policy and layer in _parse_layers(layers, last + 1):
            return parse_policy(policy)
    raise ConfigError(_PATH, f"no policy for layer {layer} in {text!r}")


def parse_policy(text: str, *, names: Collection[str] | None = None) -> Policy:
    """Reads one policy, e.g. `dots` or `names(attn,up)`.

    Raises:
        ConfigError: it does not exist, or names what the model does not mark.
    """
    match = re.fullmatch(r"(\w+)(?:\((.*)\))?", text)
    known = {kind.value: kind for kind in Kind}
    if match is None or match[1] not in known:
        raise ConfigError(_PATH, f"unknown policy {text!r}; policies: {_POLICIES}")
    kind = known[match[1]]
    given = tuple(match[2].split(",")) if match[2] else ()
    if kind not in (Kind.NAMES, Kind.OFFLOAD):
        if match[2] is not None:
            raise ConfigError(_PATH, f"{kind.value!r} takes no names, got {text!r}")
        return Policy(kind)
    offer = "" if names is None else f"; the model marks: {', '.join(sorted(names))}"
    if not given or "" in given:
        raise ConfigError(_PATH, f"{text!r} must name marked values{offer}")
    for name in given:
        if names is not None and name not in names:
            raise ConfigError(_PATH, f"unknown name {name!r} in {text!r}{offer}")
    return Policy(kind, given)


def _split_outside_parentheses(text: str) -> list[str]:
    return re.split(r",(?![^(]*\))", text)


def _parse_layers(text: str, num_layers: int) -> range:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is None:
        raise ConfigError(_PATH, f"{text!r} is no layer: write 3 or 0-3")
    first = int(match[1])
    last = int(match[2] or match[1])
    if last < first:
        raise ConfigError(_PATH, f"layers {text} run backwards")
    if last >= num_layers:
        raise ConfigError(_PATH, f"no layer {last}: layers are 0-{num_layers - 1}")
    return range(first, last + 1)


def wrap(fn: Callable[..., Any], policy: Policy, *, in_scan: bool) -> Callable:
    """`fn` with its backward pass under `policy`; `fn` itself for `none`.

    Args:
        fn: any differentiable function of arrays; it may close over tracers.
        policy: what is kept of it.
        in_scan: it is the body of a `lax.scan`. There the forward and the backward
            pass are separate loops, so that the compiler cannot merge the second
            computation with the first, and the barriers against it
            (`prevent_cse`) would only cost fusions. Everywhere else it would, which
            undoes the remat.
    """
    if policy.kind is Kind.NONE:
        return fn
    return jax.checkpoint(fn, policy=_jax_policy(policy), prevent_cse=not in_scan)


def _jax_policy(policy: Policy) -> Callable[..., Any]:
    offered = jax.checkpoint_policies
    match policy.kind:
        case Kind.FULL:
            return offered.nothing_saveable
        case Kind.DOTS:
            return offered.dots_saveable
        case Kind.DOTS_NO_BATCH:
            return offered.dots_with_no_batch_dims_saveable
        case Kind.NAMES:
            return offered.save_only_these_names(*policy.names)
        case Kind.OFFLOAD:
            return offered.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=list(policy.names),
                offload_src="device",
                offload_dst="pinned_host",
            )
        case Kind.NONE:
            return offered.everything_saveable
