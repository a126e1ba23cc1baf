"""The nearest documents of a query, against those that all scores would give."""

import numpy as np
import torch

from biphase.encoder.search import find_nearest
from biphase.finetuning.metrics import best_documents


def test_ties_at_the_last_place_are_broken_as_trec_eval_does() -> None:
    """The documents that are kept are the first of all of them in the order of pytrec_eval's rule."""
    rng = np.random.default_rng(0)
    ids = [str(number) for number in rng.permutation(30)]
    names_N = np.argsort(np.argsort(np.array(ids, dtype=object)))
    scores, pieces = torch.from_numpy(rng.integers(0, 4, (50, 30)).astype(np.float32)), torch.eye(30).split(17)
    numbered = [(np.arange(17), pieces[0]), (np.arange(17, 30), pieces[1])]
    nearest = find_nearest(scores, numbered, 4, names_N=names_N)
    for row, hits in zip(scores.tolist(), nearest, strict=True):
        ranked = best_documents(dict(zip(ids, row, strict=True)), 4)
        assert {ids[document] for document, _ in hits} == {id for id, _ in ranked}
        assert [score for _, score in hits] == [score for _, score in ranked]
