"""The tests that transformers makes of every model (ModelTesterMixin, in its source distribution) on our classes.

Opt-in, because they are not installed with the package:

    pip download --no-deps --no-binary :all: transformers==5.23.0 && tar xzf transformers-5.23.0.tar.gz
    pip install parameterized
    TRANSFORMERS_SOURCE=$PWD/transformers-5.23.0 pytest -m slow tests/parity/test_hf_suite.py

A checkout of transformers' repository at that version has the tests of generation (GenerationTesterMixin) too. With
CLASSES_OF=transformers they run on transformers' own classes of the same names, to compare what fails.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.helpers import ROOT

# What the mixin derives from for export and generation: empty where the source has none.
STUBS = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n\n\nclass ExportGenerateTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}
# It wants a generating model to be a base model and a head, but T5's state dict has no such prefix: transformers' own
# class fails alike.
CANNOT = {"OursTest::test_model_base_model_prefix"}

T5 = """
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
BERT = """
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
@pytest.mark.parametrize(("module", "least"), [(T5, 150), (BERT, 100)], ids=["t5", "bert"])
def test_transformers_tests_of_every_model_pass(module, least, tmp_path):
    source = Path(os.environ.get("TRANSFORMERS_SOURCE", "/nowhere")) / "tests"
    if not (source.is_dir() and importlib.util.find_spec("parameterized")):
        pytest.skip(
            "the installed transformers has no tests: TRANSFORMERS_SOURCE names its sources, beside parameterized"
        )
    tests = tmp_path / "tests"
    tests.mkdir()
    for path in source.glob("*.py"):
        shutil.copy(path, tests)
    modules = {**STUBS, "ours/test_ours.py": module}
    modules |= {name: (source / name).read_text() for name in STUBS if (source / name).exists()}
    for name, text in modules.items():
        (tests / name).parent.mkdir()
        (tests / name).write_text(text)
        (tests / name).with_name("__init__.py").touch()
    (tests / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml"]
    subprocess.run([*command, "tests/ours/test_ours.py"], cwd=tmp_path, env=environment)
    failed, passed = set(), 0
    for case in ElementTree.parse(tmp_path / "report.xml").iter("testcase"):  # pytest writes it at its end
        outcome = {part.tag for part in case} & {"failure", "error", "skipped"}
        passed += not outcome
        if outcome - {"skipped"}:
            failed.add(f"{case.get('classname').rpartition('.')[2]}::{case.get('name')}")
    assert failed <= CANNOT and passed > least
