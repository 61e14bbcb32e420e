"""A resume that could change numbers is refused unless allowed by name."""

import shlex

import pytest

from jaxft.config import ConfigError
from jaxft.recovery.resume import check_resume

SAVED = {"optimizer.b1": 0.9, "optimizer.b2": 0.95, "jax": "0.10.2", "XLA_FLAGS": ""}


def test_equal_facts_pass() -> None:
    assert check_resume(SAVED, dict(SAVED), allow="") == {}


def test_everything_that_differs_is_listed_in_one_line() -> None:
    now = SAVED | {"optimizer.b1": 0.8, "jax": "0.11.0", "new": 1}
    with pytest.raises(ConfigError) as error:
        check_resume(SAVED, now, allow="")
    text = str(error.value)
    assert "\n" not in text
    for part in ("optimizer.b1: 0.9 -> 0.8", "jax: 0.10.2 -> 0.11.0", "new: (absent)"):
        assert part in text
    assert "--config.resume.allow=jax,new,optimizer.b1" in text


def test_names_and_patterns_allow() -> None:
    now = SAVED | {"optimizer.b1": 0.8, "optimizer.b2": 0.9}
    changes = check_resume(SAVED, now, allow="optimizer.*")
    assert changes == {"optimizer.b1": [0.9, 0.8], "optimizer.b2": [0.95, 0.9]}
    assert check_resume(SAVED, now, allow=" optimizer.b2 , optimizer.b1 ") == changes
    with pytest.raises(ConfigError, match=r"optimizer\.b2"):
        check_resume(SAVED, now, allow="optimizer.b1")


def test_something_that_is_gone_counts() -> None:
    now = {name: value for name, value in SAVED.items() if name != "XLA_FLAGS"}
    with pytest.raises(ConfigError, match="XLA_FLAGS"):
        check_resume(SAVED, now, allow="")


def test_a_section_allows_what_is_under_it_and_nothing_else() -> None:
    saved = SAVED | {"optimizers": 1, "model.options.a": 1, "model.width": 8}
    now = saved | {"optimizer.b1": 0.8, "optimizer.b2": 0.9}
    assert set(check_resume(saved, now, allow="optimizer")) == {
        "optimizer.b1",
        "optimizer.b2",
    }
    now = saved | {"model.options.a": 2, "model.width": 9}
    assert len(check_resume(saved, now, allow="model")) == 2
    with pytest.raises(ConfigError, match=r"model\.width: 8 -> 9\)"):
        check_resume(saved, now, allow="model.options")
    with pytest.raises(ConfigError, match="optimizers: 1 -> 2"):
        check_resume(saved, saved | {"optimizers": 2}, allow="optimizer")


@pytest.mark.parametrize(
    ("allow", "close"),
    [
        ("optimzer.b1", "optimizer.b1"),
        ("optimzer", "optimizer"),
        ("optimizer.c*", "optimizer"),
        ("config.optimizer.b1", "optimizer.b1"),
        ("JAX", "XLA_FLAGS, jax, optimizer"),
        ("everything", "XLA_FLAGS, jax, optimizer"),
        ("jax, optimizer.b3", "optimizer.b"),
    ],
)
def test_a_name_of_nothing_is_refused_even_where_nothing_differs(
    allow: str, close: str
) -> None:
    with pytest.raises(ConfigError, match="names nothing") as error:
        check_resume(SAVED, dict(SAVED), allow=allow)
    assert error.value.path == "resume.allow"
    assert close in error.value.problem
    assert repr(allow.split(", ")[-1]) in error.value.problem


def test_what_is_only_saved_or_only_new_can_be_named() -> None:
    assert check_resume({"cpu": "a"}, {"gpu": "b"}, allow="cpu,gpu") == {
        "cpu": ["a", "(absent)"],
        "gpu": ["(absent)", "b"],
    }


def test_the_flag_that_is_offered_works_when_it_is_pasted() -> None:
    saved = SAVED | {"model.options.a b": 1, "data.options.x[1]": 1}
    now = saved | {"jax": "0.11.0", "model.options.a b": 2, "data.options.x[1]": 2}
    now["optimizer.b1"] = 0.8
    with pytest.raises(ConfigError) as error:
        check_resume(saved, now, allow="optimizer.*")
    command = error.value.problem.partition("other numbers with ")[2]
    (word,) = shlex.split(command)
    allow = word.removeprefix("--config.resume.allow=")
    assert check_resume(saved, now, allow=allow).keys() == {
        "jax",
        "model.options.a b",
        "data.options.x[1]",
        "optimizer.b1",
    }


def test_long_values_show_where_they_differ() -> None:
    rules = ", ".join(f"axis{i}=data" for i in range(30))
    saved, now = {"rules": rules}, {"rules": rules.replace("axis20=data", "axis20=-")}
    with pytest.raises(ConfigError) as error:
        check_resume(saved, now, allow="")
    assert "axis20=data" in error.value.problem
    assert "axis20=-," in error.value.problem
    assert len(error.value.problem) < 400
    # A value that only grew, and one of several lines.
    for new in (rules + ", more=fsdp", "a\nb"):
        with pytest.raises(ConfigError) as error:
            check_resume(saved, {"rules": new}, allow="")
        assert "\n" not in str(error.value)
        assert "more=fsdp" in str(error.value) or "-> a b" in str(error.value)


def test_a_schedule_that_followed_the_length_says_so() -> None:
    saved = {"optimizer.decay_steps": 30}
    with pytest.raises(ConfigError, match=r"30 -> 40 \(follows train.num_steps") as e:
        check_resume(saved, {"optimizer.decay_steps": 40}, allow="")
    assert "--config.optimizer.decay_steps=30)" in str(e.value)


def test_places_are_of_no_matter_where_sums_have_one_order() -> None:
    saved = SAVED | {
        "mesh.shape": [1, 1, 1],
        "mesh.dcn_data": 1,
        "mesh.device_kind": "cpu",
        "num_processes": 1,
        "sharding.path_rules": "",
    }
    now = saved | {"mesh.shape": [2, 4, 1], "num_processes": 2, "mesh.dcn_data": 2}
    now["sharding.path_rules"] = "w = fsdp"
    with pytest.raises(ConfigError, match="num_processes: 1 -> 2"):
        check_resume(saved, now, allow="")
    changes = check_resume(saved, now, allow="", fixed_order=True)
    assert changes["mesh.shape"] == [[1, 1, 1], [2, 4, 1]]
    assert len(changes) == 4
    with pytest.raises(ConfigError, match=r"mesh\.device_kind: cpu -> tpu"):
        check_resume(
            saved, now | {"mesh.device_kind": "tpu"}, allow="", fixed_order=True
        )
