"""A decoder of generated tokens for all tests of evaluation."""

import pytest

from lm_experiments_tools.evaluation.predictions import TextDecoder
from tests.helpers.evaluation_toys import WORDS


@pytest.fixture(scope="module")
def decode() -> TextDecoder:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return TextDecoder(
        PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    )
