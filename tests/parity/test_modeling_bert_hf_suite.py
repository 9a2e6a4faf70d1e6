"""transformers' own tests of every model on the classes of modeling_bert: how to run them, see hf_suite.py."""

import pytest

from tests.helpers.hf_suite import run_hf_suite

MODULE = """
import importlib
import os
import unittest

import torch

from ..test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask

bert = importlib.import_module(os.environ.get("CLASSES_OF", "modeling_bert"))


class Tester:
    batch_size, seq_length, hidden_size, num_hidden_layers, num_attention_heads = 13, 7, 32, 2, 4
    vocab_size, num_labels, is_training = 99, 2, True

    def get_config(self):
        return bert.BertConfig(
            vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
            type_vocab_size=16,
        )

    def prepare_config_and_inputs_for_common(self):
        ids, types = ids_tensor([13, 7], 99), ids_tensor([13, 7], 16)
        mask = random_attention_mask([13, 7])
        return self.get_config(), {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}


class BertTest(ModelTesterMixin, unittest.TestCase):
    test_can_init_all_missing_weights_before_2023 = True
    all_model_classes = (
        bert.BertModel, bert.BertForPreTraining, bert.BertForMaskedLM, bert.BertForQuestionAnswering,
        bert.BertForSequenceClassification, bert.BertForTokenClassification,
    )

    def setUp(self):
        self.model_tester = Tester()

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        if return_labels and model_class is bert.BertForPreTraining:
            inputs["labels"] = torch.zeros((13, 7), dtype=torch.long)
            inputs["next_sentence_label"] = torch.zeros(13, dtype=torch.long)
        return inputs
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_transformers_tests_of_every_model_pass(tmp_path):
    outcome = run_hf_suite(tmp_path, MODULE)
    assert not outcome.failed and outcome.passed >= 100, outcome.output
