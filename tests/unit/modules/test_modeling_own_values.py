"""Initial values of what a class of a user's own adds to a model: when it is made, and where a checkpoint lacks it."""

import pytest
import torch
from torch import nn

import modeling_bert
import modeling_t5
from lm_experiments_tools.attention.positions import PositionScheme, RelativeBiasPosition

T5 = {
    "vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
}  # fmt: skip
BERT = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20,
    "max_position_embeddings": 24,
}  # fmt: skip


class Slopes(PositionScheme):
    """Its own values, in a parameter, a table and a matrix."""

    def __init__(self, config, bidirectional):
        super().__init__()
        self.slope = nn.Parameter(torch.empty(4))
        self.table = nn.Embedding(3, 4)
        self.mix = nn.Linear(4, 4)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.slope, 0.25)
        nn.init.constant_(self.table.weight, 0.5)
        nn.init.eye_(self.mix.weight)
        nn.init.zeros_(self.mix.bias)


class Forgetful(PositionScheme):
    def __init__(self, config, bidirectional):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(4))


class Table(RelativeBiasPosition):
    """What it derives from has its values from the model."""

    def __init__(self, config, bidirectional):
        super().__init__(32, 128, 4, bidirectional)


class GatedAttention(modeling_t5.T5Attention):
    """Without reset_parameters: layers of torch's."""

    def __init__(self, config, kind, layer_idx):
        super().__init__(config, kind, layer_idx)
        self.gate = nn.Linear(16, 64)
        self.kinds = nn.Embedding(40, 64)


class ClosedGates(GatedAttention):
    def reset_parameters(self):
        nn.init.zeros_(self.gate.weight)
        nn.init.constant_(self.gate.bias, -4.0)
        nn.init.constant_(self.kinds.weight, 2.0)


def made_and_loaded(cls, sizes, folder, **settings):
    """One model that is made, and one from a checkpoint of the base model, which lacks what is new; with that."""
    torch.manual_seed(0)
    base = cls(cls.config_class(**sizes))
    base.save_pretrained(folder)
    config = cls.config_class(**sizes, **settings)
    loaded = cls.from_pretrained(folder, config=config)
    for name, value in base.state_dict().items():
        if name in loaded.state_dict():
            assert torch.equal(loaded.state_dict()[name], value), name
    return cls(config), loaded


def values(model, cls):
    found = [module for module in model.modules() if type(module) is cls]
    assert found
    return found


@pytest.mark.parametrize(
    ("cls", "sizes"), [(modeling_t5.T5ForConditionalGeneration, T5), (modeling_bert.BertForMaskedLM, BERT)]
)
def test_a_scheme_has_the_values_of_its_reset_parameters(cls, sizes, tmp_path):
    for model in made_and_loaded(cls, sizes, tmp_path, position_embedding_type=f"{__name__}:Slopes"):
        for scheme in values(model, Slopes):
            assert (scheme.slope == 0.25).all() and (scheme.table.weight == 0.5).all()
            assert torch.equal(scheme.mix.weight, torch.eye(4)) and not scheme.mix.bias.any()
            nn.init.zeros_(scheme.slope)
        model.save_pretrained(tmp_path / "own")
        for scheme in values(cls.from_pretrained(tmp_path / "own"), Slopes):
            assert not scheme.slope.any(), "what a checkpoint has was overwritten"


@pytest.mark.parametrize(
    ("cls", "sizes"), [(modeling_t5.T5ForConditionalGeneration, T5), (modeling_bert.BertForMaskedLM, BERT)]
)
def test_parameters_that_nothing_sets_are_a_sentence(cls, sizes):
    with pytest.raises(ValueError, match=r"Forgetful has parameters \(slope\) but no reset_parameters\(\)") as error:
        cls(cls.config_class(**sizes, position_embedding_type=f"{__name__}:Forgetful"))
    assert "\n" not in str(error.value)
    model = cls(cls.config_class(**sizes, position_embedding_type=f"{__name__}:Table"))
    spread = 0.25 if sizes is T5 else 0.02
    assert all(0.7 * spread < table.weight.std() < 1.3 * spread for table in values(model, Table))


def test_attention_has_the_values_of_its_reset_parameters_or_of_its_layers(tmp_path):
    for name, kind in (("ClosedGates", ClosedGates), ("GatedAttention", GatedAttention)):
        settings = {"decoder_cross_attention_layer": f"{__name__}:{name}"}
        for model in made_and_loaded(modeling_t5.T5ForConditionalGeneration, T5, tmp_path, **settings):
            for layer in values(model, kind):
                if kind is ClosedGates:
                    assert not layer.gate.weight.any() and (layer.gate.bias == -4).all()
                    assert (layer.kinds.weight == 2).all()
                else:  # uniform within 16 ** -0.5, and N(0, 1)
                    assert 0.24 < layer.gate.weight.abs().max() <= 0.25 and 0 < layer.gate.bias.abs().max() <= 0.25
                    assert 0.9 < layer.kinds.weight.std() < 1.1


class ScaledFeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))

    def reset_parameters(self):
        nn.init.constant_(self.scale, 0.25)

    def forward(self, x):
        return x * self.scale


class OwnFeedForward(modeling_t5.T5ForConditionalGeneration):
    def __init__(self, config):
        super().__init__(config)
        for block in [*self.encoder.block, *self.decoder.block]:
            block.layer[-1].DenseReluDense = ScaledFeedForward(config.d_model)
        self.post_init()


def test_modules_put_into_a_model_have_the_values_of_their_reset_parameters(tmp_path):
    cls, config = OwnFeedForward, modeling_t5.T5Config(**T5)
    modeling_t5.T5ForConditionalGeneration(config).save_pretrained(tmp_path)  # without the modules
    for model in (cls(config), cls.from_pretrained(tmp_path)):
        scales = [value for name, value in model.named_parameters() if name.endswith(".scale")]
        assert scales and all((scale == 0.25).all() for scale in scales)
    with torch.no_grad():
        scales[0].fill_(2)
    model.save_pretrained(tmp_path)
    loaded = cls.from_pretrained(tmp_path)
    assert sum(bool((value == 2).all()) for name, value in loaded.named_parameters() if name.endswith(".scale")) == 1
