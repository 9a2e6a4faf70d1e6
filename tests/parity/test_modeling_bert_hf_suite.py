"""The tests that transformers makes of every model (ModelTesterMixin, in its source distribution), on modeling_bert.

Opt-in, because the tests are not installed with the package:

    pip download --no-deps --no-binary :all: transformers==5.23.0 && tar xzf transformers-5.23.0.tar.gz
    pip install parameterized
    TRANSFORMERS_SOURCE=$PWD/transformers-5.23.0 pytest -m slow tests/parity/test_modeling_bert_hf_suite.py

The distribution lacks two modules that the mixin derives from, for export and generation: they are empty here. With
CLASSES_OF=transformers the same tests run on transformers' BERT, to compare what is skipped.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "bert/test_bert.py": """
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
""",
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_transformers_tests_of_every_model_pass(tmp_path):
    source = Path(os.environ.get("TRANSFORMERS_SOURCE", "/nowhere")) / "tests"
    if not (source.is_dir() and importlib.util.find_spec("parameterized")):
        pytest.skip("needs parameterized, and TRANSFORMERS_SOURCE, the unpacked source distribution of transformers")
    folder = tmp_path / "tests"
    folder.mkdir()
    for path in source.glob("*.py"):
        shutil.copy(path, folder)
    for name, text in FILES.items():
        (folder / name).parent.mkdir()
        (folder / name).write_text(text)
        (folder / name).with_name("__init__.py").touch()
    (folder / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfs", "tests/bert/test_bert.py"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    print(result.stdout[-12000:])
    passed = int(re.search(r"(\d+) passed", result.stdout + "0 passed")[1])
    assert result.returncode == 0 and passed >= 100, result.stdout[-4000:]
