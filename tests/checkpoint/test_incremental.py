"""Which leaves are linked: single decisions, and whole runs of a model of a root."""

import dataclasses
import statistics

import pytest

from jaxft.checkpoint import incremental
from jaxft.checkpoint.manifest import LeafEntry, Manifest
from jaxft.fingerprints import Fingerprint, LeafDigest

SETTINGS = {"array_layout": "files", "codec": "raw", "full_every": 10}


def _digest(value):
    return LeafDigest(Fingerprint(value, value), 0)


def _entry(path, *, value=1, written_at=0, num_links=0, shape=(4,), dtype="float32"):
    return LeafEntry(
        path=path,
        name=path.replace("/", "."),
        dtype=dtype,
        shape=shape,
        fingerprint=Fingerprint(value, value),
        written_at=written_at,
        num_links=num_links,
        num_chunks=1,
        num_bytes=20,
    )


def _manifest(step, *entries, array_layout="files", codec="raw"):
    return Manifest(
        step=step,
        timeline=0,
        array_layout=array_layout,
        codec=codec,
        healthy=True,
        leaves={entry.path: entry for entry in entries},
        files={},
    )


def _plan(*, value=1, spec=("float32", (4,)), step=30, newest=None, base=None, **other):
    """What is decided about one leaf `a`, and whether its digest is waited for."""
    settings = {"step": step, "newest": newest, "base": base, **SETTINGS, **other}
    specs = {"a": spec}
    waits = incremental.candidates(specs, **settings)
    links = incremental.plan_links({"a": _digest(value)}, specs, **settings)
    assert links.keys() <= waits
    return links.get("a"), bool(waits)


BASE = _manifest(10, _entry("a", written_at=10))
NEWEST = _manifest(20, _entry("a", written_at=20))


def test_an_unchanged_leaf_is_linked_to_the_step_before_the_newest():
    link, waits = _plan(newest=NEWEST, base=BASE)
    assert waits
    assert link == dataclasses.replace(BASE.leaves["a"], num_links=2)


def test_a_changed_leaf_is_waited_for_and_written():
    assert _plan(value=2, newest=NEWEST, base=BASE) == (None, True)


@pytest.mark.parametrize(
    "change",
    [
        {"newest": None},
        {"base": None},
        {"newest": None, "base": None},
        {"spec": ("bfloat16", (4,))},
        {"spec": ("float32", (2, 2))},
        {"codec": "zstd"},
        {"array_layout": "ocdbt"},
        {"base": _manifest(10, _entry("a", written_at=10), array_layout="ocdbt")},
        {"base": _manifest(10, _entry("a", written_at=10), codec="lz4")},
        {"base": _manifest(10, _entry("b", written_at=10))},
        {"newest": _manifest(20, _entry("b", written_at=20))},
        {"newest": _manifest(20, _entry("a", written_at=20, value=2))},
        {"newest": _manifest(20, _entry("a", written_at=10, num_links=2))},
        {"base": NEWEST},
        {"newest": BASE},
        {"step": 20},
        {"step": 10},
        {"full_every": 1},
        {"full_every": 0},
    ],
    ids=[
        "second save",
        "no base",
        "first save",
        "other dtype",
        "other shape",
        "other codec",
        "other layout",
        "layout was other",
        "codec was other",
        "not in the base",
        "not in the newest",
        "changed between them",
        "newest shares the file",
        "base is the newest",
        "newest is the base",
        "newest is replaced",
        "base is replaced",
        "every save is full",
        "off",
    ],
)
def test_nobody_waits_for_a_leaf_that_cannot_be_linked(change):
    assert _plan(**{"newest": NEWEST, "base": BASE, **change}) == (None, False)


def test_both_layouts_of_shard_files_must_be_files():
    other = {"array_layout": "ocdbt"}
    base = _manifest(10, _entry("a", written_at=10), **other)
    assert _plan(newest=NEWEST, base=base, **other) == (None, False)


def test_a_newest_step_in_another_layout_does_not_matter():
    newest = _manifest(20, _entry("a", written_at=20), array_layout="ocdbt")
    assert _plan(newest=newest, base=BASE)[0] is not None


@pytest.mark.parametrize(("num_links", "linked"), [(8, True), (9, False), (10, False)])
def test_a_leaf_is_written_anew_when_it_is_old(num_links, linked):
    base = _manifest(10, _entry("a", written_at=1, num_links=num_links))
    link, waits = _plan(newest=NEWEST, base=base)
    assert (link is not None, waits) == (linked, linked)


def test_a_leaf_without_a_digest_is_written():
    settings = {"step": 30, "newest": NEWEST, "base": BASE, **SETTINGS}
    assert incremental.plan_links({}, {"a": ("float32", (4,))}, **settings) == {}


def test_what_is_linked_depends_on_nothing_but_the_paths():
    names = [f"layers/{number}/kernel" for number in range(20)]
    base = _manifest(10, *[_entry(n, written_at=2, num_links=4) for n in names])
    newest = _manifest(20, *[_entry(n, written_at=3, num_links=4) for n in names])
    digests = {name: _digest(1) for name in names}
    plans = [
        incremental.plan_links(
            {name: digests[name] for name in some},
            dict.fromkeys(some, ("float32", (4,))),
            step=30,
            newest=newest,
            base=base,
            **SETTINGS,
        )
        for some in (names, names[::-1])
    ]
    assert plans[0] == plans[1]
    assert len(plans[0]) == 10


# --- whole runs ---------------------------------------------------------------


class Root:
    """Saves by the plan, and keeps for each step which files its leaves are in."""

    def __init__(self, shapes, *, full_every=10):
        self.specs = {path: ("float32", shape) for path, shape in shapes.items()}
        self.full_every = full_every
        self.manifests = []
        self.commits = {}  # step -> number of the commit
        self.shares = []  # of the elements, the written ones

    def save(self, values):
        step = 10 * (len(self.commits) + 1)
        newest, base = ([None, None, *self.manifests])[:-3:-1]
        settings = {**SETTINGS, "full_every": self.full_every}
        settings |= {"step": step, "newest": newest, "base": base}
        waits = incremental.candidates(self.specs, **settings)
        digests = {path: _digest(values[path]) for path in waits}
        links = incremental.plan_links(digests, self.specs, **settings)
        entries, written, total = [], 0, 0
        for path, (_, shape) in self.specs.items():
            total += shape[0]
            if path not in links:
                written += shape[0]
                entry = _entry(path, value=values[path], written_at=step, shape=shape)
            else:
                entry = links[path]
                assert entry.fingerprint == _digest(values[path]).fingerprint
            entries.append(entry)
        self.commits[step] = len(self.commits)
        self.shares.append(written / total)
        self.manifests.append(_manifest(step, *entries))
        self._check()

    def _check(self):
        *_, new = self.manifests
        for path, entry in new.leaves.items():
            assert entry.num_links <= self.full_every
            if len(self.manifests) == len(self.commits):  # none was lost
                age = self.commits[new.step] - self.commits[entry.written_at]
                assert entry.num_links == age
            if len(self.manifests) > 1:
                other = self.manifests[-2].leaves[path]
                assert entry.written_at != other.written_at


FROZEN = {f"params/layers/{number}/kernel": (95,) for number in range(40)}
TRAINED = {f"params/adapters/{number}": (5,) for number in range(40)}


def _run(*, num_saves, full_every=10, frozen=FROZEN, trained=TRAINED):
    root = Root({**frozen, **trained}, full_every=full_every)
    for number in range(num_saves):
        root.save(dict.fromkeys(trained, number) | dict.fromkeys(frozen, 7))
    return root


def test_the_first_two_saves_are_full_and_the_third_writes_what_changed():
    assert _run(num_saves=3).shares == [1, 1, 0.05]


@pytest.mark.parametrize("full_every", [0, 1, 2, 3, 4, 5, 9, 10, 11, 30])
def test_no_file_is_shared_by_neighbours_or_older_than_allowed(full_every):
    root = _run(num_saves=60, full_every=full_every)
    if full_every < 2:
        assert set(root.shares) == {1}


def test_most_saves_write_what_has_changed_and_no_later_one_writes_everything():
    shares = _run(num_saves=60).shares
    assert statistics.median(shares) == pytest.approx(0.05)
    assert max(shares[2:]) < 0.6
    # Of twelve saves each half of the leaves is written by two.
    assert statistics.mean(shares[24:]) == pytest.approx(0.05 + 0.95 / 6, abs=0.01)


@pytest.mark.parametrize("num_frozen", [1, 2, 3, 5])
def test_few_leaves_are_written_no_more_often_than_they_must(num_frozen):
    frozen = {f"params/{number}": (1000,) for number in range(num_frozen)}
    shares = _run(num_saves=120, frozen=frozen, trained={}).shares
    assert statistics.mean(shares[24:]) == pytest.approx(1 / 6, abs=0.02)


def test_one_large_leaf_among_small_ones_keeps_its_turn():
    frozen = {"embed": (100_000,), **FROZEN}
    shares = _run(num_saves=120, frozen=frozen, trained={}).shares
    assert statistics.mean(shares[24:]) == pytest.approx(1 / 6, abs=0.02)


def test_leaves_that_change_now_and_then():
    paths = [f"params/{number}" for number in range(30)]
    root = Root(dict.fromkeys(paths, (10,)))
    values = dict.fromkeys(paths, 0)
    for number in range(60):
        for index, path in enumerate(paths):
            # Each by its own rhythm; some only once, one back and forth.
            if index == 0:
                values[path] = number % 2
            elif number % (index * index) == 0:
                values[path] = number
        root.save(dict(values))
    assert statistics.median(root.shares) < 0.5


def test_after_lost_steps_neighbours_still_share_nothing():
    root = _run(num_saves=20)
    values = dict.fromkeys(TRAINED, 99) | dict.fromkeys(FROZEN, 7)
    # A restore fell back over the newest steps, or one in the middle is gone.
    for lost in (-1, -2, -1, -3, -2, -1):
        del root.manifests[lost]
        root.save(values)
        root.save(values)
    assert root.shares[-1] < 1


def test_one_in_the_middle_is_gone_so_both_share_a_file():
    shared = _entry("a", written_at=10, num_links=2)
    newest = _manifest(30, shared)
    assert _plan(step=40, newest=newest, base=BASE) == (None, False)
