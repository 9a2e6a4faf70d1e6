"""--optimizer_groups: parameters by name pattern to options of their own."""

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from lm_experiments_tools.config.training import OptimizerArgs
from lm_experiments_tools.errors import UserError
from lm_experiments_tools.optimizers import build_optimizer


def model():
    settings = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(vocab_size=30, **settings))


def built(*texts, name="AdamW", **options):
    toy = model()
    rules = OptimizerArgs(optimizer_groups=texts).group_rules()
    optimizer = build_optimizer(toy, name=name, lr=1.0, weight_decay=0.1, rules=rules, **options)
    names = {id(p): key for key, p in toy.named_parameters()}
    found = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    assert found.keys() == {*names.values()}
    return toy, optimizer, found


def test_the_first_pattern_that_matches_gives_the_options_and_the_default_rule_the_rest():
    _, optimizer, groups = built("*embeddings*: lr_scale=0.5 weight_decay=0", "*.1.*: betas=0.9,0.98")
    assert groups["bert.embeddings.word_embeddings.weight"]["lr"] == 0.5
    assert groups["bert.embeddings.word_embeddings.weight"]["weight_decay"] == 0
    second, first = (groups[f"bert.encoder.layer.{i}.output.dense.weight"] for i in (1, 0))
    assert (second["betas"], second["lr"], second["weight_decay"]) == ((0.9, 0.98), 1.0, 0.1)
    assert groups["bert.encoder.layer.1.output.dense.bias"]["weight_decay"] == 0.0
    assert first is optimizer.param_groups[0] and first["betas"] == (0.9, 0.999)


def test_everything_may_be_decayed_as_with_torchs_defaults():
    ours, optimizer, _ = built("*: weight_decay=0.3")
    theirs = model()
    reference = torch.optim.AdamW(theirs.parameters(), lr=1.0, weight_decay=0.3)
    for toy, method in ((ours, optimizer), (theirs, reference)):
        for p in toy.parameters():
            p.grad = torch.ones_like(p)
        method.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6)


def test_muon_keeps_hidden_matrices_of_a_rule_and_scales_the_others():
    _, _, groups = built("*.layer.1.*: lr_scale=0.5", name="Muon", extra={"others_lr_scale": 0.1})
    assert groups["bert.encoder.layer.1.output.dense.weight"]["is_hidden"]
    assert groups["bert.encoder.layer.1.output.dense.weight"]["lr"] == 0.5
    assert groups["bert.encoder.layer.1.output.dense.bias"]["lr"] == pytest.approx(0.05)
    assert groups["bert.encoder.layer.0.output.dense.weight"]["lr"] == 1.0


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        (["*nothing*: lr_scale=2"], {}, r"--optimizer_groups \*nothing\* is the first match of no trainable"),
        (["*: betass=1"], {}, "no option 'betass'; did you mean 'betas'"),
        (["*: lr_scale=0"], {}, "lr_scale is 0, but it takes a number above 0 .freeze by --trained or --freeze"),
        (["*: momentum=0.5"], {"name": "Muon"}, "Muon has one momentum for all parameters"),
        (["*"], {}, "is not 'PATTERN: NAME=VALUE"),
    ],
)
def test_refused_rules(texts, options, message):
    with pytest.raises(UserError, match=message):
        toy = model()
        rules = OptimizerArgs(optimizer_groups=tuple(texts)).group_rules()
        build_optimizer(toy, lr=1.0, weight_decay=0.0, rules=rules, **{"name": "AdamW", **options})
