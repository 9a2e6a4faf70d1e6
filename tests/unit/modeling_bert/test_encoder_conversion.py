"""`lmtools convert` of encoders, and the shipped configurations of published encoders."""

import torch
import transformers

from lm_experiments_tools.models.build import build_model, load_model_config, num_parameters
from lm_experiments_tools.tools.main import main
from modeling_bert import BertConfig, BertForMaskedLM
from modeling_bert.conversion import to_original

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
IDS = {"cls_token_id": 1, "sep_token_id": 2}


def logits(model):
    ids = torch.arange(3, 43).reshape(2, 20)
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def test_convert_writes_both_ways(tmp_path, capsys):
    torch.manual_seed(0)
    theirs = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**SIZES, **IDS, local_attention=4))
    theirs.save_pretrained(tmp_path / "theirs")
    source, ours, back = (str(tmp_path / name) for name in ("theirs", "ours", "back"))
    assert main(["convert", source, "--to", ours]) == 0
    model = BertForMaskedLM.from_pretrained(ours)
    torch.testing.assert_close(logits(model), logits(theirs))
    assert main(["convert", ours, "--to", back, "--model_type", "modernbert"]) == 0
    again = transformers.AutoModelForMaskedLM.from_pretrained(back)
    assert type(again) is transformers.ModernBertForMaskedLM and torch.equal(logits(again), logits(theirs))

    assert main(["convert", ours, "--to", str(tmp_path / "no"), "--model_type", "eurobert"]) == 2
    assert "eurobert cannot express" in capsys.readouterr().err and not (tmp_path / "no").exists()


def neobert_parameters():
    """Embeddings, 28 layers of attention, SwiGLU of 2/3 * 3072 features and two norms; last norm, output layer."""
    words = 30522 * 768
    return words + 28 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768 + words + 30522


def test_presets_have_the_published_sizes():
    """Each has as many parameters as transformers' class with its published numbers, on the meta device."""
    expected = {
        "modernbert-base": ("ModernBert", {}),
        "modernbert-large": (
            "ModernBert",
            {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 2624},
        ),
        "eurobert-210m": ("EuroBert", {"rope_parameters": {"rope_type": "default", "rope_theta": 250000.0}}),
    }
    for preset, (family, changes) in expected.items():
        theirs = getattr(transformers, f"{family}Config")(**changes)
        ours = load_model_config(preset, BertConfig)
        with torch.device("meta"):
            total = num_parameters(getattr(transformers, f"{family}ForMaskedLM")(theirs)).total
            model = build_model(BertForMaskedLM, ours, seed=0)
        assert num_parameters(model).total == total
        back = to_original(BertForMaskedLM(BertConfig(**small(ours))), family.lower()).config
        for key, value in theirs.to_dict().items():
            if key not in (*SIZES, "layer_types", "transformers_version", "architectures", "dtype", "head_dim"):
                if key not in ("cls_token_id", "sep_token_id", "num_key_value_heads"):
                    assert getattr(back, key) == value, key
    with torch.device("meta"):
        neobert = build_model(BertForMaskedLM, load_model_config("neobert", BertConfig), seed=0)
    assert num_parameters(neobert).total == neobert_parameters()


def small(config):
    values = {key: value for key, value in config.to_dict().items() if key != "model_type"} | SIZES
    return values | {"layer_types": values["layer_types"] and values["layer_types"][:2]}
