"""--suffix stands after every source, in training, evaluation and prediction, and is never cut off."""

import numpy as np
import pytest

from lm_experiments_tools import FineTuner
from lm_experiments_tools.data.examples.example_encoder import ExampleEncoder
from tests.helpers.finetuning_toys import read, word_tokenizer, write_json
from tests.helpers.pretrained_toys import save_toy

LONG = " ".join(f"w{number}" for number in range(30))


def ids(text):
    return word_tokenizer("token")(text)["input_ids"]


@pytest.mark.parametrize("end", ["template", "token"])
@pytest.mark.parametrize("decoder", [False, True])
def test_source_is_cut_before_it(decoder, end):
    encoder = ExampleEncoder(word_tokenizer(end), 8, 8, decoder=decoder, suffix=" w90 w91")
    ending = [] if decoder or end == "token" else [1]
    rows = encoder.encode_sources(["w1 w2", LONG])["input_ids"]
    assert rows[0] == ids("w1 w2 w90 w91") + ending
    room = 8 - 2 - len(ending)
    assert rows[1] == ids(LONG)[:room] + ids("w90 w91") + ending
    assert encoder.num_tokens("w1 w2") == len(rows[0])
    assert (encoder.sources.longest, encoder.sources.lost) == (32 + len(ending), 30 - room)


@pytest.mark.parametrize("kind", ["decoder", "encoder-decoder"])
def test_training_evaluation_and_prediction_read_it(kind, tmp_path, monkeypatch):
    path = write_json(tmp_path / "a.jsonl", [{"source": LONG, "target": "w3"}])
    flags = {"model_type": kind, "input_seq_len": 24, "target_seq_len": 8, "prefix": "w7 ", "suffix": " w80 w81"}
    data = read(word_tokenizer("token"), data_path=(path,), valid_data_path=path, batch_size=1, **flags)
    room = 16 if kind == "decoder" else 24
    source = ids("w7 " + LONG)[: room - 2] + ids("w80 w81")
    trained, evaluated = next(iter(data.train)), next(iter(data.splits["valid"].loader))
    for batch in (trained, evaluated):
        assert np.asarray(batch["input_ids"])[0, :room].tolist() == source
    data.train.close()
    tuner = FineTuner(save_toy(kind, tmp_path / kind), **flags)
    seen = []
    generate = tuner.model.generate
    monkeypatch.setattr(tuner.model, "generate", lambda **given: seen.append(given["input_ids"]) or generate(**given))
    tuner.generate_single("w1 w2")
    tuner.generate_diverse("w1 w2", num_texts=1)
    assert len(seen) == 2 and all(
        rows[0].tolist() == tuner.tokenizer("w7 w1 w2 w80 w81")["input_ids"] for rows in seen
    )
