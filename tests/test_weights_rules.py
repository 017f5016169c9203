"""Key rules: the longest prefix of whole parts counts, wrappers come off, and nothing lands on one name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pimm_ray.errors import WeightsError
from pimm_ray.weights.rules import rename

MODEL = ["backbone.enc.0.weight", "backbone.encoder.0.weight", "head.weight"]


def one(stored: str, rules=(), wanted=MODEL) -> str:
    return rename([stored], wanted, rules).targets[stored]


@pytest.mark.parametrize("stored, rules, target", [
    ("enc.0.weight", {"enc": "backbone.enc"}, "backbone.enc.0.weight"),
    ("encoder.0.weight", {"enc": "backbone.enc"}, "encoder.0.weight"),
    ("encoder.0.weight", {"enc": "wrong", "encoder": "backbone.encoder"}, "backbone.encoder.0.weight"),
    ("a.b.c", {"a.b": "x", "a": "y"}, "x.c"),
    ("a.b.c", {"a": "y", "a.b": "x"}, "x.c"),
    ("a.b.c", {"a": "a.b"}, "a.b.b.c"),
    ("a.b.c", {"": "model"}, "model.a.b.c"),
    ("a.b.c", {"a": ""}, "b.c"),
    ("a.b.c", {"a.": "z."}, "z.b.c"),
    ("a", {"a": "b"}, "b"),
    ("module.enc.0.weight", {"module.enc": "module.backbone.enc"}, "backbone.enc.0.weight"),
    ("module.enc.0.weight", {"enc": "backbone.enc"}, "backbone.enc.0.weight"),
    ("_orig_mod.module.enc._orig_mod.0.weight", {"enc": "backbone.enc"}, "backbone.enc.0.weight"),
    ("module._orig_mod.head.weight", (), "head.weight"),
    ("module.module.head.weight", (), "head.weight"),
    ("backbone.module.enc.0.weight", (), "backbone.enc.0.weight"),
])  # fmt: skip
def test_a_name_becomes(stored, rules, target):
    assert one(stored, rules) == target


def test_a_submodule_that_is_really_called_module_stays():
    wanted = ["module.weight", "module.inner.module.bias"]
    assert list(rename(wanted, wanted).targets.values()) == wanted
    wrapped = [f"module.{name}" for name in wanted]
    assert list(rename(wrapped, wanted).targets.values()) == wanted


def test_each_rule_says_how_many_names_it_changed():
    found = rename(["a.x", "a.y", "b"], [], [("a", "z"), ("c", "d")])
    assert found.by_rule == {"a -> z": 2, "c -> d": 0}


@pytest.mark.parametrize("stored, rules, said", [
    (["a.w", "b.w"], {"a": "c", "b": "c"}, r"'a.w' and 'b.w' both become 'c.w'"),
    (["a.w", "c.w"], {"a": "c"}, r"'a.w' and 'c.w' both become 'c.w'"),
    (["a.w"], [("a", "b"), ("a.", "c")], r"two rules have the prefix 'a'"),
])  # fmt: skip
def test_two_names_on_one_target_are_an_error_that_names_both(stored, rules, said):
    with pytest.raises(WeightsError, match=said):
        rename(stored, MODEL, rules)


@pytest.mark.parametrize("rules", ["ab", ["ab"], [("a", 1)], {"a": None}, [("a", "b", "c")]])
def test_a_rule_is_a_pair_of_strings(rules):
    with pytest.raises(TypeError, match="is not a pair of strings"):
        rename(["a"], [], rules)


parts = st.lists(st.sampled_from(["a", "b", "ab", "module", "_orig_mod"]), min_size=1, max_size=4).map(".".join)


@given(st.lists(parts, unique=True, max_size=6), st.dictionaries(parts, parts, max_size=3), st.randoms())
def test_the_order_of_names_and_rules_never_matters(stored, rules, random):
    def result(names, pairs):
        try:
            return rename(names, MODEL, pairs).targets
        except WeightsError:
            return None

    names, pairs = list(stored), list(rules.items())
    before = result(names, pairs)
    random.shuffle(names)
    random.shuffle(pairs)
    assert result(names, pairs) == before
