"""Steps made by hand, without jax: the layout on disk as a test wants it.

Not a module of tests; they load it by its path.
"""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from jaxft import fingerprints
from jaxft.checkpoint import array_store, run_record, step_files
from jaxft.checkpoint import manifest as manifests

_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_CODECS = {
    "raw": [],
    "zstd": [{"name": "zstd", "configuration": {"level": 1}}],
    "lz4": [{"name": "blosc", "configuration": {"cname": "lz4", "clevel": 5}}],
}
_AS_BYTES = ("uint2", "uint4", "float8_e4m3")


def make_step(
    root: pathlib.Path,
    step: int,
    leaves: Mapping[str, Any],
    *,
    layout: str = "files",
    codec: str = "raw",
    keys: tuple[str, ...] = (),
    links: Mapping[str, pathlib.Path] | None = None,
    record: Mapping[str, Any] | None = None,
    with_manifest: bool = True,
    healthy: bool = True,
) -> pathlib.Path:
    """Writes `<root>/<step>`.

    Args:
        root: the checkpoint root.
        step: the label.
        leaves: path -> array, number or text.
        layout: `files` or `ocdbt`.
        codec: `raw`, `lz4` or `zstd`.
        keys: paths whose uint32 array is the data of typed random keys.
        links: path -> the step that has the same leaf, to be linked.
        record: what else the run record has.
        with_manifest: whether there is one.
        healthy: what it says.
    """
    path = root / str(step)
    state = path / "state"
    state.mkdir(parents=True)
    links = dict(links or {})
    entries = {}
    for leaf, value in leaves.items():
        if isinstance(value, str):
            continue
        if leaf in links:
            _link(links[leaf] / "state" / _name(leaf), state / _name(leaf))
        else:
            _write_array(state, _name(leaf), np.asarray(value), layout, codec)
        entries[leaf] = _entry(leaf, value, step, keys, links)
    _write_notes(path, leaves, layout, keys)
    _write_record(path, step, leaves, keys, record or {})
    if with_manifest:
        write_manifest(path, step, entries, layout=layout, codec=codec, healthy=healthy)
    for folder, _, files in os.walk(path):
        for file in files:
            os.chmod(os.path.join(folder, file), 0o444)
    return path


def write_manifest(
    path: pathlib.Path,
    step: int,
    entries: Mapping[str, dict[str, Any]],
    *,
    layout: str = "files",
    codec: str = "raw",
    healthy: bool = True,
) -> None:
    files = step_files.collect_files(path, array_layout=layout)
    sizes = array_store.measure_leaves(
        path,
        names=[entry["name"] for entry in entries.values()],
        files=files,
        array_layout=layout,
    )
    leaves = {}
    for leaf, entry in entries.items():
        num_chunks, num_bytes = sizes[entry["name"]]
        leaves[leaf] = manifests.LeafEntry(
            **entry, num_chunks=num_chunks, num_bytes=num_bytes
        )
    record = run_record.read_record(path)
    manifest = manifests.Manifest(
        step=step,
        timeline=record["timeline"],
        array_layout=layout,
        codec=codec,
        healthy=healthy,
        unhealthy=() if healthy else (next(iter(leaves)),),
        leaves=leaves,
        files=files,
    )
    manifests.write(path, manifest)


def _name(leaf: str) -> str:
    return leaf.replace("/", ".")


def _type(leaf: str, value: Any, keys: tuple[str, ...]) -> run_record.LeafSpec:
    kind = run_record.LeafKind
    if isinstance(value, bool | int | float | str):
        return run_record.LeafSpec(kind(type(value).__name__))
    if leaf in keys:
        return run_record.LeafSpec(kind.ARRAY, "key<fry>", value.shape[:-1])
    return run_record.LeafSpec(kind.ARRAY, str(value.dtype), value.shape)


def _entry(
    leaf: str,
    value: Any,
    step: int,
    keys: tuple[str, ...],
    links: Mapping[str, pathlib.Path],
) -> dict[str, Any]:
    digest = fingerprints.digest_array(np.asarray(value))
    spec = _type(leaf, value, keys)
    older = manifests.read(links[leaf]).leaves[leaf] if leaf in links else None
    return {
        "path": leaf,
        "name": _name(leaf),
        "dtype": spec.dtype or str(np.asarray(value).dtype),
        "shape": spec.shape,
        "fingerprint": digest.fingerprint,
        "written_at": older.written_at if older else step,
        "num_links": older.num_links + 2 if older else 0,
        "num_nonfinite": digest.num_nonfinite,
    }


def _write_array(
    state: pathlib.Path, name: str, value: np.ndarray, layout: str, codec: str
) -> None:
    if str(value.dtype) in _AS_BYTES:
        as_bits = str(value.dtype).startswith("float")
        value = value.view(np.uint8) if as_bits else value.astype(np.uint8)
    chunk = [
        max(1, -(-size // 2)) if dim == 0 else max(1, size)
        for dim, size in enumerate(value.shape)
    ]
    checked = [_BYTES, {"name": "crc32c"}]
    inner = {
        "chunk_shape": chunk,
        "codecs": [_BYTES, *_CODECS[codec], {"name": "crc32c"}],
        "index_codecs": checked,
    }
    store: dict[str, Any] = {"driver": "file", "path": f"{state}/{name}/"}
    if layout == "ocdbt":
        base = {"driver": "file", "path": f"{state}/"}
        store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    spec = {
        "driver": "zarr3",
        "kvstore": store,
        "metadata": {
            "shape": list(value.shape),
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": chunk},
            },
            "data_type": str(value.dtype),
            "codecs": [{"name": "sharding_indexed", "configuration": inner}],
        },
        "store_data_equal_to_fill_value": True,
        "create": True,
    }
    ts.open(spec).result().write(value).result()


def _link(source: pathlib.Path, target: pathlib.Path) -> None:
    for folder, _, files in os.walk(source):
        into = target / os.path.relpath(folder, source)
        into.mkdir(parents=True)
        for file in files:
            os.link(os.path.join(folder, file), into / file)


def _write_notes(
    path: pathlib.Path, leaves: Mapping[str, Any], layout: str, keys: tuple[str, ...]
) -> None:
    tree, metadatas, texts = {}, [], {}
    for leaf, value in leaves.items():
        segments = tuple(leaf.split("/"))
        kind = "jax.Array" if isinstance(value, np.ndarray) else "scalar"
        if isinstance(value, str):
            kind, texts[_name(leaf)] = "string", value
        tree[str(segments)] = {
            "key_metadata": [{"key": key, "key_type": 2} for key in segments],
            "value_metadata": {"value_type": kind, "skip_deserialize": False},
        }
        impl = {"random_key_impl": "threefry2x32"} if leaf in keys else None
        metadatas.append(
            {"array_metadata": {"param_name": _name(leaf), "ext_metadata": impl}}
        )
    notes = {
        "state/_METADATA": {
            "tree_metadata": tree,
            "use_ocdbt": layout == "ocdbt",
            "use_zarr3": True,
        },
        "state/_sharding": {},
        "state/_strings.json": texts,
        "state/array_metadatas/process_0": {"array_metadatas": metadatas},
        "_CHECKPOINT_METADATA": {"item_handlers": {"state": "", "run": ""}},
    }
    for name, value in notes.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(json.dumps(value))


def _write_record(
    path: pathlib.Path,
    step: int,
    leaves: Mapping[str, Any],
    keys: tuple[str, ...],
    more: Mapping[str, Any],
) -> None:
    tree: dict[str, Any] = {}
    for leaf, value in leaves.items():
        *folders, last = leaf.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = str(_type(leaf, value, keys))
    body = run_record.make_record(step, time_secs=1.7e9 + step, state=tree)
    (path / "run").mkdir()
    (path / "run/metadata").write_text(json.dumps({**body, **more}))
