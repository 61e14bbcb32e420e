"""What each policy keeps and computes again, layer by layer, from tracing alone.

World: device, traced; nothing is compiled or run. Floor: `remat`, above `policies`.
Read `jaxft/remat/policies.py` before this file and `jaxft/remat/planner.py`, which
chooses by these numbers, after it.

`record_layers` listens while a loss is traced: `apply_layers`, `scan_layers` and
`remat.wrap` tell it of each layer. A layer is traced once for each policy; like layers
share the result. What a policy keeps are the residuals of `jax.vjp` that are computed
inside the layer, and the layer's input; parameters and what all layers share are there
anyway.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from jaxft.remat import policies
from jaxft.remat.planner import Layers, Option
from jaxft.types import PyTree

_SIMPLE = ("none", "full", "dots", "dots_no_batch")
# With more marked names only single ones, all of them and all but one are tried.
_MAX_NAMES = 4


@dataclasses.dataclass
class LayerRecorder:
    """Hears of layers while a loss is traced.

    Attributes:
        offload: whether host memory is an option.
        scanned: None until a layer is heard of.
    """

    offload: bool = True
    scanned: bool | None = None
    options: list[tuple[Option, ...]] = dataclasses.field(default_factory=list)
    forward_flops: list[int] = dataclasses.field(default_factory=list)
    _alive: list[Any] = dataclasses.field(default_factory=list)
    _seen: dict[Any, tuple[tuple[Option, ...], int]] = dataclasses.field(
        default_factory=dict
    )

    def hear(
        self,
        layer_fn: Callable[..., Any],
        carry: PyTree,
        layer: PyTree,
        *,
        count: int,
        scanned: bool,
    ) -> None:
        """Takes down `count` layers that look like `layer`."""
        self.scanned = scanned if self.scanned is None else self.scanned and scanned
        key = (_shape_key(carry), _shape_key(layer), _code_of(layer_fn))
        if key not in self._seen:
            self._alive.append(layer_fn)  # Else what it closes over lends its id.
            self._seen[key] = _measure(layer_fn, carry, layer, offload=self.offload)
        options, flops = self._seen[key]
        self.options += [options] * count
        self.forward_flops += [flops] * count

    def layers(self) -> Layers:
        """All that was heard of, with the policies that every layer has."""
        shared = set.intersection(*({o.policy for o in row} for row in self.options))
        return Layers(
            options=tuple(
                tuple(o for o in row if o.policy in shared) for row in self.options
            ),
            scanned=bool(self.scanned),
            forward_flops=tuple(self.forward_flops),
        )


_recorder: contextvars.ContextVar[LayerRecorder | None] = contextvars.ContextVar(
    "layer_recorder", default=None
)


@contextlib.contextmanager
def record_layers(*, offload: bool = True) -> Iterator[LayerRecorder]:
    """While a loss is traced: takes down its layers."""
    recorder = LayerRecorder(offload=offload)
    token = _recorder.set(recorder)
    try:
        yield recorder
    finally:
        _recorder.reset(token)


def hear_layers(
    layer_fn: Callable[..., Any],
    carry: PyTree,
    layer: PyTree,
    *,
    count: int = 1,
    scanned: bool = False,
) -> None:
    """Tells whoever listens of `count` like layers; without one it does nothing."""
    recorder = _recorder.get()
    if recorder is None:
        return
    # What is traced here is not to be heard of again.
    token = _recorder.set(None)
    try:
        recorder.hear(layer_fn, carry, layer, count=count, scanned=scanned)
    finally:
        _recorder.reset(token)


def _shape_key(tree: PyTree) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)


def _code_of(fn: Callable[..., Any]) -> Any:
    """Functions defined anew are the same by their code and what they close over."""
    fn = getattr(fn, "__wrapped__", fn)
    cells = getattr(fn, "__closure__", None) or ()
    return getattr(fn, "__code__", fn), tuple(id(cell.cell_contents) for cell in cells)


def _measure(
    layer_fn: Callable[..., Any], carry: PyTree, layer: PyTree, *, offload: bool
) -> tuple[tuple[Option, ...], int]:
    """The options of one layer, and the FLOPs of its forward pass."""
    leaves, treedef = jax.tree.flatten((carry, layer))
    num_carry = len(jax.tree.leaves(carry))
    varied = [
        i
        for i, leaf in enumerate(leaves)
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    ]

    def forward(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(layer_fn(*treedef.unflatten(leaves)))

    avals = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
    closed = jax.make_jaxpr(forward)(*avals)
    # The model's own Python runs once; each policy starts from what it traced.
    run = jex_core.jaxpr_as_fun(closed)
    marked = sorted(set(_marked(closed.jaxpr)))
    plain: dict[str, tuple[int, int, int]] = {}
    for text in _candidates(marked):
        plain[text] = _trace_policy(
            run, avals, varied=varied, num_carry=num_carry, text=text
        )
    none = plain["none"]
    options = tuple(
        Option(
            policy=text,
            kept_bytes=kept,
            recomputed_flops=max(0, flops - none[1]),
            recomputed_bytes=max(0, moved - none[2]),
        )
        for text, (kept, flops, moved) in plain.items()
    )
    if offload:
        options += tuple(_offloaded(options))
    return options, _work(closed.jaxpr)[0]


def _offloaded(options: Sequence[Option]) -> Iterator[Option]:
    """What is kept by name can be kept elsewhere: all but what `full` keeps, too."""
    (full,) = (option for option in options if option.policy == "full")
    for option in options:
        if option.policy.startswith("names("):
            yield dataclasses.replace(
                option,
                policy=option.policy.replace("names(", "offload("),
                kept_bytes=full.kept_bytes,
                host_bytes=option.kept_bytes - full.kept_bytes,
            )


def _candidates(marked: Sequence[str]) -> Iterator[str]:
    yield from _SIMPLE
    count = len(marked)
    sizes = range(1, count + 1) if count <= _MAX_NAMES else {1, count - 1, count}
    for size in sizes:
        for chosen in itertools.combinations(marked, size):
            yield f"names({','.join(chosen)})"


def _trace_policy(
    forward: Callable[..., Any],
    avals: Sequence[Any],
    *,
    varied: Sequence[int],
    num_carry: int,
    text: str,
) -> tuple[int, int, int]:
    """Bytes kept, and FLOPs and bytes of both passes."""
    policy = policies.parse_policy(text)

    def of_varied(leaves: Sequence[Any], chosen: Sequence[Any]) -> Any:
        full = list(leaves)
        for i, leaf in zip(varied, chosen, strict=True):
            full[i] = leaf
        return forward(*full)

    backward: list[Any] = []

    def both(leaves: Sequence[Any]) -> Any:
        wrapped = policies.wrap(
            lambda *chosen: of_varied(leaves, chosen), policy, in_scan=True
        )
        outputs, pull_back = jax.vjp(wrapped, *(leaves[i] for i in varied))
        cotangents = [_ones_like(x) for x in outputs]
        residuals, treedef = jax.tree.flatten(pull_back)
        pull = lambda own, given: treedef.unflatten(own)(given)
        backward.append(jax.make_jaxpr(pull)(residuals, cotangents))
        return residuals, pull_back(cotangents)

    closed, shapes = jax.make_jaxpr(both, return_shape=True)(avals)
    inputs, count = closed.jaxpr.invars, len(shapes[0])
    pull = backward[0].jaxpr
    read = _read(pull, [True] * len(pull.outvars))
    residuals = itertools.compress(closed.jaxpr.outvars[:count], read[:count])
    held = _held(closed.jaxpr, list(residuals), passed=inputs[num_carry:])
    kept = sum(_bytes(variable.aval) for variable in held)
    return kept, *_work(closed.jaxpr)


def _held(jaxpr: Any, residuals: Sequence[Any], *, passed: Sequence[Any]) -> list[Any]:
    """The residuals that take memory of their own for each layer.

    Not among them: literals, what is there anyway (`passed`: parameters), what the
    backward pass does not read, and what is the same for all layers, as it depends on
    none of the inputs. The compiler drops these, too.
    """
    varying = _varying(jaxpr, [True] * len(jaxpr.invars))
    there = {id(v) for v in passed}
    held = {id(v): v for v in residuals if id(v) in varying and id(v) not in there}
    return list(held.values())


def _varying(jaxpr: Any, inputs: Sequence[bool]) -> set[int]:
    """Ids of the variables that depend on an input that varies."""
    pairs = zip(jaxpr.invars, inputs, strict=True)
    found = {id(v) for v, varies in pairs if varies}
    for eqn in jaxpr.eqns:
        flags = [id(v) in found for v in eqn.invars]
        inner = getattr(eqn.params.get("jaxpr"), "jaxpr", None)
        if inner is not None and len(inner.invars) == len(flags) and any(flags):
            within = _varying(inner, flags)
            pairs = zip(eqn.outvars, inner.outvars, strict=True)
            found |= {id(outer) for outer, own in pairs if id(own) in within}
        elif any(flags):
            found |= {id(v) for v in eqn.outvars}
    return found


def _read(jaxpr: Any, outputs: Sequence[bool]) -> list[bool]:
    """Which inputs the wanted outputs are computed from."""
    wanted = {
        id(v) for v, is_wanted in zip(jaxpr.outvars, outputs, strict=True) if is_wanted
    }
    for eqn in reversed(jaxpr.eqns):
        flags = [id(v) in wanted for v in eqn.outvars]
        if not any(flags):
            continue
        inner = getattr(eqn.params.get("jaxpr"), "jaxpr", None)
        used = [True] * len(eqn.invars)
        if eqn.primitive.name == "jit" and inner is not None:
            used = _read(inner, flags)
        wanted |= {
            id(v) for v, is_used in zip(eqn.invars, used, strict=True) if is_used
        }
    return [id(v) in wanted for v in jaxpr.invars]


def _ones_like(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.ones_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def _bytes(aval: Any) -> int:
    itemsize = getattr(aval.dtype, "itemsize", 4)
    return math.prod(aval.shape) * itemsize


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs inside an equation."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def _marked(jaxpr: Any) -> Iterator[str]:
    """All names that `checkpoint_name` gives in it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"]
        for inner in _inner(eqn.params):
            yield from _marked(inner)


def _work(jaxpr: Any) -> tuple[int, int]:
    """FLOPs, and the bytes that the matrix products move; the rest is fused to them."""
    flops = moved = 0
    for eqn in jaxpr.eqns:
        inners = list(_inner(eqn.params))
        if inners:
            trips = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
            for inner in inners:
                more, bytes_more = _work(inner)
                flops += trips * more
                moved += trips * bytes_more
            continue
        size = sum(math.prod(v.aval.shape) for v in eqn.outvars)
        depth = _depth(eqn)
        flops += 2 * size * depth if depth else size
        if depth:
            moved += sum(_bytes(v.aval) for v in (*eqn.invars, *eqn.outvars))
    return flops, moved


def _depth(eqn: Any) -> int:
    """Multiplications for each element of the result; 0 for what is no product."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        out_features = eqn.params["dimension_numbers"].rhs_spec[0]
        return math.prod(kernel.shape) // kernel.shape[out_features]
    return 0
