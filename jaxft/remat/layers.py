"""Applies the layers of a model under a remat plan: a list in a loop, a stack by scan.

World: device. Floor: beside `policies`, above `types`. Read
`jaxft/remat/policies.py` before this file and `jaxft/models/transformer.py`, its
user, after it.

Like layers are one stack `[num_layers, ...]` whatever the plan says. A uniform plan
is one scan; a pattern that repeats over all layers is one scan over blocks of
layers; any other plan is one scan for each run of layers with one policy. On CPU the
results are bit-equal under all plans, except that a layer which stands alone between
two scans is compiled with its surroundings and may differ in the last bit.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxft.remat.estimate import hear_layers
from jaxft.remat.policies import Policy, wrap
from jaxft.types import PyTree

# (carry, one layer's slice of the stack) -> (carry, output): a body of `lax.scan`.
LayerFn = Callable[[Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Segment:
    """Successive layers that one scan covers.

    Attributes:
        policies: one a layer of the scan's body.
        num_blocks: trips of the scan; it covers `len(policies) * num_blocks` layers.
    """

    policies: tuple[Policy, ...]
    num_blocks: int

    @property
    def num_layers(self) -> int:
        """How many layers it covers."""
        return len(self.policies) * self.num_blocks


def apply_layers(
    layer_fn: LayerFn,
    carry: PyTree,
    *,
    layers: Sequence[PyTree],
    plan: Sequence[Policy],
) -> tuple[PyTree, list[PyTree]]:
    """Applies a list of layers in a Python loop.

    Args:
        layer_fn: (carry, layer) -> (carry, output).
        carry: what goes from layer to layer.
        layers: one tree a layer; they need not look alike.
        plan: one policy a layer.

    Returns:
        The last carry, and the layers' outputs.
    """
    outputs = []
    for layer, policy in zip(layers, plan, strict=True):
        hear_layers(layer_fn, carry, layer)
        carry, output = wrap(layer_fn, policy, in_scan=False)(carry, layer)
        outputs.append(output)
    return carry, outputs


def scan_layers(
    layer_fn: LayerFn, carry: PyTree, *, stack: PyTree, plan: Sequence[Policy]
) -> tuple[PyTree, PyTree]:
    """Applies a stack of like layers with as few scans as the plan allows.

    Args:
        layer_fn: (carry, layer) -> (carry, output), as a body of `lax.scan`.
        carry: what goes from layer to layer; same shapes and dtypes all the way.
        stack: tree of arrays `[num_layers, ...]`: the parameters, and whatever else
            differs by layer (a key a layer, for dropout).
        plan: one policy a layer.

    Returns:
        The last carry, and the outputs, `[num_layers, ...]`.
    """
    segments = plan_segments(plan)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stack)
    hear_layers(layer_fn, carry, one, count=len(plan), scanned=True)
    outputs = []
    for segment, part in zip(segments, _split_stack(stack, segments), strict=True):
        carry, output = _apply_segment(layer_fn, carry, stack=part, segment=segment)
        outputs.append(output)
    if len(outputs) == 1:
        return carry, outputs[0]
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *outputs)


def plan_segments(plan: Sequence[Policy]) -> tuple[Segment, ...]:
    """The scans that cover a plan, with the fewest layer bodies to compile.

    A pattern that repeats over the whole plan becomes one scan over blocks; any
    other plan becomes one scan for each run of layers with one policy.
    """
    runs = [(policy, len(list(run))) for policy, run in itertools.groupby(plan)]
    period = next(_periods(plan), len(plan))
    if period < len(runs):
        return (Segment(tuple(plan[:period]), len(plan) // period),)
    return tuple(Segment((policy,), length) for policy, length in runs)


def _periods(plan: Sequence[Policy]) -> Iterator[int]:
    num_layers = len(plan)
    for period in range(1, num_layers):
        if num_layers % period == 0 and all(
            plan[layer] == plan[layer % period] for layer in range(num_layers)
        ):
            yield period


def _split_stack(stack: PyTree, segments: Sequence[Segment]) -> list[PyTree]:
    """The stack cut into the segments' parts."""
    if len(segments) == 1:
        return [stack]
    lengths = [segment.num_layers for segment in segments]
    return _unzip(jax.tree.map(lambda leaf: jax.lax.split(leaf, lengths), stack), stack)


def _unzip(tree_of_lists: PyTree, like: PyTree) -> list[PyTree]:
    """A tree with a list at each leaf -> a list of trees."""
    treedef = jax.tree.structure(like)
    columns = treedef.flatten_up_to(tree_of_lists)
    return [treedef.unflatten(row) for row in zip(*columns, strict=True)]


def _apply_segment(
    layer_fn: LayerFn, carry: PyTree, *, stack: PyTree, segment: Segment
) -> tuple[PyTree, PyTree]:
    """One scan; a single trip is no loop (XLA unrolls it), so it is none for us."""
    in_scan = segment.num_blocks > 1
    layers = [wrap(layer_fn, policy, in_scan=in_scan) for policy in segment.policies]
    if len(layers) == 1 and in_scan:
        return jax.lax.scan(layers[0], carry, stack, length=segment.num_blocks)

    def apply_block(carry: PyTree, block: PyTree) -> tuple[PyTree, PyTree]:
        outputs = []
        # `split`, not indexing: its transpose is one concatenation.
        parts = jax.tree.map(lambda leaf: jax.lax.split(leaf, [1] * len(layers)), block)
        for layer, part in zip(layers, _unzip(parts, block), strict=True):
            one = jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), part)
            carry, output = layer(carry, one)
            outputs.append(output)
        return carry, jax.tree.map(lambda *rows: jnp.stack(rows), *outputs)

    if not in_scan:
        return apply_block(carry, stack)
    shape = (segment.num_blocks, len(layers))
    blocks = jax.tree.map(lambda leaf: leaf.reshape(shape + leaf.shape[1:]), stack)
    carry, outputs = jax.lax.scan(apply_block, carry, blocks)
    join = lambda leaf: leaf.reshape((segment.num_layers, *leaf.shape[2:]))
    return carry, jax.tree.map(join, outputs)
