"""The wrapper of SkyRL's policy worker over two tensor-parallel ranks: by tiles of a shard the bits that the shard's logits give."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from unittest import mock

import pytest
from ranks import on_ranks

from isoexec.contract import CONTRACT_VARIABLE
from isoexec.ops._core.bits import as_bits, nudge
from isoexec.ops.logprob import of_hidden
from tests.audit.skyrl_wrapper import LENGTHS, RESPONSE, batch_of, scored, trained, wrapped

if importlib.util.find_spec("skyrl") is None:
    pytest.skip("SkyRL is not installed; run `make build`", allow_module_level=True)


def score_and_train(contract: str, model: str, out: str) -> dict:
    """(bits of the logprobs, metrics) from logits, from hidden states, and from hidden states behind a norm that has moved by one ulp."""
    os.environ[CONTRACT_VARIABLE] = contract
    trainer, wrapper = wrapped(model, Path(out), 512, tensor_parallel=2, sequence_parallel=True)
    batch, found = batch_of(LENGTHS, RESPONSE, 512), {}
    norm = trainer.gpt.decoder.final_layernorm.weight
    with mock.patch.object(of_hidden, "LOGIT_BYTES", 1 << 12):
        for form in ("logits", "hidden", "planted"):
            wrapper._makes_logits = form == "logits"
            if form == "planted":
                norm.data = nudge(norm.data, index=3)
            found[form] = as_bits(scored(wrapper, batch)).tolist(), trained(wrapper, batch)
    trainer.close()
    return found


def test_tiles_of_a_shard_give_the_bits_of_its_logits(checkpoint_of, tmp_path):
    model, contract = checkpoint_of("Qwen3ForCausalLM")
    ranks = on_ranks(2, score_and_train, contract, model, str(tmp_path))
    for found in ranks:
        assert found["hidden"] == found["logits"] == ranks[0]["logits"]
        assert found["planted"][0] != found["hidden"][0]
