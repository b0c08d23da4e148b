"""The last recorded run of this folder on a GPU (gpu_results.json) proves what the code routes and pins now."""

import json
from pathlib import Path

from isoexec.ops._core.provider import PROVIDERS
from isoexec.ops.attention import fa3

RECORDED = json.loads((Path(__file__).parent / "gpu_results.json").read_text())


def test_nothing_failed():
    assert RECORDED["passed"] and not RECORDED["other"]


def test_the_pinned_providers_are_the_proven_ones():
    assert RECORDED["providers"] == {p.name: p.sha256 for p in PROVIDERS.values()}, "run the gates on a GPU with these providers"


def test_every_head_size_given_to_a_provider_passed_its_gate():
    gates = [name for name in RECORDED["passed"] if name.startswith("test_attention::test_every_case_has_the_same_bits[public-")]
    proven = {int(name.rstrip("]").rsplit("-", 1)[1]) for name in gates}
    assert set(fa3.HEAD_SIZES) <= proven
