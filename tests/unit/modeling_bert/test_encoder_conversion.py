"""`lmtools convert` of encoders, tiling, and the shipped configurations of published encoders."""

import pytest
import torch
import transformers

from lm_experiments_tools.errors import UserError
from lm_experiments_tools.models.build import build_model, load_model_config, num_parameters
from lm_experiments_tools.tools.main import main
from modeling_bert import BertConfig, BertForMaskedLM
from modeling_bert.conversion import to_original
from modeling_bert.tiling import tile, tile_model

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
IDS = {"cls_token_id": 1, "sep_token_id": 2}
LARGER = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 40}


def logits(model):
    ids = torch.arange(3, 43).reshape(2, 20)
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def test_convert_writes_both_ways_and_tiles(tmp_path, capsys):
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

    larger = {**model.config.to_dict(), **LARGER, "layer_types": ["full_attention"] + ["sliding_attention"] * 2}
    config = BertConfig(**{key: value for key, value in larger.items() if key != "model_type"})
    config.save_pretrained(tmp_path / "larger")
    command = ["convert", source, "--to", str(tmp_path / "tiled"), "--tile", str(tmp_path / "larger" / "config.json")]
    assert main(command) == 0
    found = BertForMaskedLM.from_pretrained(tmp_path / "tiled").state_dict()
    expected = tile_model(model, config).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert main(["convert", ours, "--to", str(tmp_path / "no"), "--model_type", "eurobert"]) == 2
    assert "eurobert cannot express" in capsys.readouterr().err and not (tmp_path / "no").exists()
    assert main([*command[:3], str(tmp_path / "no"), "--tile", "neobert"]) == 2
    assert "Tiling makes a larger model of the same kind; these do not fit: classifier_bias" in capsys.readouterr().err


def test_a_tile_is_in_the_centre_and_wraps_around():
    assert tile(torch.tensor([1, 2, 3]), (8,)).tolist() == [2, 3, 1, 2, 3, 1, 2, 3]
    assert tile(torch.tensor([1, 2, 3, 4]), (8,), parts=2).tolist() == [2, 1, 2, 1, 4, 3, 4, 3]
    matrix = torch.arange(6.0).view(2, 3)
    larger = tile(matrix, (4, 9))
    assert torch.equal(larger[1:3, 3:6], matrix)
    assert torch.equal(larger, torch.cat([matrix[1:], matrix, matrix[:1]]).repeat(1, 3))


@pytest.mark.parametrize("first_attention_norm", [True, False])
def test_a_tiled_model_holds_the_smaller_one(first_attention_norm):
    kind = {"pre_layer_norm": True, "gated_mlp": True, "position_embedding_type": "rotary", "num_key_value_heads": 1}
    kind |= {"first_attention_norm": first_attention_norm, "max_position_embeddings": 20}
    torch.manual_seed(0)
    small = BertForMaskedLM(BertConfig(**SIZES, **kind))
    large = tile_model(small, BertConfig(**{**SIZES, **kind, **LARGER, "num_key_value_heads": 2}))
    plain = BertForMaskedLM(large.config)
    assert {n: w.shape for n, w in large.state_dict().items()} == {n: w.shape for n, w in plain.state_dict().items()}
    assert large.get_output_embeddings().weight is large.get_input_embeddings().weight
    centre = slice(8, 24)  # of 32 features
    words = small.get_input_embeddings().weight
    assert torch.equal(large.get_input_embeddings().weight[:, centre], words)
    for number, source in enumerate((0, 1, 1)):  # round(2 / 3 * number)
        ours, theirs = large.bert.encoder.layer[number], small.bert.encoder.layer[source]
        # of 4 query heads, 2 for each head of keys, and of 2 of those: the centre that tears none apart is at 0
        assert torch.equal(ours.attention.self.query.weight[:16, centre], theirs.attention.self.query.weight)
        assert torch.equal(ours.attention.self.key.weight[:8, centre], theirs.attention.self.key.weight)
        assert torch.equal(ours.attention.output.dense.weight[centre, :16], theirs.attention.output.dense.weight)
        assert torch.equal(ours.output.dense.weight[centre, 8:32], theirs.output.dense.weight)
        wide = ours.intermediate.dense.weight
        halves = torch.cat([wide[8:32, centre], wide[48:72, centre]])
        assert torch.equal(halves, theirs.intermediate.dense.weight)
    assert logits(large).isfinite().all()
    for change, message in (
        ({"hidden_size": 8}, "hidden_size"),
        ({"vocab_size": 62}, "vocab_size"),
        ({"num_attention_heads": 2}, r"features of a head \(8 and 16\)"),
        ({"gated_mlp": False}, "gated_mlp"),
    ):
        with pytest.raises(UserError, match=message):
            tile_model(small, BertConfig(**{**SIZES, **kind, **LARGER, "num_key_value_heads": 2, **change}))


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


@pytest.mark.parametrize("layers", [4, 5, 9])
def test_tiling_to_twice_the_layers_and_more_uses_each_of_the_smaller(layers):
    small = BertForMaskedLM(BertConfig(**SIZES))
    large = tile_model(small, BertConfig(**{**SIZES, "num_hidden_layers": layers}))
    theirs = [layer.attention.self.query.weight for layer in small.bert.encoder.layer]
    ours = [layer.attention.self.query.weight for layer in large.bert.encoder.layer]
    used = [next(k for k, weight in enumerate(theirs) if torch.equal(weight, own)) for own in ours]
    assert used == sorted(used) and set(used) == set(range(len(theirs)))
