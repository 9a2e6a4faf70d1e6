"""Metrics of fine-tuning, by the rules of the programs people compare with; imports data.examples, backends, config.

| --metrics | values | scale | rule |
|---|---|---|---|
| bleu | bleu | 0-100 | sacrebleu, corpus level, by its tokenizer --bleu_tokenize (13a) and its default smoothing |
| chrf | chrf | 0-100 | sacrebleu's chrF2, corpus level |
| rouge | rouge1, rouge2, rougeL, rougeLsum | 0-100 | rouge-score's F-measure with its stemmer, mean over examples (as
  Hugging Face's example scripts, without their bootstrap); sentences of rougeLsum are lines of the texts as they
  are; of several references the best one, for each value alone |
| exact_match | exact_match | 0-100 | SQuAD: lower case, no punctuation, no articles; the best of the references |
| f1_tokens | f1_tokens | 0-100 | SQuAD 1.1: words in common after the same normalisation; the best of the references |
| scrolls | rouge1, rouge2, rougeL, rouge_geometric_mean, f1_tokens, exact_match | 0-100 | SCROLLS: rouge-score without
  stemmer, the best of the references for each value; the geometric mean is of the three means; the rest as SQuAD |
| instructions | rougeL, rouge1, exact_match, and each for every task as rougeL/TASK | 0-100 | natural-instructions'
  evaluation of its default (English) track: rouge-score with stemmer, exact match that keeps articles |
| gen_len | gen_len | tokens | mean number of generated tokens without padding |
| accuracy | accuracy | 0-1 | scikit-learn |
| f1, precision, recall | the same | 0-1 | scikit-learn; of two labels those of the last one (GLUE's positive class),
  of more the mean over labels that occur (macro) |
| mcc | mcc | -1 to 1 | scikit-learn's matthews_corrcoef, of any number of labels |
| pearson, spearman | the same | -1 to 1 | scipy (ranks of ties are averaged); nan where one side is constant |
| mse | mse | label's unit squared | scikit-learn's mean_squared_error |

Text metrics are computed on rank 0 over the strings of all workers (`predictions.Predictions`); corpus metrics such as
BLEU are not means of parts.
"""
