"""The shipped BERT configurations against the published sizes, and what each of them needs to be built."""

import json
import shutil

import pytest
import torch
from transformers import BertConfig, BertForPreTraining, BertModel, BigBirdForPreTraining

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import build_model, load_model_config, num_parameters
from lm_experiments_tools.models.presets import list_presets

# Parameters of transformers' models of the same sizes: BertModel of bert-base-uncased, bert-large-uncased and
# google/bert_uncased_L-{2,4,4,8}_H-{128,256,512,512} on the Hub, whose files state them ("Well-Read Students Learn
# Better", arXiv 1908.08962, table 1).
BERT_MODEL = {
    "bert_base_uncased": 109_482_240,
    "bert_large_uncased": 335_141_888,
    "bert-tiny": 4_385_920,
    "bert-mini": 11_170_560,
    "bert-small": 28_763_648,
    "bert-medium": 41_373_184,
}
CLASSES = {"bigbird": BigBirdForPreTraining}
OURS = (
    "bert_base_uncased-4L_preln_rel",
    "bert_base_uncased-4L_preln_sparse_rope",
    "bert_base_uncased-4L_preln_sparse_rope16",
)
SHIPPED = sorted(name for name, path in list_presets().items() if path.parent.name == "bert_configs")
BUILT = [name for name in SHIPPED if name not in OURS]


def on_meta(model_cls, preset):
    with torch.device("meta"):
        return build_model(model_cls, load_model_config(preset, model_cls.config_class), seed=0)


def test_the_issues_presets_are_shipped():
    expected = {"bert_base_uncased", "bert_base_uncased-4L", "bert_base_uncased-bigbird", "bert_large_uncased"}
    expected |= {"bigbird", "bert-micro"} | {*OURS}
    assert {*expected, *BERT_MODEL} == set(SHIPPED)


@pytest.mark.parametrize("preset", BUILT)
def test_preset_is_built_with_tied_words(preset):
    model = on_meta(CLASSES.get(preset, BertForPreTraining), preset)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("preset", BERT_MODEL)
def test_preset_has_the_number_of_parameters_of_the_published_model(preset):
    assert num_parameters(on_meta(BertModel, preset)).total == BERT_MODEL[preset]


def test_base_is_bert_as_transformers_defines_it():
    """Every setting, not only those that are tensors; the class's defaults are bert-base-uncased."""
    ours, theirs = load_model_config("bert_base_uncased", BertConfig).to_dict(), BertConfig().to_dict()
    assert ours == theirs


@pytest.mark.parametrize("config_cls", [BertConfig, None])
def test_variations_of_our_own_class_are_refused_by_transformers_with_its_name(config_cls):
    message = "BertConfig has no 'pre_layer_norm', which --model_cls modeling_bert.modeling_bert:BertForPreTraining"
    with pytest.raises(UserError, match=message):
        load_model_config(OURS[0], config_cls)


def test_the_hubs_older_config_files_are_read_and_a_value_that_would_be_ignored_is_not(tmp_path):
    """bert-base-uncased's config.json carries two keys that transformers no longer has."""
    hub = {
        "architectures": ["BertForMaskedLM"], "gradient_checkpointing": False, "model_type": "bert",
        "position_embedding_type": "absolute", "transformers_version": "4.6.0.dev0", "use_cache": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hub))
    assert load_model_config(tmp_path / "config.json", BertConfig).hidden_size == 768
    (tmp_path / "config.json").write_text(json.dumps({**hub, "position_embedding_type": "relative_key"}))
    with pytest.raises(UserError, match="no 'position_embedding_type', which --model_cls modeling_bert"):
        load_model_config(tmp_path / "config.json", BertConfig)


def test_a_copied_variant_finds_its_base_among_the_presets(tmp_path):
    shutil.copy(list_presets()["bert_base_uncased-4L"], tmp_path / "mine.json")
    assert load_model_config(tmp_path / "mine.json", BertConfig).num_hidden_layers == 4
