"""Made checkpoints: complete, repeatable, and with distributions in which a difference shows."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from isoexec.contract import ContractError, contract_for_model
from isoexec.verify.checkpoint import ARCHITECTURES, ENTROPY_RANGE, FP32_PARAMETERS, make_checkpoint, mean_entropy
from isoexec.verify.plant import PLANTED_WEIGHT, plant_ulp


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def test_entropy_of_text_it_was_not_scaled_on(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(3, 512, (4, 300), generator=torch.Generator().manual_seed(9))
    with torch.inference_mode():
        log_probabilities = model(tokens).logits.log_softmax(-1)
    assert ENTROPY_RANGE[0] <= mean_entropy(log_probabilities) <= ENTROPY_RANGE[1]
    for tenth in log_probabilities[:, :60], log_probabilities[:, -60:]:
        assert ENTROPY_RANGE[0] <= mean_entropy(tenth) <= ENTROPY_RANGE[1]


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "Qwen3ForCausalLM"])
def test_every_architecture(architecture, tmp_path):
    """Loads back in HF, with fp32 where a bf16 number would be another decay or bias, and predicts neither evenly nor with certainty."""
    from safetensors.torch import load_file

    folder = make_checkpoint(tmp_path, architecture, seed=3)
    dtypes = {name: tensor.dtype for name, tensor in load_file(folder / "model.safetensors").items()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {n for n in dtypes if n.endswith(FP32_PARAMETERS)}
    assert any(n.endswith("A_log") for n in dtypes) == ("3_5" in architecture)
    assert any(n.endswith("e_score_correction_bias") for n in dtypes) == architecture.startswith("Glm")
    assert any("visual" in n for n in dtypes) == architecture.endswith("ConditionalGeneration")

    contract = contract_for_model(folder, "cpu")
    assert (contract.architecture, contract.numerics.row_leaves, contract.numerics.combine_groups) == (architecture, 8, 8)
    model, report = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    tokens = torch.randint(3, 512, (4, 200), generator=torch.Generator().manual_seed(9))
    with torch.inference_mode():
        log_probabilities = model(tokens).logits.log_softmax(-1)
        tokens[:, 0] += 1
        far = (model(tokens).logits.log_softmax(-1) - log_probabilities)[:, 150:].abs().max()
    assert ENTROPY_RANGE[0] <= mean_entropy(log_probabilities) <= ENTROPY_RANGE[1]
    assert far > 0.01  # the first token is remembered


def test_expert_groups_of_a_contract(tmp_path):
    folder = make_checkpoint(tmp_path, "Qwen3MoeForCausalLM", num_experts=12, num_hidden_layers=1)
    assert contract_for_model(folder, "cpu").numerics.combine_groups == 4


def test_entropy_of_a_uniform_distribution():
    assert mean_entropy(torch.zeros(2, 8).log_softmax(-1)) == pytest.approx(2.0794415)


def test_same_seed_same_weights(folder, tmp_path):
    weights = (folder / "model.safetensors").read_bytes()
    assert (make_checkpoint(tmp_path / "a") / "model.safetensors").read_bytes() == weights
    assert (make_checkpoint(tmp_path / "b", seed=1) / "model.safetensors").read_bytes() != weights


def test_every_id_decodes_and_text_comes_back(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == 512
    text = "Hello, 12 + 30 = 42 é\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert all(tokenizer.convert_ids_to_tokens(i) for i in range(512))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)


def test_tied_embeddings_and_other_sizes(tmp_path):
    folder = make_checkpoint(tmp_path / "tied", tie_word_embeddings=True, num_hidden_layers=1)
    assert contract_for_model(folder, "cpu").architecture == "Qwen3ForCausalLM"


def test_refusals(tmp_path):
    with pytest.raises(ContractError, match="knows Qwen3ForCausalLM"):
        make_checkpoint(tmp_path, "LlamaForCausalLM")
    with pytest.raises(ContractError, match="vocab_size 100"):
        make_checkpoint(tmp_path, vocab_size=100)


def test_a_planted_ulp_is_one_ulp_in_one_weight(folder, tmp_path):
    from safetensors.torch import load_file

    from isoexec.ops._core.bits import as_bits

    name = plant_ulp(folder, tmp_path / "planted")
    assert name.endswith(PLANTED_WEIGHT)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "planted" / "model.safetensors")
    changed = {k: as_bits(after[k]).int() - as_bits(before[k]).int() for k in before if (as_bits(before[k]) != as_bits(after[k])).any()}
    assert list(changed) == [name]
    assert changed[name].count_nonzero() == 1 and changed[name].abs().max() == 1
