"""Links and deletions together: no two neighbouring steps share a file, ever.

Single decisions are tested where they are made; here whole runs go on, in a model of
a root under every kind of policy, and for one of them on disk.
"""

import itertools
import pathlib
import random

import jax.numpy as jnp
import pytest

from jaxft import records
from jaxft.checkpoint import incremental, manager, manifest, policies
from jaxft.fingerprints import Fingerprint, LeafDigest

FROZEN = ("embed", "kernel", "scale")
PATHS = (*FROZEN, "now and then", "adapter")
SPECS = dict.fromkeys(PATHS, ("float32", (4,)))


class Root:
    """A root in memory: what is committed, and which step wrote which bytes."""

    def __init__(self, keep, *, full_every=10):
        self.keep = policies.parse_keep(keep)
        self.full_every = full_every
        self.manifests = {}
        self.metrics = {}
        self.pinned = set()
        self.num_linked = 0

    def infos(self):
        return [self._info(step) for step in sorted(self.manifests)]

    def _info(self, step):
        metrics = {"loss": self.metrics[step]}
        return records.CheckpointInfo(
            step=step, path="", commit_secs=0.0, metrics=metrics
        )

    def commit(self, step, *, loss, values):
        self.metrics[step] = loss
        infos = self.infos()
        newest, base = ([None, None, *(self.manifests[i.step] for i in infos)])[:-3:-1]
        neighbour = policies.lasting_neighbour(
            infos, self._info(step), keep=self.keep, pinned=self.pinned
        )
        links = incremental.plan_links(
            {path: _digest(values[path]) for path in PATHS},
            SPECS,
            step=step,
            newest=newest,
            base=base,
            array_layout="files",
            codec="raw",
            full_every=self.full_every,
            beside=neighbour and self.manifests[neighbour.step],
        )
        self.num_linked += len(links)
        entries = {p: links.get(p) or _entry(p, values[p], step) for p in PATHS}
        self.manifests[step] = _manifest(step, entries)
        self.retain()

    def retain(self, *, shares=True):
        gone = policies.plan_deletions(
            self.infos(),
            keep=self.keep,
            pinned=self.pinned,
            shares=self.share if shares else None,
        )
        for info in gone:
            del self.manifests[info.step]

    def share(self, first, second):
        ours, theirs = (self.manifests[i.step].leaves for i in (first, second))
        return any(ours[p].written_at == theirs[p].written_at for p in PATHS)

    def wanted(self):
        infos = self.infos()
        gone = policies.plan_deletions(infos, keep=self.keep, pinned=self.pinned)
        return [info for info in infos if info not in gone]


def _digest(value):
    return LeafDigest(Fingerprint(value, value), 0)


def _entry(path, value, step):
    return manifest.LeafEntry(
        path=path,
        name=path,
        dtype="float32",
        shape=(4,),
        fingerprint=Fingerprint(value, value),
        written_at=step,
        num_chunks=1,
        num_bytes=20,
        num_nonfinite=0,
    )


def _manifest(step, leaves):
    return manifest.Manifest(
        step=step,
        timeline=0,
        array_layout="files",
        codec="raw",
        healthy=True,
        leaves=leaves,
        files={},
    )


def _values(number):
    frozen = dict.fromkeys(FROZEN, 7)
    return frozen | {"now and then": number // 7, "adapter": number}


@pytest.mark.parametrize("full_every", [2, 10, 1000])
@pytest.mark.parametrize(
    "keep",
    [
        *("last(1)", "last(2)", "last(3)", "last(9)", "every(3)", "every(10)"),
        *("last(1) | every(10)", "last(2) | every(4)", "last(3) | every(7)"),
        *("last(1) | best(1, loss)", "last(2) | best(3, loss)", "best(2, loss, max)"),
        "last(2) | every(5) | best(2, loss)",
    ],
)
def test_neighbours_share_no_file_whatever_is_deleted(keep, full_every):
    rng = random.Random(f"{keep} {full_every}")
    root = Root(keep, full_every=full_every)
    step = 0
    for number in range(80):
        step += rng.choice((1, 1, 1, 2, 3))
        root.commit(step, loss=rng.choice((rng.random(), 1.0)), values=_values(number))
        if rng.random() < 0.05:
            root.pinned.add(rng.choice(list(root.manifests)))
        if rng.random() < 0.05 and len(root.manifests) > 1:  # a rollback
            newest = max(root.manifests)
            del root.manifests[newest]
            root.pinned.discard(newest)
            root.retain()
        infos = root.infos()
        for first, second in itertools.pairwise(infos):
            assert not root.share(first, second), (first.step, second.step)
        # At most one more between any two that the policy asks for.
        assert len(infos) <= 2 * len(root.wanted())
    if full_every > 2 and keep not in ("last(1)", "every(10)"):
        assert root.num_linked > 0


def test_steps_that_stay_for_good_need_none_between_them():
    """Milestones cost what they are: none keeps another step for ever."""
    root = Root("last(3) | every(10)", full_every=1000)
    for step in range(1, 101):
        root.commit(step, loss=0.0, values=_values(step))
    steps = [info.step for info in root.infos()]
    assert [step for step in steps if step <= 90] == [*range(10, 100, 10)]
    assert steps[-3:] == [98, 99, 100]
    assert len(steps) <= 9 + 3 + 1
    assert root.num_linked > 150


def test_without_the_rule_one_file_would_be_all_there_is():
    """The case that the rule is for."""
    root = Root("last(1) | every(10)")
    for step in (10, 11, 12):
        root.commit(step, loss=0.0, values=_values(0))
    assert [info.step for info in root.infos()] == [10, 11, 12]
    assert root.manifests[12].leaves["embed"].written_at == 10
    root.retain(shares=False)
    first, last = root.infos()
    assert root.share(first, last)


def _state(step):
    return {
        "step": step,
        "w": jnp.full((4,), step, jnp.float32),
        "frozen": jnp.arange(64.0),
    }


@pytest.mark.device
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("keep", ["last(1) | every(10)", "last(1) | best(1, loss)"])
def test_one_flipped_bit_never_takes_all_steps(tmp_path, keep):
    with manager.CheckpointManager(tmp_path, keep=keep, layout="files") as checkpoints:
        for step in (10, 11, 12):
            metrics = {"loss": float(step)}
            checkpoints.save(step, _state(step), metrics=metrics, force=True)
    newest = manifest.read(tmp_path / "12").leaves["frozen"]
    assert newest.written_at == 10
    chunk = max(
        (file for file in (tmp_path / "12/state/frozen").rglob("*") if file.is_file()),
        key=lambda file: file.stat().st_size,
    )
    _flip(chunk)
    restored = manager.CheckpointManager(tmp_path, keep=keep).restore(_state(0))
    assert restored.step == 11
    # What was between them goes when it is not needed any more.
    with manager.CheckpointManager(tmp_path, keep=keep, layout="files") as checkpoints:
        for step in (13, 14):
            metrics = {"loss": float(step)}
            checkpoints.save(step, _state(step), metrics=metrics, force=True)
    kept = [int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()]
    origins = [
        manifest.read(tmp_path / str(step)).leaves["frozen"].written_at
        for step in sorted(kept)
    ]
    assert all(a != b for a, b in itertools.pairwise(origins))


def _flip(path: pathlib.Path):
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
