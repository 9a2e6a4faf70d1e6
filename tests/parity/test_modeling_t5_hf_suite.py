"""transformers' own tests of every model on the classes of modeling_t5: how to run them, see hf_suite.py."""

import pytest

from tests.helpers.hf_suite import run_hf_suite

# It wants a generating model to be a base model and a head, but T5's state dict has no such prefix: transformers' own
# class fails alike.
CANNOT = {"OursTest::test_model_base_model_prefix"}

MODULE = """
import importlib
import os
import unittest

import torch

from ..generation.test_utils import GenerationTesterMixin
from ..test_modeling_common import ModelTesterMixin, ids_tensor

t5 = importlib.import_module(os.environ.get("CLASSES_OF", "modeling_t5"))

SIZES = dict(
    vocab_size=99, d_model=32, d_ff=37, d_kv=8, num_layers=2, num_decoder_layers=2, num_heads=4,
    relative_attention_num_buckets=8, initializer_factor=0.002, bos_token_id=0, decoder_start_token_id=0,
)

class Tester:
    batch_size, seq_length, encoder_seq_length, decoder_seq_length = 8, 7, 7, 7
    vocab_size, hidden_size, num_hidden_layers, num_attention_heads = 99, 32, 2, 4

    def __init__(self, is_encoder):
        self.is_encoder = is_encoder
        self.is_training = not is_encoder  # it has no loss

    def get_config(self):
        return t5.T5Config(**SIZES, is_encoder_decoder=not self.is_encoder)

    def prepare_config_and_inputs_for_common(self):
        ids, masks = ([ids_tensor([8, 7], n) for _ in range(2)] for n in (99, 2))
        for row, mask in zip(ids, masks):
            row.clamp_(3)
            row[:, -1], mask[:, 0] = 1, 1
        inputs = {"input_ids": ids[0], "attention_mask": masks[0]}
        if not self.is_encoder:
            inputs |= {"decoder_input_ids": ids[1], "decoder_attention_mask": masks[1], "use_cache": False}
        return self.get_config(), inputs

class OursTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    test_can_init_all_missing_weights_before_2023 = True
    all_model_classes = (t5.T5Model, t5.T5ForConditionalGeneration, t5.T5ForSequenceClassification)
    is_encoder_decoder = True

    def setUp(self):
        self.model_tester = Tester(is_encoder=False)

class OursEncoderTest(ModelTesterMixin, unittest.TestCase):
    test_can_init_all_missing_weights_before_2023 = True
    all_model_classes = (t5.T5EncoderModel,)

    def setUp(self):
        self.model_tester = Tester(is_encoder=True)

@unittest.skipUnless(hasattr(t5, "T5EncoderForSequenceClassification"), "transformers has none")
class OursEncoderClassifierTest(ModelTesterMixin, unittest.TestCase):
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.all_model_classes = (t5.T5EncoderForSequenceClassification,)
        self.model_tester = Tester(is_encoder=True)
        self.model_tester.is_training = True

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        return {**inputs, "labels": torch.zeros(8, dtype=torch.long)} if return_labels else inputs
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_transformers_tests_of_every_model_pass(tmp_path):
    outcome = run_hf_suite(tmp_path, MODULE)
    assert outcome.failed <= CANNOT and outcome.passed > 150, outcome.output
