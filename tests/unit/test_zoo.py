"""What the models of transformers compute as their loss is read as it is. `make models` tries all of them."""

import pytest
import torch

from harness.zoo import EXACT, TASKS, Model, judge, models

SOME = {
    "causal": "LlamaForCausalLM Qwen3ForCausalLM GPT2LMHeadModel MistralForCausalLM OPTForCausalLM GPTNeoXForCausalLM "
    "BloomForCausalLM PhiForCausalLM Qwen3MoeForCausalLM MixtralForCausalLM",
    "masked": "BertForMaskedLM RobertaForMaskedLM ElectraForMaskedLM DistilBertForMaskedLM",
    "sequence to sequence": "BartForConditionalGeneration T5ForConditionalGeneration MarianMTModel",
    "samples": "BertForSequenceClassification LlamaForSequenceClassification AlbertForSequenceClassification",
    "tokens": "BertForTokenClassification Qwen3ForTokenClassification",
    "spans": "BertForQuestionAnswering LlamaForQuestionAnswering",
    "choices": "BertForMultipleChoice",
    "pairs": "BertForNextSentencePrediction",
    "images": "ViTForImageClassification DeiTForImageClassification",
    "pixels": "SegformerForSemanticSegmentation",
}
CASES = [Model(name, task) for task, names in SOME.items() for name in names.split()]


@pytest.mark.parametrize("model", CASES, ids=lambda model: model.name)
def test_micro_batches_are_exact_without_being_told(model):
    found = judge(*model)
    assert (found.verdict, found.said) == ("exact", "")
    assert found.error < EXACT


def test_a_loss_that_is_not_read_is_said_to_be_unknown():
    found = judge("ViTForMaskedImageModeling", "patches")
    assert found.verdict == "unknown"
    assert "DivBackward0" in found.said


def test_weights_that_are_wrong_would_be_seen(monkeypatch):
    monkeypatch.setattr("macrobatch._loss.reductions.total_weight_of", lambda node: torch.tensor(1.0))
    assert judge("BertForMaskedLM", "masked").verdict == "wrong"


def test_all_models_of_all_tasks_are_listed():
    listed = list(models())
    assert set(CASES) <= set(listed)
    assert {model.task for model in listed} == set(TASKS.values())
    assert len(listed) > 500
