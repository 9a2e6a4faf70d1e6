"""Our models through transformers' exporters to ONNX: their numbers in other sizes than they were traced in."""

import copy

import pytest
import torch

import modeling_bert
import modeling_t5
from lm_experiments_tools.models.build import build_model
from tests.helpers.pretrained_toys import t5_config

BERT = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}


def our_bert(cls=modeling_bert.BertForSequenceClassification, **changed):
    return build_model(cls, modeling_bert.BertConfig(**BERT, **changed), seed=0).eval()


def our_t5(**changed):
    values = {**t5_config(num_layers=1).to_diff_dict(), "num_memory_tokens": 2, "tie_word_embeddings": False}
    config = modeling_t5.T5Config(**{**values, **changed})
    return build_model(modeling_t5.T5ForConditionalGeneration, config, seed=0).eval()


def exporter():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    exporters = pytest.importorskip("transformers.exporters")
    return exporters.OnnxExporter(), exporters.OnnxConfig(dynamic=True)


def ids_and_mask(rows, length):
    ids = torch.randint(5, 96, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[1:, length - 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["absolute", "rotary", "alibi"])
def test_a_classifier_computes_what_torch_does(positions, tmp_path):
    """Saved and loaded again, as docs/interchange.md shows it."""
    (onnx, settings), model = exporter(), our_bert(position_embedding_type=positions)
    onnx.export(model, ids_and_mask(2, 7), settings).save_pretrained(tmp_path)
    from transformers.exporters import ExportedModel

    rows = ids_and_mask(3, 12)
    found = ExportedModel.from_pretrained(tmp_path)(**rows).logits
    torch.testing.assert_close(found, model(**rows).logits.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_an_encoder_decoder_has_a_graph_for_the_first_tokens_and_one_for_later_ones():
    """An axis of size 1 stays fixed, so the decoder starts with several tokens in the trace."""
    (onnx, settings), model = exporter(), our_t5(num_memory_tokens=0)
    start = torch.tensor([[0, 5, 9]]).repeat(2, 1)
    exported = onnx.export_for_generation(model, {**ids_and_mask(2, 7), "decoder_input_ids": start}, settings)
    assert set(exported.components) == {"prefill", "decode"}
    rows = ids_and_mask(3, 12)
    inputs = {"encoder_outputs": model.encoder(**rows), "attention_mask": rows["attention_mask"]}
    cache = model(**inputs, decoder_input_ids=rows["input_ids"][:, :5], use_cache=True).past_key_values
    inputs["decoder_input_ids"] = rows["input_ids"][:, 5:6]
    found = exported.runners["decode"](**inputs, past_key_values=copy.deepcopy(cache)).logits
    torch.testing.assert_close(found, model(**inputs, past_key_values=cache).logits, atol=1e-5, rtol=1e-4)


def test_memory_tokens_leave_the_number_of_rows_free():
    """What a graph needs, without the minute of writing one."""
    encoder = our_t5().encoder
    ids, free = torch.ones(2, 5, dtype=torch.long), {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    program = torch.export.export(encoder, (ids, torch.ones_like(ids)), dynamic_shapes=(free, free)).module()
    more = torch.ones(3, 9, dtype=torch.long)
    found = program(more, torch.ones_like(more)).last_hidden_state
    torch.testing.assert_close(found, encoder(more, torch.ones_like(more)).last_hidden_state)


def test_a_model_with_alibi_computes_on_after_an_export():
    """Whose slopes are kept for all calls, unless they are those of a trace."""
    model = our_bert(modeling_bert.BertModel, position_embedding_type="alibi")
    model.set_attn_implementation("eager")
    ids = torch.ones(2, 5, dtype=torch.long)
    program = torch.export.export(model, (ids,))
    expected = program.module()(ids).last_hidden_state
    torch.testing.assert_close(model(ids).last_hidden_state.detach(), expected.detach())
