"""BLEU and ROUGE-L of texts against several references each, as the E2E challenge does.

The challenge's scripts (https://github.com/tuetschek/e2e-metrics) compute BLEU with the
tokens of mteval-v13a and without regard to case, as sacrebleu does here. ROUGE-L they
compute by the script of COCO's captions: of precision and recall the best over the
references, each on its own, weighted by beta 1.2, of words in lower case without marks.
The words and the longest common subsequence are those of `rouge-score` here.
"""

import itertools
import statistics
from collections.abc import Sequence

import sacrebleu
from rouge_score import rouge_scorer

BETA = 1.2


def bleu(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Of all texts together, from 0 to 100; not all have as many references."""
    streams = list(map(list, itertools.zip_longest(*references)))
    return sacrebleu.corpus_bleu(list(texts), streams, lowercase=True).score


_SCORER = rouge_scorer.RougeScorer(["rougeL"])


def _rouge_l(text: str, references: Sequence[str]) -> float:
    found = [_SCORER.score(reference, text)["rougeL"] for reference in references]
    precision = max(x.precision for x in found)
    recall = max(x.recall for x in found)
    if not precision or not recall:
        return 0.0
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def rouge_l(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The mean over the texts, from 0 to 100."""
    return 100 * statistics.fmean(map(_rouge_l, texts, references))
