"""Every shipped BERT configuration with our own class: built, saved, loaded and trained."""

import pytest
import torch
import transformers

from lm_experiments_tools.models.build import build_model, load_model_config, num_parameters
from lm_experiments_tools.models.presets import list_presets
from modeling_bert import BertConfig, BertForPreTraining

SHIPPED = sorted(name for name, path in list_presets().items() if path.parent.name == "bert_configs")
OURS = [name for name in SHIPPED if name != "bigbird"]  # that one is for transformers' BigBird
VARIANTS = ["bert_base_uncased-4L_preln_rel", "bert_base_uncased-4L_preln_sparse_rope", "bert_base_uncased-bigbird"]


def small(preset):
    """The preset with as many heads and the same variants, small enough to train."""
    values = load_model_config(preset, BertConfig).to_dict()
    sizes = {"hidden_size": 8 * values["num_attention_heads"], "intermediate_size": 32, "num_hidden_layers": 2}
    values |= {**sizes, "vocab_size": 99, "max_position_embeddings": 64, "rotary_dim": values["rotary_dim"] and 4}
    if values["sparse_attention"]:
        values["sparse_attention"] = {**values["sparse_attention"], "block": 8}
    return BertConfig(**values)


@pytest.mark.parametrize("preset", OURS)
def test_preset_is_built_and_its_configuration_is_saved_whole(preset, tmp_path):
    config = load_model_config(preset, BertConfig)
    with torch.device("meta"):
        model = build_model(BertForPreTraining, config, seed=0)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    config.save_pretrained(tmp_path)
    assert BertConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert isinstance(read, BertConfig) == config.is_variant
    written = {key: value for key, value in config.to_diff_dict().items() if key != "model_type"}
    assert {key: getattr(read, key) for key in written} == written


def test_variants_have_the_parameters_that_their_keys_say():
    with torch.device("meta"):
        totals = {
            name: num_parameters(build_model(BertForPreTraining, load_model_config(name, BertConfig), seed=0)).total
            for name in ("bert_base_uncased-4L", *VARIANTS)
        }
        base = num_parameters(transformers.BertForPreTraining(transformers.BertConfig())).total
    positions, norm = 512 * 768, 2 * 768
    four_layers = totals["bert_base_uncased-4L"]
    assert totals["bert_base_uncased-4L_preln_rel"] == four_layers - positions + norm + 32 * 12
    assert totals["bert_base_uncased-4L_preln_sparse_rope"] == four_layers - positions + norm
    assert totals["bert_base_uncased-bigbird"] == base + 7 * positions  # 4,096 instead of 512


@pytest.mark.parametrize("tied", [True, False])
def test_words_added_to_a_model_are_saved_with_their_biases(tied, tmp_path):
    config = BertConfig(**{**small("bert_base_uncased").to_dict(), "tie_word_embeddings": tied})
    model = BertForPreTraining(config).eval()
    torch.nn.init.normal_(model.get_output_embeddings().bias)
    model.resize_token_embeddings(110)
    model.save_pretrained(tmp_path)
    loaded, report = BertForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not (report["missing_keys"] or report["unexpected_keys"])
    ids = torch.arange(100, 110)[None]
    logits, again = (each(input_ids=ids).prediction_logits for each in (model, loaded.eval()))
    assert logits.shape[-1] == 110 and torch.equal(logits, again)
