"""BERT of our own is trained, stopped, saved, checkpointed, adapted and compiled like any model of transformers."""

import json
from pathlib import Path

import pytest
import torch
import transformers

import modeling_bert
from lm_experiments_tools.attention.kernels.call import force_backend
from modeling_bert import BertConfig
from run_bert_pretraining import main
from tests.helpers.bert_toys import make_bert_data

BIGBIRD = {"sparse_config_cls": "BigBird", "sparse_attention": {"block": 8}}
VARIANTS = {
    "base": {},
    "pre-norm, T5 bias": {"pre_layer_norm": True, "position_embedding_type": "relative_attention_bias"},
    "pre-norm without last": {"pre_layer_norm": True, "last_layer_norm": False},
    "rotary, sparse": {"pre_layer_norm": True, "position_embedding_type": "rotary", "rotary_dim": 4, **BIGBIRD},
    "T5 bias, sparse": {"position_embedding_type": "relative_attention_bias", **BIGBIRD},
    "relative_key_query": {"position_embedding_type": "relative_key_query"},
    "alibi": {"position_embedding_type": "alibi"},
}
SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 37,
    "max_position_embeddings": 40, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def sparse_is_sparse():
    """Inputs as short as here take SDPA by themselves, which is not what serves long ones."""
    with force_backend("blocks"):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_bert_data(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(data, name, model_cls, iters=4, cfg=None, **flags):
    words = {
        "data_path": data / "train", "vocab_file": data / "vocab.txt", "model_path": name, "input_seq_len": 48,
        "model_cfg": cfg or data / "tiny.json", "batch_size": 8, "lr": 1e-3, "iters": iters, "log_interval": 1,
        "backend": "local", "model_cls": model_cls, "optimizer": "AdamW", **flags,
    }  # fmt: skip
    main([word for key, value in words.items() for word in (f"--{key}", str(value))])
    lines = map(json.loads, Path(name, "metrics.jsonl").read_text().splitlines())
    return [{name: line[name] for name in line["metrics"]} for line in lines if line["split"] == "train"]


def model_of(variant, cls=modeling_bert.BertForPreTraining, **more):
    torch.manual_seed(0)
    return cls(BertConfig(**SIZES, **VARIANTS[variant], **more))


def batch(rows=2, length=20):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 99, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length - 3 :] = 0
    return {
        "input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(ids > 30, -100),
        "next_sentence_label": torch.arange(rows) % 2,
    }  # fmt: skip


def test_a_run_logs_what_it_logs_with_transformers_class(data, work):
    """Initial values included: the same seed draws the same weights. Ours is named as in t5-experiments."""
    model_cls = "modeling_bert.modeling_bert"
    ours, theirs = (run(data, name, f"{name}:BertForPreTraining", use_nsp=1) for name in (model_cls, "transformers"))
    assert len(ours) == 4 and "loss_mlm" in ours[0]
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    loaded = transformers.BertForPreTraining.from_pretrained(f"{model_cls}/last").state_dict()
    expected = transformers.BertForPreTraining.from_pretrained("transformers/last").state_dict()
    for name, value in loaded.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_has_a_gradient_and_what_is_learned_survives_saving(variant, tmp_path):
    model = model_of(variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = model(**batch()).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        if not losses:
            still = [name for name, parameter in model.named_parameters() if not parameter.grad.any()]
            assert still == []
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    model.eval().save_pretrained(tmp_path)
    loaded, report = modeling_bert.BertForPreTraining.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert loaded.config.to_diff_dict() == model.config.to_diff_dict()
    assert torch.equal(loaded.eval()(**batch()).loss, model(**batch()).loss)


@pytest.mark.parametrize(
    ("variant", "reentrant"), [*((name, True) for name in VARIANTS), ("base", False), ("T5 bias, sparse", False)]
)
def test_gradient_checkpointing_changes_no_gradient(variant, reentrant):
    gradients = []
    for checkpointing in (False, True):
        model = model_of(variant).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            assert model.is_gradient_checkpointing
        torch.manual_seed(7)  # of dropout
        model(**batch()).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@pytest.mark.parametrize(
    ("variant", "is_cast"), [*((name, True) for name in VARIANTS), ("base", False), ("T5 bias, sparse", False)]
)
def test_in_bfloat16_it_is_near_and_trains(variant, is_cast):
    model = model_of(variant).eval()
    expected = model(**batch()).loss
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        loss = (model if is_cast else model.bfloat16())(**batch()).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [{}, {"fullgraph": True, "backend": "aot_eager"}], ids=["compiled", "one graph"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_compiled_model_computes_the_same(variant, options):
    if options and "sparse" in variant:
        pytest.skip("the graph ends at block-sparse attention")
    torch.compiler.reset()  # or the graphs of other models count against how often one may be made anew
    model = model_of(variant).eval()
    expected = model(**batch()).loss
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    loss = torch.compile(model, **options)(**batch()).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5, msg=name)
