"""Hostile text: nothing but the contract's own error, no hang, and a canonical form that is one."""

import json
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isoexec.contract import ContractError, ExecutionContract, Identity, canonical_json, differences
from isoexec.contract.canonical import LARGEST_TEXT, parse_json
from isoexec.contract.manifest import Manifest
from isoexec.runtimes import compose

CONTRACT = compose.composed(ExecutionContract("Qwen3_5MoeForCausalLM", "cpu"))
DATA = CONTRACT.data()
READERS = (ExecutionContract.from_json, Identity.from_json, Manifest.from_data)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=8
)
exact = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
quick = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def paths(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths(item, (*path, key))


PATHS = [path for path in paths(DATA) if path]


def replaced(path, new):
    data = json.loads(json.dumps(DATA))
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return data


def refuses_or_reads(read, text):
    try:
        read(text)
    except ContractError as error:
        assert len(str(error)) < 6000 and "\n" not in str(error)


@quick
@given(st.text(max_size=200))
def test_any_text(text):
    for read in READERS:
        refuses_or_reads(read, text)


@quick
@given(values)
def test_any_json(value):
    for read in READERS:
        refuses_or_reads(read, json.dumps(value))


@quick
@given(st.sampled_from(PATHS), values)
def test_any_value_at_any_place_of_a_contract(path, value):
    text = json.dumps(replaced(path, value))
    try:
        contract = ExecutionContract.from_json(text)
    except ContractError as error:
        assert "\n" not in str(error)
        return
    # What is accepted is another contract, or the same one; never another with the same digest.
    assert ExecutionContract.from_json(contract.to_json()).to_json() == contract.to_json()
    assert (contract == CONTRACT) == (contract.digest == CONTRACT.digest)


@quick
@given(exact)
def test_canonical_form_round_trips_byte_for_byte(value):
    text = canonical_json(value)
    assert canonical_json(json.loads(text)) == text
    assert differences(value, json.loads(text)) == []
    assert canonical_json(json.loads(json.dumps(value, indent=3))) == text


@pytest.mark.parametrize("seed", range(5))
def test_order_does_not_matter(seed):
    random = Random(seed)

    def shuffle(value):
        if isinstance(value, dict):
            items = [(key, shuffle(item)) for key, item in value.items()]
            random.shuffle(items)
            return dict(items)
        return [shuffle(item) for item in value] if isinstance(value, list) else value

    data = shuffle(DATA)
    random.shuffle(data["composition"])
    again = ExecutionContract.from_json(json.dumps(data))
    assert again.to_json() == CONTRACT.to_json() and again.identities == CONTRACT.identities


@pytest.mark.parametrize(
    "text, message",
    [
        ("[" * 100_000, "not JSON|nested"),
        ('{"a":' * 30 + "1" + "}" * 30, "nested more than"),
        ("[" * 900 + "]" * 900, "nested more than"),
        ('{"architecture": ' + "[" * 900 + "]" * 900 + "}", "nested more than"),
        (" " * (LARGEST_TEXT + 1), "characters, more than"),
        ("NaN", "number NaN"),
        ('{"claims": {"trainer_tp": Infinity}}', "number Infinity"),
        ('{"numerics": 1e400}', "number 1e400"),
        ("9" * 5000, "not JSON"),
        ('{"backend": "cpu", "backend": "cuda"}', "key 'backend' appears twice"),
        ('{"__class__": "os.system", "architecture": "x", "backend": "cpu"}', "unknown entry '__class__'"),
        ('{"architecture": "x", "backend": "cpu", "data": 1}', "unknown entry 'data'"),
        ('{"architecture": "x", "backend": "cpu", "dtypes": null}', "dtypes: expected an object"),
        ('{"architecture": "x", "backend": ["cpu"]}', "backend: expected one of"),
        ('{"architecture": "x", "backend": {}}', "backend: expected one of"),
    ],
)
def test_refused_by_name(text, message):
    with pytest.raises(ContractError, match=message):
        ExecutionContract.from_json(text)


def test_the_reader_gives_values_and_nothing_else():
    assert parse_json('{"a": [1, true, null, "\\u0000"]}') == {"a": [1, True, None, "\0"]}
