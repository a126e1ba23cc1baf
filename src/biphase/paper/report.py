"""The paper's published scores → its tables, figures and findings, judged by the same code as our own studies."""

from pathlib import Path

from biphase.paper.findings import judge_paper
from biphase.paper.published import TABLE_NUMBERS, read_reference
from biphase.report.page import write_report

TITLE = "Should we still pretrain encoders with masked language modeling?"
QUESTION = (
    "Same architecture, same data in the same order, same budget: which objective makes the better text encoder, CLM "
    "(the next token), MLM (masked tokens), or one after the other? The 800 published scores of arXiv 2507.00994, "
    "judged anew."
)
COMMANDS = ("pip install .", "biphase report paper --out paper-report")
NOT_PUBLISHED = (
    "Published are means and half-widths over five fine-tuning seeds (1.96·s/√5), rounded to 0.01 points. Tests are "
    "Welch's, from these alone: pairing by seed, which could tell smaller differences, is not possible. A half-width "
    "printed as 0.00 counts as 0.005.",
    "Scores at every learning rate and seed are not published: F5 cannot be tested, and its figure not drawn.",
    "The four models of 40,000 steps CLM and 2,000 steps MLM at masking ratios of 20 to 50 % are in no published "
    "table: F7 cannot be tested, and its figure not drawn.",
    "Half-widths of averages are taken as published; to recompute them needs the scores of each seed.",
    "The metrics are the paper's own; standard ones (F1 of entities, official SQuAD F1, trec_eval's nDCG@10) are not "
    "published.",
    "FLOPs are not published: they are counted from the published shapes, with the head where there is a target.",
)


def report_paper(out: Path) -> Path:
    """Write `tables/`, `figures/` and `index.html` into the folder `out`; returns the page."""
    results = read_reference()
    return write_report(
        results,
        out,
        title=TITLE,
        question=QUESTION,
        verdicts=judge_paper(results),
        table_numbers=TABLE_NUMBERS,
        commands=COMMANDS,
        missing=NOT_PUBLISHED,
    )
