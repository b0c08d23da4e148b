"""Expert parallel degrees 1, 2, 4 give the bits of one process (case 7), with replicated and with sharded tokens, over gloo."""

import os
import subprocess
import sys

import ep_worker
import pytest
import torch

from isoexec.ops._core.bits import bit_equal
from tests.ops.op_checks import same_bits

CASES = [(size, replicated, top_k) for size, ks in ep_worker.TOP_K.items() for replicated in (True, False) for top_k in ks]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ep")
    command = [sys.executable, ep_worker.__file__, str(folder)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(4)]


@pytest.fixture(scope="module")
def alone(folder):
    return torch.load(folder / "alone.pt", weights_only=True)


def tokens(ranks, case, key):
    """``key`` of all 24 tokens, as the ranks together hold it."""
    size, replicated, _ = case
    parts = [ranks[r]["results"][case][key] for r in range(size)]
    if replicated:
        for part in parts[1:]:
            same_bits(part, parts[0], "replicated ranks")
        return parts[0]
    return torch.cat(parts)


@pytest.mark.parametrize("case", CASES)
def test_forward_bits(ranks, alone, case):
    same_bits(tokens(ranks, case, "fp32"), alone[case[2]]["fp32"], "before rounding")
    same_bits(tokens(ranks, case, "out"), alone[case[2]]["out"], "output")


@pytest.mark.parametrize("case", CASES)
def test_gradients(ranks, alone, case):
    size, _, top_k = case
    for key in ("gate_up", "down"):
        got = torch.cat([ranks[r]["results"][case][key] for r in range(size)])
        # Rows of one expert arrive in the same order in every layout here, so even these agree.
        same_bits(got, alone[top_k][key], key)
    same_bits(tokens(ranks, case, "shared"), alone[top_k]["shared"])
    got, expected = tokens(ranks, case, "x").float(), alone[top_k]["x"].float()
    assert (got - expected).abs().max() <= 2**-6 * expected.abs().max() and expected.abs().max() > 0.1


def test_a_sum_in_rank_order_would_be_seen(ranks, alone):
    case = 4, True, 8
    partials = [ranks[r]["results"][case]["partial"] for r in range(4)]
    shared = ep_worker.inputs()[4].float()
    tree = (partials[0] + partials[1]) + (partials[2] + partials[3])
    same_bits(tree + shared, alone[8]["fp32"])
    chain = ((partials[0] + partials[1]) + partials[2]) + partials[3]
    assert not bit_equal(chain + shared, alone[8]["fp32"])


def test_one_ulp_of_one_expert_is_seen(ranks, alone):
    planted = torch.cat([rank["planted"]["fp32"] for rank in ranks])
    assert not bit_equal(planted, alone[8]["fp32"])


def test_dispatch_moves_bits(ranks):
    """Every rank sees every rank's rows, one of which brings none."""
    for rank in ranks:
        *found, rows = rank["dispatched"]
        for got, expected, name in zip(found, ep_worker.hostile(), ("x", "weights", "experts"), strict=True):
            same_bits(got, expected, name)
        assert rows == ep_worker.TOKENS[4]


def test_a_degree_that_owns_no_subtree_is_refused(ranks):
    for rank in ranks[:3]:
        assert "degree 3 does not divide combine_groups 2" in rank["refusal"]
