"""A run of a model that transformers saves under other names than its own."""

import json

from run_t5_pretraining import main
from tests.helpers.runs import words
from tests.helpers.vocabulary_toys import numbered_words_vocabulary

NEOX = {"model_type": "gpt_neox", "vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 1, "use_cache": False}
NEOX |= {"num_attention_heads": 2, "intermediate_size": 16, "hidden_dropout": 0.1}


def test_gpt_neox_resumes_bit_for_bit(tmp_path, monkeypatch):
    """Its output layer is `embed_out` in files and `lm_head` in the model."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": " ".join(f"word{i} token{j}" for j in range(40))}) for i in range(40)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    (tmp_path / "neox.json").write_text(json.dumps(NEOX))
    flags = {
        "data_path": "text.jsonl", "vocab": numbered_words_vocabulary(tmp_path), "task": "causal_lm", "lr": 1e-3,
        "model_cls": "transformers:GPTNeoXForCausalLM", "model_cfg": "neox.json", "lr_scheduler": "constant",
        "input_seq_len": 32, "batch_size": 4, "data_n_workers": 1, "backend": "local", "data_pipeline": "native",
    }  # fmt: skip
    for run, iters in (("whole", 4), ("parts", 2), ("parts", 4)):
        main(words(**flags, model_path=run, iters=iters))
    whole, parts = ((tmp_path / run / "last" / "model.safetensors").read_bytes() for run in ("whole", "parts"))
    assert whole == parts
    main(words(**flags, model_path="begun", iters=1, init_checkpoint="parts/last", reset_iteration=True))
